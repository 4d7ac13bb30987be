"""Saves in the background that wait until they are told to go on, and runs that make them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Small
from torch.utils.data import DataLoader
from training import trainer_for

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.checkpoint import writing


class Held:
    """Writes wait until `release` is set; in this process."""

    def __init__(self) -> None:
        self.release, self.writing, self.at_once, self.most = threading.Event(), threading.Event(), 0, 0
        real = writing.dcp.save

        def save(*args: Any, **kwargs: Any) -> Any:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.writing.set()
            assert self.release.wait(30)
            try:
                return real(*args, **kwargs)
            finally:
                self.at_once -= 1

        writing.dcp.save = save  # type: ignore[assignment]


def trainer_with(layout: str, *callbacks: L.Callback, steps: int, **strategy: Any) -> L.Trainer:
    settings = {**Layout.parse(layout).as_dict(), "async_checkpoint": True, "timeout_seconds": 60, **strategy}
    return trainer_for(
        layout,
        max_steps=steps,
        max_epochs=50,
        callbacks=list(callbacks),
        enable_checkpointing=True,
        strategy=ThreeDStrategy(**settings),
    )


def saver(folder: Path, every: int, top_k: int = -1, **kwargs: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=top_k, **kwargs)


def small_fit(trainer: L.Trainer, module: Small | None = None, samples: int = 64) -> None:
    trainer.fit(module or Small(), DataLoader(torch.randn(samples, 4), batch_size=4))
