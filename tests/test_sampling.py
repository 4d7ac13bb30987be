"""Every sample once, in the same global batches whatever the number of data-parallel ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from modules import Numbers
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from training import run, trainer_for

from lightning_3d import Layout
from lightning_3d.errors import DataError
from lightning_3d.strategies.batches.global_batches import Progress
from lightning_3d.strategies.batches.sampling import shard_dataloader

RANKS = (1, 2, 3, 4)


def shards(loader: Any, ranks: int, *, seed: int = 3, done: int = 0) -> list[Any]:
    return [
        shard_dataloader(loader, num_replicas=ranks, rank=r, seed=seed, progress=lambda: Progress(done))
        for r in range(ranks)
    ]


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else list(batch) for batch in loader]


def global_batches(loader: Any, ranks: int, **kwargs: Any) -> list[list[int]]:
    """The samples of each step, ranks one after the other; all ranks must have equally many steps, as many as told."""
    sharded = shards(loader, ranks, **kwargs)
    per_rank = [batches_of(shard) for shard in sharded]
    assert {len(batches) for batches in per_rank} == {len(shard) for shard in sharded}
    assert len({len(batches) for batches in per_rank}) == 1
    assert all(batch for batches in per_rank for batch in batches)
    return [[index for batch in step for index in batch] for step in zip(*per_rank, strict=True)]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def joined(batches: list[list[int]], ranks: int) -> list[list[int]]:
    """What ranks make of one process's batches: a last one that is too small for them joins the one before."""
    if len(batches) > 1 and len(batches[-1]) < ranks:
        return [*batches[:-2], batches[-2] + batches[-1]]
    return batches


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batches_are_those_of_one_process(ranks: int, shuffle: bool, drop_last: bool) -> None:
    for count in range(1, 41):
        for batch_size in range(1, 5):
            settings: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last}
            loader = DataLoader(Numbers(count), batch_size=batch_size, **settings)
            one = DataLoader(Numbers(count), batch_size=batch_size * ranks, **settings)
            if count < ranks and not drop_last:
                with pytest.raises(DataError, match=f"{count} samples .* {ranks} data-parallel ranks.*at most {count}"):
                    global_batches(loader, ranks)
                continue
            got = global_batches(loader, ranks)
            assert got == joined(global_batches(one, 1), ranks)
            seen = [index for batch in got for index in batch]
            dropped = count % (batch_size * ranks) if drop_last else 0
            assert len(seen) == len(set(seen)) == count - dropped
            assert shuffle or seen == list(range(count - dropped))
            sizes = [len(batch) for shard in shards(loader, ranks) for batch in batches_of(shard)[:-1]]
            assert set(sizes) <= {batch_size, *range(batch_size, 2 * batch_size)}


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    loader = DataLoader(Numbers(40), batch_size=5, shuffle=True)
    orders: dict[tuple[int, int], list[list[int]]] = {}
    for seed in (0, 1):
        for epoch in (0, 1):
            found = []
            for ranks in (1, 2, 4):
                torch.manual_seed(ranks)
                sharded = shards(loader, ranks, seed=seed)
                for shard in sharded:
                    shard.batch_sampler.sampler.set_epoch(epoch)
                steps = zip(*(batches_of(shard) for shard in sharded), strict=True)
                found.append([index for step in steps for batch in step for index in batch])
            assert found[0] == found[1] == found[2]
            orders[seed, epoch] = found[0]
    assert len({tuple(order) for order in orders.values()}) >= 3  # type: ignore[arg-type]
    assert orders[0, 0] != orders[0, 1] and orders[0, 0] != orders[1, 0]


def test_drawing_the_order_leaves_the_global_generators_alone() -> None:
    loader = shards(DataLoader(Numbers(9), batch_size=2, shuffle=True), 2)[0]
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    len(loader), list(loader)
    assert random.getstate() == states[0] and str(np.random.get_state()) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


class NumPySampler(Sampler):
    """Draws from NumPy's global generator, and can be told the epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(((np.random.permutation(self.count) + self.epoch) % self.count).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ByLength:
    """A batch sampler of batches of unlike sizes, shuffled by Python's generator; no subclass of torch's."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        ends = np.cumsum(self.sizes)
        batches = [list(range(end - size, end)) for size, end in zip(self.sizes, ends, strict=True)]
        random.shuffle(batches)
        return iter(batches)


@pytest.mark.parametrize("ranks", RANKS)
def test_custom_samplers_and_batch_samplers_are_shared_out(ranks: int) -> None:
    drawn = WeightedRandomSampler([1.0] * 10 + [9.0] * 10, num_samples=24, replacement=True)
    got = global_batches(DataLoader(Numbers(20), batch_size=2, sampler=drawn), ranks)
    one = global_batches(DataLoader(Numbers(20), batch_size=2 * ranks, sampler=drawn), 1)
    assert got == one and len(flat(got)) == 24

    sampler = NumPySampler(23)
    got = global_batches(DataLoader(Numbers(23), batch_size=2, sampler=sampler), ranks)
    assert sorted(flat(got)) == list(range(23)) and flat(got) != list(range(23))

    sizes = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    loader: Any = DataLoader(Numbers(sum(sizes)), batch_sampler=ByLength(sizes))  # type: ignore[arg-type]
    got = global_batches(loader, ranks)
    assert sorted(flat(got)) == list(range(sum(sizes)))


def test_a_sampler_that_has_set_epoch_is_told_the_epoch() -> None:
    sampler = NumPySampler(8)
    shards(DataLoader(Numbers(8), batch_size=2, sampler=sampler), 2)[0].batch_sampler.sampler.set_epoch(5)
    assert sampler.epoch == 5


class Endless:
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0, 1]


def test_a_batch_sampler_without_a_length_is_refused_on_several_ranks_and_left_alone_on_one() -> None:
    loader: Any = DataLoader(Numbers(4), batch_sampler=Endless())  # type: ignore[arg-type]
    assert shards(loader, 1)[0] is loader
    with pytest.raises(DataError, match="Endless has no length.*__len__.*use_distributed_sampler=False"):
        shards(loader, 2)


# ------------------------------------------------------------------ the user's own generator


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_generator_of_the_user_s_gives_the_orders_of_plain_loaders(ranks: int) -> None:
    def loader(batch_size: int) -> DataLoader:
        return DataLoader(Numbers(24), batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(11))

    plain = loader(4 * ranks)
    expected = [batches_of(plain) for _ in range(3)]
    assert expected[0] != expected[1]
    got: list[Any] = []
    for rank in range(ranks):
        # Each rank is a process of its own with a generator of its own.
        shard: Any = shard_dataloader(loader(4), num_replicas=ranks, rank=rank, seed=0, progress=Progress)
        orders = []
        for epoch in range(3):
            shard.batch_sampler.sampler.set_epoch(epoch)
            len(shard)
            orders.append(batches_of(shard))
        got.append(orders)
    for epoch in range(3):
        steps = zip(*(orders[epoch] for orders in got), strict=True)
        assert [[i for batch in step for i in batch] for step in steps] == expected[epoch]


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("done", [2, 6])
def test_a_resumed_loader_goes_on_where_it_was(own_generator: bool, custom: bool, done: int) -> None:
    progress = [Progress()]

    def loader() -> Any:
        generator = torch.Generator().manual_seed(4) if own_generator else None
        order = RandomSampler(Numbers(23), generator=generator)
        kwargs: Any = (
            {"batch_sampler": BatchSampler(order, 2, False)} if custom else {"sampler": order, "batch_size": 2}
        )
        plain = DataLoader(Numbers(23), generator=generator, **kwargs)
        return shard_dataloader(plain, num_replicas=2, rank=1, seed=5, progress=lambda: progress[0])

    def epoch(shard: Any, number: int) -> list[list[int]]:
        shard.batch_sampler.sampler.set_epoch(number)
        return batches_of(shard)

    first = loader()
    assert len(first) == 6
    orders = [epoch(first, 0)]
    first.batch_sampler.sampler.set_epoch(1)
    iterator = iter(first)
    orders.append([next(iterator).tolist() for _ in range(done)])
    progress[0] = Progress(done, done, done == 6)
    state = first.state_dict()
    orders[1] += [batch.tolist() for batch in iterator]
    orders.append(epoch(first, 2))
    assert orders[0] != orders[1] != orders[2]

    second = loader()
    second.load_state_dict(state)
    if done < 6:
        iter(second)
        assert epoch(second, 1) == orders[1][done:]
        # A loader that is used up before its epoch starts over within it.
        assert own_generator or batches_of(second) == orders[1]
        if own_generator:
            return
    assert epoch(second, 2) == orders[2]


# ------------------------------------------------------------------ other loaders


def test_other_iterables_are_left_alone() -> None:
    assert all(shard is rows for rows in ([1, 2], range(3)) for shard in shards(rows, 2))


def test_a_distributed_sampler_must_be_of_the_data_parallel_ranks() -> None:
    good = [DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), num_replicas=2, rank=r)) for r in range(2)]
    assert shard_dataloader(good[1], num_replicas=2, rank=1, seed=0, progress=Progress) is good[1]
    with pytest.raises(DataError, match=r"num_replicas=2, rank=1.*rank 0 of 4.*distributed_sampler_kwargs"):
        shard_dataloader(good[1], num_replicas=4, rank=0, seed=0, progress=Progress)


@pytest.mark.parametrize("ranks", RANKS)
def test_loaders_without_automatic_batches_are_shared_out_or_refused(ranks: int) -> None:
    got = global_batches_of_items(DataLoader(Numbers(12), batch_size=None, shuffle=True), ranks)
    assert sorted(got) == list(range(12))
    assert got == global_batches_of_items(DataLoader(Numbers(12), batch_size=None, shuffle=True), 1)
    if ranks > 1:
        with pytest.raises(DataError, match=f"batch_size=None has 13 items.*{ranks} data-parallel ranks.*batch_size=1"):
            shards(DataLoader(Numbers(13), batch_size=None), ranks)
    # torch's way to fetch in bulk: the sampler's items are lists of indices.
    rows = TensorDataset(torch.arange(13))
    bulk = DataLoader(rows, batch_size=None, sampler=BatchSampler(SequentialSampler(rows), 3, False))
    steps = zip(*([batch[0].tolist() for batch in shard] for shard in shards(bulk, ranks)), strict=True)
    assert [index for step in steps for batch in step for index in batch] == list(range(13))


def global_batches_of_items(loader: DataLoader, ranks: int) -> list[int]:
    per_rank = [list(shard) for shard in shards(loader, ranks)]
    return [int(item) for step in zip(*per_rank, strict=True) for item in step]


class Shifted(DataLoader):
    """A loader with a constructor of its own that takes no sampler, and changes what it yields."""

    def __init__(self, rows: Dataset, size: int, *, shift: int) -> None:
        super().__init__(rows, batch_size=size)
        self.shift = shift

    def __iter__(self) -> Any:
        return (batch + self.shift for batch in super().__iter__())


def test_a_loader_of_a_subclass_keeps_its_class_and_its_attributes() -> None:
    loader = Shifted(Numbers(10), 2, shift=100)
    sharded = shards(loader, 2)
    assert all(type(shard) is Shifted and shard.shift == 100 for shard in sharded)
    assert global_batches(loader, 2) == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]
    assert batches_of(loader)[0] == [100, 101]
    assert type(loader.batch_sampler) is BatchSampler


def test_workers_that_stay_see_each_epoch_s_own_order() -> None:
    settings: dict[str, Any] = {"batch_size": 3, "shuffle": True}
    kept = shards(DataLoader(Numbers(12), num_workers=1, persistent_workers=True, **settings), 2)[1]
    fresh = shards(DataLoader(Numbers(12), **settings), 2)[1]
    for epoch in range(3):
        for loader in (kept, fresh):
            loader.batch_sampler.sampler.set_epoch(epoch)
        assert batches_of(kept) == batches_of(fresh)


class Noise(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(10**9, ()))


def test_workers_draw_other_numbers_on_each_rank_and_in_each_epoch_and_the_same_after_a_resume() -> None:
    loader = DataLoader(Noise(), batch_size=2, num_workers=1)
    found = {}
    for rank, shard in enumerate(shards(loader, 2)):
        for epoch in range(2):
            shard.batch_sampler.sampler.set_epoch(epoch)
            found[rank, epoch] = batches_of(shard)
    assert len({number for batches in found.values() for batch in batches for number in batch}) == 16
    again = shards(loader, 2)[1]
    again.batch_sampler.sampler.set_epoch(1)
    assert batches_of(again) == found[1, 1]


def test_prediction_s_record_of_indices_is_kept() -> None:
    loader: Any = DataLoader(Numbers(7), batch_sampler=_IndexBatchSamplerWrapper(BatchSampler(range(7), 2, False)))  # type: ignore[arg-type]
    seen = []
    for shard in shards(loader, 2):
        assert isinstance(shard.batch_sampler, _IndexBatchSamplerWrapper)
        batches = batches_of(shard)
        assert shard.batch_sampler.seen_batch_indices == batches
        seen.append(batches)
    assert seen == [[[0, 1], [4, 5]], [[2, 3], [6]]]


# ------------------------------------------------------------------ inside the Trainer


class Seen(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[list[int]]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen[-1].append(batch.tolist() if isinstance(batch, torch.Tensor) else [batch])
        return self.weight * 1.0

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_loaders(layout: str) -> list[Any]:
    ranks = Layout.parse(layout).data
    results: list[Any] = []
    drawn = WeightedRandomSampler([1.0] * 10, num_samples=16, replacement=True)
    for kwargs in (
        {"batch_size": 8 // ranks, "shuffle": True},
        {"batch_size": 4 // ranks, "sampler": drawn},
        {"batch_size": None if ranks > 1 else 2, "shuffle": True},
        {"batch_size": 8 // ranks, "shuffle": True, "num_workers": 1, "persistent_workers": True},
    ):
        L.seed_everything(7, verbose=False)
        module = Seen()
        trainer_for(layout, max_epochs=2).fit(module, DataLoader(Numbers(24), **kwargs))  # type: ignore[arg-type]
        results.append(module.seen)
    module = Seen()
    predicted = trainer_for(layout).predict(module, DataLoader(Numbers(13), batch_size=2))
    results.append(torch.cat(predicted).tolist())  # type: ignore[arg-type]
    return results


@pytest.mark.distributed
def test_the_trainer_feeds_two_ranks_what_it_feeds_one() -> None:
    (one,) = run("single", fit_loaders)
    two = run("dp2", fit_loaders)
    for case in range(4):
        for epoch in range(2):
            steps = zip(*(rank[case][epoch] for rank in two), strict=True)
            assert [[i for batch in step for i in batch] for step in steps] == one[case][epoch]
        assert one[case][0] != one[case][1]
    assert two[0][4] == one[4] == list(range(13))
