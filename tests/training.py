"""Runs a LightningModule under a strategy in forked ranks and brings back all that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.strategies.processes.launch import fork_ranks

torch.set_num_threads(1)

GLOBAL_BATCH = 8


class Recorder(L.Callback):
    """Keeps the logged losses and the gradient norm before clipping of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        if isinstance(trainer.strategy, ThreeDStrategy):
            self.norms.append(float(trainer.strategy.gradient_norm()))
        else:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if "train_loss" in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics["train_loss"]))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def ordered(dataset: Dataset, *, replicas: int, global_batch: int = GLOBAL_BATCH, **kwargs: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=global_batch // replicas, **kwargs)


def trainer_for(
    layout: str | None,
    *,
    num_microbatches: int | None = None,
    loss_parallel: bool = False,
    sequence_parallel: bool = False,
    **kwargs: Any,
) -> L.Trainer:
    """A quiet CPU Trainer; `layout` None is strategy="auto" in one process."""
    parsed = Layout.parse(layout) if layout else None
    strategy: Any = "auto"
    if parsed:
        settings = {**parsed.as_dict(), "num_microbatches": num_microbatches}
        strategy = ThreeDStrategy(
            **settings, loss_parallel=loss_parallel, sequence_parallel=sequence_parallel, timeout_seconds=60
        )
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    devices = parsed.world_size if parsed else 1
    return L.Trainer(accelerator="cpu", devices=devices, **{"strategy": strategy, **defaults, **kwargs})


def run(layout: str | None, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120) -> list[Any]:
    """`function(layout, *args)` on every rank of a layout; results in the order of ranks."""
    world_size = Layout.parse(layout).world_size if layout else 1
    return fork_ranks(function, world_size=world_size, timeout_seconds=timeout_seconds, args=(layout, *args))
