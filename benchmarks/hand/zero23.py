"""ZeRO-2 and ZeRO-3, one flat buffer per block of the model.

Both reduce a block's gradients, from hooks, as soon as all are there, and free them. At stage 3 a block's parameters
exist only while it computes; those of embedding and head from their forward to their backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from benchmarks.hand.flat import flatten_parameters_
from benchmarks.job import ADAMW, Clock, Job, next_token_loss


class Unit:
    """The parameters of some modules, whose shard this rank holds.

    Args:
        group: the data-parallel ranks.
    """

    def __init__(
        self, modules: list[nn.Module], job: Job, *, free_after_forward: bool, group: ProcessGroup | None
    ) -> None:
        self.group = group
        self.size = job.layout.data
        self.stage = job.layout.zero_stage
        self.parameters = [p for module in modules for p in module.parameters()]
        self.full = flatten_parameters_(self.parameters, multiple=self.size)
        mine = self.full.chunk(self.size)[job.data_parallel_rank]
        self.shard = nn.Parameter(mine.clone() if self.stage == 3 else mine)
        self.full_bytes = self.full.untyped_storage().nbytes()
        self.is_gathered = True
        self.waiting = len(self.parameters)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        if self.stage == 3:
            for module in modules:
                module.register_forward_pre_hook(lambda *_: self.gather())
                if free_after_forward:
                    module.register_forward_hook(self._after_forward)
            self.free()

    def gather(self) -> None:
        if self.is_gathered:
            return
        self.full.untyped_storage().resize_(self.full_bytes)
        # Autograd has saved these parameters and must not take the same values for new ones.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.full):
            dist.all_gather_into_tensor(self.full, self.shard.data, group=self.group)
        self.is_gathered = True

    def free(self) -> None:
        self.full.untyped_storage().resize_(0)
        self.is_gathered = False

    def _after_forward(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: self.gather())
        self.free()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self.waiting -= 1
        if self.waiting:
            return
        self.waiting = len(self.parameters)
        gradient = torch.zeros(self.full.numel())
        parts = [p.grad.view(-1) for p in self.parameters if p.grad is not None]
        torch.cat(parts, out=gradient[: sum(map(len, parts))])
        for p in self.parameters:
            p.grad = None
        if self.stage == 3:
            self.free()
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, gradient, group=self.group)
        self.shard.grad /= self.size


def build_units(
    job: Job,
    *,
    first: list[nn.Module],
    layers: Iterable[nn.Module],
    last: list[nn.Module],
    group: ProcessGroup | None = None,
) -> list[Unit]:
    """One unit for the modules before the layers, one for each layer, one for the modules after them."""
    return [
        Unit(first, job, free_after_forward=False, group=group),
        *(Unit([layer], job, free_after_forward=True, group=group) for layer in layers),
        Unit(last, job, free_after_forward=False, group=group),
    ]


def train(job: Job, clock: Clock) -> None:
    model = job.build_model()
    units = build_units(job, first=[model.embed], layers=model.layers, last=[model.norm, model.head])
    optimizer = torch.optim.AdamW([unit.shard for unit in units], **ADAMW)
    batches = job.local_batches()
    clock.start()
    for rows in batches:
        loss = next_token_loss(model(rows[:, :-1]), rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.layout.zero_stage == 2:
            for unit in units:
                dist.all_gather_into_tensor(unit.full, unit.shard.data)
        clock.tick()
        clock.note(loss)
