"""Ranks that hold parts of one model are given the same batches.

What a loader draws in this process (augmentation, masks, crops) comes from generators that are seeded anew for each
batch, by its place in the run and the data-parallel rank: whatever else a process has drawn, its peers draw the same,
and a resumed run draws what it would have drawn. What ranks read first is compared, for a dataset may go by other
things that differ between processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.distributed import ProcessGroup

from lightning_3d.checkpoint.random_state import seed_number, seeded
from lightning_3d.errors import DataError
from lightning_3d.strategies.batches.fingerprint import fingerprint
from lightning_3d.strategies.batches.in_step import changed


class Alike:
    """Gives the loaders of peers equal random numbers, and compares what comes out.

    Args:
        group: all ranks of the job, which can exchange objects of the CPU.
        data_parallel_rank: ranks that share one must be given the same batches.
        trained: tells the number of batches that the run has trained on.
    """

    def __init__(self, *, group: ProcessGroup | None, data_parallel_rank: int, trained: Callable[[], int]) -> None:
        self._group, self._rank, self._trained = group, data_parallel_rank, trained
        self._data_ranks = self._gather(data_parallel_rank)

    def keep(self, loader: Any, *, name: str, source: str) -> Any:
        """The loader itself where no rank has a peer; all ranks must be at their loader of this name.

        Args:
            source: a text, equal on all ranks, from which its random numbers are seeded.
        """
        if len(set(self._data_ranks)) == len(self._data_ranks):
            return loader
        kept = changed(loader, partial(self._batches, name=name, source=source), around=partial(self._drawing, source))
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(kept, "worker_init_fn", self) is None:
            # Lightning's own would seed the workers of each rank differently.
            kept.worker_init_fn = partial(pl_worker_init_function, rank=self._rank)
        return kept

    def _batches(self, batches: Iterator[Any], *, name: str, source: str) -> Iterator[Any]:
        start = self._trained()
        for index in count():
            place = start + index if name == "train" else f"{start}+{index}"
            with self._drawing(source, place):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            if index == 0:
                self._compare(batch, name=name)
            yield batch

    def _drawing(self, source: str, place: Any = None) -> Any:
        # The seeds of workers, where an iterator is made.
        place = f"workers/{self._trained()}" if place is None else place
        return seeded(seed_number(f"{source}/{place}/{self._rank}"))

    def _compare(self, batch: Any, *, name: str) -> None:
        found = self._gather(fingerprint(batch))
        first = {data_rank: rank for rank, data_rank in reversed(list(enumerate(self._data_ranks)))}
        for rank, data_rank in enumerate(self._data_ranks):
            other = first[data_rank]
            if found[rank] != found[other]:
                raise DataError(
                    f"the {name} loader gives rank {rank} another batch than rank {other}, but both hold parts of the "
                    f"same model and must see the same data (data-parallel rank {data_rank}). Shard by "
                    "**trainer.strategy.distributed_sampler_kwargs, not by the rank of the process, and draw random "
                    "numbers from Python's, NumPy's and torch's own generators, which are seeded alike there, not from "
                    "one that is seeded by the process or the time."
                )

    def _gather(self, value: Any) -> list[Any]:
        box: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(box, value, group=self._group)
        return box
