"""ZeRO-1: the flat gradient is reduced and scattered once, AdamW updates a shard, the shards are gathered."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.hand.flat import flatten_parameters_, windows
from benchmarks.job import ADAMW, Clock, Job, next_token_loss


def train(job: Job, clock: Clock) -> None:
    model = job.build_model()
    parameters = list(model.parameters())
    flat = flatten_parameters_(parameters, multiple=job.layout.data)
    gradient = torch.zeros_like(flat)
    for parameter, window in windows(gradient, parameters):
        parameter.grad = window
    # A window on the buffer: the update of the shard is an update of the parameters.
    shard = nn.Parameter(flat.chunk(job.layout.data)[job.data_parallel_rank])
    shard.grad = torch.empty_like(shard)
    optimizer = torch.optim.AdamW([shard], **ADAMW)
    batches = job.local_batches()
    clock.start()
    for rows in batches:
        loss = next_token_loss(model(rows[:, :-1]), rows)
        loss.backward()
        dist.reduce_scatter_tensor(shard.grad, gradient)
        shard.grad /= job.layout.data
        optimizer.step()
        dist.all_gather_into_tensor(flat, shard.data)
        gradient.zero_()
        clock.tick()
        clock.note(loss)
