"""A language model under many losses, which tensor-parallel ranks split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from modules import VOCAB, Rows
from torch import nn

from lightning_3d.models.gpt import GPT, GPTConfig


class Language(L.LightningModule):
    """The reference GPT with 4 heads, 2 of keys and values, under one of several losses."""

    def __init__(
        self, loss: str = "flat", vocab_size: int = VOCAB, tied: bool = False, dropout: float = 0.0, **optimizer: Any
    ) -> None:
        super().__init__()
        self.kind, self.optimizer = loss, optimizer
        self.widths: set[int] = set()
        self.model = GPT(
            GPTConfig(
                vocab_size=vocab_size, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, dropout=dropout,
                max_sequence_length=16, tie_embeddings=tied,
            )
        )  # fmt: skip
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def data(self) -> Rows:
        return Rows(24)

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits, targets = self.model(rows[:, :-1]), rows[:, 1:].flatten()
        self.widths.add(logits.shape[-1])
        loss = LOSSES[self.kind](logits, targets)
        if self.kind == "used in other ways too":
            self.log("accuracy", (logits.argmax(-1).flatten() == targets).double().mean(), sync_dist=True)
            loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        loss = loss * self.temperature
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, **self.optimizer)


def changed_in_place(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits[..., 5] = -3.0
    logits.mul_(0.7)
    logits += 0.1 * logits.detach().square()
    return F.cross_entropy(logits.flatten(0, 1), targets)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "flat": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets),
    "ignored targets": lambda logits, targets: F.cross_entropy(
        logits.view(-1, logits.size(-1)), targets.where(targets % 3 > 0, -7), ignore_index=-7
    ),
    "summed": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / len(targets),
    "of each token": lambda logits, targets: F.cross_entropy(
        logits.double().reshape(-1, logits.shape[-1]), target=targets, reduction="none"
    ).square().mean(),
    "sliced": lambda logits, targets: nn.CrossEntropyLoss()(
        logits[:, 1:].contiguous().flatten(0, 1), targets.view(len(logits), -1)[:, 1:].flatten()
    ),
    "smoothed": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=0.1),
    "weighted classes": lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), targets, weight=torch.linspace(0.5, 2.0, logits.shape[-1], dtype=logits.dtype)
    ),
    "classes second": lambda logits, targets: F.cross_entropy(logits.mT, targets.view(len(logits), -1)),
    "own softmax": lambda logits, targets: -logits.log_softmax(-1).flatten(0, 1).gather(1, targets[:, None]).mean(),
    "changed in place": lambda logits, targets: changed_in_place(logits, targets),
    "used in other ways too": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets),
}  # fmt: skip
