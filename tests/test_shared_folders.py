"""Several ModelCheckpoints in one folder save under the names that plain Lightning gives them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Small
from torch.utils.data import DataLoader
from training import run, trainer_for

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.checkpoint import store, writing

pytestmark = pytest.mark.distributed


class BestAtFirst(Small):
    """Its first validation is its best."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("worse", float(self.trainer.global_step), sync_dist=True)


def slow_writes() -> None:
    real = writing.dcp.save

    def save(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return real(*args, **kwargs)

    writing.dcp.save = save  # type: ignore[assignment]


def fit(layout: str | None, savers: list[ModelCheckpoint], **settings: Any) -> None:
    slow_writes()
    if layout is not None:
        strategy: Any = ThreeDStrategy(**Layout.parse(layout).as_dict(), async_checkpoint=True, timeout_seconds=60)
        settings["strategy"] = strategy
    trainer = trainer_for(layout, callbacks=savers, enable_checkpointing=True, **settings)
    data = torch.randn(16, 4)
    batch_size = 2 // (Layout.parse(layout).data if layout else 1)
    trainer.fit(BestAtFirst(), *(DataLoader(data, batch_size=batch_size) for _ in range(2)))


def latest_and_best(layout: str | None, folder: Path, link: bool) -> Any:
    last = {"save_last": "link"} if link else {}
    savers = [ModelCheckpoint(folder, **last), ModelCheckpoint(folder, monitor="worse", **last)]
    fit(layout, savers, max_epochs=3)
    found = [Path(path).name for saver in savers for path in (saver.best_model_path, saver.last_model_path) if path]
    return sorted(path.name for path in folder.iterdir()), found


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("layout", ["single", "zero3x2"])
def test_in_the_background_the_latest_and_the_best_have_names_of_their_own(
    tmp_path: Path, layout: str, link: bool
) -> None:
    (expected,) = run(None, latest_and_best, tmp_path / "plain", link)
    assert any("-v1" in name for name in expected[1])
    assert run(layout, latest_and_best, tmp_path / "ours", link) == [expected] * Layout.parse(layout).world_size


def in_a_window(layout: str | None, folder: Path) -> Any:
    savers = [
        ModelCheckpoint(folder, save_on_train_epoch_end=False),
        ModelCheckpoint(folder, save_on_train_epoch_end=False, monitor="worse", save_weights_only=True),
    ]
    fit(layout, savers, max_epochs=1, accumulate_grad_batches=4, val_check_interval=6)
    return sorted(path.name for path in folder.iterdir()), [Path(saver.best_model_path).name for saver in savers]


def test_inside_a_window_the_whole_one_and_the_weights_have_names_of_their_own(tmp_path: Path) -> None:
    (expected,) = run(None, in_a_window, tmp_path / "plain")
    assert any("-v1" in name for name in expected[0])
    assert run("single", in_a_window, tmp_path / "ours") == [expected]
    whole, weights = (store.saved_tensors(tmp_path / "ours" / name) for name in expected[1])
    assert set(weights) < set(whole)
