"""Which samples a rank sees: the same global batches in every layout, nothing repeated, nothing dropped.

Batch k of a job is made of the k-th `num_replicas` batches of the user's own batch sampler, one for each data-parallel
rank, in order. One process with batches that much larger therefore sees the same samples in the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs, _reinstantiate_wrapped_cls
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_3d.checkpoint.random_state import seeded
from lightning_3d.errors import DataError

_PLAIN = (
    "dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers", "pin_memory_device",
)  # fmt: skip


class ShardedBatchSampler:
    """One rank's batches out of those that a batch sampler makes for one process.

    Every rank draws the user's sampler's random numbers from (seed, epoch), so that all agree on the order. Batches
    left over when they do not divide by the ranks are pooled and split evenly: all ranks get equally many batches, none
    is empty, and no sample comes twice.

    Args:
        batch_sampler: yields lists of indices, of the size that one rank is to get.
        num_replicas, rank: data-parallel size and coordinate.
        seed: equal on every rank.
        progress: called when a checkpoint is saved: batches of this epoch that are done.
    """

    def __init__(
        self, batch_sampler: Any, *, num_replicas: int, rank: int, seed: int, progress: Callable[[], int]
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.epoch = 0
        self._progress = progress
        self._start = 0
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> ShardedBatchSampler:
        """Lightning calls `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0
        inner: Any = getattr(self.batch_sampler, "sampler", None)
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self._batches(), self._start, None)

    def _batches(self) -> Iterator[list[int]]:
        for group in self._groups():
            if len(group) == self.num_replicas:
                yield group[self.rank]
            else:
                yield _split([index for batch in group for index in batch], self.num_replicas)[self.rank]

    def _groups(self) -> Iterator[list[list[int]]]:
        """`num_replicas` batches at a time; the last group may have any number that still gives each rank a sample."""
        # Read in one go: what else draws numbers between two batches must not change the order.
        with seeded(self.seed + self.epoch):
            batches = [list(batch) for batch in self.batch_sampler]
        size = self.num_replicas
        whole = len(batches) // size
        rest = batches[whole * size :]
        if rest and not self.drop_last and sum(map(len, rest)) < size:
            # Too few samples for a batch on each rank: share them out together with the batches before.
            whole = max(whole - 1, 0)
            rest = batches[whole * size :]
            if sum(map(len, rest)) < size:
                raise DataError(
                    f"{sum(map(len, rest))} samples cannot give each of {size} data-parallel ranks one. "
                    f"Use a data-parallel size of at most {sum(map(len, rest))}, or more data."
                )
        for group in range(whole):
            yield batches[group * size : (group + 1) * size]
        if rest and not self.drop_last:
            yield rest

    def __len__(self) -> int:
        if type(self.batch_sampler) is BatchSampler and (self.num_replicas == 1 or self.drop_last):
            return len(self.batch_sampler) // self.num_replicas
        return sum(1 for _ in self._groups())

    def state_dict(self) -> dict[str, int]:
        """The epoch and the batches of it that are done."""
        return {"epoch": self.epoch, "batches": self._progress()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.set_epoch(state["epoch"])
        self._start = state["batches"]
        if self._start >= len(self):
            # Saved at the end of an epoch: the next one starts at its first batch.
            self.set_epoch(state["epoch"] + 1)


def shard_dataloader(
    dataloader: object, *, num_replicas: int, rank: int, seed: int, progress: Callable[[], int]
) -> object:
    """The same loader over this rank's batches, able to continue inside an epoch; other iterables are left alone.

    Loaders that already have a DistributedSampler, and iterable datasets, decide for themselves what a rank sees.
    """
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
        return dataloader
    if isinstance(dataloader.sampler, DistributedSampler) or dataloader.batch_sampler is None:
        return dataloader
    original: Any = dataloader.batch_sampler
    if not hasattr(original, "__len__"):
        raise DataError(
            f"{type(original).__name__} has no length, so its batches cannot be shared out over ranks. Give it a "
            "__len__, or shard the data yourself and set Trainer(use_distributed_sampler=False)."
        )
    tracked = isinstance(original, _IndexBatchSamplerWrapper)
    sampler: Any = ShardedBatchSampler(
        original._batch_sampler if tracked else original,
        num_replicas=num_replicas,
        rank=rank,
        seed=seed,
        progress=progress,
    )
    args, kwargs = _constructor_arguments(dataloader)
    kwargs.update(
        batch_sampler=_IndexBatchSamplerWrapper(sampler) if tracked else sampler,
        sampler=None,
        shuffle=False,
        batch_size=1,
        drop_last=False,
    )
    if dataloader.generator is None:
        # Seeds of workers come from here and not from the generator that dropout uses.
        kwargs["generator"] = torch.Generator().manual_seed(seed + rank)
    sharded = _reinstantiate_wrapped_cls(dataloader, *args, **kwargs)
    sharded.state_dict = sampler.state_dict
    sharded.load_state_dict = sampler.load_state_dict
    return sharded


def _constructor_arguments(dataloader: DataLoader) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(dataloader) is DataLoader:
        return (), {name: getattr(dataloader, name) for name in _PLAIN}
    return _get_dataloader_init_args_and_kwargs(dataloader, dataloader.sampler)


def _split(indices: list[int], parts: int) -> list[list[int]]:
    """Consecutive parts whose sizes differ by at most one."""
    size, larger = divmod(len(indices), parts)
    ends = [(part + 1) * size + min(part + 1, larger) for part in range(parts)]
    return [indices[end - size - (part < larger) : end] for part, end in enumerate(ends)]
