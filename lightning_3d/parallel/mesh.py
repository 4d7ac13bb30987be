"""The device mesh: every axis always exists, of size 1 where it is not used."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.layout import Layout

# Outermost to innermost, so that tensor parallelism stays inside a node.
AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def build_mesh(layout: Layout, *, device: torch.device) -> DeviceMesh:
    """The mesh of a resolved layout over all processes, axes `AXES`; collective."""
    sizes = (layout.pipeline, layout.replicas, layout.data_parallel_shards, layout.tensor)
    return init_device_mesh(device.type, sizes, mesh_dim_names=AXES)


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The two axes of data parallelism as one; collective at its first call for a mesh."""
    if mesh["dp_replicate"].size() == 1:
        return mesh["dp_shard"]
    if mesh["dp_shard"].size() == 1:
        return mesh["dp_replicate"]
    return mesh["dp_replicate", "dp_shard"]._flatten("dp")


def data_parallel_group(mesh: DeviceMesh) -> ProcessGroup:
    """The processes that see different batches of the same model part."""
    return data_parallel_mesh(mesh).get_group()
