"""A small classifier for 8 x 8 images of digits, built in the constructor as most LightningModules are."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d.errors import ConfigError

_PIXELS = 64
_CLASSES = 10


class DigitsMLP(L.LightningModule):
    """64 -> hidden -> 10 with ReLU.

    A batch is (pixels (batch, 64), labels (batch,) int64). Logs `train_loss`, and over the epoch `val_loss`,
    `val_accuracy`, `test_loss`, `test_accuracy`; predicts the most likely digit, (batch,).

    Raises:
        ConfigError: a value that cannot work; the message names the field and a value that would.
    """

    def __init__(
        self,
        hidden_size: int = 64,
        num_hidden_layers: int = 1,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        learning_rate: float = 1e-2,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("num_hidden_layers", num_hidden_layers)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}={size!r} is not a whole number of at least 1; {name}=1 would do.")
        if optimizer not in ("adamw", "sgd"):
            raise ConfigError(f"optimizer={optimizer!r} must be 'adamw' or 'sgd'.")
        if (
            isinstance(learning_rate, bool)
            or not isinstance(learning_rate, (int, float))
            or not 0 < learning_rate < math.inf
        ):
            raise ConfigError(f"learning_rate={learning_rate!r} must be a number above 0; 0.01 would do.")
        if (
            isinstance(weight_decay, bool)
            or not isinstance(weight_decay, (int, float))
            or not 0 <= weight_decay < math.inf
        ):
            raise ConfigError(f"weight_decay={weight_decay!r} must be a number of at least 0; 0 would do.")
        self.save_hyperparameters()
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        widths = [_PIXELS, *[hidden_size] * num_hidden_layers]
        hidden = [layer for inputs, outputs in pairwise(widths) for layer in (nn.Linear(inputs, outputs), nn.ReLU())]
        self.model = nn.Sequential(*hidden, nn.Linear(hidden_size, _CLASSES))
        self.val_accuracy = MulticlassAccuracy(num_classes=_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes=_CLASSES, average="micro")

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.model(pixels)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pixels, labels = batch
        loss = F.cross_entropy(self(pixels), labels)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=labels.shape[0])
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, name="val", accuracy=self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, name="test", accuracy=self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        pixels, _ = batch
        predicted: Tensor = self(pixels).argmax(dim=-1)
        return predicted

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                self.parameters(), lr=self.learning_rate, momentum=0.9, weight_decay=self.weight_decay
            )
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)

    def _evaluate(self, batch: tuple[Tensor, Tensor], *, name: str, accuracy: MulticlassAccuracy) -> None:
        pixels, labels = batch
        logits = self(pixels)
        accuracy.update(logits, labels)
        self.log(f"{name}_loss", F.cross_entropy(logits, labels), sync_dist=True, batch_size=labels.shape[0])
        self.log(f"{name}_accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=True, batch_size=labels.shape[0])
