"""What tensor-parallel ranks draw: other numbers inside split regions, equal ones outside, the same when recomputed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from modules import VOCAB, Points, Rows
from parity import largest_difference, replicas, train
from split_language import Language
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Recorder, ordered, run, trainer_for

from lightning_3d.models.gpt import Block

pytestmark = pytest.mark.distributed


class Dropping(L.LightningModule):
    """A split MLP with dropout inside and outside of the split region."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 96)
        )
        self.dropped: dict[str, list[torch.Tensor]] = {"1": [], "3": []}
        for name, dropped in self.dropped.items():
            self.net.get_submodule(name).register_forward_hook(
                lambda _, args, output, dropped=dropped: dropped.append((output == 0).detach().clone())
            )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_dropping(layout: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), Dropping()
    trainer_for(layout, max_steps=4, callbacks=[recorder]).fit(module, ordered(Points(32), replicas=1))
    return {"dropped": module.dropped, "losses": recorder.losses, "state": torch.get_rng_state()}


@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_dropout_differs_between_ranks_inside_a_split_region_and_is_equal_outside(layout: str) -> None:
    first, second = run(layout, fit_dropping)[:2]
    assert first["losses"] == second["losses"]
    assert torch.equal(first["state"], second["state"])
    assert first["dropped"]["1"][0].shape[-1] == 32
    assert len(first["dropped"]["3"]) >= 4
    for name, equal in (("1", False), ("3", True)):
        masks = list(zip(first["dropped"][name], second["dropped"][name], strict=True))
        assert all(torch.equal(a, b) is equal for a, b in masks)
        share = torch.stack([a.double().mean() for a, _ in masks]).mean()
        assert 0.4 < float(share) < 0.6


class Drawing(Language):
    """Notes what it draws from each generator, in each kind of step."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[str, list[tuple[float, ...]]] = {}

    def draw(self, step: str, rows: torch.Tensor) -> torch.Tensor:
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        self.drawn.setdefault(step, []).append(drawn)
        return self.model(rows[:, :-1]).mean()

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.draw("train", rows)

    def validation_step(self, rows: torch.Tensor, batch_idx: int) -> None:
        self.draw("validate", rows)

    def test_step(self, rows: torch.Tensor, batch_idx: int) -> None:
        self.draw("test", rows)

    def predict_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.draw("predict", rows)


def draw_in_steps(layout: str) -> dict[str, list[tuple[float, ...]]]:
    L.seed_everything(1, verbose=False)
    module, options = Drawing(), {"replicas": replicas(layout)}
    trainer = trainer_for(layout, max_epochs=2, num_microbatches=1 if "pp" in layout else None)
    # What ranks do between steps must not reach into them.
    random.seed(os.getpid())
    trainer.fit(module, ordered(Rows(24), **options), ordered(Rows(16), **options))
    trainer.test(module, ordered(Rows(24), **options), verbose=False)
    trainer.predict(module, ordered(Rows(24), **options), return_predictions=False)
    return module.drawn


@pytest.mark.parametrize("layout", ["tp2", "dp2-tp2", "tp2-pp2"])
def test_each_step_draws_other_numbers_and_those_of_its_data_parallel_rank(layout: str) -> None:
    ranks = run(layout, draw_in_steps)
    axes = replicas(layout)
    for step, count in (("train", 6), ("validate", 4), ("test", 3), ("predict", 3)):
        # Under a pipeline the first are those of a probe.
        distinct = {tuple(got[step][-count:]) for got in ranks}
        assert len(distinct) == axes, step
        for kind in range(3):
            assert len({numbers[kind] for mine in distinct for numbers in mine}) == count * axes, step


class CheckpointedBlock(Block):
    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, *args, use_reentrant=False)


def fit_checkpointed(layout: str, checkpointed: bool) -> dict[str, Any]:
    def build() -> Language:
        module = Language(dropout=0.3)
        for layer in module.model.layers if checkpointed else ():
            layer.__class__ = CheckpointedBlock
        return module

    return train(layout, build, {})


class HalfCheckpointedMLP(nn.Module):
    """Its recomputation ends where activations are split."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.fc1, self.drop, self.fc2 = nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32)

    def inside(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drop(F.gelu(self.fc1(hidden)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return hidden + self.fc2(self.inside(hidden))
        return hidden + self.fc2(checkpoint(self.inside, hidden, use_reentrant=False))


class HalfCheckpointed(L.LightningModule):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(HalfCheckpointedMLP(checkpointed) for _ in range(4))
        self.head = nn.Linear(32, VOCAB)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}

    def data(self) -> Rows:
        return Rows(40)

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.embed(rows[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), rows[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_half_checkpointed(layout: str, checkpointed: bool) -> dict[str, Any]:
    return train(layout, HalfCheckpointed, {"max_steps": 4}, checkpointed)


@pytest.mark.parametrize("fit", [fit_checkpointed, fit_half_checkpointed])
@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_recomputation_draws_the_same_dropout(layout: str, fit: Callable[..., dict[str, Any]]) -> None:
    ranks, expected = (run(layout, fit, checkpointed) for checkpointed in (True, False))
    for got, wanted in zip(ranks, expected, strict=True):
        assert got["losses"] == wanted["losses"]
        assert largest_difference(got["weights"], wanted["weights"]) < 1e-12
