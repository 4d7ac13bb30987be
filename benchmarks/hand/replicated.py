"""One process, or replicas: one all-reduce of the flat gradient, one AdamW tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.hand.flat import flatten_parameters_, windows
from benchmarks.job import ADAMW, Clock, Job, next_token_loss


def train(job: Job, clock: Clock) -> None:
    model = job.build_model()
    parameters = list(model.parameters())
    flat = nn.Parameter(flatten_parameters_(parameters, multiple=1))
    flat.grad = torch.zeros_like(flat)
    for parameter, window in windows(flat.grad, parameters):
        parameter.grad = window
    optimizer = torch.optim.AdamW([flat], **ADAMW)
    batches = job.local_batches()
    clock.start()
    for rows in batches:
        loss = next_token_loss(model(rows[:, :-1]), rows)
        loss.backward()
        if job.layout.data > 1:
            dist.all_reduce(flat.grad)
            flat.grad /= job.layout.data
        optimizer.step()
        flat.grad.zero_()
        clock.tick()
        clock.note(loss)
