"""A step that is computed twice and gives other bits is told, with the rank and the parameter."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from modules import Classifier, Points, Rows, TinyGPT
from torch.utils.data import DataLoader
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.errors import ConfigError, NumbersError

pytestmark = pytest.mark.distributed


class Flipping(TinyGPT):
    """One bit of one gradient, on rank 1, at the fourth step and never again."""

    broken: str | None = None
    calls = 0
    done = False

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(rows, batch_idx)
        self.calls += 1
        now = self.global_step == 3 and self.global_rank == 1 and not self.done
        if self.broken and now:
            self.done = True
            if self.broken == "loss":
                return loss * (1 + 4e-7)
            self.temperature.register_hook(lambda gradient: gradient * (1 + 4e-7))
        return loss


def fit(layout: str, every: int, broken: str | None, dropout: float) -> Any:
    L.seed_everything(1, verbose=False)
    module, recorder = Flipping(dropout=dropout), Recorder()
    module.broken = broken
    trainer = trainer_for(layout, max_epochs=1, callbacks=[recorder])
    strategy: Any = trainer.strategy
    strategy._replay_every_n_steps = every
    error = None
    try:
        trainer.fit(module, ordered(Rows(48), replicas=Layout.parse(layout).data))
    except NumbersError as raised:
        error = str(raised)
    return error, recorder.losses, whole_weights(module), module.calls


@pytest.mark.parametrize("layout", ["zero3x2", "pp2", "dp2"])
def test_a_replayed_run_is_the_run_that_it_would_be(layout: str) -> None:
    plain = run(layout, fit, 0, None, 0.3)
    replayed = run(layout, fit, 2, None, 0.3)
    for (error, losses, weights, calls), (_, expected, expected_weights, fewer) in zip(replayed, plain, strict=True):
        assert error is None and losses == expected and calls == fewer * 3 / 2
        assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("layout", "broken"),
    [("dp2", "loss"), ("zero3x2", "loss"), ("dp2", "gradient"), ("pp2", "loss"),
     pytest.param("tp2", "loss", marks=pytest.mark.slow), pytest.param("tp2", "gradient", marks=pytest.mark.slow)],
)  # fmt: skip
def test_one_that_differs_by_a_bit_is_told_with_its_rank(layout: str, broken: str) -> None:
    for error, *_ in run(layout, fit, 2, broken, 0.0):
        what = "its loss" if broken == "loss" else "the gradient of temperature"
        assert error is not None and error.startswith("step 3 gave other numbers when it was computed again")
        places = {
            # Its gradient has gone into both ranks' by the way.
            ("tp2", "loss"): r"on rank 0 the gradient of \S+; on rank 1 its loss",
            # Stages share the loss.
            ("pp2", "loss"): "on rank 0, 1 its loss",
        }
        assert re.search(places.get((layout, broken), f"on rank 1 {what}") + " is the first that differs", error)


def fit_window(layout: str) -> None:
    trainer = trainer_for(layout, max_epochs=1, accumulate_grad_batches=2)
    strategy: Any = trainer.strategy
    strategy._replay_every_n_steps = 2
    with pytest.raises(ConfigError, match="accumulate_grad_batches=2.*replay_every_n_steps=0"):
        trainer.fit(Classifier(), DataLoader(Points(8), batch_size=2))


def test_replay_with_accumulation_is_refused() -> None:
    run("dp2", fit_window)
