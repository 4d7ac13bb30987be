"""LightningModules and data that the distributed tests train."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d.models.gpt import GPT, GPTConfig

VOCAB = 64


class Rows(Dataset):
    """Token rows of length 17; row i depends on i alone."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (17,), generator=torch.Generator().manual_seed(index))


class Numbers(Dataset):
    """Each sample is its own index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class TinyGPT(L.LightningModule):
    """A tied GPT with a learned temperature outside of it; built in `configure_model` if `lazy`."""

    def __init__(self, *, lazy: bool = False, dropout: float = 0.0, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.lazy, self.dropout_rate, self.learning_rate = lazy, dropout, learning_rate
        self.model: GPT | None = None
        self.rows: list[list[int]] = []
        if not lazy:
            self._build()

    def configure_model(self) -> None:
        if self.model is None:
            self._build()

    def _build(self) -> None:
        config = GPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            max_sequence_length=16,
            tie_embeddings=True,
        )
        self.model = GPT(config)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.drop = nn.Dropout(self.dropout_rate)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.model is not None
        logits = self.drop(self.model(rows[:, :-1])) / self.temperature
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.rows.append(rows[:, 0].tolist())
        loss = self.loss(rows)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, rows: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(rows), sync_dist=True)

    def predict_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.model is not None
        return self.model(rows[:, :-1]).mean((1, 2))

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Points(Dataset):
    """Feature vectors of size 6 with a class of 3."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator, dtype=torch.get_default_dtype()), index % 3


class Classifier(L.LightningModule):
    """An MLP with a frozen layer, an unused layer and a torchmetrics accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        self.unused = nn.Linear(4, 4)
        self.net[2].requires_grad_(False)
        self.accuracy = MulticlassAccuracy(num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        features, label = batch
        loss = F.cross_entropy(self.net(features), label)
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss, "extra": loss.detach() * 2}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, label = batch
        output = self.net(features)
        self.accuracy(output, label)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("val_loss", F.cross_entropy(output, label), sync_dist=True, batch_size=len(label))
        self.log("count", float(len(label)), sync_dist=True, reduce_fx="sum", batch_size=1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"class": self.net(batch[0]).argmax(-1), "label": batch[1]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class GAN(L.LightningModule):
    """Two optimizers in manual optimization, toggled, one with two backwards to a step."""

    def __init__(self, *, toggle: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.ones(6))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features = batch[0]
        first, second = self.optimizers()
        if self.toggle:
            self.toggle_optimizer(first)
        loss = F.softplus(-self.discriminator(self.generator(features) * self.scale)).mean()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        if self.toggle:
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
        else:
            second.zero_grad()
        self.manual_backward(F.softplus(-self.discriminator(features)).mean())
        fake = (self.generator(features) * self.scale).detach()
        other = F.softplus(self.discriminator(fake)).mean()
        self.manual_backward(other)
        second.step()
        second.zero_grad()
        if self.toggle:
            self.untoggle_optimizer(second)
        self.log("train_loss", loss + other, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW([*self.generator.parameters(), self.scale], lr=1e-2),
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-1),
        ]


class Small(L.LightningModule):
    """Few tensors, since each of their writes is made to fail once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        self.mark = nn.Parameter(torch.tensor(0.0))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean() + 0 * self.mark
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)
