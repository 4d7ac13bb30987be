"""WeightAveraging works in every layout as in one process; what cannot is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.errors import ConfigError
from lightning_3d.strategies.saving.averaging import _is_at

pytestmark = pytest.mark.distributed


class Seen(L.Callback):
    """Weights that validation used, and those that the step after it started from."""

    def __init__(self) -> None:
        self.validated: list[dict[str, torch.Tensor]] = []
        self.trained: list[dict[str, torch.Tensor]] = []

    def on_validation_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.validated.append(whole_weights(module))

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.trained.append(whole_weights(module))


def averaging(kind: str) -> WeightAveraging:
    return EMAWeightAveraging(decay=0.7) if kind == "ema" else WeightAveraging()


def fit(layout: str | None, folder: Path, kind: str, ckpt_path: Path | None, steps: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    # Built in the constructor: plain Lightning fills what configure_model builds with other values.
    torch.set_default_dtype(torch.float64)
    module, seen = TinyGPT(), Seen()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = trainer_for(
        layout,
        max_steps=steps,
        max_epochs=9,
        precision="64-true",
        val_check_interval=2,
        limit_val_batches=1,
        callbacks=[averaging(kind), seen, saver],
        enable_checkpointing=True,
    )
    replicas = Layout.parse(layout).data if layout else 1
    trainer.fit(module, ordered(Rows(), replicas=replicas), ordered(Rows(8), replicas=replicas), ckpt_path=ckpt_path)
    return {"end": whole_weights(module), "validated": seen.validated, "trained": seen.trained}


def united(ranks: list[Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, value in rank.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def assert_close(ranks: list[Any], expected: dict[str, torch.Tensor]) -> None:
    got = united(ranks)
    assert got.keys() == expected.keys()
    assert max(float((got[name] - expected[name]).abs().max()) for name in got) < 1e-9


@pytest.mark.parametrize(
    ("layout", "kind"), [("zero3x2", "ema"), ("tp2-pp2", "ema"), ("zero1x2", "swa"), ("pp2", "swa")]
)
def test_average_and_what_it_is_used_for_equal_one_process(tmp_path: Path, layout: str, kind: str) -> None:
    expected = run(None, fit, tmp_path / "one", kind, None, 5)[0]
    ranks = run(layout, fit, tmp_path / "many", kind, None, 5)
    assert_close([rank["end"] for rank in ranks], expected["end"])
    for part in ("validated", "trained"):
        assert len(ranks[0][part]) == len(expected[part])
        for index, weights in enumerate(expected[part]):
            assert_close([rank[part][index] for rank in ranks], weights)
    # The average differs from the weights: a callback that does nothing would pass else.
    assert not torch.equal(expected["validated"][0]["temperature"], expected["trained"][2]["temperature"])


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("zero3x2", "tp2-pp2"), ("tp2-pp2", "zero2x2"), pytest.param("zero3x2", "zero3x2", marks=pytest.mark.slow)],
)
def test_average_is_saved_and_goes_on_in_another_layout(tmp_path: Path, saved: str, loaded: str) -> None:
    expected = run(saved, fit, tmp_path / "whole", "ema", None, 5)
    whole = united([rank["end"] for rank in expected])
    ranks = run(loaded, fit, tmp_path / "rest", "ema", tmp_path / "whole" / "step=3.ckpt", 5)
    assert_close([rank["end"] for rank in ranks], whole)


@pytest.mark.parametrize("layout", ["zero3x2", "tp2-pp2", "single"])
def test_average_in_a_plain_ckpt_goes_on_in_any_layout(tmp_path: Path, layout: str) -> None:
    # Of the end of an epoch: inside of one, plain Lightning keeps no position in the data.
    (expected,) = run(None, fit, tmp_path / "one", "ema", None, 7)
    ranks = run(layout, fit, tmp_path / "rest", "ema", tmp_path / "one" / "step=5.ckpt", 7)
    assert_close([rank["end"] for rank in ranks], expected["end"])
    assert_close([rank["trained"][0] for rank in ranks], expected["trained"][5])


def test_a_device_without_a_number_is_any_of_its_kind() -> None:
    here = torch.device("cuda", 0)
    for wanted, fits in (("cuda", True), ("cuda:0", True), ("cuda:1", False), ("cpu", False)):
        assert _is_at(here, torch.device(wanted)) == fits
    assert _is_at(torch.device("cpu"), torch.device("cpu"))


def refused(layout: str, folder: Path) -> str:
    trainer = trainer_for(layout, max_epochs=1, callbacks=[StochasticWeightAveraging(swa_lrs=1e-2)])
    with pytest.raises(ConfigError, match="whole weights on every rank. Use .*EMAWeightAveraging") as error:
        trainer.fit(TinyGPT(), ordered(Rows(), replicas=1))
    return str(error.value)


def test_stochastic_weight_averaging_is_refused(tmp_path: Path) -> None:
    assert run("single", refused, tmp_path)
