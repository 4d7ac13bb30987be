"""Tensor parallelism, a pipeline, both, and tensor parallelism under ZeRO-3."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.hand.flat import flatten_parameters_, windows
from benchmarks.hand.groups import build_groups
from benchmarks.hand.one_f_one_b import run_step
from benchmarks.hand.tensor_parallel import SplitPart
from benchmarks.hand.zero23 import build_units
from benchmarks.job import ADAMW, Clock, Job
from benchmarks.part import Part


def train(job: Job, clock: Clock) -> None:
    groups = build_groups(job)
    part = SplitPart(job, groups.tensor) if job.layout.tensor > 1 else Part(job)
    gradient = None
    if job.layout.data > 1:
        ends = [[m for m in modules if m is not None] for modules in ([part.embed], [part.norm, part.head])]
        units = build_units(job, first=ends[0], layers=part.layers, last=ends[1], group=groups.data)
        optimizer = torch.optim.AdamW([unit.shard for unit in units], **ADAMW)
    else:
        parameters = list(part.parameters())
        flat = nn.Parameter(flatten_parameters_(parameters, multiple=1))
        gradient = flat.grad = torch.zeros_like(flat)
        for parameter, window in windows(gradient, parameters):
            parameter.grad = window
        optimizer = torch.optim.AdamW([flat], **ADAMW)
    batches = job.local_batches()
    clock.start()
    for rows in batches:
        if job.layout.pipeline > 1:
            loss = run_step(part, rows, job)
        else:
            loss = part.loss(part(rows[:, :-1]), rows)
            loss.backward()
        optimizer.step()
        if gradient is None:
            optimizer.zero_grad()
        else:
            gradient.zero_()
        clock.tick()
        clock.note(loss)
