"""Checkpoints as users save and load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from training import trainer_for, whole_weights

from features.case import Net, case, fit, fresh, loader
from lightning_3d.checkpoint import store


@case
def best_last_and_a_link(layout: str | None, folder: Path) -> Any:
    def trainer(epochs: int) -> tuple[L.Trainer, ModelCheckpoint]:
        saver = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last="link")
        settings: dict[str, Any] = {"precision": "64-true", "enable_checkpointing": True, "callbacks": [saver]}
        return trainer_for(layout, max_epochs=epochs, **settings), saver

    first, saver = trainer(2)
    first.fit(fresh(Net), loader(layout), loader(layout, 16))
    assert (folder / "last.ckpt").is_symlink() and len(list(folder.iterdir())) == 3
    module = fresh(Net, scale=9.0)
    second, saver = trainer(4)
    second.fit(module, loader(layout), loader(layout, 16), ckpt_path="last")
    weights = whole_weights(module)
    best = second.test(module, loader(layout, 16), ckpt_path="best", verbose=False)
    return second.global_step, Path(saver.best_model_path).name, float(saver.best_model_score), weights, best  # type: ignore[arg-type]


@case
def checkpoints_by_hand(layout: str | None, folder: Path) -> Any:
    module = fresh(Net, scale=2.0)
    trainer, _ = fit(layout, module)
    trainer.save_checkpoint(folder / "all.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    if layout is not None:
        extra = store.load_extra(folder / "all.ckpt")
        assert extra["hyper_parameters"] == {"width": 6, "scale": 2.0}
        names = set(store.saved_tensors(folder / "weights.ckpt"))
        assert names == {f"model.{name}" for name in module.state_dict()}
    expected = trainer.validate(module, loader(layout, 16), verbose=False)
    for name in ("all.ckpt", "weights.ckpt"):
        other = trainer_for(layout, precision="64-true")
        assert other.validate(fresh(Net), loader(layout, 16), ckpt_path=folder / name, verbose=False) == expected
    return expected


class Renamed(Net):
    """Its head had another name when the checkpoint was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = self.head
        del self.head

    def output(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = block(features)
        return self.classifier(features) * self.scale

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of_the_user"] = {"seen": 5}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in ("weight", "bias"):
            state[f"classifier.{name}"] = state.pop(f"head.{name}")


@case
def entries_that_are_renamed_while_loading(layout: str | None, folder: Path) -> Any:
    trainer, _ = fit(layout, fresh(Net))
    trainer.save_checkpoint(folder / "old.ckpt")
    module = fresh(Renamed)
    other = trainer_for(layout, precision="64-true")
    return other.validate(module, loader(layout, 16), ckpt_path=folder / "old.ckpt", verbose=False), whole_weights(
        module
    )
