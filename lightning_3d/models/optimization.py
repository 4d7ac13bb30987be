"""AdamW with decay on matrices only, and the warm-up and cosine schedule, shared by the language models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_3d.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """AdamW's settings and the schedule's, checked when they are set.

    Attributes:
        warmup_steps: optimizer steps over which the learning rate rises to `learning_rate`.
        max_steps: the optimizer step at which the cosine ends; None means the trainer's own number of steps.
        min_learning_rate_ratio: the share of `learning_rate` that is left when the cosine ends.

    Raises:
        ConfigError: a value that cannot work; the message names the field and a value that would.
    """

    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 0
    max_steps: int | None = None
    min_learning_rate_ratio: float = 0.1

    def __post_init__(self) -> None:
        if not is_number(self.learning_rate) or not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate={self.learning_rate!r} must be a number above 0; 3e-4 would do.")
        if not is_number(self.weight_decay) or not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay={self.weight_decay!r} must be a number of at least 0; 0.1 would do.")
        if len(self.betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas={self.betas!r} must be two numbers from 0 to below 1; (0.9, 0.95) would do.")
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps={self.warmup_steps!r} must be a whole number of at least 0; 0 would do.")
        if self.max_steps is not None and (
            isinstance(self.max_steps, bool) or not isinstance(self.max_steps, int) or self.max_steps < 1
        ):
            raise ConfigError(
                f"max_steps={self.max_steps!r} must be a whole number of at least 1, or null for the trainer's own."
            )
        if not is_number(self.min_learning_rate_ratio) or not 0 <= self.min_learning_rate_ratio <= 1:
            raise ConfigError(
                f"min_learning_rate_ratio={self.min_learning_rate_ratio!r} must be from 0 to 1; 0.1 would do."
            )


def build_adamw(
    module: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.95)
) -> AdamW:
    """AdamW over the trainable parameters in two groups: matrices decay; norms, biases and other vectors do not.

    Both groups are always there, even when one is empty, so that a checkpoint's groups mean the same for every model.

    Raises:
        ConfigError: no parameter is trainable.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(
            f"{type(module).__name__} has no trainable parameter: set requires_grad on those that should be trained, "
            "and build the model before its optimizer."
        )
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=learning_rate, betas=betas)


def warmup_cosine(
    optimizer: Optimizer, *, warmup_steps: int, max_steps: int, min_learning_rate_ratio: float
) -> LambdaLR:
    """Step the learning rate by `warmup_cosine_factor`, once an optimizer step."""

    # A closure, not a callable object: LambdaLR would store an object's fields in the checkpoint and put them back on
    # resume, over settings that the user has changed.
    def factor(step: int) -> float:
        return warmup_cosine_factor(
            step, warmup_steps=warmup_steps, max_steps=max_steps, min_learning_rate_ratio=min_learning_rate_ratio
        )

    return LambdaLR(optimizer, factor)


def warmup_cosine_factor(step: int, *, warmup_steps: int, max_steps: int, min_learning_rate_ratio: float) -> float:
    """Share of the peak learning rate at optimizer step `step`, counted from 0.

    It rises linearly to 1 over `warmup_steps`, falls along half a cosine to `min_learning_rate_ratio` at `max_steps`,
    and stays there.

    >>> [round(warmup_cosine_factor(s, warmup_steps=2, max_steps=6, min_learning_rate_ratio=0.0), 2) for s in range(8)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15, 0.0, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return min_learning_rate_ratio + (1 - min_learning_rate_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
