"""SIGTERM and Ctrl-C: all ranks stop between the same two steps, save if asked, and leave nothing."""

from __future__ import annotations

import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from faulty_jobs import Ended, Fault, Job, Slow, train

from lightning_3d.checkpoint import store, writing
from lightning_3d.strategies.processes.board import Board, Post
from lightning_3d.strategies.processes.stopping import AgreedStop

SIGNALS = {"SIGTERM": 128 + signal.SIGTERM, "SIGINT": 1}


def stopped(folder: Path, *, sig: str, how: str, to: str, save: bool) -> Ended:
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(folder / "checkpoints", save_on_exception=save, save_top_k=-1)
    body = partial(
        train, Fault("none", -2, ""), folder, layout="zero1x2-pp2", timeout_seconds=60, max_steps=10_000,
        callbacks=[checkpoint, Slow(folder)], val_check_interval=None, accumulate_grad_batches=2,
    )  # fmt: skip
    job = Job(body, how=how, folder=folder)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("step-*"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    job.kill(getattr(signal, sig), to=to)
    return job.wait()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sig", "how", "to"),
    [
        ("SIGTERM", "script", "rank 2"),
        ("SIGINT", "script", "all"),
        ("SIGTERM", "ranks", "first"),
        pytest.param("SIGTERM", "script", "first", marks=pytest.mark.slow),
        pytest.param("SIGINT", "ranks", "first", marks=pytest.mark.slow),
    ],
)
def test_signal_ends_all_ranks_at_one_step_with_a_checkpoint(sig: str, how: str, to: str, tmp_path: Path) -> None:
    ended = stopped(tmp_path, sig=sig, how=how, to=to, save=True)
    assert ended.code == (128 + getattr(signal, sig) if how == "ranks" else SIGNALS[sig]), ended.errors
    assert ended.alive == []
    assert "Traceback" not in ended.errors, ended.errors
    steps = {(tmp_path / f"step-{rank}").read_text() for rank in range(4)}
    assert len(steps) == 1
    (saved,) = store.committed(tmp_path / "checkpoints")
    assert store.summary(saved)["global_step"] == int(steps.pop())


@pytest.mark.slow
@pytest.mark.distributed
def test_signal_without_a_wish_to_save_ends_all_ranks_and_writes_nothing(tmp_path: Path) -> None:
    ended = stopped(tmp_path, sig="SIGTERM", how="script", to="first", save=False)
    assert ended.code == 143 and ended.alive == []
    assert not (tmp_path / "checkpoints").exists()


class SavesItself(L.Callback):
    """As a user's own callback may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: L.Trainer, *_: object) -> None:
        trainer.save_checkpoint(self.path)


def refused(*_: object, **__: object) -> None:
    raise AssertionError("nobody would come to this barrier")


class Unwound(L.Callback):
    """Told once Lightning has torn down, on the rank that failed: no collective has kept it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, *_: object) -> None:
        # Not to pytest.
        warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)

    def on_exception(self, trainer: L.Trainer, *_: object) -> None:
        teardown, dist.barrier = trainer.strategy.teardown, refused

        def noted() -> None:
            teardown()
            (self.folder / f"unwound-{trainer.global_rank}").touch()

        trainer.strategy.teardown = noted  # type: ignore[method-assign]


class SlowWrites(L.Callback):
    """So that a save in the background is under way at the next step."""

    def on_train_start(self, *_: object) -> None:
        real = writing.dcp.save

        def save(*args: Any, **kwargs: Any) -> Any:
            time.sleep(1)
            return real(*args, **kwargs)

        writing.dcp.save = save  # type: ignore[assignment]


@pytest.mark.distributed
@pytest.mark.parametrize("saver", ["ModelCheckpoint", "OnExceptionCheckpoint", "own", "background"])
def test_error_of_one_rank_does_not_wait_for_a_checkpoint_by_all(saver: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    callbacks = L.pytorch.callbacks
    savers: dict[str, list[L.Callback]] = {
        "ModelCheckpoint": [callbacks.ModelCheckpoint(folder, save_on_exception=True)],
        "OnExceptionCheckpoint": [callbacks.OnExceptionCheckpoint(folder)],
        "own": [SavesItself(folder / "own.ckpt")],
        # Saved at step 2; the third batch fails.
        "background": [callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2), SlowWrites()],
    }
    body = partial(
        train, Fault("forward", 0, "exception"), tmp_path, layout="dp2", timeout_seconds=60,
        callbacks=[Unwound(tmp_path), *savers[saver]], async_checkpoint=saver == "background",
    )  # fmt: skip
    ended = Job(body, how="script", folder=tmp_path, world_size=2).wait()
    assert ended.code == 1 and ended.alive == [] and ended.seconds < 30
    assert ended.errors.count("rank 0 of 2 raised ValueError: the cause") == 1
    assert (tmp_path / "unwound-0").exists(), ended.errors
    # What had been begun is finished.
    assert [path.name for path in store.committed(folder)] == (["step=2.ckpt"] if saver == "background" else [])
    assert ("is not saved after an error that one rank alone may have" in ended.errors) == (saver != "background")


def test_ranks_stop_at_the_boundary_after_the_highest_vote(tmp_path: Path) -> None:
    stops = [AgreedStop(Board(tmp_path), world_size=3) for _ in range(3)]
    # Rank 1 is one step ahead.
    for rank, passed in enumerate((4, 5, 4)):
        for _ in range(passed):
            stops[rank].boundary()
    stops[2].request(signal.SIGINT)
    for rank, stop in enumerate(stops):
        assert stop.answer() and not stop.answer()
        Board(tmp_path).post(Post(rank=rank, pid=1, time=0.0, vote=stop.vote))
    stops[0].boundary()
    stops[2].boundary()
    for stop in stops:
        assert not stop.agreed
        with pytest.raises(KeyboardInterrupt):
            stop.boundary()
        assert stop.agreed


def test_random_schedules_of_votes_and_boundaries_end_at_one_boundary(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    for trial in range(200):
        folder = tmp_path / str(trial)
        folder.mkdir()
        board = Board(folder)
        stops = [AgreedStop(board, world_size=4) for _ in range(4)]
        passed, ended = [0] * 4, [0] * 4
        while not all(ended):
            rank = int(torch.randint(4, (), generator=draw))
            stop = stops[rank]
            event = float(torch.rand((), generator=draw))
            if event < 0.05:
                stop.request(signal.SIGTERM)
            elif event < 0.3:
                if stop.answer():
                    board.post(Post(rank=rank, pid=1, time=0.0, vote=stop.vote))
            # A collective in each step: nobody is a whole step ahead. Who has voted waits for all votes.
            elif not ended[rank] and passed[rank] == min(passed) and (stop.vote is None or len(board.read_all(4)) == 4):
                try:
                    passed[rank] += 1
                    stop.boundary()
                except SystemExit as error:
                    assert error.code == 143
                    ended[rank] = passed[rank]
        assert len(set(ended)) == 1
