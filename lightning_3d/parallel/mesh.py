"""The device mesh: every axis always exists, of size 1 where it is not used."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_3d.layout import Layout

# Outermost to innermost, so that tensor parallelism stays inside a node.
AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def build_mesh(layout: Layout, *, device: torch.device) -> DeviceMesh:
    """The mesh of a resolved layout over all processes, axes `AXES`; collective."""
    sizes = (layout.pipeline, layout.replicas, layout.data_parallel_shards, layout.tensor)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    for group in (*mesh.get_all_groups(), data_parallel_group(mesh)):
        # Else torch's own default, which may be sooner than the job's: 10 minutes for nccl.
        _set_pg_timeout(_timeout(), group)
    return mesh


def new_group(ranks: Sequence[int] | None = None, *, backend: str | None = None) -> ProcessGroup:
    """A process group whose ranks wait for each other as long as those of the whole job; collective over the job."""
    group: Any = dist.new_group(ranks, backend=backend, timeout=_timeout())
    return group


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The two axes of data parallelism as one."""
    if mesh["dp_replicate"].size() == 1:
        return mesh["dp_shard"]
    if mesh["dp_shard"].size() == 1:
        return mesh["dp_replicate"]
    return mesh["dp_replicate", "dp_shard"]._flatten("dp")


def data_parallel_group(mesh: DeviceMesh) -> ProcessGroup:
    """The processes that see different batches of the same model part."""
    return data_parallel_mesh(mesh).get_group()


def host_data_parallel_group(mesh: DeviceMesh) -> ProcessGroup:
    """The same processes, talking without their GPUs, which need not be waited for; collective over the job."""
    own = data_parallel_group(mesh)
    if dist.get_backend(own) == "gloo":
        return own
    pp, _, _, tp = mesh.mesh.shape
    for ranks in mesh.mesh.permute(0, 3, 1, 2).reshape(pp * tp, -1).tolist():
        group = new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            own = group
    return own


def _timeout() -> timedelta:
    world: Any = dist.group.WORLD
    timeout: timedelta = world._get_backend(world._device_types[0]).options._timeout
    return timeout
