"""The process groups of a rank, by axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from benchmarks.job import Job


@dataclass(frozen=True)
class Groups:
    """The ranks that differ from this one in one axis only."""

    data: ProcessGroup
    tensor: ProcessGroup


def build_groups(job: Job) -> Groups:
    """Collective: every rank makes every group."""
    layout = job.layout
    ranks = torch.arange(layout.world_size).view(layout.pipeline, layout.data, layout.tensor)
    return Groups(
        data=_of_this_rank(job, ranks.transpose(1, 2).flatten(0, 1).tolist()),
        tensor=_of_this_rank(job, ranks.flatten(0, 1).tolist()),
    )


def _of_this_rank(job: Job, members: list[list[int]]) -> ProcessGroup:
    made = {tuple(ranks): dist.new_group(ranks) for ranks in members}
    return next(group for ranks, group in made.items() if job.rank in ranks)
