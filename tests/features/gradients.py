"""What is done with gradients, and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from torch import nn
from training import whole, whole_weights

from features.case import Net, alike, case, fit, fresh


class Clipped(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@case
def gradient_clipping_of_one_s_own(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(Clipped))[1]


class Watched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[dict[str, float]] = []
        self.gradients: list[list[torch.Tensor]] = []

    def on_after_backward(self) -> None:
        self.gradients.append([whole(p.grad) for p in self.parameters() if p.grad is not None])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for kind in (1, 2, "inf"):
            self.norms.append({name: float(value) for name, value in grad_norm(self, kind).items()})
        self.log_dict(grad_norm(self, 2))


@case
def hooks_see_the_gradients_of_the_whole_batch(layout: str | None, folder: Path) -> Any:
    module = fresh(Watched)
    trainer, got = fit(layout, module, accumulate_grad_batches=1)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "norm" in name}
    assert len(logged) == 8 and module.gradients
    return got, module.norms, module.gradients, logged


class Skipping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@alike
def a_step_that_returns_none_is_refused_by_lightning_on_all_ranks(layout: str | None, folder: Path) -> Any:
    with pytest.raises(RuntimeError, match="returning None in distributed training is not supported"):
        fit(layout, fresh(Skipping))


class Toggled(Net):
    def on_train_epoch_start(self) -> None:
        self.blocks[0].requires_grad_(self.current_epoch != 1)
        self.scale.requires_grad_(self.current_epoch == 2)


class ToggledInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def output(self, features: torch.Tensor) -> torch.Tensor:
        return super().output(features) / self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scale.requires_grad_(batch_idx != self.current_epoch)
        self.head.requires_grad_(batch_idx != 2)
        self.temperature.requires_grad_(batch_idx != 0)
        return super().training_step(batch, batch_idx)


@case
def parameters_frozen_for_an_epoch(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(Toggled))[1]


@case
def parameters_frozen_for_a_step(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(ToggledInside))[1]


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[1], optimizer, lr=1e-2)


class HeadOnly(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@case
def finetuning(layout: str | None, folder: Path) -> Any:
    module = fresh(HeadOnly)
    before = whole_weights(module)
    got = fit(layout, module, Thaw())[1]
    assert torch.equal(got["weights"]["blocks.0.linear.weight"], before["blocks.0.linear.weight"])
    assert not torch.equal(got["weights"]["blocks.1.linear.weight"], before["blocks.1.linear.weight"])
    return got
