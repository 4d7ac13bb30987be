"""Checkpoints with weights alone, and loading that does not unpickle what it does not trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for, whole_weights

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.errors import CheckpointError
from lightning_3d.strategies.saving import resume

pytestmark = pytest.mark.distributed


class Opinion:
    """An object of the user's, in a checkpoint."""


class Opinionated(TinyGPT):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["opinion"] = Opinion()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.opinion = checkpoint.get("opinion")


def loaders(layout: str) -> tuple[Any, Any]:
    replicas = Layout.parse(layout).data
    return ordered(Rows(), replicas=replicas), ordered(Rows(8), replicas=replicas)


def weights_alone(layout: str, folder: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = TinyGPT(lazy=True)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_weights_only=True)
    trainer = trainer_for(layout, max_steps=2, callbacks=[saver], enable_checkpointing=True)
    train, val = loaders(layout)
    trainer.fit(module, train)
    expected = trainer.validate(module, val, verbose=False)
    other = TinyGPT(lazy=True)
    got = trainer_for(layout).validate(other, val, ckpt_path=folder / "step=2.ckpt", verbose=False)
    same = all(
        torch.equal(a, b) for a, b in zip(whole_weights(module).values(), whole_weights(other).values(), strict=True)
    )
    try:
        trainer_for(layout, max_steps=4).fit(TinyGPT(lazy=True), train, ckpt_path=folder / "step=2.ckpt")
    except CheckpointError as error:
        return {"expected": expected, "got": got, "same": same, "error": str(error)}
    return {}


@pytest.mark.parametrize("layout", ["zero3x2", "tp2-pp2"])
def test_weights_alone_serve_evaluation_and_are_refused_for_going_on(tmp_path: Path, layout: str) -> None:
    for rank in run(layout, weights_alone, tmp_path):
        assert rank["same"] and rank["expected"] == rank["got"]
        assert "step=2.ckpt holds weights only (save_weights_only=True)" in rank["error"]
        assert "leave out ckpt_path and set ThreeDStrategy(initial_weights=" in rank["error"]


def url_is_refused(layout: str) -> str:
    trainer = trainer_for(layout, max_steps=1)
    train, _ = loaders(layout)
    trainer.fit(TinyGPT(lazy=True), train)
    trainer.save_checkpoint("memory://weights.ckpt", weights_only=True)
    with pytest.raises(CheckpointError) as caught:
        trainer_for(layout, max_steps=4).fit(TinyGPT(lazy=True), train, ckpt_path="memory://weights.ckpt")
    return str(caught.value)


def test_weights_at_a_url_are_not_advised_as_initial_weights() -> None:
    (told,) = run("single", url_is_refused)
    assert "memory://weights.ckpt holds weights only" in told and "initial_weights='its copy on this machine'" in told


def file_url_is_refused(layout: str, path: Path) -> str:
    trainer = trainer_for(layout, max_steps=1)
    train, _ = loaders(layout)
    trainer.fit(TinyGPT(lazy=True), train)
    trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises(CheckpointError) as caught:
        trainer_for(layout, max_steps=4).fit(TinyGPT(lazy=True), train, ckpt_path=f"file://{path}")
    return str(caught.value)


def test_weights_at_a_url_of_this_machine_are_advised_by_their_path(tmp_path: Path) -> None:
    (told,) = run("single", file_url_is_refused, tmp_path / "weights.ckpt")
    assert f"initial_weights='{tmp_path}/weights.ckpt'" in told


def read_for_each_run(layout: str, folder: Path) -> list[str]:
    train, val = loaders(layout)
    first = trainer_for(layout, max_steps=1)
    first.fit(TinyGPT(lazy=True), train)
    first.save_checkpoint(folder / "step=1.ckpt")
    read: list[str] = []
    resume.load_initial_weights_ = lambda strategy, path: read.append(path.name)  # type: ignore[assignment]
    strategy = ThreeDStrategy(**Layout.parse(layout).as_dict(), initial_weights=folder / "step=1.ckpt")
    trainer = trainer_for(layout, max_steps=2, strategy=strategy)
    counts = []
    for ckpt_path in (None, folder / "step=1.ckpt", None):
        trainer.validate(TinyGPT(lazy=True), val, ckpt_path=ckpt_path, verbose=False)
        counts.append(f"{len(read)}")
    return counts


def test_initial_weights_are_read_for_each_new_module_but_where_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert run("single", read_for_each_run, tmp_path) == [["1", "1", "2"]]


def with_objects(layout: str, path: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    train, val = loaders(layout)
    trainer = trainer_for(layout, max_steps=1)
    trainer.fit(Opinionated(lazy=True), train)
    trainer.save_checkpoint(path)
    found: dict[str, Any] = {}
    for what in ("fit", "validate", "test", "predict"):
        for weights_only in (None, True, False):
            module = Opinionated(lazy=True)
            call = getattr(trainer_for(layout, max_steps=2), what)
            module.test_step = module.validation_step  # type: ignore[method-assign]
            try:
                call(module, train if what == "fit" else val, ckpt_path=path, weights_only=weights_only)
                found[f"{what} {weights_only}"] = type(module.opinion).__name__
            except CheckpointError as error:
                found[f"{what} {weights_only}"] = str(error)
    return found


@pytest.mark.parametrize("layout", ["single", "zero3x2"])
def test_objects_of_other_classes_are_loaded_only_if_trusted(tmp_path: Path, layout: str) -> None:
    for found in run(layout, with_objects, tmp_path / "some.ckpt"):
        for what, told in found.items():
            if what.endswith("False"):
                assert told == "Opinion", what
            else:
                assert "some.ckpt" in told and "Opinion" in told and "weights_only=False" in told, (what, told)
