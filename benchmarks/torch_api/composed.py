"""DTensor's `parallelize_module`, `torch.distributed.pipelining` and `fully_shard`, as their documentation has them.

The plan lets q, k and v share one all-reduce, and so w1 and w3; loss_parallel keeps logits split.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.job import ADAMW, Clock, Job
from benchmarks.part import Part


def train(job: Job, clock: Clock) -> None:
    layout = job.layout
    mesh = init_device_mesh("cpu", (layout.pipeline, layout.data, layout.tensor), mesh_dim_names=("pp", "dp", "tp"))
    part = Part(job)
    if layout.tensor > 1:
        _split(part, mesh["tp"])
    if layout.data > 1:
        _shard(part, mesh["dp"])
    # Fused AdamW takes plain tensors or DTensors, not both in a group.
    kinds = [
        [p for p in part.parameters() if isinstance(p, DTensor) is is_distributed] for is_distributed in (True, False)
    ]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], **ADAMW)
    schedule = _schedule(part, mesh["pp"], job) if layout.pipeline > 1 else None
    batches = job.local_batches()
    clock.start()
    for rows in batches:
        with loss_parallel() if layout.tensor > 1 else nullcontext():
            if schedule is not None:
                loss = _run_schedule(schedule, part, rows)
            else:
                loss = part.loss(part(rows[:, :-1]), rows)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
        clock.note(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def _split(part: Part, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {}
    if part.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if part.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    whole = (Replicate(),)
    for index in range(len(part.layers)):
        inputs = (Replicate(), None, None)
        plan[f"layers.{index}.attention"] = PrepareModuleInput(input_layouts=inputs, desired_input_layouts=inputs)
        plan[f"layers.{index}.feed_forward"] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            plan[f"layers.{index}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            plan[f"layers.{index}.{name}"] = RowwiseParallel()
    parallelize_module(part, mesh, plan)


def _shard(part: Part, mesh: DeviceMesh) -> None:
    units: list[nn.Module | None] = [*part.layers, part.embed, part.head]
    for unit in units:
        if unit is not None:
            fully_shard(unit, mesh=mesh)
    fully_shard(part, mesh=mesh)


def _schedule(part: Part, mesh: DeviceMesh, job: Job) -> Schedule1F1B:
    stage = PipelineStage(part, job.stage, job.layout.pipeline, torch.device("cpu"), group=mesh.get_group())
    return Schedule1F1B(stage, job.microbatches, loss_fn=part.loss)


def _run_schedule(schedule: Schedule1F1B, part: Part, rows: Tensor) -> Tensor | None:
    if part.is_first:
        schedule.step(rows[:, :-1])
        return None
    losses: list[Tensor] = []
    schedule.step(target=rows, losses=losses)
    return torch.stack(losses).mean()
