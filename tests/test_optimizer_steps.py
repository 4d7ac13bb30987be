"""Every optimizer of torch that goes number by number steps over shards as over whole tensors in one process."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows, TinyGPT
from torch.distributed.tensor import DTensor, Replicate
from training import ordered, run, trainer_for, whole, whole_weights

from lightning_3d import Layout

pytestmark = pytest.mark.distributed

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "AdamW of a tensor's rate": (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 1.0}),
    # An eps that gradients of 1e-8 do not outgrow: their rounding would be divided by as little.
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9, "eps": 1e-3}),
    "Rprop": (torch.optim.Rprop, {}),
}


class AnyOptimizer(TinyGPT):
    """Trains matrices, vectors and a temperature that has no dimension."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        kind, options = KINDS[self.kind]
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() == 1], "lr": 1e-3},
            {"params": [p for p in parameters if p.dim() != 1]},
        ]
        return kind(groups, **options)


def steps(layout: str | None) -> dict[str, Any]:
    return {kind: fit(layout, kind) for kind in KINDS}


def fit(layout: str | None, kind: str, build: type[AnyOptimizer] = AnyOptimizer) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    L.seed_everything(1, verbose=False)
    module = build(kind)
    trainer = trainer_for(layout, max_steps=3, precision="64-true")
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data if layout else 1))
    (optimizer,) = trainer.optimizers
    states = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            states[f"{name} {key}"] = whole(value) if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor) and value.dim():
                assert type(value) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
                if isinstance(parameter, DTensor):
                    assert value.placements == parameter.placements
    # Nothing is left that a step made for itself.
    assert set(optimizer.state) <= set(module.parameters())
    return {"weights": whole_weights(module), "states": states}


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Any]:
    return run(None, steps)[0]


@pytest.mark.parametrize("layout", ["zero1x2", "zero3x2", "tp2", pytest.param("zero3x2-tp2", marks=pytest.mark.slow)])
def test_optimizers_step_over_shards_as_over_whole_tensors(of_one_process: dict[str, Any], layout: str) -> None:
    for rank in run(layout, steps):
        torch.testing.assert_close(rank, of_one_process, rtol=1e-9, atol=1e-11)


class Gathering(AnyOptimizer):
    """Makes its gradients whole, as a hook that needs all of a matrix may leave them."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for p in self.parameters():
            if isinstance(p.grad, DTensor):
                p.grad = p.grad.redistribute(placements=[Replicate()] * p.grad.device_mesh.ndim)


def test_gradients_that_a_hook_made_whole_step_as_sharded_ones(of_one_process: dict[str, Any]) -> None:
    for rank in run("zero3x2", fit, "AdamW fused", Gathering):
        torch.testing.assert_close(rank, of_one_process["AdamW fused"], rtol=1e-9, atol=1e-11)


class Replaced(AnyOptimizer):
    """Times its steps by a step of the optimizer object's own."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        step = optimizer.step
        optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)
        return optimizer


def warned(layout: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(layout, "SGD", Replaced)
    return [str(one.message) for one in caught]


def test_a_step_that_was_replaced_on_the_object_is_told_not_to_be_called() -> None:
    assert any("step of this SGD was replaced on the object" in told for told in run("zero1x2", warned)[0])
