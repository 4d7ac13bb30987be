"""A checkpoint that a callback no longer wants goes once what takes its place is there, and not in a later run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from held_saves import Held, saver, small_fit, trainer_with
from training import run

from lightning_3d.checkpoint import store, writing
from lightning_3d.errors import CheckpointError

pytestmark = pytest.mark.distributed

WINDOW = 4


class Asks(L.Callback):
    """To save and to remove in the first batch; there may be an error in the third."""

    def __init__(self, folder: Path, asked: str = "save one, save two, remove former", *, error: bool = False) -> None:
        self.folder, self.asked, self.error = folder, asked, error

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if args[-1] == 0:
            for verb, name in map(str.split, self.asked.split(", ")):
                what = trainer.save_checkpoint if verb == "save" else trainer.strategy.remove_checkpoint
                what(self.folder / f"{name}.ckpt")

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if self.error and args[-1] == 2:
            raise ValueError("the cause")


def saved(layout: str, folder: Path, *names: str) -> None:
    trainer = trainer_with(layout, saver(folder, 100), steps=1, async_checkpoint=False)
    small_fit(trainer)
    for name in names:
        trainer.save_checkpoint(folder / name)


def in_windows(layout: str, asks: Asks, in_background: bool = True) -> L.Trainer:
    trainer = trainer_with(layout, asks, saver(asks.folder, 100), steps=3, async_checkpoint=in_background)
    trainer.accumulate_grad_batches = WINDOW
    return trainer


def fail_at(number: int) -> None:
    """The write of this number, counted from 1, finds no space."""
    real, calls = writing.dcp.save, []

    def save(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    writing.dcp.save = save  # type: ignore[assignment]


def there(folder: Path) -> list[str]:
    return [path.name for path in sorted(store.committed(folder), key=lambda path: path.name)]


def second_of_two_fails(layout: str, folder: Path, error: bool) -> Any:
    saved(layout, folder, "former.ckpt")
    fail_at(2)
    with pytest.raises(CheckpointError, match=r"two.ckpt .*No space left"):
        small_fit(in_windows(layout, Asks(folder, error=error)))
    return there(folder)


@pytest.mark.parametrize("error", [False, True])
def test_of_several_that_wait_for_a_window_the_last_lets_the_former_go(tmp_path: Path, error: bool) -> None:
    assert run("single", second_of_two_fails, tmp_path, error) == [["former.ckpt", "one.ckpt"]]


def saved_anew(layout: str, folder: Path, in_background: bool) -> Any:
    saved(layout, folder, "two.ckpt")
    small_fit(in_windows(layout, Asks(folder, "save one, remove two, save two"), in_background=in_background))
    return there(folder)


@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_saved_anew_is_not_removed(tmp_path: Path, in_background: bool) -> None:
    assert run("single", saved_anew, tmp_path, in_background) == [["one.ckpt", "two.ckpt"]]


class FailsMeanwhile(L.Callback):
    """An error of which each rank must think that it alone has it, while a save is held in the background."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.held, self.done = folder, Held(), False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self.done:
            self.done = True
            trainer.save_checkpoint(self.folder / "one.ckpt")
            trainer.strategy.remove_checkpoint(self.folder / "former.ckpt")
            raise ValueError("the cause")

    def on_exception(self, *_: Any) -> None:
        threading.Timer(0.3, self.held.release.set).start()


def goes_on_after_an_error(layout: str, folder: Path, saves_first: bool) -> Any:
    saved(layout, folder, "former.ckpt")
    trainer = trainer_with(layout, FailsMeanwhile(folder), saver(folder, 2), steps=2)
    with pytest.raises(ValueError, match="the cause"):
        small_fit(trainer)
    if saves_first:
        trainer.save_checkpoint(folder / "by_hand.ckpt")
    small_fit(trainer)
    trainer.strategy.barrier()
    return there(folder)


@pytest.mark.parametrize("saves_first", [False, True])
def test_a_removal_that_an_error_has_left_is_not_done_by_what_comes_later(tmp_path: Path, saves_first: bool) -> None:
    expected = [*(["by_hand.ckpt"] if saves_first else []), "former.ckpt", "one.ckpt", "step=2.ckpt"]
    assert run("zero1x2", goes_on_after_an_error, tmp_path, saves_first) == [expected] * 2


def goes_on_after_a_full_disk(layout: str, folder: Path) -> Any:
    saved(layout, folder, "former.ckpt")
    asks = Asks(folder, error=True)
    trainer = in_windows(layout, asks)
    fail_at(1)
    with pytest.raises(CheckpointError, match=r"one.ckpt .*No space left"):
        small_fit(trainer)
    asks.folder, asks.error = folder / "again", False
    small_fit(trainer)
    return there(folder), there(folder / "again")


def test_a_checkpoint_that_an_error_has_left_waiting_is_not_saved_by_the_next_fit(tmp_path: Path) -> None:
    assert run("single", goes_on_after_a_full_disk, tmp_path) == [(["former.ckpt"], ["one.ckpt", "two.ckpt"])]
