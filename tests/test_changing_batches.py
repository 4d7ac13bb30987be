"""Batches that change from step to step under a pipeline: another length, a number of their own."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows, TinyGPT
from parity import (
    largest_difference,
    united,
)
from training import Recorder, ordered, run, trainer_for, whole_weights

pytestmark = pytest.mark.distributed


def of_many_lengths(rows: list[torch.Tensor]) -> torch.Tensor:
    """A batch whose length depends on its first row."""
    stacked = torch.stack(rows)
    return stacked[:, : 4 + int(stacked[0, 0]) % 12]


class LengthsGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        self.lengths.append(rows.shape[1])
        return super().loss(rows)


def fit_lengths(layout: str | None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), LengthsGPT()
    trainer = trainer_for(layout, max_epochs=2, precision="64-true", callbacks=[recorder])
    loaders = [ordered(Rows(count), replicas=1, collate_fn=of_many_lengths) for count in (40, 21)]
    trainer.fit(module, *loaders)
    return {
        "losses": recorder.losses,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "weights": whole_weights(module),
        "lengths": set(module.lengths),
    }


@pytest.mark.parametrize("layout", ["pp2", "pp2@gpipe"])
def test_length_may_change_between_steps_and_in_validation(layout: str) -> None:
    expected, ranks = run(None, fit_lengths)[0], run(layout, fit_lengths)
    assert len(expected["lengths"]) > 3
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-9)
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9


class WeighedGPT(TinyGPT):
    """Its batches are rows and how much they count, which is another number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls.append(batch["weight"])
        return self.loss(batch["rows"]) * batch["weight"]


def weighed(rows: list[torch.Tensor]) -> dict[str, Any]:
    return {"rows": torch.stack(rows), "weight": 1.0 + float(rows[0][0]) / 64}


def fit_weighed(layout: str | None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = WeighedGPT()
    trainer = trainer_for(layout, max_steps=4, precision="64-true", num_microbatches=4 if layout else None)
    trainer.fit(module, ordered(Rows(), replicas=1, collate_fn=weighed))
    return {"calls": module.calls, "weights": whole_weights(module)}


def test_a_number_that_each_batch_has_of_its_own_costs_no_run_of_the_step() -> None:
    expected, ranks = run(None, fit_weighed)[0], run("pp2", fit_weighed)
    assert len(set(expected["calls"])) == 4
    often = [weight for weight in expected["calls"] for _ in range(4)]
    for got in ranks:
        # Once for each micro-batch, and before the first to see what travels between stages.
        assert got["calls"] == [often[0], *often]
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9
