"""Streams: every sample once, in the same global batches whatever the number of data-parallel ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_3d.errors import DataError
from lightning_3d.strategies.batches.global_batches import Progress
from lightning_3d.strategies.batches.sampling import shard_dataloader


class Stream(IterableDataset):
    """Numbers from 0 on; each worker has every so many."""

    def __init__(self, count: int, *, shuffle: bool = False) -> None:
        self.count, self.shuffle, self.reads = count, shuffle, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        numbers = list(range(worker, self.count, workers))
        if self.shuffle:
            random.shuffle(numbers)
        for number in numbers:
            self.reads += 1
            yield number


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


class Remembering(Stream):
    """Tells and takes its place."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.count:
            self.at, self.reads = self.at + 1, self.reads + 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def shard(loader: DataLoader, ranks: int, rank: int, progress: list[Progress] | None = None) -> Any:
    told = progress if progress is not None else [Progress()]
    return shard_dataloader(loader, num_replicas=ranks, rank=rank, seed=5, progress=lambda: told[0])


def global_batches(loader: DataLoader, ranks: int) -> list[list[int]]:
    per_rank = [[batch.tolist() for batch in shard(loader, ranks, rank)] for rank in range(ranks)]
    assert len({len(batches) for batches in per_rank}) == 1 and all(batch for batches in per_rank for batch in batches)
    return [[number for batch in step for number in batch] for step in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_global_batches_of_a_stream_are_those_of_one_process(shuffle: bool) -> None:
    for count in (4, 5, 8, 9, 15, 23, 38):
        for ranks in (1, 2, 3, 4):
            for drop_last in (False, True):
                stream = Stream(count, shuffle=shuffle)
                got = global_batches(DataLoader(stream, batch_size=2, drop_last=drop_last), ranks)
                one = global_batches(DataLoader(stream, batch_size=2 * ranks, drop_last=drop_last), 1)
                if len(one) > 1 and len(one[-1]) < ranks:
                    one = [*one[:-2], one[-2] + one[-1]]
                assert got == one
                seen = [number for batch in got for number in batch]
                assert len(set(seen)) == len(seen) == (count - count % (2 * ranks) if drop_last else count)
                assert shuffle or seen == sorted(seen)


def test_a_stream_with_a_length_tells_how_many_batches_a_rank_gets() -> None:
    for count in (4, 5, 11, 12, 13, 14, 25):
        for ranks in (1, 2, 4):
            for drop_last in (False, True):
                loader = DataLoader(Sized(count), batch_size=3, drop_last=drop_last)
                assert len(shard(loader, ranks, 0)) == len(global_batches(loader, ranks))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_one_order_on_all_ranks_and_another_in_each_epoch(persistent: bool) -> None:
    loader = DataLoader(Stream(23, shuffle=True), batch_size=2, num_workers=2, persistent_workers=persistent)
    sharded = [shard(loader, 2, rank) for rank in range(2)]
    orders = []
    for epoch in range(2):
        for each in sharded:
            each.sampler.set_epoch(epoch)
        steps = zip(*([batch.tolist() for batch in each] for each in sharded), strict=True)
        orders.append([number for step in steps for batch in step for number in batch])
        assert sorted(orders[-1]) == list(range(23))
    assert orders[0] != orders[1]


def test_reading_a_stream_leaves_the_generators_of_the_step_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    list(shard(DataLoader(Stream(9, shuffle=True), batch_size=2), 2, 1))
    assert (torch.rand(1), random.random()) == expected


def test_too_few_samples_for_the_ranks_are_refused() -> None:
    with pytest.raises(DataError, match="Stream has 3 samples.*each of 4 data-parallel ranks.*at most 3"):
        list(shard(DataLoader(Stream(3), batch_size=2), 4, 0))


class InParts(Stream):
    def shard(self, num_shards: int, index: int) -> Any:
        part = InParts(self.count)
        part.part = num_shards, index  # type: ignore[attr-defined]
        return part

    def __iter__(self) -> Iterator[int]:
        shards, index = getattr(self, "part", (1, 0))
        for number in range(index, self.count, shards):
            self.reads += 1
            yield number


def test_a_dataset_that_can_cut_itself_is_read_once_in_all() -> None:
    loader = DataLoader(InParts(10), batch_size=2)
    sharded = [shard(loader, 2, rank) for rank in range(2)]
    assert [[batch.tolist() for batch in each] for each in sharded] == [
        [[0, 2], [4, 6], [8]],
        [[1, 3], [5, 7], [9]],
    ]
    assert [each.dataset.dataset.reads for each in sharded] == [5, 5]


class Doubling(DataLoader):
    def __iter__(self) -> Any:
        return (batch * 2 for batch in super().__iter__())


def test_a_loader_with_an_iterator_of_its_own_gets_batches() -> None:
    got = [batch.tolist() for batch in shard(Doubling(Stream(8), batch_size=2), 2, 1)]
    assert got == [[4, 6], [12, 14]]


# ------------------------------------------------------------------ going on inside a stream


def taken(loader: Any, count: int, told: list[Progress]) -> list[list[int]]:
    """Batches of a run that stops after `count`, one having been fetched ahead."""
    iterator = iter(loader)
    batches = []
    ahead = next(iterator)
    for done in range(1, count + 1):
        batches.append(ahead.tolist())
        ahead = next(iterator, None)
        told[0] = Progress(done, done, False)
    return batches


@pytest.mark.parametrize(
    ("kind", "workers", "new_ranks"),
    [
        (Stream, 0, 1),
        (Stream, 0, 2),
        (Stream, 2, 2),
        (Stream, 2, 3),
        (Sized, 0, 3),
        (Remembering, 0, 2),
        (Remembering, 1, 1),
    ],
)
def test_a_resumed_stream_goes_on_with_the_next_sample(kind: type[Stream], workers: int, new_ranks: int) -> None:
    for stop in (1, 5):
        steps: list[list[list[int]]] = []
        state = None
        for rank in range(2):
            told = [Progress()]
            loader = shard(DataLoader(kind(53), batch_size=2, num_workers=workers), 2, rank, told)
            steps.append(taken(loader, stop, told))
            state = loader.state_dict()
        before = [number for batches in steps for batch in batches for number in batch]
        whole = global_batches(DataLoader(kind(53), batch_size=2, num_workers=workers), 2)
        after = []
        for rank in range(new_ranks):
            stream = kind(53)
            loader = shard(DataLoader(stream, batch_size=2, num_workers=workers), new_ranks, rank)
            batches = loader.load_state_dict(state)
            assert batches == stop if new_ranks == 2 else True
            after.append([batch.tolist() for batch in loader])
            if kind is Remembering and workers == 0:
                assert stream.reads == 53 - len(before)
            # The next epoch begins at the start again.
            loader.sampler.set_epoch(1)
            assert len(list(loader)) >= len(after[-1])
        rest = [number for step in zip(*after, strict=True) for batch in step for number in batch]
        assert sorted(before + rest) == list(range(53))
        if new_ranks == 2:
            assert rest == [number for batch in whole[stop:] for number in batch]


def test_another_number_of_workers_inside_an_epoch_is_refused() -> None:
    told = [Progress()]
    loader = shard(DataLoader(Stream(53), batch_size=2, num_workers=2), 1, 0, told)
    taken(loader, 2, told)
    state = loader.state_dict()
    with pytest.raises(DataError, match="read by 2 workers; now there are 0.*num_workers=2"):
        shard(DataLoader(Stream(53), batch_size=2), 1, 0).load_state_dict(state)
    state["finished"] = True
    shard(DataLoader(Stream(53), batch_size=2), 1, 0).load_state_dict(state)


def test_a_stream_cut_by_its_own_method_goes_on_over_as_many_ranks_only() -> None:
    told = [Progress()]
    loader = shard(DataLoader(InParts(53), batch_size=2), 2, 1, told)
    before = taken(loader, 2, told)
    state = loader.state_dict()
    again = shard(DataLoader(InParts(53), batch_size=2), 2, 1)
    again.load_state_dict(state)
    assert sorted(n for batch in [*before, *map(torch.Tensor.tolist, again)] for n in batch) == list(range(1, 53, 2))
    with pytest.raises(DataError, match="cut into 2 parts; now there are 3"):
        shard(DataLoader(InParts(53), batch_size=2), 3, 1).load_state_dict(state)
