"""Ranks whose batches use different parameters train as one process does, in float64, at every ZeRO stage."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from training import GLOBAL_BATCH, Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.errors import LaunchError

pytestmark = pytest.mark.distributed

LAYOUTS = [
    "dp2",
    "zero2x2",
    "zero3x2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1x2", "hsdp2x2")),
]
BATCHES = 6


class Halves(Dataset):
    """Feature vectors of size 6, each with its kind: halves of a global batch differ, every third batch is all 0."""

    def __len__(self) -> int:
        return BATCHES * GLOBAL_BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        batch, place = divmod(index, GLOBAL_BATCH)
        kind = 0 if batch % 3 == 2 else (place // (GLOBAL_BATCH // 2) + batch) % 2
        return torch.randn(6, generator=generator, dtype=torch.float64), kind


class Block(nn.Module):
    """With a part that samples of kind 1 alone use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, hidden: torch.Tensor, picked: torch.Tensor, any_picked: bool) -> torch.Tensor:
        result = hidden + self.linear(hidden).tanh()
        return result + self.extra(hidden) * picked.unsqueeze(1) if any_picked else result


class KindsOfSamples(L.LightningModule):
    """Each kind of sample has a head (and a temperature) of its own.

    Args:
        sizes: outputs of the heads; the last head is never used.
        case: of kind 1: "heads" is all of the above; "early exit" takes the hidden after the first block; "no targets"
            has a loss that reaches no parameter.
        manual: whether the step calls the backward.
    """

    def __init__(self, case: str, sizes: tuple[int, int, int] = (3, 3, 3), manual: bool = False) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = not manual
        self.enter = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head_a, self.head_b, self.head_c = (nn.Linear(6, size) for size in sizes)
        self.temperatures = nn.ParameterList([nn.Parameter(torch.tensor(1.0)) for _ in sizes])

    def forward(self, features: torch.Tensor, kinds: torch.Tensor) -> list[torch.Tensor]:
        hidden = [self.enter(features)]
        # Rows that a loss passes over would reach their part in one process, with gradients of zero.
        any_picked = self.case == "heads" and bool((kinds == 1).any())
        for block in self.blocks:
            hidden.append(block(hidden[-1], kinds, any_picked))
        return hidden

    def losses(self, hidden: list[torch.Tensor], kinds: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for kind in kinds.unique().tolist():
            if self.case == "no targets" and kind == 1:
                continue
            source = hidden[1] if self.case == "early exit" and kind == 1 else hidden[-1]
            output = (self.head_a, self.head_b)[kind](source[kinds == kind]) * self.temperatures[kind]
            total = total + output.square().mean(1).sum()
        return total if self.case == "no targets" and not (kinds == 0).any() else total / len(kinds)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        features, kinds = batch
        loss = self.losses(self(features, kinds), kinds)
        self.log("train_loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        # In two parts: the second backward must keep what the first has left.
        self.manual_backward(loss)
        self.manual_backward(self.losses(self(features * 0.5, kinds), kinds))
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def fit(layout: str | None, accumulate: int, *case: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), KindsOfSamples(*case)
    before = whole_weights(module)
    trainer = trainer_for(
        layout, max_epochs=2, precision="64-true", accumulate_grad_batches=accumulate, callbacks=[recorder]
    )
    trainer.fit(module, ordered(Halves(), replicas=Layout.parse(layout).data if layout else 1))
    return {"losses": recorder.losses, "norms": recorder.norms, "weights": whole_weights(module), "before": before}


CASES: dict[str, tuple[Any, ...]] = {
    "heads of equal size": (1, "heads"),
    "heads of unlike size": (1, "heads", (3, 5, 2)),
    "heads, accumulated": (2, "heads", (3, 5, 2)),
    "heads, manual": (1, "heads", (3, 5, 2), True),
    "an early exit": (1, "early exit"),
    "no targets": (1, "no targets"),
    "no targets, accumulated": (3, "no targets"),
    "no targets, manual": (1, "no targets", (3, 3, 3), True),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    return CASES[request.param], run(None, fit, *CASES[request.param])[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_used_on_some_ranks_train_as_in_one_process(layout: str, case: Any) -> None:
    arguments, expected = case
    for got in run(layout, fit, *arguments, timeout_seconds=60):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        for name, value in expected["weights"].items():
            assert torch.allclose(got["weights"][name], value, rtol=0, atol=1e-9), name
            if name.startswith("head_c"):
                assert torch.equal(got["weights"][name], got["before"][name].double()), "nobody used it"


class DroppedBlocks(KindsOfSamples):
    """Each rank skips another of its blocks, as layers that are dropped at random do."""

    def forward(self, features: torch.Tensor, kinds: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.enter(features)
        for index, block in enumerate(self.blocks):
            if index != self.trainer.strategy.data_parallel_rank:
                hidden = block(hidden, kinds, False)
        return [hidden, hidden]


def fit_dropped(layout: str) -> None:
    trainer_for(layout, max_steps=2, precision="64-true").fit(DroppedBlocks("heads"), ordered(Halves(), replicas=2))


@pytest.mark.parametrize("layout", ["zero1x2", "zero3x2"])
def test_unlike_blocks_on_ranks_are_refused_under_zero(layout: str) -> None:
    with pytest.raises(LaunchError, match="called different repeated blocks.*zero_stage=0"):
        run(layout, fit_dropped, timeout_seconds=60)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


class Recovers(KindsOfSamples):
    """Goes on after a backward that raised half way."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, kinds = batch
        optimizer: Any = self.optimizers()
        if batch_idx == 1:
            hidden = self.blocks[0](self.enter(features), kinds, False)
            for block in self.blocks[1:]:
                hidden = block(RaisesInBackward.apply(hidden), kinds, False)
            with pytest.raises(ArithmeticError):
                self.manual_backward(hidden.square().mean())
        optimizer.zero_grad()
        loss = self.losses(self(features, kinds), kinds)
        self.log("train_loss", loss, sync_dist=True)
        self.manual_backward(loss)
        optimizer.step()


def fit_recovering(layout: str | None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), Recovers("heads", (3, 3, 3), True)
    trainer = trainer_for(layout, max_epochs=1, precision="64-true", callbacks=[recorder])
    trainer.fit(module, ordered(Halves(), replicas=2 if layout else 1))
    return {"losses": recorder.losses, "weights": whole_weights(module)}


@pytest.mark.parametrize("layout", ["dp2", "zero2x2", "zero3x2"])
def test_a_backward_that_raised_leaves_nothing_behind(layout: str) -> None:
    expected = run(None, fit_recovering)[0]
    for got in run(layout, fit_recovering, timeout_seconds=60):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        for name, value in expected["weights"].items():
            assert torch.allclose(got["weights"][name], value, rtol=0, atol=1e-9), name


@pytest.mark.parametrize("layout", ["dp2-pp2", "zero2x2-pp2", "zero3x2-pp2"])
@pytest.mark.parametrize("name", ["heads, accumulated", "no targets"])
def test_the_same_under_a_pipeline(layout: str, name: str) -> None:
    expected = run(None, fit, *CASES[name])[0]
    for got in run(layout, fit, *CASES[name], timeout_seconds=90):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        for parameter, value in got["weights"].items():
            assert torch.allclose(value, expected["weights"][parameter], rtol=0, atol=1e-9), parameter
