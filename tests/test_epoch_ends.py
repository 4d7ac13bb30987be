"""An epoch that was ended early is gone on with, one that had ended is not; hooks, schedules and logs count on."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Numbers
from test_data_position import SaveAt, Seen, loader_for, whole_steps
from torch.utils.data import DataLoader
from training import run, trainer_for

from lightning_3d import Layout

pytestmark = pytest.mark.distributed


class StopAt(L.Callback):
    def __init__(self, batches: int | None) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.should_stop = True


class Hooks(L.Callback):
    """Epochs that began and ended, validations and saves, with the number of batches done."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def note(self, trainer: L.Trainer, name: str) -> None:
        self.seen.append((name, trainer.current_epoch, trainer.fit_loop.total_batch_idx + 1))

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "start")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "end")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "validation")


class Scheduled(Seen):
    """Rates tell how often each schedule was stepped: by epochs, and by steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}]


def cut(layout: str | None, kind: str, folder: Path, how: str, settings: Any, stop: int | None, resume: bool) -> Any:
    """A run that ends early, and saves as `how` tells; or one that goes on from there."""
    L.seed_everything(7, verbose=False)
    module, hooks = Scheduled(), Hooks()
    savers = [] if how == "by hand" else [ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)]
    callbacks = [*savers, hooks, StopAt(stop if how == "should_stop" else None)]
    trainer = trainer_for(
        layout, callbacks=callbacks, enable_checkpointing=bool(savers), **{"max_epochs": 4, **settings}
    )
    loader = loader_for(kind, 8 // (Layout.parse(layout).data if layout else 1))
    held_out = DataLoader(Numbers(8), batch_size=2)
    path = folder / "by hand.ckpt"
    trainer.fit(module, loader, held_out, ckpt_path=None if not resume else "last" if savers else path)
    if not savers and not resume:
        trainer.save_checkpoint(path)
    return module.seen, trainer.global_step, module.rates, hooks.seen, trainer.current_epoch


@pytest.mark.parametrize(
    ("how", "kind", "settings"),
    [
        ("by hand", "plain", {}),
        ("by hand", "plain", {"max_steps": 20}),
        ("saver", "plain", {"max_steps": 20, "val_check_interval": 2}),
        ("saver", "stream", {"max_steps": 20}),
        ("saver", "plain", {"reload_dataloaders_every_n_epochs": 1}),
        ("should_stop", "workers", {}),
        ("should_stop", "stateful own part", {"use_distributed_sampler": False}),
        ("should_stop", "plain", {"limit_train_batches": 4, "max_steps": 16}),
        ("by hand", "plain", {"limit_train_batches": 0.8}),
    ],
)
def test_the_rest_of_an_epoch_that_ended_early_is_gone_on_with(
    tmp_path: Path, how: str, kind: str, settings: dict[str, Any]
) -> None:
    if "stateful" in kind:
        pytest.importorskip("torchdata")
    length = 4 if "limit_train_batches" in settings else 5
    expected = run("dp2", cut, kind, tmp_path / "whole", "saver", settings, None, False)
    for stop in (length + 2, 2 * length):
        folder, ends = tmp_path / str(stop), {} if how == "should_stop" else {"max_steps": stop}
        before = run("dp2", cut, kind, folder, how, {**settings, **ends}, stop, False)
        after = run("dp2", cut, kind, folder, how, settings, None, True)
        whole = whole_steps([rank[:2] for rank in expected])
        assert len(whole) == 4 * length
        assert whole_steps([rank[:2] for rank in before]) == whole[:stop]
        assert whole_steps([rank[:2] for rank in after]) == whole[stop:]
        assert after[0][1] == expected[0][1] and after[0][4] == expected[0][4] == 4
        assert after[0][2] == expected[0][2][stop:]
        assert after[0][3] == [
            hook for hook in expected[0][3] if hook[2] > stop or (hook[0], hook[2]) == ("start", stop)
        ]


class Logged(L.pytorch.loggers.logger.DummyLogger):
    """Keeps the steps under which something is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.steps.append(step)


class SeenLogged(Seen):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("seen", float(batch_idx))
        return super().training_step(batch, batch_idx)


def logged(layout: str, folder: Path, saves: tuple[int, ...], stop: int | None, ckpt_path: Path | None) -> Any:
    L.seed_everything(7, verbose=False)
    module, logger, hooks = SeenLogged(), Logged(), Hooks()
    callbacks = [SaveAt(folder, saves), StopAt(stop), hooks]
    trainer = trainer_for(layout, max_epochs=3, accumulate_grad_batches=2, callbacks=callbacks, logger=logger)
    trainer.fit(module, loader_for("plain", 4), ckpt_path=ckpt_path)
    if stop:
        trainer.save_checkpoint(folder / f"{stop}.ckpt")
    return module.seen, logger.steps, hooks.seen


@pytest.mark.parametrize(("save", "from_batch", "from_step"), [(2, 2, 1), (5, 5, 3), (7, 7, 4)])
def test_steps_of_logs_and_a_second_resume_go_on_wherever_the_run_stopped(
    tmp_path: Path, save: int, from_batch: int, from_step: int
) -> None:
    seen, steps, hooks = run("dp2", logged, tmp_path, (save,), None, None)[0]
    assert len(seen) == 15 and steps == list(range(9))
    # Inside an epoch again: after a resume at the epoch's end too.
    got = run("dp2", logged, tmp_path, (4,), None, tmp_path / f"{save}.ckpt")[0]
    assert got[:2] == (seen[from_batch:], steps[from_step:])
    ends = [hook for hook in hooks if hook[0] == "end" and hook[2] >= save]
    assert [hook for hook in got[2] if hook[0] == "end"] == ends
    left = {2: 8, 5: 6, 7: 3}[save]
    got = run("dp2", logged, tmp_path, (), None, tmp_path / "4.ckpt")[0]
    assert got[0] == seen[-left:]


@pytest.mark.parametrize("stop", [2, 3, 7])
def test_steps_of_logs_go_on_in_an_epoch_that_ended_early(tmp_path: Path, stop: int) -> None:
    seen, steps, _ = run("dp2", logged, tmp_path, (), None, None)[0]
    run("dp2", logged, tmp_path, (), stop, None)
    got = run("dp2", logged, tmp_path, (), None, tmp_path / f"{stop}.ckpt")[0]
    # An open window has not moved the weights.
    assert got[:2] == {2: (seen[2:], steps[1:]), 3: (seen[2:], steps[1:]), 7: (seen[7:], steps[4:])}[stop]


class Everything(Scheduled):
    """With what follows a batch: validations, by their batches, and a schedule that halves at each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("seen", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append((self.trainer.fit_loop.total_batch_idx + 1, batch_idx))

    def configure_optimizers(self) -> Any:
        (optimizer,), (by_epochs,) = super().configure_optimizers()
        by_steps = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=9, eps=0.0)
        config = {"scheduler": by_steps, "interval": "step", "monitor": "seen"}
        return [optimizer], [by_epochs, config]


class Broken(Exception):
    """What ends a run in the tests."""


class Breaks(L.Callback):
    """Ends the run in a hook once so many batches were begun, by an error or a signal."""

    def __init__(self, hook: str, batches: int, index: int = 0, *, signalled: bool = False) -> None:
        self.hook, self.batches, self.index, self.signalled = hook, batches, index, signalled

    def __str__(self) -> str:
        return f"{'signal' if self.signalled else 'error'} in {self.hook} {self.batches}"

    def at(self, trainer: L.Trainer, hook: str, index: int = 0) -> None:
        place = trainer.fit_loop.total_batch_idx + 1
        if (hook, place, index) != (self.hook, self.batches, self.index):
            return
        if not self.signalled:
            raise Broken
        os.kill(os.getpid(), signal.SIGTERM)
        # The run stops at the boundary that follows the watchdog's vote.
        while trainer.strategy._run._stop.vote is None:  # type: ignore[attr-defined]
            time.sleep(0.02)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "epoch start")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "epoch end")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "batch start")

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "step")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "batch end")

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "validation start")

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int, *_: Any) -> None:
        self.at(trainer, "validation step", index)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.at(trainer, "validation batch end", args[3])

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "validation end")


class SaveIn(L.Callback):
    """A checkpoint in a hook, after so many batches; None: after any number."""

    def __init__(self, path: Path, hook: str, batches: int | None) -> None:
        self.path, self.hook, self.batches = path, hook, batches

    def at(self, trainer: L.Trainer, hook: str) -> None:
        if hook == self.hook and self.batches in (None, trainer.fit_loop.total_batch_idx + 1):
            trainer.save_checkpoint(self.path)

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "exception")

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "epoch start")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "batch end")

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "validation start")

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "validation batch end")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "validation end")


def everything(layout: str, callbacks: list[Any], path: Path | None, settings: dict[str, Any]) -> Any:
    """A run that goes on from `path`; or ends early, and saves there."""
    L.seed_everything(7, verbose=False)
    breaks = any(isinstance(callback, Breaks) for callback in callbacks)
    if breaks and path is not None:
        callbacks = [*callbacks, SaveIn(path, "exception", None)]
    module, logger, hooks = Everything(), Logged(), Hooks()
    trainer = trainer_for(layout, max_epochs=3, callbacks=[hooks, *callbacks], logger=logger, **settings)
    with suppress(Broken, SystemExit):
        trainer.fit(
            module, loader_for("plain", 8), DataLoader(Numbers(8), batch_size=4), ckpt_path=None if breaks else path
        )
    counts: Any = trainer.fit_loop.epoch_loop
    stepped = counts._batches_that_stepped, counts.batch_progress.total.ready, trainer.global_step
    return module.seen, module.rates, module.validated, hooks.seen, logger.steps, stepped


def check_goes_on(got: Any, whole: Any, done: int, again: str = "") -> None:
    """All that comes after `done` batches, with the validation or the start of an epoch that is done there `again`."""
    batches = done + (again != "validation")
    assert got[0] == whole[0][done:]
    assert got[1] == whole[1][done:]
    assert got[2] == [batch for batch in whole[2] if batch[0] >= batches]
    assert got[3] == [hook for hook in whole[3] if hook[2] > done or (hook[0], hook[2]) == (again, done)]
    assert got[5] == whole[5]
    assert got[4] == whole[4][len(whole[4]) - len(got[4]) :] and got[4][0] == whole[4][-1] + 1 - len(got[4])


HALVES = {"val_check_interval": 2}
ACROSS = {"check_val_every_n_epoch": None, "val_check_interval": 3}
WINDOWS = {"val_check_interval": 3, "accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    ("settings", "broken", "done", "again"),
    [
        (HALVES, Breaks("step", 4), 3, ""),
        (HALVES, Breaks("step", 6), 5, ""),
        (HALVES, Breaks("batch end", 4), 4, "validation"),
        (HALVES, Breaks("validation step", 4, 1), 4, "validation"),
        (HALVES, Breaks("epoch start", 5), 5, "start"),
        (HALVES, Breaks("validation end", 4, signalled=True), 4, ""),
        (HALVES, Breaks("epoch end", 5, signalled=True), 5, ""),
        (ACROSS, Breaks("step", 6), 5, ""),
        (ACROSS, Breaks("validation end", 6, signalled=True), 6, ""),
        (WINDOWS, Breaks("step", 4), 2, ""),
        (WINDOWS, Breaks("validation step", 3, 1), 2, ""),
        (WINDOWS, Breaks("validation end", 3, signalled=True), 4, ""),
        pytest.param(HALVES, Breaks("step", 5), 4, "", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("batch start", 8), 7, "", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("batch end", 3), 3, "", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("validation start", 2), 2, "validation", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("validation start", 4), 4, "validation", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("validation batch end", 4, 0), 4, "validation", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("validation end", 4), 4, "validation", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("epoch start", 0), 0, "start", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("epoch end", 5), 5, "start", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("batch end", 3, signalled=True), 3, "", marks=pytest.mark.slow),
        pytest.param(HALVES, Breaks("epoch start", 0, signalled=True), 0, "", marks=pytest.mark.slow),
        pytest.param(ACROSS, Breaks("step", 4), 3, "", marks=pytest.mark.slow),
        pytest.param(ACROSS, Breaks("validation step", 6, 1), 6, "validation", marks=pytest.mark.slow),
        pytest.param(ACROSS, Breaks("epoch end", 5, signalled=True), 5, "", marks=pytest.mark.slow),
        pytest.param(WINDOWS, Breaks("batch end", 3), 2, "", marks=pytest.mark.slow),
        pytest.param(WINDOWS, Breaks("batch start", 6), 5, "", marks=pytest.mark.slow),
        pytest.param(WINDOWS, Breaks("batch end", 6), 5, "", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_wherever_an_error_or_a_signal_ends_a_run_it_goes_on_and_so_does_what_it_saves_then(
    tmp_path: Path, settings: dict[str, Any], broken: Breaks, done: int, again: str
) -> None:
    (whole,) = run("single", everything, [], None, settings)
    run("single", everything, [broken], tmp_path / "broken.ckpt", settings)
    later = [SaveIn(tmp_path / hook, hook, 12) for hook in ("batch end", "validation end")]
    (got,) = run("single", everything, later, tmp_path / "broken.ckpt", settings)
    check_goes_on(got, whole, done, again)
    validated = ("validation", 2, 12) in whole[3]
    (got,) = run("single", everything, [], tmp_path / "batch end", settings)
    check_goes_on(got, whole, 12, "validation" if validated else "")
    if validated:
        (got,) = run("single", everything, [], tmp_path / "validation end", settings)
        check_goes_on(got, whole, 12)


@pytest.mark.parametrize(
    ("hook", "done", "again"),
    [
        ("epoch start", 5, "start"),
        ("validation start", 4, "validation"),
        ("validation batch end", 4, "validation"),
        ("validation end", 4, ""),
    ],
)
def test_what_a_callback_saves_in_any_hook_goes_on_from_there(tmp_path: Path, hook: str, done: int, again: str) -> None:
    path = tmp_path / "saved.ckpt"
    (whole,) = run("single", everything, [SaveIn(path, hook, done)], None, HALVES)
    (got,) = run("single", everything, [], path, HALVES)
    check_goes_on(got, whole, done, again)
