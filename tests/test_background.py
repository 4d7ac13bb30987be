"""async_checkpoint=True: training goes on while a copy is written, and nothing is lost by that."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from held_saves import Held, saver, small_fit, trainer_with
from modules import Rows, Small, TinyGPT
from torch.utils.data import DataLoader
from training import ordered, run, whole, whole_weights

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.checkpoint import store, writing
from lightning_3d.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.distributed


class Watch(L.Callback):
    """What is there at the end of each step."""

    def __init__(self, folder: Path, held: Held | None = None, release_at: int = 0) -> None:
        self.folder, self.held, self.release_at = folder, held, release_at
        self.there: dict[int, list[str]] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.there[trainer.global_step] = sorted(path.name for path in store.committed(self.folder))
        self.weights[trainer.global_step] = whole_weights(module)
        if self.held and trainer.global_step == self.release_at:
            self.held.release.set()


def steps_go_on(layout: str, folder: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    held, module = Held(), TinyGPT(lazy=True)
    watch = Watch(folder, held, release_at=5)
    callback = saver(folder, 2)
    trainer = trainer_with(layout, watch, callback, steps=5)

    class Once(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            callback._every_n_train_steps = 2 if trainer.global_step < 3 else 100

    trainer.callbacks.insert(0, Once())  # type: ignore[attr-defined]
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data))
    ran = weights_and_moments(trainer, module)
    expected = watch.weights[2]
    state = {f"model.{name}": torch.zeros_like(value) for name, value in expected.items()}
    store.load_tensors(folder / "step=2.ckpt", state)
    same = all(torch.equal(state[f"model.{name}"], value) for name, value in expected.items())
    end = [path.name for path in store.committed(folder)]
    return {"there": watch.there, "same": same, "end": end, "ran": ran}


def go_on(layout: str, path: Path) -> list[torch.Tensor]:
    module, trainer = TinyGPT(lazy=True), trainer_with(layout, saver(path.parent, 100), steps=5)
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data), ckpt_path=path)
    return weights_and_moments(trainer, module)


def weights_and_moments(trainer: L.Trainer, module: L.LightningModule) -> list[torch.Tensor]:
    trainer.strategy.share.reshard()  # type: ignore[attr-defined]
    states = [trainer.optimizers[0].state[p] for p in module.parameters() if p.numel()]
    kept = [whole(state[key]) for state in states for key in sorted(state)]
    assert kept
    return [*whole_weights(module).values(), *kept]


@pytest.mark.parametrize("layout", ["single", "zero3x2", "tp2-pp2"])
def test_steps_go_on_while_a_copy_is_written_and_do_not_change_it(tmp_path: Path, layout: str) -> None:
    ranks = run(layout, steps_go_on, tmp_path)
    for got in ranks:
        # Steps 3 to 5 were made while the checkpoint of step 2 was under way; fit waited for it.
        assert got["there"][3] == got["there"][5] == [] and got["end"] == ["step=2.ckpt"]
        assert got["same"]
    # Nor do moments and counts of later steps get into the copy.
    for got, resumed in zip(ranks, run(layout, go_on, tmp_path / "step=2.ckpt"), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(got["ran"], resumed, strict=True))


def saves_follow_each_other(layout: str, folder: Path) -> Any:
    held = Held()
    # By then the second save has been asked for.
    threading.Timer(1.0, held.release.set).start()
    callback = saver(folder, 1, top_k=1)
    seen: list[int] = []

    class Look(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(len(store.committed(folder)))

    trainer = trainer_with(layout, callback, Look(), steps=6)
    small_fit(trainer)
    return held.most, seen, [path.name for path in store.committed(folder)], callback.best_model_path


def test_one_save_at_a_time_and_the_former_is_removed_after_the_next_is_whole(tmp_path: Path) -> None:
    for most, seen, end, best in run("zero3x2", saves_follow_each_other, tmp_path):
        assert most == 1 and end == ["step=6.ckpt"] and best.endswith("step=6.ckpt")
        # From the first on there always is one; never more than the former and the new one.
        assert set(seen[2:]) <= {1, 2}


def fails_in_background(layout: str, folder: Path, broken_rank: int) -> Any:
    callback = saver(folder, 2, top_k=1, save_last=False)
    real = writing.dcp.save
    calls: list[int] = []

    def save(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and int(os.environ["RANK"]) == broken_rank:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    # Not dcp itself, so that its own agreement does not help.
    writing.dcp.save = save  # type: ignore[assignment]
    trainer = trainer_with(layout, callback, steps=50)
    begin = time.monotonic()
    try:
        small_fit(trainer, samples=400)
    except CheckpointError as error:
        found = str(error), trainer.global_step, callback.best_model_path, [p.name for p in store.committed(folder)]
        return *found, time.monotonic() - begin
    return "no error"


def test_an_error_in_the_background_stops_all_ranks_and_leaves_the_former_checkpoint_selected(tmp_path: Path) -> None:
    # One rank: where a rank of several skips torch's own talk, the others wait in it.
    for message, step, best, there, seconds in run("single", fails_in_background, tmp_path, 0):
        assert "No space left" in message and "step=4.ckpt" in message and "rank 0" in message
        assert 4 <= step <= 6 and seconds < 30
        assert best.endswith("step=2.ckpt") and there == ["step=2.ckpt"]


def fails_on_one_rank(layout: str, folder: Path) -> Any:
    callback = saver(folder, 2, top_k=1)
    real = writing.rank_file
    calls: list[int] = []

    def rank_file(rank: int) -> str:
        calls.append(rank)
        if len(calls) == 2 and rank == 1:
            raise OSError(28, "No space left on device")
        return real(rank)

    writing.rank_file = rank_file
    trainer = trainer_with(layout, callback, steps=50)
    try:
        small_fit(trainer, samples=400)
    except CheckpointError as error:
        return str(error), trainer.global_step, callback.best_model_path, [p.name for p in store.committed(folder)]
    return "no error"


@pytest.mark.parametrize("layout", ["zero3x2", "tp2-pp2"])
def test_an_error_of_one_rank_in_the_background_comes_at_the_same_step_everywhere(tmp_path: Path, layout: str) -> None:
    ranks = run(layout, fails_on_one_rank, tmp_path)
    assert len(set(map(str, ranks))) == 1
    message, step, best, there = ranks[0]
    assert "failed on rank 1: OSError: [Errno 28] No space left" in message and "step=4.ckpt" in message
    assert 4 <= step <= 6 and best.endswith("step=2.ckpt") and there == ["step=2.ckpt"]


def stopped_by_signal(layout: str, folder: Path) -> Any:
    held = Held()

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 31 and trainer.is_global_zero:
                os.kill(os.getpid(), signal.SIGTERM)
            # The watchdog votes within half a second, before the next save, which would wait for this one.
            time.sleep(0.05 if trainer.global_step > 30 else 0.0)

        def on_exception(self, *_: Any) -> None:
            threading.Timer(0.5, held.release.set).start()

    trainer = trainer_with(layout, saver(folder, 30), Stop(), steps=59)
    try:
        small_fit(trainer, samples=400)
    except BaseException as error:
        return type(error).__name__, held.writing.is_set(), [path.name for path in store.committed(folder)]
    return "no exception"


def test_a_signal_waits_for_what_is_under_way(tmp_path: Path) -> None:
    for error, writing_began, there in run("single", stopped_by_signal, tmp_path):
        assert error in ("SIGTERMException", "SystemExit") and writing_began
        assert there == ["step=30.ckpt"]


class Evaluated(Small):
    """Small, with batches to evaluate on."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)


class SaveAt(L.Callback):
    """A checkpoint in each of these hooks."""

    def __init__(self, folder: Path, hooks: list[str]) -> None:
        for hook in hooks:
            setattr(self, hook, partial(self.save, folder / f"{hook}.ckpt"))

    @staticmethod
    def save(path: Path, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        trainer.save_checkpoint(path)


HOOKS = [
    "on_fit_start", "on_sanity_check_end", "on_train_start", "on_validation_end", "on_train_epoch_end", "on_train_end",
    "on_fit_end", "teardown",
]  # fmt: skip


def saves_at_every_hook(layout: str, folder: Path) -> Any:
    slow_writes()
    trainer = trainer_with(layout, SaveAt(folder, HOOKS), saver(folder, 100), steps=2)
    trainer.num_sanity_val_steps = 1
    loaders = [DataLoader(torch.randn(16, 4), batch_size=4) for _ in range(2)]
    module = Evaluated()
    trainer.fit(module, *loaders)
    there = {path.name for path in store.committed(folder)}
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    # After a fit there is no later moment: it is there on return, and serves at once.
    trainer.save_checkpoint(folder / "after.ckpt")
    after = store.is_committed(folder / "after.ckpt")
    trainer.validate(module, loaders[1], ckpt_path=folder / "after.ckpt", verbose=False)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    writing.dcp.save = full  # type: ignore[assignment]
    try:
        trainer.save_checkpoint(folder / "full.ckpt")
    except CheckpointError as error:
        return there, left, after, str(error)
    return there, left, after, "no error"


def slow_writes() -> None:
    real = writing.dcp.save

    def save(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return real(*args, **kwargs)

    writing.dcp.save = save  # type: ignore[assignment]


@pytest.mark.parametrize("layout", ["single", "zero3x2"])
def test_wherever_a_checkpoint_is_asked_for_it_is_there_in_the_end(tmp_path: Path, layout: str) -> None:
    for there, left, after, message in run(layout, saves_at_every_hook, tmp_path):
        assert there == {f"{hook}.ckpt" for hook in HOOKS} and left == []
        assert after and "full.ckpt failed on rank 0: OSError: [Errno 28] No space left" in message


class SavesFirst(Small):
    """Asks for a checkpoint in the last hook before the strategy's own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_start(self) -> None:
        self.trainer.save_checkpoint(self.path)


def saves_at_the_start(layout: str, folder: Path) -> list[str]:
    slow_writes()
    trainer = trainer_with(layout, saver(folder, 100), steps=1)
    small_fit(trainer, SavesFirst(folder / "start.ckpt"))
    return [path.name for path in folder.iterdir()]


def test_a_save_under_way_is_no_leftover(tmp_path: Path) -> None:
    assert run("single", saves_at_the_start, tmp_path) == [["start.ckpt"]]


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="async_checkpoint='yes' must be True or False"):
        ThreeDStrategy(async_checkpoint="yes")  # type: ignore[arg-type]
