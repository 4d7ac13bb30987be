"""Entries that a user adds to a checkpoint come back: copies of the weights in any layout, all else as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for, whole

from lightning_3d import Layout
from lightning_3d.checkpoint.plain import read_plain
from lightning_3d.errors import CheckpointError
from lightning_3d.parallel.local import local_tensor

pytestmark = pytest.mark.distributed


class Entries(TinyGPT):
    """Adds entries by the names of its parameters, and keeps what it gets back.

    Args:
        kinds: ema (a copy, its name with dots), wide (a copy in double precision), norms (a number per weight), whole
            (gathered weights, where these are sharded), part (a part of a sharded weight below another key).
    """

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds, self.back = kinds, dict[str, Any]()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        named = {name: p.detach() for name, p in self.named_parameters()}
        if "ema" in self.kinds:
            checkpoint["my.ema"] = {name: p + 1 for name, p in named.items()}
        if "wide" in self.kinds:
            checkpoint["wide"] = {name: p.double() / 3 for name, p in named.items()}
        if "norms" in self.kinds:
            checkpoint["norms"] = {name: whole(p).norm() for name, p in named.items()}
        if "whole" in self.kinds:
            checkpoint["whole"] = {name: whole(p) for name, p in named.items()}
        if "part" in self.kinds:
            checkpoint["mine"] = {"deep": [named["model.embed.weight"]]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.back = {key: checkpoint[key] for key in ("my.ema", "wide", "norms", "whole") if key in checkpoint}

    def test_step(self, rows: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(rows))


def save(layout: str | None, path: Path, kinds: tuple[str, ...]) -> dict[str, torch.Tensor]:
    L.seed_everything(1, verbose=False)
    module = Entries(*kinds)
    trainer = trainer_for(layout, max_steps=1)
    trainer.fit(module, ordered(Rows(8), replicas=Layout.parse(layout).data if layout else 1))
    trainer.save_checkpoint(path)
    return {name: whole(p) for name, p in module.named_parameters()}


def load(layout: str | None, path: Path, stage: str) -> dict[str, dict[str, torch.Tensor]]:
    """Entries that came back; that copies are placed as the weights is checked here."""
    module = Entries()
    trainer = trainer_for(layout, max_steps=2, max_epochs=9)
    loader = ordered(Rows(8), replicas=Layout.parse(layout).data if layout else 1)
    if stage == "fit":
        trainer.fit(module, loader, ckpt_path=path, weights_only=True)
    else:
        trainer.test(module, loader, ckpt_path=path, verbose=False, weights_only=True)
    own = module.state_dict()
    for name, value in {**module.back["my.ema"], **module.back.get("wide", {})}.items():
        assert local_tensor(value).shape == local_tensor(own[name]).shape, name
        assert getattr(value, "placements", None) == getattr(own[name], "placements", None), name
    return {key: {name: whole(value) for name, value in copy.items()} for key, copy in module.back.items()}


def check(back: dict[str, Any], weights: dict[str, torch.Tensor], expected: set[str]) -> None:
    assert back.keys() == expected
    for name, value in back.get("my.ema", {}).items():
        assert torch.equal(value, weights[name] + 1), name
    for name, value in back.get("wide", {}).items():
        assert value.dtype == torch.float64 and torch.equal(value, weights[name].double() / 3), name
    for name, value in back.get("norms", {}).items():
        assert torch.equal(value, weights[name].norm()), name
    for name, value in back.get("whole", {}).items():
        assert torch.equal(value, weights[name]), name


KINDS = ("ema", "wide", "norms", "whole")
ENTRIES = {"my.ema", "wide", "norms", "whole"}


@pytest.mark.parametrize(("saved", "loaded"), [("single", "zero3x2"), ("zero3x2", "tp2"), ("zero3x2", "single")])
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_entries_come_back_in_every_stage(tmp_path: Path, saved: str, loaded: str, stage: str) -> None:
    weights = run(saved, save, tmp_path / "saved.ckpt", KINDS)[0]
    for back in run(loaded, load, tmp_path / "saved.ckpt", stage):
        check(back, weights, ENTRIES)
        assert all(copy.keys() == weights.keys() for copy in back.values())
    check({key: read_plain(tmp_path / "saved.ckpt", optimizer=True)[key] for key in ENTRIES}, weights, ENTRIES)


def test_copies_of_stages_are_put_together(tmp_path: Path) -> None:
    ranks = run("pp2", save, tmp_path / "saved.ckpt", ("ema",))
    weights = {name: value for rank in ranks for name, value in rank.items()}
    check({"my.ema": read_plain(tmp_path / "saved.ckpt", optimizer=True)["my.ema"]}, weights, {"my.ema"})
    for back in run("pp2", load, tmp_path / "saved.ckpt", "test"):
        check(back, weights, {"my.ema"})


@pytest.mark.parametrize("layout", ["zero3x2", "pp2"])
def test_copies_in_a_plain_ckpt_become_parts(tmp_path: Path, layout: str) -> None:
    (weights,) = run(None, save, tmp_path / "plain.ckpt", ("ema", "norms"))
    seen = set()
    for back in run(layout, load, tmp_path / "plain.ckpt", "fit"):
        check(back, weights, {"my.ema", "norms"})
        assert back["norms"].keys() == weights.keys()
        seen |= back["my.ema"].keys()
    assert seen >= weights.keys()


def refusal(layout: str, path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(layout, path, ("part",))
    return str(caught.value)


def test_parts_that_would_be_saved_of_one_rank_alone_are_refused(tmp_path: Path) -> None:
    for error in run("zero3x2", refusal, tmp_path / "saved.ckpt"):
        assert "mine.deep.0" in error and "full_tensor()" in error, error
    assert not (tmp_path / "saved.ckpt").exists()
