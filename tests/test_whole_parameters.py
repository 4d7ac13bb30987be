"""A parameter that is whole inside a split region: its gradient is summed, or it is refused by name."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from modules import Points
from parity import alone, assert_equal, train
from torch import nn
from training import run

from lightning_3d.errors import ModelError

pytestmark = pytest.mark.distributed


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


class Scaled(L.LightningModule):
    """An MLP with a parameter between its split layers, and one of the same kind outside."""

    def __init__(self, planned: bool, from_zero: bool = False) -> None:
        super().__init__()
        self.planned = planned
        self.fc1, self.inside, self.fc2, self.outside = nn.Linear(6, 64), Scale(), nn.Linear(64, 3), Scale()
        if from_zero:
            nn.init.zeros_(self.fc2.weight)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"fc1": "colwise", "fc2": "rowwise", **({"inside": "replicate"} if self.planned else {})}

    def data(self) -> Points:
        return Points(48)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.outside(self.fc2(torch.tanh(self.inside(self.fc1(batch[0]))))), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def fit_scaled(layout: str | None, planned: bool, from_zero: bool = False) -> Any:
    try:
        return train(layout, Scaled, {"max_steps": 5}, planned, from_zero)
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("layout", ["tp2", "zero3x2-tp2"])
def test_whole_parameter_in_a_split_region_is_summed_where_the_plan_says_so(layout: str) -> None:
    assert_equal(run(layout, fit_scaled, True), alone(fit_scaled, True))


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize("layout", ["tp2", "zero3x2-tp2"])
def test_whole_parameter_in_a_split_region_is_refused_by_name_where_it_does_not(layout: str, from_zero: bool) -> None:
    for told in run(layout, fit_scaled, False, from_zero):
        assert told.startswith("the gradient of inside.scale differs between tensor-parallel ranks")
        assert "'replicate' in tensor_parallel_plan()" in told
