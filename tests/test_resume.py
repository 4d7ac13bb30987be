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
from lightning_3d.checkpoint.places import Folder
from lightning_3d.errors import CheckpointError

pytestmark = pytest.mark.distributed

# Batches of an epoch are ten, windows two batches, validation comes twice an epoch: an epoch is five steps.
ON = 20


class SaveAt(L.Callback):
    """A checkpoint at each of these boundaries: where it is asked for, and at which step."""

    def __init__(self, folder: Path, boundaries: list[str]) -> None:
        self.folder, self.left = folder, set(boundaries)

    def save(self, trainer: L.Trainer, moment: str) -> None:
        name = f"{moment}-{trainer.global_step}"
        if name in self.left:
            self.left.remove(name)
            trainer.save_checkpoint(self.folder / f"{name}.ckpt")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "window" if trainer.fit_loop.epoch_loop._should_accumulate() else "step")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch")


class Ends(L.Callback):
    """All that can differ, after each of these steps."""

    def __init__(self, steps: set[int], recorder: Recorder) -> None:
        self.steps, self.recorder, self.seen = steps, recorder, dict[int, dict[str, Any]]()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step not in self.steps or trainer.fit_loop.epoch_loop._should_accumulate():
            return
        trainer.strategy.share.reshard()  # type: ignore[attr-defined]
        optimizer = trainer.optimizers[0]
        moved = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.numel()]
        self.seen[step] = {
            "losses": self.recorder.losses[-2 * ON :],
            "rows": module.rows[-2 * ON :],
            "rates": [group["lr"] for group in optimizer.param_groups],
            "weights": list(whole_weights(module).values()),
            "moments": [whole(optimizer.state[p][key]) for p in moved for key in ("exp_avg", "exp_avg_sq")],
            "random": [torch.get_rng_state()],
        }


def fit(
    layout: str, folder: Path, boundaries: list[str], ckpt_path: Path | None, ends: set[int], workers: int
) -> dict[int, dict[str, Any]]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), TinyGPT(lazy=True, dropout=0.2)
    compared, saver = Ends(ends, recorder), SaveAt(folder, boundaries)
    trainer = trainer_for(
        layout,
        max_steps=max(ends),
        max_epochs=50,
        accumulate_grad_batches=2,
        val_check_interval=5,
        callbacks=[recorder, compared, saver],
    )
    replicas = Layout.parse(layout).data
    train = ordered(Rows(), replicas=replicas, global_batch=4, shuffle=True, num_workers=workers)
    trainer.fit(module, train, ordered(Rows(4), replicas=replicas, global_batch=4), ckpt_path=ckpt_path)
    assert not saver.left
    return compared.seen


BOUNDARIES = ["step-3", "step-5", "window-3", "window-5", "validation-2", "validation-5", "epoch-5"]


def check_boundaries(tmp_path: Path, layout: str, boundaries: list[str], workers: int) -> None:
    steps = {}
    for name in boundaries:
        # Inside a window, a checkpoint waits for the window's end.
        moment, _, asked = name.partition("-")
        steps[name] = int(asked) + (moment == "window" or name == "validation-2")
    ends = {step + ON for step in steps.values()}
    undisturbed = run(layout, fit, tmp_path, boundaries, None, ends, workers, timeout_seconds=280)
    for name, step in steps.items():
        path = tmp_path / f"{name}.ckpt"
        assert store.summary(path)["global_step"] == step, name
        resumed = run(layout, fit, tmp_path, [], path, {step + ON}, workers, timeout_seconds=280)
        for got, expected in zip(resumed, undisturbed, strict=True):
            one, other = got[step + ON], expected[step + ON]
            assert len(one["losses"]) == 2 * ON
            for part in ("rows", "losses", "rates"):
                assert one[part] == other[part], (name, part)
            for part in ("weights", "moments", "random"):
                assert all(torch.equal(a, b) for a, b in zip(one[part], other[part], strict=True)), (name, part)


@pytest.mark.parametrize(
    ("layout", "workers", "boundaries"),
    [("zero1x2", 0, ["window-3", "epoch-5"]), ("tp2-pp2", 0, ["step-3", "validation-2"]), ("zero3x2", 2, ["step-5"])],
)
def test_resumed_run_equals_the_undisturbed_one(
    tmp_path: Path, layout: str, workers: int, boundaries: list[str]
) -> None:
    check_boundaries(tmp_path, layout, boundaries, workers)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "layout", ["single", "dp2", "zero1x2", "zero2x2", "zero3x2", "hsdp2x2", "tp2", "pp2", "tp2-pp2", "zero3x2-tp2-pp2"]
)
def test_resumed_run_equals_the_undisturbed_one_at_every_boundary(tmp_path: Path, layout: str) -> None:
    check_boundaries(tmp_path, layout, BOUNDARIES, 0)


def slow(*layouts: str) -> list[Any]:
    return [pytest.param(layout, marks=pytest.mark.slow) for layout in layouts]


def fit_to_end(layout: str, folder: Path, ckpt_path: Path | None, steps: int) -> dict[str, torch.Tensor]:
    L.seed_everything(1, verbose=False)
    module = TinyGPT(lazy=True)
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_for(
        layout, max_steps=steps, max_epochs=50, precision="64-true", callbacks=[saver], enable_checkpointing=True
    )
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data), ckpt_path=ckpt_path)
    return whole_weights(module)


@pytest.mark.parametrize("other", ["single", "tp2-pp2", *slow("dp2", "zero2x2", "zero3x4", "hsdp2x2")])
@pytest.mark.parametrize("first", ["zero3x2", *slow("tp2-pp2", "zero1x2-pp2")])
def test_a_run_goes_on_in_another_layout(tmp_path: Path, first: str, other: str) -> None:
    expected = run(first, fit_to_end, tmp_path / "first", None, 6 + ON)
    got = run(other, fit_to_end, tmp_path / "second", tmp_path / "first" / "step=6.ckpt", 6 + ON)
    # Stages of a pipeline hold parts of the model.
    weights, others = ({name: w for rank in ranks for name, w in rank.items()} for ranks in (expected, got))
    assert weights.keys() == others.keys()
    for name, weight in others.items():
        assert torch.allclose(weight, weights[name], rtol=0, atol=1e-9), name


def test_a_folder_without_a_whole_checkpoint_is_refused_and_the_whole_ones_are_named(tmp_path: Path) -> None:
    run("single", fit_to_end, tmp_path, None, 3)
    (tmp_path / "step=3.ckpt").rename(tmp_path / ".step=3.ckpt.saving")
    (tmp_path / "broken.ckpt").mkdir()
    assert store.newest(tmp_path) is None
    (tmp_path / ".step=3.ckpt.saving").rename(tmp_path / "step=3.ckpt")
    assert store.newest(tmp_path) == Folder(tmp_path / "step=3.ckpt")
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


class Draws(TinyGPT):
    """Keeps the rows of its training steps, and a number that each draws."""

    def __init__(self) -> None:
        super().__init__(lazy=True)
        self.drawn: list[float] = []

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().training_step(rows, batch_idx)

    def test_step(self, rows: torch.Tensor, batch_idx: int) -> None:
        self.validation_step(rows, batch_idx)


def fit_after(layout: str, folder: Path, evaluate: str | None, ckpt_path: Path | None) -> Any:
    L.seed_everything(1, verbose=False)
    module, replicas = Draws(), Layout.parse(layout).data
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = trainer_for(layout, max_epochs=2, callbacks=[saver], enable_checkpointing=True)
    if evaluate:
        getattr(trainer, evaluate)(module, ordered(Rows(8), replicas=replicas), ckpt_path=ckpt_path)
    L.seed_everything(1, verbose=False)
    trainer.fit(module, ordered(Rows(), replicas=replicas, shuffle=True))
    return module.rows, module.drawn, sorted(found.name for found in Folder(folder).whole())


@pytest.mark.parametrize(
    ("layout", "evaluate"),
    [pytest.param("zero3x2", "validate", marks=pytest.mark.slow), ("pp2", "test"), ("dp2", "predict")],
)
def test_a_fit_after_an_evaluation_of_a_checkpoint_begins_at_the_beginning(
    tmp_path: Path, layout: str, evaluate: str
) -> None:
    expected = run(layout, fit_after, tmp_path / "alone", None, None)
    assert len(expected[0][2]) == 10
    # Inside the first epoch.
    got = run(layout, fit_after, tmp_path / "after", evaluate, tmp_path / "alone" / "step=2.ckpt")
    assert got == expected


class FailsOnce(L.Callback):
    def __init__(self) -> None:
        self.failed = False

    def on_train_start(self, *_: Any) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("no step came")


def fit_again(layout: str, path: Path) -> list[float]:
    module, loader = Draws(), ordered(Rows(), replicas=1)
    trainer = trainer_for(layout, max_epochs=2, callbacks=[FailsOnce()])
    with pytest.raises(RuntimeError, match="no step came"):
        trainer.fit(module, loader, ckpt_path=path)
    L.seed_everything(1, verbose=False)
    trainer.fit(module, loader)
    return module.drawn


def test_random_numbers_of_a_checkpoint_are_those_of_the_fit_that_loads_it_alone(tmp_path: Path) -> None:
    ((_, drawn, _),) = run("single", fit_after, tmp_path, None, None)
    (got,) = run("single", fit_again, tmp_path / "step=5.ckpt")
    L.seed_everything(1, verbose=False)
    assert len(got) == 5 and got[0] == drawn[0] != drawn[5]
