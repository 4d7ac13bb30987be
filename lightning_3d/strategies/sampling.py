"""Which samples a rank sees: the same global batches in every layout, nothing repeated, nothing dropped.

Batch k of a job is made of the k-th `num_replicas` batches of the user's own batch sampler, one for each data-parallel
rank, in order. One process with batches that much larger therefore sees the same samples in the same steps. (Only
where the last batch has fewer samples than there are ranks does it join the one before.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_3d.checkpoint.random_state import seeded
from lightning_3d.errors import DataError


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
        generators: those of the user's that order the samples; saved, so that a resumed epoch has the same order.
    """

    def __init__(
        self,
        batch_sampler: Any,
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        progress: Callable[[], int],
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.epoch = 0
        # Seeds of the loader's workers come from here and not from the generator that dropout uses.
        self.worker_seeds = torch.Generator()
        self._seed_workers()
        self._progress = progress
        self._generators = list(generators)
        self._began = self._generator_states()
        self._resume_at: tuple[int, list[torch.Tensor]] | None = None
        self._counted: tuple[int, int] | None = None
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> ShardedBatchSampler:
        """Lightning calls `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._resume_at = epoch, None
            self._seed_workers()
        inner: Any = getattr(self.batch_sampler, "sampler", None)
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)

    def _seed_workers(self) -> None:
        self.worker_seeds.manual_seed(self.seed + self.epoch * self.num_replicas + self.rank)

    def __iter__(self) -> Iterator[list[int]]:
        start, states = self._resume_at or (0, [])
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)
        self._began = self._generator_states()
        yield from islice(self._batches(self._draw()), start, None)
        # Only now, for Lightning makes more than one iterator before the first batch. A loader that is shorter than the
        # epoch starts over within it.
        self._resume_at = None

    def _draw(self) -> list[list[int]]:
        # In one go: what else draws numbers between two batches must not change the order.
        with seeded(self.seed + self.epoch):
            return [list(batch) for batch in self.batch_sampler]

    def _batches(self, drawn: list[list[int]]) -> Iterator[list[int]]:
        for group in self._groups(drawn):
            if len(group) == self.num_replicas:
                yield group[self.rank]
            else:
                yield _split([index for batch in group for index in batch], self.num_replicas)[self.rank]

    def _groups(self, drawn: list[list[int]]) -> Iterator[list[list[int]]]:
        """`num_replicas` batches at a time; the last group may have any number that still gives each rank a sample."""
        size = self.num_replicas
        whole = len(drawn) // size
        rest = drawn[whole * size :]
        if rest and not self.drop_last and sum(map(len, rest)) < size:
            # Too few samples for a batch on each rank: share them out together with the batches before.
            whole = max(whole - 1, 0)
            rest = drawn[whole * size :]
            if sum(map(len, rest)) < size:
                raise DataError(
                    f"{sum(map(len, rest))} samples cannot give each of {size} data-parallel ranks one. "
                    f"Use a data-parallel size of at most {sum(map(len, rest))}, or more data."
                )
        for group in range(whole):
            yield drawn[group * size : (group + 1) * size]
        if rest and not self.drop_last:
            yield rest

    def __len__(self) -> int:
        count = len(self.batch_sampler)
        if self.drop_last or count % self.num_replicas == 0:
            return count // self.num_replicas
        if self._counted is None or self._counted[0] != self.epoch:
            # The order that the next epoch will have must not depend on who asked for a length.
            before = self._generator_states()
            self._counted = self.epoch, sum(1 for _ in self._groups(self._draw()))
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)
        return self._counted[1]

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def state_dict(self) -> dict[str, Any]:
        # At an epoch's end the next order is drawn from the generators as they are; inside it, as they were.
        batches = self._progress()
        states = self._began if batches < len(self) else self._generator_states()
        return {"epoch": self.epoch, "batches": batches, "generators": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches that were done, or with the epoch after."""
        self.set_epoch(state["epoch"])
        self._resume_at = state["batches"], state.get("generators", [])
        if state["batches"] >= len(self):
            self.set_epoch(state["epoch"] + 1)
            for generator, saved in zip(self._generators, state.get("generators", []), strict=False):
                generator.set_state(saved)


class ShardedSampler(ShardedBatchSampler):
    """One rank's items of a sampler whose items are whole batches already (``DataLoader(batch_size=None)``)."""

    def __init__(self, sampler: Any, **settings: Any) -> None:
        super().__init__(_EachAlone(sampler), **settings)

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in super().__iter__())


class _EachAlone:
    """Each item of a sampler as a batch of its own."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[Any]]:
        return ([item] for item in self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def shard_dataloader(
    dataloader: object, *, num_replicas: int, rank: int, seed: int, progress: Callable[[], int]
) -> object:
    """The same loader over this rank's batches, able to continue inside an epoch; other iterables are left alone.

    Loaders that already have a DistributedSampler, and iterable datasets, decide for themselves what a rank sees.

    Raises:
        DataError: batches that cannot be shared out over the ranks.
    """
    if not isinstance(dataloader, DataLoader):
        return dataloader
    if isinstance(dataloader.dataset, IterableDataset):
        if num_replicas > 1:
            _warn_of_stream(dataloader.dataset, num_replicas=num_replicas)
        return dataloader
    if isinstance(dataloader.sampler, DistributedSampler):
        _check_distributed(dataloader.sampler, num_replicas=num_replicas, rank=rank)
        return dataloader
    original: Any = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    if not hasattr(original, "__len__"):
        if num_replicas == 1:
            return dataloader
        raise DataError(
            f"{type(original).__name__} has no length, so its batches cannot be shared out over ranks. Give it a "
            "__len__, or shard the data yourself and set Trainer(use_distributed_sampler=False)."
        )
    tracked = isinstance(original, _IndexBatchSamplerWrapper)
    inner = original._batch_sampler if tracked else original
    settings: dict[str, Any] = {
        "num_replicas": num_replicas,
        "rank": rank,
        "seed": seed,
        "progress": progress,
        "generators": _generators(dataloader, inner, getattr(inner, "sampler", None)),
    }
    # A copy, so that a loader of any class keeps all that its own constructor gave it; its attributes are locked.
    sharded: Any = copy.copy(dataloader)
    attributes = sharded.__dict__
    attributes["_iterator"] = None
    sampler: ShardedBatchSampler
    if dataloader.batch_sampler is not None:
        sampler = ShardedBatchSampler(inner, **settings)
        attributes["batch_sampler"] = _IndexBatchSamplerWrapper(sampler) if tracked else sampler
    elif isinstance(inner, BatchSampler):
        sampler = attributes["sampler"] = ShardedBatchSampler(inner, **settings)
    else:
        _check_whole_batches(len(inner), num_replicas=num_replicas)
        sampler = attributes["sampler"] = ShardedSampler(inner, **settings)
    if dataloader.generator is None:
        attributes["generator"] = sampler.worker_seeds
    attributes["state_dict"] = sampler.state_dict
    attributes["load_state_dict"] = sampler.load_state_dict
    return sharded


def _generators(*holders: Any) -> list[torch.Generator]:
    found = (getattr(holder, "generator", None) for holder in holders)
    return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))


def _warn_of_stream(dataset: IterableDataset, *, num_replicas: int) -> None:
    rank_zero_warn(
        f"each of {num_replicas} data-parallel ranks reads the whole stream of {type(dataset).__name__}, unless its "
        "__iter__ takes this rank's part: trainer.strategy.data_parallel_rank of trainer.strategy.data_parallel_size."
    )


def _check_distributed(sampler: DistributedSampler, *, num_replicas: int, rank: int) -> None:
    if (sampler.num_replicas, sampler.rank) != (num_replicas, rank):
        raise DataError(
            f"DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}) on data-parallel rank "
            f"{rank} of {num_replicas}. Leave the sampler out (this strategy shards loaders itself), or build it with "
            "**trainer.strategy.distributed_sampler_kwargs."
        )


def _check_whole_batches(count: int, *, num_replicas: int) -> None:
    if count % num_replicas:
        raise DataError(
            f"a DataLoader with batch_size=None has {count} items, which cannot be shared out evenly over "
            f"{num_replicas} data-parallel ranks without repeating or dropping one. Use a number of items that "
            f"{num_replicas} divides, or set batch_size=1."
        )


def _split(indices: list[int], parts: int) -> list[list[int]]:
    """Consecutive parts whose sizes differ by at most one."""
    size, larger = divmod(len(indices), parts)
    ends = [(part + 1) * size + min(part + 1, larger) for part in range(parts)]
    return [indices[end - size - (part < larger) : end] for part, end in enumerate(ends)]
