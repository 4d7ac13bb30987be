"""Ranks that were started with other code, settings or models are told at once, with what differs and where."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Classifier, Points
from torch import nn
from torch.utils.data import DataLoader
from training import run, trainer_for

from lightning_3d.checkpoint import store
from lightning_3d.errors import ConfigError
from lightning_3d.strategies.guards import start_check

pytestmark = pytest.mark.distributed


class OtherRate(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2 * (1 + int(os.environ["RANK"])))


def other(name: str, rank: int) -> tuple[L.LightningModule, dict[str, Any]]:
    if name == "accumulation":
        return Classifier(), {"accumulate_grad_batches": 1 + rank}
    if name == "precision":
        return Classifier(), {"precision": ("32-true", "bf16-mixed")[rank]}
    if name == "clipping":
        return Classifier(), {"gradient_clip_val": (None, 1.0)[rank]}
    if name == "shape":
        module = Classifier()
        if rank == 1:
            module.unused = nn.Linear(4, 5)
        return module, {}
    if name == "frozen":
        module = Classifier()
        module.unused.requires_grad_(rank == 0)
        return module, {}
    if name == "rate":
        return OtherRate(), {}
    if name == "code":
        if rank == 1:
            start_check.inspect.getsource = lambda kind: "another version"  # type: ignore[attr-defined]
        return Classifier(), {}
    assert name == "version"
    if rank == 1:
        start_check.version = lambda package: "9.9"  # type: ignore[attr-defined]
    return Classifier(), {}


CASES = {
    "accumulation": "Trainer's accumulate_grad_batches: 1 on rank 0, 2 on rank 1",
    "precision": "Trainer's precision: 32-true on rank 0, bf16-mixed on rank 1",
    "clipping": "Trainer's gradient_clip_val: None on rank 0, 1.0 on rank 1",
    "shape": "unused.weight of the model: (4, 4) torch.float32 on rank 0, (5, 4) torch.float32 on rank 1",
    "frozen": "unused.weight of the model: (4, 4) torch.float32 on rank 0, (4, 4) torch.float32, frozen on rank 1",
    "rate": "lr of group 0 of optimizer 0: 0.01 on rank 0, 0.02 on rank 1",
    "code": "code of Classifier",
    "version": " on rank 0, 9.9 on rank 1",
}


def start(layout: str, name: str) -> str:
    module, settings = other(name, int(os.environ["RANK"]))
    trainer = trainer_for(layout, max_epochs=1, **settings)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module, DataLoader(Points(12), batch_size=2))
    return str(caught.value)


def go_on(layout: str, folder: Path) -> list[str]:
    rank = int(os.environ["RANK"])
    told = []
    # As with folders that each machine has for itself: rank 1 finds no "last".
    saver = ModelCheckpoint(folder / f"machine-{rank}", save_last=True)
    module, loader = Classifier(), DataLoader(Points(12), batch_size=2)
    trainer = trainer_for(layout, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module, loader, ckpt_path="last")
    told.append(str(caught.value))
    # Nor in a later run, with a module that is laid out.
    trainer = trainer_for(layout, max_epochs=1)
    trainer.fit(module := Classifier(), loader)
    with pytest.raises(ConfigError) as caught:
        trainer.validate(module, loader, ckpt_path=folder / f"machine-{rank}" / "last.ckpt", verbose=False)
    return [*told, str(caught.value)]


def test_ranks_that_go_on_from_different_checkpoints_are_told(tmp_path: Path) -> None:
    last = tmp_path / "machine-0" / "last.ckpt"
    store.save(last, {"x": torch.zeros(1)}, extra={}, rank_state={}, summary={"global_step": 1})
    begin = time.monotonic()
    for fit, validate in run("dp2", go_on, tmp_path):
        assert f"ranks differ in ckpt_path: {last} on rank 0, None on rank 1" in fit
        assert f"ranks differ in ckpt_path: {last} on rank 0, {tmp_path}/machine-1/last.ckpt on rank 1" in validate
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("name", CASES)
def test_what_differs_between_ranks_is_told_on_all_of_them(name: str) -> None:
    for message in run("dp2", start, name):
        assert message.startswith("ranks differ in ") and CASES[name] in message
