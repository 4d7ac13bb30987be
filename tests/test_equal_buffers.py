"""Buffers that each data-parallel rank changes by itself are equal in evaluations and checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from modules import Points
from torch import nn
from training import ordered, run, trainer_for

from lightning_3d import Layout
from lightning_3d.strategies.guards.equal_buffers import warn_of_local_statistics

pytestmark = pytest.mark.distributed


class Normed(L.LightningModule):
    """Keeps its running statistics as each validation and each checkpoint finds them, and a cache that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        # Longer on some ranks: no two are made equal.
        self.cache = torch.zeros(2 + self.global_rank)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.net[1].running_mean.clone())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hook"] = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(layout: str, folder: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = Normed()
    count = Layout.parse(layout).data
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_for(layout, max_steps=3, val_check_interval=2)
        trainer.fit(module, ordered(Points(48), replicas=count), ordered(Points(8), replicas=count))
        own = module.net[1].running_mean.clone()
        trainer.save_checkpoint(folder / "last")
    return {
        "seen": module.seen,
        "own": own,
        "saved": module.net[1].running_mean.clone(),
        "counted": int(module.net[1].num_batches_tracked),
        "cache": len(module.cache),
        "warned": [str(w.message) for w in caught if "normalise over" in str(w.message)],
    }


@pytest.mark.parametrize("layout", ["dp2", "zero2x2", "hsdp2x2"])
def test_running_statistics_are_the_first_ranks(layout: str, tmp_path: Path) -> None:
    first, *others = run(layout, fit, tmp_path)
    assert len(first["warned"]) == 1 and "net.1" in first["warned"][0] and "sync_batchnorm" in first["warned"][0]
    assert first["counted"] == 3 and first["seen"]
    for index, other in enumerate(others, start=1):
        assert all(torch.equal(a, b) for a, b in zip(first["seen"], other["seen"], strict=True))
        assert not torch.equal(first["own"], other["own"]), "the step after the evaluation made them differ"
        assert torch.equal(first["own"], other["saved"])
        assert other["cache"] == 2 + index


def test_synchronised_batch_norm_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_local_statistics(nn.SyncBatchNorm.convert_sync_batchnorm(Normed()))
