"""The global batches of a loader over data that can be indexed, and one rank's part of each.

Batch k of a job is made of the k-th `num_replicas` batches of the user's own batch sampler, one for each data-parallel
rank, in order. One process with batches that much larger therefore sees the same samples in the same steps. (Only
where the last batch has fewer samples than there are ranks does it join the one before.)

A place in an epoch is a number of samples of the whole job, in an order that no layout changes. So a run that goes on
with other ranks or other batches cuts what is left anew, and no sample is lost or comes twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler

from lightning_3d.checkpoint.random_state import seeded
from lightning_3d.errors import DataError

# One batch of indices for each rank; the last of an epoch may be of any number of batches.
Group = list[list[Any]]


@dataclass(frozen=True)
class Progress:
    """How far a run has come in its epoch, in batches of one rank.

    Args:
        batches: done.
        window: done when the accumulation window began that is open now; `batches` between two windows.
        finished: whether the epoch has no more of them.
    """

    batches: int = 0
    window: int = 0
    finished: bool = False


class ShardedBatchSampler:
    """One rank's batches out of those that a batch sampler makes for one process.

    Every rank draws the user's sampler's random numbers from (seed, epoch), so that all agree on the order. Batches
    left over when they do not divide by the ranks are pooled and split evenly: all ranks get equally many batches, none
    is empty, and no sample comes twice.

    Args:
        batch_sampler: yields lists of indices, of the size that one rank is to get.
        num_replicas, rank: data-parallel size and coordinate.
        seed: equal on every rank.
        progress: called when a checkpoint is saved.
        generators: those of the user's that order the samples; saved, so that a resumed epoch has the same order.
    """

    def __init__(
        self,
        batch_sampler: Any,
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        progress: Callable[[], Progress],
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
        self._pass: _Pass | None = None
        self._counted: tuple[int, int] | None = None
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> ShardedBatchSampler:
        """Lightning calls `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._resume_at, self._pass = epoch, None, None
            self._seed_workers()
        inner: Any = getattr(self.batch_sampler, "sampler", None)
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)

    def _seed_workers(self) -> None:
        self.worker_seeds.manual_seed(self.seed + self.epoch * self.num_replicas + self.rank)

    def __iter__(self) -> Iterator[list[Any]]:
        start, states = self._resume_at or (0, [])
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)
        self._began = self._generator_states()
        self._pass = self._begin(start)
        yield from (self._part(group) for group in self._pass.groups)
        # Only now, for Lightning makes more than one iterator before the first batch. A loader that is shorter than the
        # epoch starts over within it.
        self._resume_at = None

    def _part(self, group: Group) -> list[Any]:
        if len(group) == self.num_replicas:
            return group[self.rank]
        return split_evenly([index for batch in group for index in batch], self.num_replicas)[self.rank]

    def __len__(self) -> int:
        """Batches of an epoch from its start, also where this one goes on in the middle."""
        count = len(self.batch_sampler)
        if self.drop_last or count % self.num_replicas == 0:
            return count // self.num_replicas
        if self._counted is None or self._counted[0] != self.epoch:
            self._counted = self.epoch, len(self._peek(0).groups)
        return self._counted[1]

    # ------------------------------------------------------------------ order

    def _begin(self, start: int) -> _Pass:
        # In one go: what else draws numbers between two batches must not change the order.
        with seeded(self.seed + self.epoch):
            # The sampler itself, where batches are so many of its samples each: they can be cut anew anywhere.
            plain = type(self.batch_sampler) is BatchSampler
            drawn = list(self.batch_sampler.sampler if plain else self.batch_sampler)
        order = drawn if plain else [index for batch in drawn for index in batch]
        rest = self._cut(order[start:]) if plain else _without(drawn, start)
        return _Pass(order, start, self._groups(rest, started=start > 0))

    def _peek(self, start: int) -> _Pass:
        # The order that the next epoch will have must not depend on who asked.
        before = self._generator_states()
        found = self._begin(start)
        for generator, state in zip(self._generators, before, strict=True):
            generator.set_state(state)
        return found

    def _cut(self, order: list[Any]) -> list[list[Any]]:
        size = self.batch_sampler.batch_size
        cut = [order[at : at + size] for at in range(0, len(order), size)]
        return cut[:-1] if cut and self.drop_last and len(cut[-1]) < size else cut

    def _groups(self, drawn: list[list[Any]], *, started: bool) -> list[Group]:
        """`num_replicas` batches at a time; the last group may have any number that still gives each rank a sample."""
        size = self.num_replicas
        whole = len(drawn) // size
        rest = drawn[whole * size :]
        if rest and not self.drop_last and sum(map(len, rest)) < size:
            # Too few samples for a batch on each rank: share them out together with the batches before.
            whole = max(whole - 1, 0)
            rest = drawn[whole * size :]
            if sum(map(len, rest)) < size:
                self._refuse_too_few(sum(map(len, rest)), started=started)
                rest = []
        groups = [drawn[group * size : (group + 1) * size] for group in range(whole)]
        return [*groups, rest] if rest and not self.drop_last else groups

    def _refuse_too_few(self, count: int, *, started: bool) -> None:
        if not started:
            raise DataError(
                f"{count} samples cannot give each of {self.num_replicas} data-parallel ranks one. "
                f"Use a data-parallel size of at most {count}, or more data."
            )
        rank_zero_warn(
            f"{count} samples are left of the epoch in which the checkpoint was saved, too few for a batch on each of "
            f"{self.num_replicas} data-parallel ranks: the run goes on with the next epoch, without them."
        )

    # ------------------------------------------------------------------ the place in an epoch

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def state_dict(self) -> dict[str, Any]:
        """The place as plain numbers; `window` is where the open accumulation window began."""
        here = self._pass or (self._peek(self._resume_at[0]) if self._resume_at else None)
        # Without a pass, the epoch has been told and not begun.
        done = self._progress() if here is not None else Progress()
        samples, window = (self._samples(here, count) for count in (done.batches, done.window))
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "finished": done.finished,
            "batches": {"done": done.batches, "window": done.window},
            "samples": {"done": samples, "window": window},
            "order": digest(here.order, window) if here is not None else "",
            # At an epoch's end the next order is drawn from the generators as they are; inside it, as they were.
            "generators": self._generator_states() if done.finished else self._began,
        }

    def _samples(self, here: _Pass | None, batches: int) -> int:
        """Samples of all ranks after `batches` of each in this epoch."""
        if here is None:
            return 0
        # A loader that is shorter than the epoch starts over within it.
        within = batches if batches <= len(self) else (batches - 1) % len(self) + 1
        done = within - (len(self) - len(here.groups))
        return here.start + sum(len(batch) for group in here.groups[: max(done, 0)] for batch in group)

    def load_state_dict(self, state: dict[str, Any], *, at: str = "done") -> int:
        """Go on after the samples that were done, or with the epoch after; batches that an epoch has behind it there.

        Args:
            at: "window" goes back to where the accumulation window began that was open.
        """
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        length = len(self)
        if state["finished"]:
            self.set_epoch(state["epoch"] + 1)
        self._seed_workers()
        for generator, saved in zip(self._generators, state["generators"], strict=False):
            generator.set_state(saved)
        self._began = self._generator_states()
        if state["finished"]:
            return length
        start = state["samples"][at]
        self._resume_at, self._pass = (start, state["generators"]), None
        rest = self._peek(start)
        if state["order"] and digest(rest.order, state["samples"]["window"]) != state["order"]:
            rank_zero_warn(
                f"the loader gives epoch {self.epoch} another order than the run had that saved the checkpoint (other "
                f"data, another sampler, or batches that depend on their size): it goes on after {start} samples of "
                "the new order, among which some may have been seen already."
            )
        return length - len(rest.groups)


class ShardedSampler(ShardedBatchSampler):
    """One rank's items of a sampler whose items are whole batches already (``DataLoader(batch_size=None)``)."""

    def __init__(self, sampler: Any, **settings: Any) -> None:
        super().__init__(_EachAlone(sampler), **settings)

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in super().__iter__())


@dataclass(frozen=True)
class _Pass:
    """One way through the samples of an epoch: all of them in order, and the groups after the first `start`."""

    order: list[Any]
    start: int
    groups: list[Group]


class _EachAlone:
    """Each item of a sampler as a batch of its own."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[Any]]:
        return ([item] for item in self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def digest(order: list[Any], count: int) -> str:
    """Tells the first `count` of one order from those of another, by a thousand of them."""
    some = order[: min(count, len(order)) : max(count // 1000, 1)]
    return hashlib.sha256(repr((count, some)).encode()).hexdigest()


def _without(batches: list[list[Any]], start: int) -> list[list[Any]]:
    """What is left of batches after their first `start` samples."""
    rest = []
    for batch in map(list, batches):
        if start < len(batch):
            rest.append(batch[start:])
        start = max(start - len(batch), 0)
    return rest


def split_evenly(items: list[Any], parts: int) -> list[list[Any]]:
    """Consecutive parts whose sizes differ by at most one.

    >>> split_evenly([1, 2, 3, 4, 5], 3)
    [[1, 2], [3, 4], [5]]
    """
    size, larger = divmod(len(items), parts)
    ends = [(part + 1) * size + min(part + 1, larger) for part in range(parts)]
    return [items[end - size - (part < larger) : end] for part, end in enumerate(ends)]
