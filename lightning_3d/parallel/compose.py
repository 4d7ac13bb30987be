"""The architecture on one page: a module becomes one rank's share of a job."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.errors import ModelError
from lightning_3d.layout import Layout
from lightning_3d.parallel.blocks import repeated_blocks
from lightning_3d.parallel.init import Recording, check_initialized, materialize_, meta_tensors
from lightning_3d.parallel.mesh import data_parallel_group
from lightning_3d.parallel.pipeline import STAGES_PER_RANK, Pipeline
from lightning_3d.parallel.replicate import ReplicatedModule
from lightning_3d.parallel.share import Share
from lightning_3d.parallel.staged import StagedModule
from lightning_3d.parallel.stages import SplitModule
from lightning_3d.parallel.tensor import Region
from lightning_3d.parallel.tensor_plan import apply_tensor_parallel, resolve_plan, without_cut_pairs
from lightning_3d.parallel.trunk import find_trunk
from lightning_3d.parallel.zero import ShardedModule


def compose(
    module: nn.Module,
    *,
    layout: Layout,
    mesh: DeviceMesh,
    device: torch.device,
    recording: Recording,
    loss_parallel: bool = False,
    sequence_parallel: bool = False,
) -> Share:
    """Give this rank its share of `module`, which is changed in place; collective.

    Args:
        module: whole; on the meta device where it was built under `recording`, else with values (rank 0's count).
        layout: resolved, that of `mesh`.
        loss_parallel: whether logits stay split over the vocabulary.
        sequence_parallel: whether blocks work on parts of the sequence between split regions.

    Raises:
        ModelError: parameters on the meta device that have no initial value, modules that differ between ranks, or a
            module that cannot be cut into the pipeline's stages or split over tensor-parallel ranks.
    """
    _check_equal(module)
    sources = meta_tensors(module)
    check_initialized(sources, recording)
    if layout.world_size > 1:
        _broadcast_values_(module, device=device)

    plan = resolve_plan(module) if layout.tensor > 1 else {}
    split = None
    if layout.pipeline > 1 or layout.num_microbatches is not None:
        split = split_stages(module, layout=layout, mesh=mesh, device=device)
    if plan:
        region = Region(mesh["tp"], loss_parallel=loss_parallel)
        if split is not None:
            plan = without_cut_pairs(plan, stages=split.stage_of_blocks)
            split.cursor.stream, split.cursor.reseeded = region.stream, region.reseeded
        stacks = _stacks(module, split) if sequence_parallel else []
        apply_tensor_parallel(module, plan, region=region, stacks=stacks)
    share: Share
    if split is not None:
        share = apply_pipeline(split, layout=layout, mesh=mesh, device=device)
    else:
        share = apply_data_parallel(module, blocks=repeated_blocks(module), layout=layout, mesh=mesh)

    materialize_(module, roots=share.roots, sources=sources, recording=recording, device=device)
    return share


def _stacks(module: nn.Module, split: SplitModule | None) -> list[list[nn.Module]]:
    """The blocks that follow one another on this rank."""
    if split is not None:
        return [split.blocks(stage) for stage in split.stages]
    trunk = find_trunk(module)
    container = module.get_submodule(trunk.container)
    return [[container.get_submodule(name) for name in trunk.blocks]]


def split_stages(module: nn.Module, *, layout: Layout, mesh: DeviceMesh, device: torch.device) -> SplitModule:
    """Keep this rank's stages of a module."""
    size, rank = layout.pipeline, mesh.get_local_rank("pp")
    per_rank = STAGES_PER_RANK[layout.schedule] if size > 1 else 1
    local = [rank + size * i for i in range(per_rank)]
    return SplitModule(module, num_stages=size * per_rank, local=local, device=device)


def apply_pipeline(split: SplitModule, *, layout: Layout, mesh: DeviceMesh, device: torch.device) -> StagedModule:
    """Each of a rank's stages under data parallelism of its own, run by a schedule."""
    shares = [
        apply_data_parallel(split.pieces(stage), blocks=split.blocks(stage), layout=layout, mesh=mesh)
        for stage in split.stages
    ]
    split.watch()
    pipeline = Pipeline(split, shares=shares, group=mesh["pp"].get_group(), schedule=layout.schedule, device=device)
    return StagedModule(split.module, pipeline=pipeline, shares=shares, mesh=mesh)


def apply_data_parallel(module: nn.Module, *, blocks: list[nn.Module], layout: Layout, mesh: DeviceMesh) -> Share:
    """Replicate or shard a module as the layout's ZeRO stage says.

    Args:
        blocks: the parts of it that are gathered one at a time.
    """
    if layout.data == 1:
        return Share(module)
    group = data_parallel_group(mesh)
    if layout.data_parallel_shards == 1:
        return ReplicatedModule(module, group=group)
    axes = mesh["dp_shard"] if layout.replicas == 1 else mesh["dp_replicate", "dp_shard"]
    return ShardedModule(module, blocks=blocks, stage=layout.zero_stage, mesh=axes, group=group)


def _check_equal(module: nn.Module) -> None:
    """Ranks that run different code or configurations would otherwise wait for each other for ever."""
    lines = [
        # What is no tensor (get_extra_state) may differ, as values may.
        f"{name} {tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else name
        for name, value in module.state_dict(keep_vars=True).items()
    ]
    mine = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, mine)
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise ModelError(
            f"the model on rank {', '.join(map(str, different))} differs from rank 0's in names, shapes or dtypes. "
            "Build the same model on all ranks: same code, same configuration, nothing that depends on the rank."
        )


@torch.no_grad()
def _broadcast_values_(module: nn.Module, *, device: torch.device) -> None:
    """Rank 0's values on every rank, one tensor at a time."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            value = tensor.detach().to(device)
            dist.broadcast(value, src=0)
            tensor.copy_(value)
