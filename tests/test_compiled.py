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

from lightning_3d import Layout
from lightning_3d.checkpoint import store

pytestmark = pytest.mark.distributed


class Net(L.LightningModule):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.net: Any = torch.compile(net, backend="aot_eager") if compiled else net

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(layout: str, compiled: bool, path: Path | None, ckpt_path: Path | None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = Net(compiled)
    trainer = trainer_for(layout, max_steps=2 if ckpt_path is None else 3)
    found: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            found.update(state(trainer, module))

    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(data, batch_size=8 // Layout.parse(layout).data), ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
        found = state(trainer, module)
    return found


def state(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    trainer.strategy.share.reshard()  # type: ignore[attr-defined]
    found = {}
    for name, parameter in module.named_parameters():
        entries = {"weight": parameter, **trainer.optimizers[0].state.get(parameter, {})}
        found.update({f"{name.replace('_orig_mod.', '')} {k}": whole(v) for k, v in entries.items()})
    return found


@pytest.mark.parametrize("layout", ["zero3x2", "tp2"])
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
