"""`ThreeDStrategy` in Lightning's Trainer, as an ordinary LightningModule uses it."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.job import ADAMW, Clock, Job, next_token_loss
from lightning_3d import ThreeDStrategy


class Module(L.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.build_model()

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        return next_token_loss(self.model(rows[:, :-1]), rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAMW)


class Ticks(L.Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.clock.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.clock.tick()
        self.clock.note(outputs["loss"])


def train(job: Job, clock: Clock) -> None:
    settings = job.layout.as_dict()
    if job.layout.pipeline > 1:
        settings["num_microbatches"] = job.microbatches
    trainer = L.Trainer(
        accelerator="cpu",
        devices=job.layout.world_size,
        strategy=ThreeDStrategy(**settings, loss_parallel=job.layout.tensor > 1),
        max_steps=job.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticks(clock)],
    )
    rows: Any = job.rows()
    trainer.fit(Module(job), DataLoader(rows, batch_size=job.local_batch))
