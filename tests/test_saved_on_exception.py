"""A checkpoint that an exception or Ctrl-C asks for is written, inside an accumulation window too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from modules import Small
from torch.utils.data import DataLoader
from training import run, trainer_for

from lightning_3d.checkpoint import store

pytestmark = pytest.mark.distributed

WINDOW = 4


class Raises(L.Callback):
    """An error in the middle of the second window, after a checkpoint was asked for there."""

    def __init__(self, error: type[BaseException], asked: Path | None) -> None:
        self.error, self.asked = error, asked

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if args[-1] == WINDOW and self.asked is not None:
            trainer.save_checkpoint(self.asked)
            # As ModelCheckpoint does with the one before.
            trainer.strategy.remove_checkpoint(self.asked.with_name("former.ckpt"))

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if args[-1] == WINDOW + 2:
            raise self.error("the cause")


def fails_inside_a_window(layout: str, folder: Path, error: type[BaseException], saver: str, asked: bool) -> list[Any]:
    on_exception = {
        "OnExceptionCheckpoint": OnExceptionCheckpoint(folder, "broken"),
        "ModelCheckpoint": ModelCheckpoint(folder, filename="broken", save_on_exception=True, every_n_epochs=10),
        "none": ModelCheckpoint(folder, every_n_epochs=10),
    }[saver]
    trainer = trainer_for(
        layout,
        max_epochs=1,
        accumulate_grad_batches=WINDOW,
        callbacks=[Raises(error, folder / "asked.ckpt" if asked else None), on_exception],
        enable_checkpointing=True,
    )
    loader = DataLoader(torch.randn(64, 4), batch_size=4)
    if asked:
        first = trainer_for(layout, max_steps=1)
        first.fit(Small(), loader)
        first.save_checkpoint(folder / "former.ckpt")
    try:
        trainer.fit(Small(), loader)
    except (ValueError, SystemExit) as raised:
        found = type(raised).__name__
    steps = {path.name: store.summary(path)["global_step"] for path in store.committed(folder)}
    # A later fit of the same Trainer finds nothing that still waits.
    assert not trainer.strategy._windows.waiting  # type: ignore[attr-defined]
    return [found, steps]


@pytest.mark.parametrize("saver", ["OnExceptionCheckpoint", "ModelCheckpoint"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_an_exception_asks_for_inside_a_window_is_saved(
    tmp_path: Path, error: type[BaseException], saver: str
) -> None:
    ((found, steps),) = run("single", fails_inside_a_window, tmp_path, error, saver, False)
    assert found == ("ValueError" if error is ValueError else "SystemExit")
    assert steps == {"broken.ckpt": 1}


@pytest.mark.parametrize("saver", ["OnExceptionCheckpoint", "ModelCheckpoint", "none"])
def test_what_waited_for_the_end_of_a_window_is_saved_before_what_it_replaces_goes(tmp_path: Path, saver: str) -> None:
    ((_, steps),) = run("single", fails_inside_a_window, tmp_path, ValueError, saver, True)
    assert steps == {"asked.ckpt": 1} | ({} if saver == "none" else {"broken.ckpt": 1})
