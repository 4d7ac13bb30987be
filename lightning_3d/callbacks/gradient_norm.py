"""Logs the norm of all gradients, before they are clipped."""

from __future__ import annotations

import lightning as L
import torch
from torch.optim import Optimizer


class GradientNorm(L.Callback):
    """Logs `grad_norm`, the one norm over all ranks' gradients, every `log_every_n_steps` steps of the Trainer.

    A strategy that splits parameters tells it (`gradient_norm`); else the parameters of this process are all there are.
    """

    def __init__(self, norm_type: float = 2.0) -> None:
        self.norm_type = norm_type

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        # The Trainer's own question, which all ranks answer alike: a norm over ranks is a collective.
        if not trainer._logger_connector.should_update_logs:
            return
        of_strategy = getattr(trainer.strategy, "gradient_norm", None)
        if of_strategy is not None:
            norm = of_strategy(self.norm_type)
        else:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients, norm_type=self.norm_type)
        pl_module.log("grad_norm", norm, batch_size=1)
