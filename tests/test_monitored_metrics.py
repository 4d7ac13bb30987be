"""Callbacks and schedulers that watch a metric decide alike on all ranks, in every kind of layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from modules import Points
from torch import nn
from torch.utils.data import DataLoader
from training import run, trainer_for

from lightning_3d import Layout

pytestmark = pytest.mark.distributed


class Judged(L.LightningModule):
    """Each rank has an opinion of its own of the epoch, not synchronised."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
        self.rates: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Rank 0 improves for ever, the others get worse after epoch 1.
        worse = abs(self.current_epoch - 1) * 2.0
        self.log("opinion", 9.0 - self.current_epoch if self.global_rank == 0 else 5.0 + worse)
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "opinion"}}


def fit(layout: str, folder: Path, monitor: str, stops: bool) -> Any:
    L.seed_everything(1, verbose=False)
    saver = ModelCheckpoint(folder, monitor="opinion", filename="{epoch}", save_top_k=1)
    callbacks: list[L.Callback] = [saver]
    if stops:
        callbacks.append(EarlyStopping(monitor, patience=2))
    module = Judged()
    trainer = trainer_for(layout, max_epochs=8, callbacks=callbacks, enable_checkpointing=True)
    replicas = Layout.parse(layout).data
    loaders = [DataLoader(Points(8), batch_size=4 // replicas) for _ in range(2)]
    try:
        trainer.fit(module, *loaders)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return (
        trainer.current_epoch,
        trainer.global_step,
        saver.best_model_path,
        float(saver.best_model_score),
        module.rates,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["zero1x2-pp2", "tp2"])
def test_ranks_that_measure_other_values_stop_save_and_slow_down_together(tmp_path: Path, layout: str) -> None:
    ranks = run(layout, fit, tmp_path, "opinion", True)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][0] < 8 and len(ranks[0][4]) == ranks[0][1] and len(set(ranks[0][4])) > 1


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_metric_that_is_not_there_is_the_same_error_on_all_ranks(tmp_path: Path, layout: str) -> None:
    ranks = run(layout, fit, tmp_path, "nothing", True)
    assert ranks[0][0] == "RuntimeError" and "`nothing` which is not available" in ranks[0][1]
    assert all(rank == ranks[0] for rank in ranks)
