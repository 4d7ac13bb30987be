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

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.checkpoint import store
from lightning_3d.errors import CheckpointError

pytestmark = pytest.mark.distributed

# Batches of an epoch are ten, windows two batches, validation comes twice an epoch: an epoch is five steps.
STEPS, ON = 7, 20


class SaveEverywhere(L.Callback):
    """A checkpoint at each kind of boundary: where it was asked for, and at which step it then was."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.saved = folder, dict[str, int]()

    def save(self, trainer: L.Trainer, moment: str, step: int) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and f"{moment}-{step}" not in self.saved:
            self.saved[f"{moment}-{step}"] = trainer.global_step
            trainer.save_checkpoint(self.folder / f"{moment}-{step}.ckpt")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        inside = trainer.fit_loop.epoch_loop._should_accumulate()
        self.save(trainer, "window" if inside else "step", trainer.global_step)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "validation", trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch", trainer.global_step)


def fit(layout: str, folder: Path, ckpt_path: Path | None, steps: int, workers: int = 0) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), TinyGPT(lazy=True, dropout=0.2)
    callbacks: list[L.Callback] = [recorder] if ckpt_path else [recorder, SaveEverywhere(folder)]
    trainer = trainer_for(
        layout, max_steps=steps, max_epochs=50, accumulate_grad_batches=2, val_check_interval=5, callbacks=callbacks
    )
    replicas = Layout.parse(layout).data
    train = ordered(Rows(), replicas=replicas, global_batch=4, shuffle=True, num_workers=workers)
    trainer.fit(module, train, ordered(Rows(4), replicas=replicas, global_batch=4), ckpt_path=ckpt_path)
    optimizer = trainer.optimizers[0]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.numel()]
    return {
        "losses": recorder.losses,
        "rows": module.rows,
        "weights": list(whole_weights(module).values()),
        "moments": [whole(optimizer.state[p][key]) for p in parameters for key in ("exp_avg", "exp_avg_sq")],
        "rates": [group["lr"] for group in optimizer.param_groups],
        "random": torch.get_rng_state(),
    }


BOUNDARIES = ["step-3", "step-5", "window-3", "window-5", "validation-2", "validation-5", "epoch-5"]


def check_boundaries(tmp_path: Path, layout: str, boundaries: list[str], workers: int) -> None:
    run(layout, fit, tmp_path, None, STEPS, workers)
    saved = {name: store.summary(tmp_path / f"{name}.ckpt")["global_step"] for name in boundaries}
    for name, step in saved.items():
        # Inside a window, a checkpoint waits for the window's end.
        moment, _, asked = name.partition("-")
        inside = moment == "window" or name == "validation-2"
        assert step == int(asked) + inside, name
    ends = {step: run(layout, fit, tmp_path / f"to{step}", None, step + ON, workers) for step in set(saved.values())}
    for name, step in saved.items():
        resumed = run(layout, fit, tmp_path / "resumed", tmp_path / f"{name}.ckpt", step + ON, workers)
        for got, expected in zip(resumed, ends[step], strict=True):
            batches = 2 * ON
            assert len(got["losses"]) == batches and got["losses"] == expected["losses"][-batches:], name
            assert got["rows"][-batches:] == expected["rows"][-batches:], name
            assert got["rates"] == expected["rates"]
            for part in ("weights", "moments"):
                assert all(torch.equal(a, b) for a, b in zip(got[part], expected[part], strict=True)), (name, part)
            assert torch.equal(got["random"], expected["random"]), name


@pytest.mark.parametrize(
    ("layout", "workers", "boundaries"),
    [("zero1x2", 0, ["window-3", "epoch-5"]), ("tp2-pp2", 0, ["step-3", "validation-2"]), ("zero3x2", 2, ["step-5"])],
)
def test_resumed_run_equals_the_undisturbed_one(
    tmp_path: Path, layout: str, workers: int, boundaries: list[str]
) -> None:
    check_boundaries(tmp_path, layout, boundaries, workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["single", "dp2", "zero1x2", "zero2x2", "zero3x2", "hsdp2x2", "tp2", "pp2", "tp2-pp2", "zero3x2-tp2-pp2"]
)
def test_resumed_run_equals_the_undisturbed_one_at_every_boundary(tmp_path: Path, layout: str) -> None:
    check_boundaries(tmp_path, layout, BOUNDARIES, 0)


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


# Ten checkpoints, of which the best so far come and go.
LOSSES = [5.0, 4.0, 4.5, 3.0, 6.0, 2.0, 2.5, 1.0, 9.0, 0.5]


class Told(TinyGPT):
    """Logs the losses that the test wants, one an epoch."""

    def validation_step(self, rows: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", LOSSES[self.trainer.current_epoch % len(LOSSES)], sync_dist=True)


def fit_monitored(layout: str, folder: Path, in_background: bool) -> tuple[list[str], str, float, int]:
    L.seed_everything(1, verbose=False)
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    parsed = Layout.parse(layout)
    strategy = ThreeDStrategy(**parsed.as_dict(), async_checkpoint=in_background, timeout_seconds=60)
    trainer = trainer_for(
        layout, max_epochs=len(LOSSES), callbacks=[saver], enable_checkpointing=True, strategy=strategy
    )
    trainer.fit(Told(), ordered(Rows(8), replicas=parsed.data), ordered(Rows(8), replicas=parsed.data))
    trainer.validate(ckpt_path="best", dataloaders=ordered(Rows(8), replicas=parsed.data), verbose=False)
    score = float(saver.best_model_score)  # type: ignore[arg-type]
    return sorted(path.name for path in folder.iterdir()), saver.best_model_path, score, trainer.global_step


@pytest.mark.parametrize(("layout", "in_background"), [("hsdp2x2", False), ("zero3x2", True)])
def test_exactly_top_k_and_last_remain(tmp_path: Path, layout: str, in_background: bool) -> None:
    ranks = run(layout, fit_monitored, tmp_path, in_background)
    files, best, score, _ = ranks[0]
    assert files == ["epoch=7.ckpt", "epoch=9.ckpt", "last.ckpt"] and score == 0.5
    assert Path(best).name == "epoch=9.ckpt" and store.is_committed(Path(best))
    assert store.summary(tmp_path / "last.ckpt")["epoch"] == 9
    assert all(rank == ranks[0] for rank in ranks)
