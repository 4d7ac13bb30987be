"""1F1B by hand: each stage sends to its neighbours and receives from them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.job import MODEL, Job
from benchmarks.part import Part


def run_step(part: Part, rows: Tensor, job: Job) -> Tensor | None:
    """Forward and backward of tokens (batch, sequence + 1); the mean loss on the last stage."""
    return _Step(part, rows, job).run()


class _Step:
    def __init__(self, part: Part, rows: Tensor, job: Job) -> None:
        self.part = part
        self.microbatches = rows.chunk(job.microbatches)
        stride = job.layout.data * job.layout.tensor
        self.before, self.after = job.rank - stride, job.rank + stride
        self.warm_up = job.layout.pipeline - 1 - job.stage
        # Of micro-batches between their forward and backward: what went in and what came out.
        self.live: list[tuple[Tensor, Tensor]] = []
        self.sends: list[tuple[dist.Work | None, Tensor]] = []
        self.loss: Tensor | None = None

    def run(self) -> Tensor | None:
        for number, rows in enumerate(self.microbatches):
            self.forward(rows)
            if number >= self.warm_up:
                self.backward()
        while self.live:
            self.backward()
        for work, _ in self.sends:
            if work is not None:
                work.wait()
        return self.loss

    def forward(self, rows: Tensor) -> None:
        entered = rows[:, :-1]
        if not self.part.is_first:
            entered = torch.empty(*entered.shape, MODEL.hidden_size)
            dist.recv(entered, self.before)
            entered.requires_grad_()
        left = self.part(entered)
        if self.part.is_last:
            left = self.part.loss(left, rows) / len(self.microbatches)
            self.loss = left.detach() if self.loss is None else self.loss + left.detach()
        else:
            self.sends.append((dist.isend(left.detach(), self.after), left))
        self.live.append((entered, left))

    def backward(self) -> None:
        entered, left = self.live.pop(0)
        if self.part.is_last:
            left.backward()
        else:
            gradient = torch.empty_like(left)
            dist.recv(gradient, self.after)
            left.backward(gradient)
        if not self.part.is_first:
            assert entered.grad is not None
            self.sends.append((dist.isend(entered.grad, self.before), entered))
