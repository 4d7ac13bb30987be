"""Schedulers and early stopping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from features.case import Net, alike, case, fit, fresh
from lightning_3d.checkpoint import store


class Scheduled(Net):
    kind = "onecycle"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("rates", []).append([group["lr"] for group in self.optimizers().param_groups])  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.kind == "onecycle":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=[0.1, 0.2], total_steps=int(self.trainer.estimated_stepping_batches)
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@case
def schedules_per_step_and_per_epoch(layout: str | None, folder: Path) -> Any:
    found = {}
    for kind in ("onecycle", "plateau"):
        module = fresh(Scheduled)
        module.kind = kind
        _, got = fit(layout, module, max_epochs=5)
        assert module.rates[0] != module.rates[-1]
        found[kind] = got, module.rates
    return found


class Judged(Scheduled):
    """Validation metrics that are chosen by the test, not synchronised."""

    kind = "plateau"
    of_rank: Callable[[int, int], float] = staticmethod(lambda rank, epoch: 1.0 + epoch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.of_rank(self.global_rank, self.current_epoch))


@case
def early_stopping(layout: str | None, folder: Path) -> Any:
    stopper = EarlyStopping("val_loss", patience=2)
    trainer, got = fit(layout, fresh(Judged), stopper, max_epochs=9)
    assert trainer.current_epoch == 3
    return got, stopper.stopped_epoch, trainer.global_step


@alike
def metrics_that_differ_by_rank_lead_to_one_decision(layout: str | None, folder: Path) -> Any:
    stopper = EarlyStopping("val_loss", patience=3)
    saver = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}-{val_loss:.1f}", save_top_k=2)
    module = fresh(Judged)
    # Rank 0 improves for ever; rank 1 is best at epoch 1 and then gets worse.
    module.of_rank = lambda rank, epoch: 9.0 - epoch if rank == 0 else 5.0 + abs(epoch - 1) * 2
    trainer, _ = fit(layout, module, stopper, saver, max_epochs=9, enable_checkpointing=True)
    assert trainer.current_epoch < 9
    assert store.is_committed(Path(saver.best_model_path))
    assert all(store.is_committed(Path(path)) for path in saver.best_k_models) and len(saver.best_k_models) == 2
    assert sorted(folder.iterdir()) == sorted(map(Path, saver.best_k_models))
    return (
        trainer.current_epoch, trainer.global_step, saver.best_model_path, saver.kth_best_model_path,
        float(saver.best_model_score), sorted(saver.best_k_models), module.rates,
    )  # fmt: skip
