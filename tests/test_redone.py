"""What a killed run had saved after its last checkpoint does not stay beside what the run that goes on saves."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.checkpoint import store
from lightning_3d.strategies.saving.redone import Redone

pytestmark = pytest.mark.distributed


class KeepLast(L.Callback):
    """The last checkpoint of step 6, as a kill right after step 9's best would leave it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        earlier = self.folder.parent / "earlier"
        if trainer.global_step == 8 and trainer.is_global_zero and not earlier.exists():
            shutil.copytree(self.folder / "last.ckpt", earlier)


def fit(
    layout: str,
    folder: Path,
    ckpt_path: str | None,
    steps: int,
    filename: str,
    in_background: bool,
    *,
    save_top_k: int = 2,
) -> list[str]:
    L.seed_everything(1, verbose=False)
    parsed = Layout.parse(layout)
    # Rising, so that each is among the best.
    saver = ModelCheckpoint(
        folder,
        filename=filename,
        monitor="step",
        mode="max",
        save_top_k=save_top_k,
        save_last=True,
        every_n_train_steps=3,
    )
    strategy = ThreeDStrategy(**parsed.as_dict(), async_checkpoint=in_background, timeout_seconds=60)
    trainer = trainer_for(
        layout, strategy=strategy, max_steps=steps, callbacks=[saver, KeepLast(folder)], enable_checkpointing=True
    )
    trainer.fit(TinyGPT(), ordered(Rows(), replicas=parsed.data), ckpt_path=ckpt_path)
    return sorted(Path(path).name for path in saver.best_k_models)


def killed(layout: str, folder: Path, filename: str, in_background: bool, *, save_top_k: int = 2) -> None:
    """A run that ended between the saves of its best and its last checkpoint of step 9."""
    run(layout, partial(fit, save_top_k=save_top_k), folder, None, 9, filename, in_background)
    shutil.rmtree(folder / "last.ckpt")
    shutil.copytree(folder.parent / "earlier", folder / "last.ckpt")


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in store.committed(folder))


@pytest.mark.parametrize("in_background", [False, True])
def test_best_checkpoint_is_saved_anew_by_the_run_that_goes_on_with_the_last(
    tmp_path: Path, in_background: bool
) -> None:
    folder = tmp_path / "checkpoints"
    killed("dp2", folder, "{step}", in_background)
    assert names(folder) == ["last.ckpt", "step=6.ckpt", "step=9.ckpt"]
    for best in run("zero3x2", fit, folder, "last", 12, "{step}", in_background):
        assert best == ["step=12.ckpt", "step=9.ckpt"]
    assert names(folder) == ["last.ckpt", "step=12.ckpt", "step=9.ckpt"]
    assert store.summary(folder / "step=9.ckpt")["layout"] == "zero3x2"


def test_second_of_one_name_in_a_run_is_kept_beside_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    killed("single", folder, "same", False, save_top_k=-1)
    run("single", partial(fit, save_top_k=-1), folder, "last", 12, "same", False)
    steps = {name: store.summary(folder / name)["global_step"] for name in names(folder)}
    assert steps == {"same.ckpt": 3, "same-v1.ckpt": 6, "same-v2.ckpt": 9, "same-v3.ckpt": 12, "last.ckpt": 12}


class Rates(TinyGPT):
    """Its `luck` is high at some steps, and only in the first run."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.__dict__["first"] = first

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        step = self.global_step + 1
        self.log("luck", {2: 0.5, 8: 0.9}.get(step, 0.4) if self.__dict__["first"] else 0.4)
        return super().training_step(rows, batch_idx)


def fit_two(layout: str, folder: Path, ckpt_path: str | None, steps: int, savers: list[ModelCheckpoint]) -> list[str]:
    L.seed_everything(1, verbose=False)
    trainer = trainer_for(layout, max_steps=steps, callbacks=savers, enable_checkpointing=True)
    trainer.fit(Rates(first=ckpt_path is None), ordered(Rows(), replicas=1), ckpt_path=ckpt_path)
    return [Path(saver.best_model_path).name for saver in savers]


def test_what_another_callback_keeps_is_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    by_step = ModelCheckpoint(folder, "best", "step", mode="max", save_last=True, every_n_train_steps=6)
    by_luck = ModelCheckpoint(folder, "best", "luck", mode="max", every_n_train_steps=2)
    # The second has saved its best anew, in place, after the last.
    assert run("single", fit_two, folder, None, 8, [by_step, by_luck]) == [["best-v1.ckpt", "best.ckpt"]]
    assert run("single", fit_two, folder, "last", 12, [by_step, by_luck]) == [["best-v1.ckpt", "best.ckpt"]]
    steps = {name: store.summary(folder / name)["global_step"] for name in names(folder)}
    assert steps == {"best.ckpt": 8, "best-v1.ckpt": 12, "last.ckpt": 12}


def test_a_later_save_of_the_last_one_s_step_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    last = ModelCheckpoint(folder, "a", save_last=True, every_n_train_steps=3)
    every = ModelCheckpoint(folder, "same", "step", mode="max", save_top_k=-1, every_n_train_steps=3)
    run("single", fit_two, folder, None, 8, [last, every])
    # Not done again: the run goes on after that step.
    run("single", fit_two, folder, "last", 9, [last, every])
    steps = {name: store.summary(folder / name)["global_step"] for name in names(folder) if name.startswith("same")}
    assert steps == {"same.ckpt": 3, "same-v1.ckpt": 6, "same-v2.ckpt": 9}


def test_a_branch_of_the_last_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    killed("single", folder, "{step}", False)
    run("single", fit, folder, folder / "last.ckpt", 12, "{step}", False)
    shutil.rmtree(folder / "last.ckpt")
    shutil.copytree(tmp_path / "earlier", folder / "last.ckpt")
    branch = store.summary(folder / "step=12.ckpt")
    (best,) = run("single", fit, folder, "last", 12, "{step}", False)
    # What it had saved itself is saved anew.
    assert best == ["step=12-v1.ckpt", "step=9.ckpt"]
    assert store.summary(folder / "step=12.ckpt") == branch


def test_what_cannot_be_read_is_kept() -> None:
    def fails() -> dict[str, Any]:
        raise PermissionError("not yours")

    start = {"attempt": "a", "time": 1.0, "global_step": 6}
    later = {"attempt": "a", "time": 2.0, "global_step": 9}
    redone = Redone()
    redone.last("last.ckpt")
    redone.begin()
    redone.resume("last.ckpt", lambda: start)
    assert redone.holds(lambda: later) and not redone.holds(fails)
    for other in ({"time": 0.5}, {"global_step": 6}, {"attempt": None}, {"attempt": "b"}):
        assert not redone.holds(lambda other=other: {**later, **other})
    for path, read in (("last.ckpt", fails), ("named.ckpt", lambda: start)):
        redone.begin()
        redone.resume(path, read)
        assert not redone.holds(lambda: later)


@pytest.mark.parametrize("who", ["named", "another run"])
def test_what_another_run_has_saved_or_a_user_branches_off_from_is_kept(tmp_path: Path, who: str) -> None:
    folder = tmp_path / "checkpoints"
    killed("single", folder, "{step}", False)
    kept = folder / "step=9.ckpt"
    summary = json.loads((kept / "checkpoint.json").read_text())
    if who == "another run":
        summary["attempt"] = "another"
        (kept / "checkpoint.json").write_text(json.dumps(summary))
    (best,) = run("single", fit, folder, "last" if who == "another run" else folder / "last.ckpt", 9, "{step}", False)
    assert best == ["step=6.ckpt", "step=9-v1.ckpt"]
    assert store.summary(kept) == summary
