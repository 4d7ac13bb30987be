"""The module that the cases train, and how they are registered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from modules import Points
from torch import nn
from training import Recorder, ordered, trainer_for, whole_weights

from lightning_3d import Layout


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + torch.tanh(self.linear(features))


class Net(L.LightningModule):
    """Blocks, a head and a raw parameter; two parameter groups."""

    def __init__(self, width: int = 6, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.full((3,), scale))

    def output(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = block(features)
        return self.head(features) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.output(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.cross_entropy(self.output(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.output(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.output(batch[0])

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.blocks.parameters()}, {"params": [*self.head.parameters(), self.scale], "lr": 3e-2}]
        return torch.optim.AdamW(groups, lr=1e-2)


Case = Callable[[str | None, Path], Any]
CASES: dict[str, Case] = {}
# Not compared with one process: what the ranks say must only be equal, or is checked by the case itself.
ALIKE: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def alike(function: Case) -> Case:
    ALIKE[function.__name__] = function
    return function


def fresh(kind: Callable[..., Any], **settings: Any) -> Any:
    """In float64 from the start: stock Lightning loads a checkpoint into float32 weights before it converts them."""
    L.seed_everything(1, verbose=False)
    return kind(**settings).double()


def loader(layout: str | None, count: int = 24, **kwargs: Any) -> Any:
    return ordered(Points(count), replicas=Layout.parse(layout).data if layout else 1, **kwargs)


def fit(layout: str | None, module: L.LightningModule, *callbacks: L.Callback, val: int = 16, **kwargs: Any) -> Any:
    recorder = Recorder()
    settings = {"max_epochs": 3, "precision": "64-true", **kwargs}
    trainer = trainer_for(layout, callbacks=[recorder, *callbacks], **settings)
    trainer.fit(module, loader(layout), loader(layout, val), ckpt_path=None)
    return trainer, {"losses": recorder.losses, "norms": recorder.norms, "weights": whole_weights(module)}
