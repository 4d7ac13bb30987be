"""Loaders side by side have orders of their own; one that is sharded already is left as it is, in every phase."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from modules import Numbers
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from training import run, trainer_for

from lightning_3d import Layout
from lightning_3d.callbacks.throughput import Throughput

pytestmark = pytest.mark.distributed

COUNT = 16


class Reader(L.LightningModule):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append({k: v.tolist() for k, v in batch.items()} if isinstance(batch, dict) else batch.tolist())
        return self.scale * 1.0

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def side_by_side(layout: str, seed: int | None) -> list[dict[str, list[int]]]:
    if seed is not None:
        L.seed_everything(seed, verbose=False)
    per_rank = 4 // Layout.parse(layout).data
    loaders = {name: DataLoader(Numbers(COUNT), batch_size=per_rank, shuffle=True) for name in ("a", "b")}
    module = Reader()
    trainer_for(layout, max_epochs=2).fit(module, CombinedLoader(loaders))
    return module.seen


def united(ranks: list[list[dict[str, list[int]]]]) -> list[dict[str, list[int]]]:
    return [{k: [i for rank in step for i in rank[k]] for k in step[0]} for step in zip(*ranks, strict=True)]


def test_loaders_side_by_side_shuffle_each_for_itself_and_alike_in_every_layout() -> None:
    (alone,) = run("single", side_by_side, 3)
    orders = [[i for step in alone[at : at + 4] for i in step[name]] for at in (0, 4) for name in ("a", "b")]
    assert all(sorted(order) == list(range(COUNT)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert united(run("dp2", side_by_side, 3)) == alone


def seeded_by_torch(layout: str, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    return side_by_side(layout, None)


def test_a_seed_set_through_torch_alone_decides_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # As `seed_everything` of a test before this one may have left it.
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    first, again, other = (run("dp2", seeded_by_torch, seed) for seed in (1, 1, 2))
    assert first == again != other


class ShardedAlready(L.LightningDataModule):
    """Shards its own data, the way `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        data = Numbers(COUNT)
        sampler: Any = DistributedSampler(data, shuffle=False, **self.trainer.strategy.distributed_sampler_kwargs)  # type: ignore[attr-defined]
        if self.kind == "sampler":
            return DataLoader(data, batch_size=2, sampler=sampler)
        return DataLoader(data, batch_sampler=BatchSampler(sampler, batch_size=2, drop_last=False))

    predict_dataloader = train_dataloader


def sharded_already(layout: str, kind: str) -> tuple[list[Any], list[Any]]:
    module, data = Reader(), ShardedAlready(kind)
    trainer_for(layout, max_epochs=1).fit(module, data)
    predictions: Any = trainer_for(layout).predict(Reader(), data)
    return module.seen, [batch.tolist() for batch in predictions]


@pytest.mark.parametrize("kind", ["sampler", "batch sampler"])
def test_a_loader_that_is_sharded_already_is_not_cut_again(kind: str) -> None:
    for rank, (seen, predicted) in enumerate(run("dp2", sharded_already, kind)):
        own = [[at, at + 2] for at in range(rank, COUNT, 4)]
        assert seen == own
        if kind == "sampler":
            # As with any strategy: their order is not the data's, so each rank keeps what it has predicted.
            assert predicted == own
        elif rank == 0:
            # Lightning itself puts a plain sampler into a batch sampler for predictions: all of them, in order.
            assert predicted == [[at, at + 1] for at in range(0, COUNT, 2)]


class Slow(Numbers):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return super().__getitem__(index)


def throughput(layout: str) -> float:
    trainer = trainer_for(layout, max_epochs=1, callbacks=[Throughput()])
    trainer.fit(Reader(), DataLoader(Slow(COUNT), batch_size=2))
    return float(trainer.callback_metrics["samples_per_second"])


def test_throughput_counts_the_time_that_loading_takes() -> None:
    for rate in run("dp2", throughput):
        # Each of two ranks reads at most 20 samples in a second.
        assert 0 < rate <= 40
