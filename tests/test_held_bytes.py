"""What each stage holds per rank, counted in the middle of an accumulation window and before the step.

The formula is what FSDP2 and replication hold, with P the bytes of all parameters and N shards: stages 1 and 2 keep a
shard beside the whole parameters while they compute.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.parallel.held import HeldBytes, held_bytes

pytestmark = pytest.mark.distributed


class EvenGPT(TinyGPT):
    """All parameters divide by 4, and none is a scalar, so that the formula is exact."""

    def _build(self) -> None:
        super()._build()
        self.temperature = torch.nn.Parameter(torch.ones(4))

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return super().loss(rows) if self.temperature.dim() == 0 else self._loss(rows)

    def _loss(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.model is not None
        logits = self.model(rows[:, :-1]) * self.temperature.mean()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


class Counter(L.Callback):
    def __init__(self) -> None:
        self.seen: dict[str, HeldBytes] = {}

    def _count(self, trainer: L.Trainer, moment: str) -> None:
        assert isinstance(trainer.strategy, ThreeDStrategy)
        self.seen[moment] = held_bytes(trainer.strategy.share, trainer.strategy.optimizers)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # The third batch is inside the second window: the optimizer has its state by then.
        if batch_idx == 2:
            self._count(trainer, "mid")

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self._count(trainer, "step")


def fit(layout: str) -> tuple[dict[str, HeldBytes], int]:
    L.seed_everything(1, verbose=False)
    module, counter = EvenGPT(), Counter()
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    trainer = trainer_for(layout, max_steps=2, accumulate_grad_batches=2, callbacks=[counter])
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data))
    return counter.seen, total


# (parameters, gradients) in units of the whole model's bytes, as functions of the number of shards.
FORMULA: dict[int, Any] = {
    0: {"mid": lambda n: (1, 1), "step": lambda n: (1, 1)},
    1: {"mid": lambda n: (1 + 1 / n, 1), "step": lambda n: (1 / n, 1 / n)},
    2: {"mid": lambda n: (1 + 1 / n, 1 / n), "step": lambda n: (1 / n, 1 / n)},
    3: {"mid": lambda n: (1 / n, 1 / n), "step": lambda n: (1 / n, 1 / n)},
}


@pytest.mark.parametrize("layout", ["dp2", "zero1x2", "zero2x2", "zero3x2", "zero3x4", "hsdp2x2"])
def test_bytes_held_are_those_of_the_formula(layout: str) -> None:
    parsed = Layout.parse(layout)
    shards = parsed.data_parallel_shards
    for seen, total in run(layout, fit):
        for moment in ("mid", "step"):
            parameters, gradients = FORMULA[parsed.zero_stage][moment](shards)
            assert seen[moment] == HeldBytes(
                parameters=round(parameters * total),
                gradients=round(gradients * total),
                optimizer=round(2 * total / shards),
            )
