"""Next-token training as an ordinary LightningModule, and the GPT that uses it."""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import lightning as L
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.models.gpt import GPT, GPTConfig
from lightning_3d.models.optimization import Optimization, build_adamw, warmup_cosine


class CausalLanguageModel(L.LightningModule, ABC):
    """Trains `self.model` to predict the next token; a subclass builds it in `configure_model`.

    A batch is {"tokens": (batch, sequence + 1) int64}: each token is predicted from those before it. Every step calls
    the model once. Logs `train_loss`, `val_loss` and `test_loss` in nats per token, averaged over all ranks' rows.
    """

    model: nn.Module | None

    def __init__(self, optimization: Optimization) -> None:
        super().__init__()
        self.optimization = optimization
        self.model = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens that the model knows."""

    @abstractmethod
    def batch_loss(self, tokens: Tensor) -> Tensor:
        """Mean loss over a batch's targets, a scalar."""

    @abstractmethod
    def token_logits(self, tokens: Tensor) -> Tensor:
        """Logits (batch, sequence, vocab) of tokens (batch, sequence)."""

    def setup(self, stage: str) -> None:
        # Checked here, because an embedding looked up out of range says nothing a reader could act on.
        data_vocab_size = getattr(getattr(self.trainer, "datamodule", None), "vocab_size", None)
        if isinstance(data_vocab_size, int) and data_vocab_size > self.vocab_size:
            raise ConfigError(
                f"The data's tokenizer has {data_vocab_size} tokens, but the model's vocab_size={self.vocab_size}. "
                f"Set the model's vocab_size to {data_vocab_size} or more, or the data's to {self.vocab_size} or less."
            )

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.batch_loss(batch["tokens"])
        self._log_loss("train_loss", loss, batch["tokens"])
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_loss("val_loss", self.batch_loss(batch["tokens"]), batch["tokens"])

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_loss("test_loss", self.batch_loss(batch["tokens"]), batch["tokens"])

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Mean loss of each sample, (batch,)."""
        tokens = batch["tokens"]
        return next_token_loss(self.token_logits(tokens[:, :-1]), tokens[:, 1:], reduction="none").mean(dim=1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        settings = self.optimization
        optimizer = build_adamw(
            self,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            betas=settings.betas,
        )
        scheduler = warmup_cosine(
            optimizer,
            warmup_steps=settings.warmup_steps,
            max_steps=self._schedule_steps(),
            min_learning_rate_ratio=settings.min_learning_rate_ratio,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _schedule_steps(self) -> int:
        if self.optimization.max_steps is not None:
            return self.optimization.max_steps
        steps = self.trainer.estimated_stepping_batches
        if math.isinf(steps):
            raise ConfigError(
                "max_steps is null and the trainer has no end either, so the cosine has none. "
                "Set the model's max_steps, for example 1000, or the trainer's max_steps or max_epochs."
            )
        return int(steps)

    def _log_loss(self, name: str, loss: Tensor, tokens: Tensor) -> None:
        self.log(name, loss, prog_bar=name != "test_loss", sync_dist=True, batch_size=tokens.shape[0])


class LanguageModel(CausalLanguageModel):
    """A `GPT` trained on next tokens.

    Args:
        config: a `GPTConfig`, or its fields as a mapping.
        learning_rate, weight_decay, betas, warmup_steps, max_steps, min_learning_rate_ratio: see `Optimization`.

    Raises:
        ConfigError: a field that is unknown, missing or cannot work.
    """

    model: GPT | None

    def __init__(
        self,
        config: Mapping[str, Any] | GPTConfig,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: Sequence[float] = (0.9, 0.95),
        warmup_steps: int = 0,
        max_steps: int | None = None,
        min_learning_rate_ratio: float = 0.1,
    ) -> None:
        super().__init__(
            Optimization(
                learning_rate=learning_rate,
                weight_decay=weight_decay,
                betas=tuple(betas),  # type: ignore[arg-type]  # its length is checked there
                warmup_steps=warmup_steps,
                max_steps=max_steps,
                min_learning_rate_ratio=min_learning_rate_ratio,
            )
        )
        self.config = config if isinstance(config, GPTConfig) else _gpt_config(config)
        # Plain values, so that a checkpoint opens without this package.
        config = {field.name: getattr(self.config, field.name) for field in fields(GPTConfig)}
        betas = list(betas)
        self.save_hyperparameters()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(self.config)

    def token_logits(self, tokens: Tensor) -> Tensor:
        if self.model is None:
            raise ConfigError("The model is not built yet: call configure_model(), or let the Trainer do it.")
        logits: Tensor = self.model(tokens)
        return logits

    def batch_loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.token_logits(tokens[:, :-1]), tokens[:, 1:])


def next_token_loss(logits: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats, in the logits' dtype.

    Shapes:
        logits: (batch, sequence, vocab), targets: (batch, sequence) -> scalar, or (batch, sequence) with "none".
    """
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss


def _gpt_config(config: Mapping[str, Any]) -> GPTConfig:
    known = {field.name: field for field in fields(GPTConfig)}
    for name in config:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"The fields are {', '.join(known)}."
            raise ConfigError(f"The GPT has no field {name!r}. {hint}")
    missing = [name for name in ("vocab_size", "hidden_size", "num_layers", "num_heads") if name not in config]
    if missing:
        raise ConfigError(f"The GPT's config lacks {', '.join(missing)}: set each, for example {missing[0]}=4.")
    return GPTConfig(**config)
