"""A run that stops anywhere in an epoch goes on, in the same layout, as if it had not stopped: equal to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Rows, TinyGPT
from training import Recorder, ordered, run, trainer_for, whole, whole_weights

from lightning_3d import Layout
from lightning_3d.checkpoint import store
from lightning_3d.errors import CheckpointError

pytestmark = pytest.mark.distributed

# Five batches an epoch; a checkpoint at every third step, so inside and at the end of epochs.
STEPS = 12


def fit(layout: str, folder: Path, steps: int, ckpt_path: Path | None, workers: int, accumulate: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), TinyGPT(lazy=True, dropout=0.2)
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True)
    trainer = trainer_for(
        layout,
        max_steps=steps,
        max_epochs=50,
        accumulate_grad_batches=accumulate,
        callbacks=[recorder, saver],
        enable_checkpointing=True,
    )
    loader = ordered(Rows(), replicas=Layout.parse(layout).data, shuffle=True, num_workers=workers)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    optimizer = trainer.optimizers[0]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = [whole(optimizer.state[parameter]["exp_avg_sq"]) for parameter in parameters]
    return {
        "losses": recorder.losses,
        "rows": module.rows,
        "weights": list(whole_weights(module).values()),
        "moments": moments,
        "rates": [group["lr"] for group in optimizer.param_groups],
        "random": torch.get_rng_state(),
    }


@pytest.mark.parametrize(
    ("layout", "workers", "accumulate"),
    [("single", 0, 1), ("dp2", 0, 2), ("zero1x2", 0, 2), ("zero3x2", 2, 1), ("hsdp2x2", 0, 1)],
)
def test_resumed_run_equals_the_undisturbed_one(tmp_path: Path, layout: str, workers: int, accumulate: int) -> None:
    undisturbed = run(layout, fit, tmp_path / "whole", STEPS, None, workers, accumulate)
    for stop in (3, 9):
        folder = tmp_path / f"stopped{stop}"
        stopped = run(layout, fit, folder, stop, None, workers, accumulate)
        resumed = run(layout, fit, tmp_path / f"resumed{stop}", STEPS, folder / "last.ckpt", workers, accumulate)
        for before, got, expected in zip(stopped, resumed, undisturbed, strict=True):
            done = len(before["rows"])
            assert got["rows"] == expected["rows"][done:]
            assert got["losses"] == expected["losses"][done:]
            assert got["rates"] == expected["rates"]
            for name in ("weights", "moments"):
                assert all(torch.equal(a, b) for a, b in zip(got[name], expected[name], strict=True))
            assert torch.equal(got["random"], expected["random"])


def fit_to_end(layout: str, folder: Path, ckpt_path: Path | None, steps: int) -> dict[str, torch.Tensor]:
    L.seed_everything(1, verbose=False)
    module = TinyGPT(lazy=True)
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_for(
        layout, max_steps=steps, max_epochs=50, precision="64-true", callbacks=[saver], enable_checkpointing=True
    )
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data), ckpt_path=ckpt_path)
    return whole_weights(module)


@pytest.mark.parametrize("other", ["single", "dp2", "zero2x2", "zero3x4"])
def test_a_run_goes_on_in_another_layout(tmp_path: Path, other: str) -> None:
    expected = run("zero3x2", fit_to_end, tmp_path / "first", None, 9)[0]
    got = run(other, fit_to_end, tmp_path / "second", tmp_path / "first" / "step=6.ckpt", 9)[0]
    for name, weight in got.items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=1e-9)


def test_a_folder_without_a_whole_checkpoint_is_refused_and_the_whole_ones_are_named(tmp_path: Path) -> None:
    run("single", fit_to_end, tmp_path, None, 3)
    (tmp_path / "step=3.ckpt").rename(tmp_path / ".step=3.ckpt.saving")
    (tmp_path / "broken.ckpt").mkdir()
    assert store.newest(tmp_path) is None
    (tmp_path / ".step=3.ckpt.saving").rename(tmp_path / "step=3.ckpt")
    assert store.newest(tmp_path) == tmp_path / "step=3.ckpt"
    with pytest.raises(CheckpointError, match="holds no whole checkpoint.*step=3.ckpt"):
        store.require_committed(tmp_path / "broken.ckpt")


def fit_monitored(layout: str, folder: Path) -> tuple[list[str], str, str]:
    L.seed_everything(1, verbose=False)
    module = TinyGPT()
    saver = ModelCheckpoint(
        dirpath=folder, filename="{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    trainer = trainer_for(layout, max_epochs=5, callbacks=[saver], enable_checkpointing=True)
    count = Layout.parse(layout).data
    trainer.fit(module, ordered(Rows(), replicas=count), ordered(Rows(21), replicas=count))
    return sorted(path.name for path in folder.iterdir()), saver.best_model_path, str(saver.best_model_score)


def test_exactly_top_k_and_last_remain(tmp_path: Path) -> None:
    ranks = run("zero3x2", fit_monitored, tmp_path)
    files, best, _ = ranks[0]
    assert len(files) == 3 and "last.ckpt" in files
    assert store.is_committed(Path(best))
    assert all(rank == ranks[0] for rank in ranks)
