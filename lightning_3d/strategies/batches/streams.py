"""One rank's part of a stream (`IterableDataset`), and the place in it.

Every rank reads the whole stream and keeps its part of each global batch, as for data that can be indexed: the same
batches in every layout, equally many on each rank, nothing repeated and nothing left out. A dataset with a method
``shard(num_shards, index)`` (that of `datasets` has one) is asked for its part instead, and read once in all; which
samples meet in a batch then depends on the number of ranks.

A place is a number of samples for each worker. A resumed run reads up to it again, without making batches, unless the
dataset has ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_3d.errors import DataError
from lightning_3d.strategies.batches.fingerprint import fingerprint
from lightning_3d.strategies.batches.global_batches import Progress, split_evenly

_SEED_STEP = 1009


class Parcel(NamedTuple):
    """What travels from a worker: a batch, and where the worker then is in its stream.

    Args:
        samples: of all ranks, that this worker has given out.
        state: the dataset's own, if it tells one.
        seen: tells whether ranks read the same, with a worker's first batch.
        batch: samples, later collated; None where only the worker's turn was to be taken.
    """

    worker: int
    samples: int
    state: Any
    seen: str | None
    batch: Any


class ShardedStream(IterableDataset):
    """Parcels of one rank's samples out of a stream that every rank reads.

    Args:
        dataset: the user's; with workers, each of them reads what `__iter__` gives it there.
        batch_size: samples of one rank in a batch; None where the dataset's items are whole batches.
        num_replicas, rank: data-parallel size and coordinate.
    """

    def __init__(
        self, dataset: IterableDataset, *, batch_size: int | None, drop_last: bool, num_replicas: int, rank: int
    ) -> None:
        self.dataset: Any = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = 0
        # Where each worker goes on, and the worker whose turn it is.
        self.place: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Batches of one rank, where the dataset knows its length and one process reads it."""
        return self.batches_of(len(self.dataset))

    def batches_of(self, samples: int) -> int:
        """Batches of one rank out of so many samples of all."""
        full, rest = divmod(samples, self.global_batch_size)
        left_out = self.drop_last or self.batch_size is None or rest < self.num_replicas
        return full + (rest > 0 and not left_out)

    @property
    def global_batch_size(self) -> int:
        return (self.batch_size or 1) * self.num_replicas

    def __iter__(self) -> Iterator[Parcel]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        place, self.place = self.place, None
        state, samples = None, 0
        randomness = _Randomness(self.seed + worker)
        # Of the next pass, in a worker that stays.
        self.seed += _SEED_STEP
        if place is not None:
            state, samples = place["states"].get(worker), place["samples"].get(worker, 0)
            if state is not None:
                self.dataset.load_state_dict(state)
        with randomness():
            items = iter(self.dataset)
            if state is None:
                deque(islice(items, samples), maxlen=0)
        if place is not None and worker < place["next"]:
            # Workers take turns from the first one on, but the run had stopped in the middle of a round.
            yield Parcel(worker, samples, state, None, None)
        seen: str | None = ""
        for group, after in self._groups(items, randomness, started=samples > 0):
            samples += len(group)
            if seen == "":
                seen = fingerprint(group)
            yield Parcel(worker, samples, after, seen, self._part(group))
            seen = None

    def _groups(self, items: Iterator[Any], randomness: _Randomness, *, started: bool) -> Iterator[tuple[list, Any]]:
        """The samples of each global batch, and the dataset's state after them."""
        size = self.global_batch_size
        held: tuple[list, Any] | None = None
        while True:
            with randomness():
                group = list(islice(items, size))
                state = self.dataset.state_dict() if hasattr(self.dataset, "state_dict") else None
            if len(group) == size:
                if self.num_replicas == 1:
                    yield group, state
                    continue
                if held is not None:
                    yield held
                # One is kept back, for samples that are too few for a batch of their own.
                held = group, state
                continue
            if group and self.batch_size is None:
                rank_zero_warn(
                    f"{type(self.dataset).__name__} ends with {len(group)} batches, which cannot be shared out evenly "
                    f"over {self.num_replicas} data-parallel ranks: they are left out."
                )
            elif group and not self.drop_last:
                if len(group) < self.num_replicas:
                    group = (held[0] if held is not None else []) + group
                    held = None
                if len(group) < self.num_replicas:
                    self._refuse_too_few(len(group), started=started)
                else:
                    if held is not None:
                        yield held
                    held = group, state
            if held is not None:
                yield held
            return

    def _part(self, group: list[Any]) -> Any:
        if self.batch_size is None:
            return group[self.rank]
        batches = [group[at : at + self.batch_size] for at in range(0, len(group), self.batch_size)]
        return (
            batches[self.rank]
            if len(batches) == self.num_replicas
            else split_evenly(group, self.num_replicas)[self.rank]
        )

    def _refuse_too_few(self, count: int, *, started: bool) -> None:
        name = type(self.dataset).__name__
        if not started:
            raise DataError(
                f"{name} has {count} samples, which cannot give each of {self.num_replicas} data-parallel ranks one. "
                f"Use a data-parallel size of at most {count}, fewer workers, or more data."
            )
        rank_zero_warn(f"{count} samples are left of {name}, too few for {self.num_replicas} ranks: they are left out.")


class StreamPosition:
    """Where the run is in a stream; takes the place of the loader's sampler, so that Lightning tells it the epoch.

    Args:
        stream: read by the loader.
        seed: equal on every rank.
        progress: called when a checkpoint is saved.
        shards: into how many the dataset has cut itself; None where all ranks read the same.
    """

    def __init__(
        self,
        stream: ShardedStream,
        *,
        num_workers: int,
        seed: int,
        progress: Callable[[], Progress],
        shards: int | None = None,
    ) -> None:
        self.stream = stream
        self.shards = shards
        self.num_workers = num_workers
        self.seed = seed
        self.epoch = 0
        self.generator = torch.Generator()
        # Of the first batch of a pass over the stream: what all ranks have read.
        self.seen: str | None = None
        self._progress = progress
        self._places: dict[int, dict[str, Any]] = {}
        self._count = 0
        self._begin(_start(), batches=0)

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin(_start(), batches=0)
        if hasattr(self.stream.dataset, "set_epoch"):
            self.stream.dataset.set_epoch(epoch)

    def _begin(self, place: dict[str, Any], *, batches: int) -> None:
        self._places = {batches: place}
        self._count = batches
        self.stream.place = place if place["samples"] else None
        self.stream.seed = self.seed + self.epoch * _SEED_STEP
        # Alike on all ranks, so that a stream that shuffles in a worker gives them one order.
        self.generator.manual_seed(self.stream.seed)

    def begin_pass(self) -> None:
        """The loader makes an iterator: the stream is read from its start, or from where a resumed run goes on."""
        if self.stream.place is None:
            self._places[self._count] = _start()

    def unpack(self, following: Callable[[], Parcel]) -> Any:
        """The next batch; it has been read, and is done once a later one is asked for."""
        while True:
            parcel = following()
            if parcel.seen is not None:
                self.seen = parcel.seen
            if parcel.batch is not None:
                break
        self.stream.place = None
        last = self._places[self._count]
        self._count += 1
        self._places[self._count] = {
            "samples": {**last["samples"], parcel.worker: parcel.samples},
            "states": {**last["states"], parcel.worker: parcel.state} if parcel.state is not None else last["states"],
            "next": (parcel.worker + 1) % max(self.num_workers, 1),
        }
        # What Lightning has fetched ahead, and an accumulation window, may have to be gone back.
        oldest = min(self._progress().window, self._count - 2)
        for count in [count for count in self._places if count < oldest]:
            del self._places[count]
        return parcel.batch

    def state_dict(self) -> dict[str, Any]:
        done = self._progress()
        places = {"done": self._places.get(done.batches), "window": self._places.get(done.window)}
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "finished": done.finished,
            "batches": {"done": done.batches, "window": done.window},
            "samples": places if all(places.values()) else dict.fromkeys(places, self._places[self._count]),
            "workers": self.num_workers,
            "global_batch_size": self.stream.global_batch_size,
            "shards": self.shards,
        }

    def load_state_dict(self, state: dict[str, Any], *, at: str = "done") -> int:
        """Go on at a place that `state_dict` has told; batches that an epoch has behind it there.

        Raises:
            DataError: inside an epoch, another number of workers or shards, which cut the stream in another way.
        """
        self.seed = state["seed"]
        self.set_epoch(state["epoch"] + state["finished"])
        if state["finished"]:
            self._begin(_start(), batches=0)
            return int(state["batches"]["done"])
        name = type(self.stream.dataset).__name__
        if max(state["workers"], 1) != max(self.num_workers, 1):
            raise DataError(
                f"the checkpoint was saved inside an epoch of {name}, read by {state['workers']} workers; now there "
                f"are {self.num_workers}, which would share it out in another way. Set num_workers={state['workers']}."
            )
        if state["shards"] != self.shards:
            raise DataError(
                f"the checkpoint was saved inside an epoch of {name}, which its shard() had cut into {state['shards']} "
                f"parts; now there are {self.shards}. Use as many data-parallel ranks, or resume at an epoch's end."
            )
        place, batches = state["samples"][at], int(state["batches"][at])
        if state["global_batch_size"] != self.stream.global_batch_size:
            samples = sum(place["samples"].values())
            batches = samples // self.stream.global_batch_size
            if hasattr(self.stream.dataset, "__len__"):
                rest = self.stream.batches_of(len(self.stream.dataset) - samples)
                batches = max(len(self.stream) - rest, 0)
        self._begin(place, batches=batches)
        return batches


def shard_stream(
    dataloader: DataLoader, *, num_replicas: int, rank: int, seed: int, progress: Callable[[], Progress]
) -> dict[str, Any]:
    """The attributes by which a copy of a loader over a stream gives one rank's part of it."""
    dataset: Any = dataloader.dataset
    shards = None
    if num_replicas > 1 and callable(getattr(dataset, "shard", None)):
        dataset = dataset.shard(num_shards=num_replicas, index=rank)
        shards, num_replicas, rank = num_replicas, 1, 0
    stream = ShardedStream(
        dataset,
        batch_size=dataloader.batch_size,
        drop_last=dataloader.drop_last,
        num_replicas=num_replicas,
        rank=rank,
    )
    position = StreamPosition(stream, num_workers=dataloader.num_workers, seed=seed, progress=progress, shards=shards)
    attributes: dict[str, Any] = {
        "dataset": stream,
        "batch_size": None,
        "drop_last": False,
        "batch_sampler": None,
        "sampler": position,
        "collate_fn": partial(_collate, dataloader.collate_fn),
        "state_dict": position.state_dict,
        "load_state_dict": position.load_state_dict,
    }
    if dataloader.generator is None:
        attributes["generator"] = position.generator
    if dataloader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        # Lightning's own would seed the workers of each rank differently.
        attributes["worker_init_fn"] = partial(pl_worker_init_function, rank=0)
    return attributes


def unpacking(kind: type[DataLoader]) -> type[DataLoader]:
    """A class of loaders whose iterators give batches instead of parcels, below any `__iter__` of the user's."""

    class Unpacking(kind):  # type: ignore[misc, valid-type]
        def _get_iterator(self) -> Any:
            position: Any = self.sampler
            position.begin_pass()
            iterator: Any = super()._get_iterator()
            iterator.position = position
            # By its class: an attribute that leads back to it would keep its workers until garbage is collected.
            made: Any = type(iterator)
            iterator.__class__ = _unpacking_iterator(made)
            return iterator

    Unpacking.__name__, Unpacking.__qualname__ = kind.__name__, kind.__qualname__
    return Unpacking


@cache
def _unpacking_iterator(kind: Any) -> Any:
    class Unpacking(kind):
        def _next_data(self) -> Any:
            return self.position.unpack(super()._next_data)

        def _reset(self, *args: Any, **kwargs: Any) -> None:
            # Workers that stay serve one iterator for all epochs.
            self.position.begin_pass()
            super()._reset(*args, **kwargs)

    return Unpacking


def _start() -> dict[str, Any]:
    return {"samples": {}, "states": {}, "next": 0}


def _collate(collate: Callable[[Any], Any], parcel: Parcel) -> Parcel:
    return parcel if parcel.batch is None else parcel._replace(batch=collate(parcel.batch))


class _Randomness:
    """The generators that a stream draws from: seeded alike on all ranks, and apart from those of the step."""

    def __init__(self, seed: int) -> None:
        self._state: Any = None
        self._seed = seed

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = _generators()
        if self._state is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            torch.default_generator.manual_seed(self._seed)
        else:
            _set_generators(self._state)
        try:
            yield
        finally:
            self._state = _generators()
            _set_generators(before)


def _generators() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
