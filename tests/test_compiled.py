"""A compiled module saves and loads what the same module saves and loads as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training import run, trainer_for, whole

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.checkpoint import store
from lightning_3d.cli import main

pytestmark = pytest.mark.distributed


class Net(L.LightningModule):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.net: Any = torch.compile(net, backend="aot_eager") if compiled else net

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Blocks(L.LightningModule):
    """A stack, each of whose blocks is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)]
        self.blocks = nn.ModuleList(torch.compile(block, backend="aot_eager") for block in blocks)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
        return (batch - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_blocks(layout: str, path: Path) -> None:
    trainer = trainer_for(layout, max_steps=2)
    trainer.fit(Blocks(), DataLoader(torch.randn(24, 4), batch_size=8))
    trainer.save_checkpoint(path)


def fit(layout: str | None, compiled: bool, path: Path | None, ckpt_path: Path | None) -> dict[str, Any]:
    """`layout` None is plain Lightning."""
    L.seed_everything(1, verbose=False)
    module = Net(compiled)
    trainer = trainer_for(layout, max_steps=2 if ckpt_path is None else 3)
    found: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            found.update(state(trainer, module))

    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    batch_size = 8 // Layout.parse(layout).data if layout else 8
    trainer.fit(module, DataLoader(data, batch_size=batch_size), ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
        found = state(trainer, module)
    return found


def state(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    if isinstance(trainer.strategy, ThreeDStrategy):
        trainer.strategy.share.reshard()
    found = {}
    for name, parameter in module.named_parameters():
        entries = {"weight": parameter, **trainer.optimizers[0].state.get(parameter, {})}
        found.update({f"{name.replace('_orig_mod.', '')} {k}": whole(v) for k, v in entries.items()})
    return found


@pytest.mark.parametrize("layout", ["zero3x2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_compiled_and_plain_modules_load_each_other_s_checkpoints(tmp_path: Path, layout: str) -> None:
    keys = []
    for compiled in (True, False):
        path = tmp_path / f"{compiled}.ckpt"
        saved = run(layout, fit, compiled, path, None)[0]
        loaded = run(layout, fit, not compiled, None, path)[0]
        assert saved.keys() == loaded.keys() and len(saved) == 4 * 6
        assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
        keys.append(set(store.saved_tensors(path)))
    assert keys[0] == keys[1]


@pytest.mark.parametrize(("layout", "compiled"), [("single", True), ("zero3x2", True), ("zero3x2", False)])
def test_a_plain_ckpt_of_a_compiled_module_loads_with_its_optimizer(
    tmp_path: Path, layout: str, compiled: bool
) -> None:
    path = tmp_path / "plain.ckpt"
    (saved,) = run(None, fit, True, path, None)
    for loaded in run(layout, fit, compiled, None, path):
        assert loaded.keys() == saved.keys() and len(saved) == 4 * 6
        assert all(torch.equal(value, saved[name]) for name, value in loaded.items())


def initial(layout: str, compiled: bool, path: Path) -> dict[str, Any]:
    module = Net(compiled)
    trainer = trainer_for(layout, limit_train_batches=0, max_epochs=1)
    trainer.strategy._initial_weights = path  # type: ignore[attr-defined]
    trainer.fit(module, DataLoader(torch.randn(8, 4), batch_size=4))
    return {name.replace("_orig_mod.", ""): whole(value) for name, value in module.state_dict().items()}


@pytest.mark.parametrize("compiled", [True, False])
def test_initial_weights_of_a_compiled_module_fit_both(tmp_path: Path, compiled: bool) -> None:
    run(None, fit, not compiled, tmp_path / "plain.ckpt", None)
    state = torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"]
    (got,) = run("single", initial, compiled, tmp_path / "plain.ckpt")
    assert all(torch.equal(got[name.replace("_orig_mod.", "")], value) for name, value in state.items())


@pytest.mark.parametrize("layout", ["zero3x2", "pp2"])
def test_a_folder_of_a_compiled_module_is_to_plain_lightning_what_it_would_have_saved(
    tmp_path: Path, layout: str
) -> None:
    path, out = tmp_path / "ours.ckpt", tmp_path / "out.ckpt"
    if layout == "pp2":
        run(layout, fit_blocks, path)
        module: Any = Blocks.load_from_checkpoint(path)
    else:
        saved = run(layout, fit, True, path, None)[0]
        module = Net.load_from_checkpoint(path)
        for name, value in module.state_dict().items():
            assert torch.equal(value, saved[f"{name.replace('_orig_mod.', '')} weight"])
    assert main(["export", str(path), "--to", "ckpt", str(out)]) == 0
    plain = torch.load(out, weights_only=True)
    assert plain["state_dict"].keys() == module.state_dict().keys()
    assert len(plain["optimizer_states"][0]["state"]) == len(list(module.parameters()))
    if layout == "zero3x2":
        for source in (out, path):
            (loaded,) = run(None, fit, True, None, source)
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(value, saved[name]) for name, value in loaded.items())
