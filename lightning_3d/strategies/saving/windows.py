"""Checkpoints that are asked for inside an accumulation window wait for its end: they hold no partial gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn


class SaveAtWindowEnd(L.Callback):
    """Keeps what was asked for, and saves at the end of the batch that ends the window.

    Added by the strategy as the last callback.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[bool, Any]] = {}
        self._training = self._saving = False

    @property
    def waiting(self) -> bool:
        """Whether a checkpoint was asked for and is not saved yet."""
        return bool(self._waiting)

    @property
    def paths(self) -> list[str]:
        """Of what was asked for and is not saved yet."""
        return list(self._waiting)

    def lasting(self, trainer: L.Trainer) -> bool:
        """Whether the training goes on, so that there will be a later moment: no exception has ended it."""
        return self._training and not trainer.interrupted

    def postpone(self, trainer: L.Trainer, checkpoint: Mapping[str, Any], path: str, storage_options: Any) -> bool:
        """Whether this checkpoint is saved later."""
        module = trainer.lightning_module
        if not module.automatic_optimization or not trainer.fit_loop.epoch_loop._should_accumulate():
            return False
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        if not self.lasting(trainer):
            # An exception, or an early end: this window never ends.
            if trainer.interrupted and not self._saving:
                # What was asked for earlier comes first: its commit lets former checkpoints go.
                self._save(trainer)
            if trainer.interrupted or trainer.training:
                rank_zero_warn(
                    f"{path} is saved inside an accumulation window, without its gradients: a run that goes on from it "
                    f"does {done} batches again."
                )
            return False
        rank_zero_info(f"{path} is saved when the accumulation window ends; {done} batches of it are done.")
        self._waiting[path] = "optimizer_states" not in checkpoint, storage_options
        return True

    def begin(self, path: str) -> None:
        """The save of a path begins: it waits no longer."""
        self._waiting.pop(path, None)

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        # What a run that failed has left.
        self._waiting.clear()
        self._training = False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._training = True

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._waiting and not trainer.fit_loop.epoch_loop._should_accumulate():
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._training = False
        self._save(trainer)

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        self._training = False
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        self._saving = True
        try:
            while self._waiting:
                path, (weights_only, storage_options) = next(iter(self._waiting.items()))
                try:
                    trainer.save_checkpoint(path, weights_only, storage_options)
                finally:
                    # Where the Trainer does not save any more, or the save before this one has failed.
                    self.begin(path)
        finally:
            self._saving = False
