"""Groups with rates of their own, and frozen weights beside adapters, in every layout as in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows, TinyGPT
from torch import nn
from torch.utils.data import DataLoader
from training import ordered, run, trainer_for, whole, whole_weights

from lightning_3d import Layout
from lightning_3d.checkpoint import store
from lightning_3d.parallel.local import local_tensor

pytestmark = pytest.mark.distributed


class ThreeGroups(TinyGPT):
    """Embeddings, matrices and vectors; under pp2, the last stage has no embedding of its own."""

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        embeddings = [p for name, p in named.items() if "embed" in name]
        matrices = [p for name, p in named.items() if "embed" not in name and p.dim() > 1]
        vectors = [p for name, p in named.items() if "embed" not in name and p.dim() < 2]
        groups = [
            {"params": embeddings, "lr": 3e-2, "weight_decay": 0.0},
            {"params": matrices, "lr": 1e-2, "weight_decay": 0.5},
            {"params": vectors, "lr": 1e-3, "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def three_groups(layout: str | None, path: Path | None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    torch.set_default_dtype(torch.float64)
    module = ThreeGroups()
    trainer = trainer_for(layout, max_steps=5, max_epochs=9, precision="64-true")
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data if layout else 1))
    if path:
        trainer.save_checkpoint(path)
    options = [(group["lr"], group["weight_decay"]) for group in trainer.optimizers[0].param_groups]
    return {"weights": whole_weights(module), "options": options}


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Any]:
    return run(None, three_groups, None)[0]


@pytest.mark.parametrize("layout", ["zero1x2", "zero2x2", "zero3x2", "tp2", "pp2"])
def test_each_group_follows_its_own_rate(tmp_path: Path, of_one_process: dict[str, Any], layout: str) -> None:
    seen = set()
    for rank in run(layout, three_groups, tmp_path / "saved.ckpt"):
        # A group that is empty on this rank too.
        assert rank["options"] == of_one_process["options"]
        for name, value in rank["weights"].items():
            assert torch.allclose(value, of_one_process["weights"][name], rtol=0, atol=1e-9), name
            seen.add(name)
    assert seen == of_one_process["weights"].keys()
    assert len(store.load_extra(tmp_path / "saved.ckpt")["optimizer_groups"][0]) == 3


class Adapted(nn.Module):
    """A frozen Linear beside a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(features) + self.up(self.down(features)))


class Adapters(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(4))

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {f"blocks.*.{name}": "replicate" for name in ("base", "down", "up")}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
        return (batch - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Count(L.Callback):
    """Elements of gradients on this rank before the optimizer steps."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        found = [p.grad for p in module.parameters() if p.grad is not None]
        self.gradients = sum(local_tensor(gradient).numel() for gradient in found)
        self.frozen = sum(p.grad is not None for p in module.parameters() if not p.requires_grad)


def adapters(layout: str, path: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module, count = Adapters(), Count()
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    trainer = trainer_for(layout, max_steps=5, max_epochs=9, callbacks=[count])
    trainer.fit(module, DataLoader(torch.randn(16, 32), batch_size=4))
    trainer.save_checkpoint(path)
    state = trainer.optimizers[0].state
    moments = sum(local_tensor(e["exp_avg"]).numel() for e in state.values())
    return {
        "gradients": count.gradients,
        "frozen": count.frozen,
        "moments": moments,
        "before": before,
        "after": {name: whole(value) for name, value in module.state_dict().items()},
    }


@pytest.mark.parametrize("layout", ["zero1x2", "zero2x2", "zero3x2", "tp2"])
def test_frozen_weights_cost_no_gradient_and_no_moment(tmp_path: Path, layout: str) -> None:
    trained = 4 * 2 * 32 * 4
    for rank in run(layout, adapters, tmp_path / "saved.ckpt"):
        assert rank["frozen"] == 0
        assert rank["gradients"] == rank["moments"] == trained // Layout.parse(layout).data
        for name, value in rank["after"].items():
            assert torch.equal(value, rank["before"][name]) == ("base" in name), name
    saved = {name for name in store.saved_tensors(tmp_path / "saved.ckpt") if name.startswith("model.")}
    assert saved == {f"model.{name}" for name in Adapters().state_dict()}


class Counting(TinyGPT):
    """Counts its optimizer's hooks, as an average of weights in one would."""

    def configure_optimizers(self) -> Any:
        (optimizer,), schedulers = super().configure_optimizers()
        self.hooks: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: self.hooks.append("before"))
        optimizer.register_step_post_hook(lambda *_: self.hooks.append("after"))
        return [optimizer], schedulers


def counted(layout: str) -> list[str]:
    module = Counting()
    with warnings.catch_warnings():
        # A scheduler that takes itself to come before the optimizer would say so.
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        trainer_for(layout, max_steps=2).fit(module, ordered(Rows(), replicas=Layout.parse(layout).data))
    return module.hooks


@pytest.mark.parametrize("layout", ["tp2", "zero3x2"])
def test_hooks_of_an_optimizer_are_called_once_a_step(layout: str) -> None:
    for hooks in run(layout, counted):
        assert hooks == ["before", "after"] * 2
