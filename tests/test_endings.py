"""Runs end where nobody waits, late, or for reasons of their own: each is noticed, and told once."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import faulty_jobs
import lightning as L
import pytest
from faulty_jobs import Ended, Fault, Job, train
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, Dataset
from training import ordered

from lightning_3d.checkpoint import store
from lightning_3d.strategies.processes import board, meeting, supervise, watchdog
from lightning_3d.strategies.processes.launch import free_port, start_ranks

pytestmark = pytest.mark.distributed

NOTHING = Fault("none", -2, "")


def saving(folder: Path) -> L.pytorch.callbacks.ModelCheckpoint:
    return L.pytorch.callbacks.ModelCheckpoint(folder / "checkpoints", save_on_exception=True, save_top_k=-1)


def ended(
    fault: Fault, folder: Path, *, layout: str = "dp2", how: str = "script", timeout: float = 60.0, **settings: Any
) -> Ended:
    body = partial(train, fault, folder, layout=layout, timeout_seconds=timeout, **settings)
    world_size = 1 if layout == "dp1" else 2
    return Job(body, how=how, folder=folder, world_size=world_size).wait(seconds=90)


def await_files(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 90
    while sum(path.is_dir() or path.stat().st_size > 0 for path in folder.glob(pattern)) < count:
        assert time.monotonic() < deadline, f"no {count} files {pattern}"
        time.sleep(0.05)


# ---------------------------------------------------------------------- hangs


def test_hang_ends_the_job_although_its_report_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "hang_reports").write_text("")
    end = ended(Fault("forward", 1, "endless"), tmp_path, timeout=8.0)
    assert end.code == 1 and end.alive == []
    assert "no progress for 8 s: rank 1 (data 1) is in training, batch 2" in end.errors, end.errors


class Endless(Dataset):
    """Blocks on every rank after so many samples."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.rows = faulty_jobs.Rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.left == 0:
            faulty_jobs.endless()
        self.left -= 1
        return self.rows[index]


@pytest.mark.parametrize(
    ("after", "where"), [pytest.param(0, "training", marks=pytest.mark.slow), (9, "training"), (0, "validation")]
)
def test_loading_that_never_ends_on_all_ranks_is_a_hang(after: int, where: str, tmp_path: Path) -> None:
    made: list[DataLoader] = []
    build = faulty_jobs.loader

    def loader(layout: Any) -> DataLoader:
        made.append(
            ordered(Endless(after), replicas=layout.data) if len(made) == (where == "validation") else build(layout)
        )
        return made[-1]

    def body() -> None:
        made.clear()
        faulty_jobs.loader = loader
        train(NOTHING, tmp_path, layout="dp2", timeout_seconds=8.0)

    end = Job(body, how="script", folder=tmp_path, world_size=2).wait(seconds=90)
    assert end.code == 1 and end.alive == []
    assert "no progress for 8 s: rank 0 (data 0) is in loading a batch, at" in end.errors, end.errors
    assert "; rank 1 (data 1) is in loading a batch, at" in end.errors


def test_teardown_that_never_ends_is_a_hang(tmp_path: Path) -> None:
    end = ended(Fault("teardown", 1, "endless"), tmp_path, how="ranks", timeout=8.0)
    assert end.code == 1 and end.alive == []
    assert "rank 1 of 2 reports HangError: no progress for 8 s: rank 1 (data 1) is in teardown" in end.errors, (
        end.errors
    )


def test_one_process_is_watched_too(tmp_path: Path) -> None:
    end = ended(Fault("forward", 0, "endless"), tmp_path, layout="dp1", timeout=6.0)
    assert end.code == 1 and end.alive == []
    assert "no progress for 6 s: rank 0 is in training, batch 2" in end.errors, end.errors


def test_rank_that_still_runs_long_after_rank_zero_has_ended_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(supervise, "EXIT_SECONDS", 1.0)
    command = [sys.executable, "-c", "import os, time; time.sleep(0 if os.environ['RANK'] == '0' else 300)"]
    assert start_ranks(command, world_size=2).exit_code == 1
    assert "rank 1 of 2 still ran 1 s after rank 0 had ended" in capfd.readouterr().err


# ---------------------------------------------------------------------- signals


def test_second_interrupt_ends_a_rank_that_is_in_a_collective_for_ever(tmp_path: Path) -> None:
    job = Job(
        partial(train, Fault("forward", 1, "SIGSTOP"), tmp_path, layout="dp2", timeout_seconds=300),
        how="script", folder=tmp_path, world_size=2,
    )  # fmt: skip
    await_files(tmp_path, "pid-*", 2)
    stopped_pid = job.pids()[1]
    deadline = time.monotonic() + 60
    while Path(f"/proc/{stopped_pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for _ in range(2):
        time.sleep(1.0)
        job.kill(signal.SIGINT, to="first")
    end = job.wait(seconds=60)
    assert end.code == 1 and end.alive == []


class Marks(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        (self.folder / f"step-{trainer.global_rank}").write_text(str(trainer.global_step))
        time.sleep(0.05)


def endless_run(folder: Path, fault: Fault, *, how: str) -> Job:
    body = partial(
        train, fault, folder, layout="dp2", timeout_seconds=300, max_steps=10_000, val_check_interval=None,
        callbacks=[saving(folder), Marks(folder)],
    )  # fmt: skip
    job = Job(body, how=how, folder=folder, world_size=2)
    await_files(folder, "step-*", 2)
    return job


def test_second_interrupt_ends_a_save_that_hangs(tmp_path: Path) -> None:
    job = endless_run(tmp_path, Fault("save", 1, "endless"), how="script")
    job.kill(signal.SIGINT, to="first")
    await_files(tmp_path, "checkpoints/.*", 1)
    time.sleep(1.0)
    job.kill(signal.SIGINT, to="first")
    end = job.wait(seconds=60)
    assert end.code == 1 and end.alive == []


@pytest.mark.parametrize("how", ["script", "ranks"])
def test_save_that_fails_after_sigterm_is_told_and_is_no_good_end(how: str, tmp_path: Path) -> None:
    job = endless_run(tmp_path, Fault("save", 1, "exception"), how=how)
    job.kill(signal.SIGTERM, to="first")
    end = job.wait(seconds=60)
    assert end.code == 1 and end.alive == [], end.errors
    assert "failed on rank 1: ValueError: the cause" in end.errors
    assert end.errors.count("of 2 raised ") == 1


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
@pytest.mark.parametrize(("sig", "code"), [("SIGTERM", 143), ("SIGINT", 1)])
def test_signal_in_the_last_validation_is_not_lost(layout: str, sig: str, code: int, tmp_path: Path) -> None:
    def body() -> None:
        train(Fault("validation", 0, sig), tmp_path, layout=layout, timeout_seconds=60, max_steps=4)
        (tmp_path / "went-on").touch()
        time.sleep(5.0)

    end = Job(body, how="script", folder=tmp_path, world_size=int(layout[-1])).wait(seconds=90)
    assert end.code == code and end.alive == [], end.errors
    assert "Traceback" not in end.errors, end.errors


class Warns(L.Callback):
    def setup(self, *_: object, **__: object) -> None:
        # Not to pytest.
        warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)


# In a hook of the module, and where no handler is there any more.
@pytest.mark.parametrize("phase", ["setup", "teardown"])
def test_interrupt_outside_of_training_is_no_failure_of_a_rank(phase: str, tmp_path: Path) -> None:
    end = ended(Fault(phase, -1, "SIGINT"), tmp_path, callbacks=[Warns(), saving(tmp_path)])
    assert end.code == 1 and end.alive == [], end.errors
    assert "Traceback" not in end.errors and "of 2" not in end.errors, end.errors
    assert "save_on_exception=True is not saved: Ctrl-C" in end.errors


def test_signal_where_no_handler_is_yet_is_told_by_who_is_left(tmp_path: Path) -> None:
    end = ended(Fault("setup", 0, "SIGTERM"), tmp_path)
    assert end.code == -signal.SIGTERM and end.alive == [], end.errors
    # Whoever is left cannot know which.
    assert "rank 0 of 2 was killed by a signal or os._exit; last seen in setup" in end.errors


def test_signal_ends_one_process_with_its_code_and_a_checkpoint(tmp_path: Path) -> None:
    end = ended(Fault("forward", 0, "SIGTERM"), tmp_path, layout="dp1", max_steps=100_000, callbacks=[saving(tmp_path)])
    assert end.code == 143, end.errors
    saved = store.newest(tmp_path / "checkpoints")
    # In the third step, which is finished; the watchdog votes within half a second.
    assert saved is not None and store.summary(saved)["global_step"] >= 3


def test_handler_of_the_script_is_called_too(tmp_path: Path) -> None:
    def body() -> None:
        signal.signal(signal.SIGTERM, lambda *_: (tmp_path / f"mine-{os.environ['RANK']}").touch())
        train(Fault("forward", 0, "SIGTERM"), tmp_path, layout="dp2", timeout_seconds=60)

    end = Job(body, how="script", folder=tmp_path, world_size=2).wait(seconds=90)
    assert end.code == 143, end.errors
    assert [path.name for path in tmp_path.glob("mine-*")] == ["mine-0"]


class SignalledAtTheEnd(L.Callback):
    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            # The watchdog looks twice a second.
            time.sleep(1.5)


def ended_by_slurm(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Ended:
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\nsleep 5\necho $@ >> {folder}/queued\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent), prepend=os.pathsep)

    def body() -> None:
        os.environ.update(SLURM_JOB_ID="7", SLURM_NTASKS="2", SLURM_LOCALID=os.environ["RANK"], SLURM_NODEID="0")
        os.environ.update(SLURM_PROCID=os.environ["RANK"], SLURM_NTASKS_PER_NODE="2", SLURM_JOB_NAME="train")
        train(
            fault, folder, layout="dp2", timeout_seconds=60, plugins=[SLURMEnvironment()], num_nodes=1, **settings
        )  # fmt: skip
        (folder / f"went-on-{os.environ['RANK']}").touch()

    return Job(body, how="ranks", folder=folder, world_size=2).wait(seconds=90)


def test_slurms_signal_saves_at_the_agreed_step_and_queues_the_job_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More steps than a rank makes before all have voted.
    end = ended_by_slurm(Fault("forward", 1, "SIGUSR1"), tmp_path, monkeypatch, max_steps=100_000)
    assert end.code == 143, end.errors
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
    assert len(list(tmp_path.glob("hpc_ckpt_*"))) == 1


def test_slurms_signal_in_the_end_of_a_run_leaves_the_script_what_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ended_by_slurm(NOTHING, tmp_path, monkeypatch, callbacks=[SignalledAtTheEnd()])
    assert end.code == 0, end.errors
    assert sorted(path.name for path in tmp_path.glob("went-on-*")) == ["went-on-0", "went-on-1"]
    assert list(tmp_path.glob("queued")) == list(tmp_path.glob("hpc_ckpt_*")) == []


# ---------------------------------------------------------------------- what is left, and several machines


@pytest.mark.parametrize("kind", ["exception", "SIGKILL", "endless", "SIGTERM"])
def test_no_folder_is_left(kind: str, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def body() -> None:
        tempfile.tempdir = str(temporary)
        train(Fault("forward", 0, kind), tmp_path, layout="dp2", timeout_seconds=8.0)

    assert Job(body, how="script", folder=tmp_path, world_size=2).wait(seconds=90).code != 0
    deadline = time.monotonic() + 30
    while (left := list(temporary.glob("lightning-3d-*"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def two_machines(folder: Path, fault: Fault, *, seen: bool = True, timeout: float = 60.0) -> list[Ended]:
    """Two jobs that take each other for another machine."""
    port = str(free_port())

    def body(node: int) -> None:
        os.environ.update(NODE_RANK=str(node), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        watchdog.MACHINE = board.MACHINE = f"machine-{node}"
        watchdog.HOSTNAME = f"host{node}"
        if node == 1 and not seen:
            meeting._appears = lambda folder: False
        root = folder / "shared" / "new"
        settings = {"devices": 2, "num_nodes": 2, "default_root_dir": root}
        train(fault, folder, layout="zero1x2-pp2", timeout_seconds=timeout, **settings)

    jobs = []
    for node in (0, 1):
        (folder / f"machine-{node}").mkdir()
        jobs.append(Job(partial(body, node), how="script", folder=folder / f"machine-{node}"))
    return [job.wait(seconds=120) for job in jobs]


def test_rank_of_another_machine_is_told_by_its_number_in_the_job(tmp_path: Path) -> None:
    first, second = two_machines(tmp_path, Fault("forward", 3, "exception"))
    assert first.code != 0 and second.code == 1
    assert second.errors.count("rank 3 of 4 raised ValueError: the cause") == 1, second.errors
    cause = "rank 3 (stage 1, data 1) of 4 on host1 raised ValueError: the cause; "
    assert first.errors.count(cause) == 1 and second.errors.count(cause) == 0, first.errors


@pytest.mark.parametrize("rank", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_stopped_rank_ends_both_machines_and_is_named_on_each(rank: int, tmp_path: Path) -> None:
    for end in two_machines(tmp_path, Fault("forward", rank, "SIGSTOP"), timeout=10.0):
        assert end.code != 0 and end.alive == [] and end.seconds < 60
        named = f"no progress for 10 s: rank {rank} (stage 1, data {rank % 2}) on host1 has not been heard of for"
        assert sum(line.startswith(named) for line in end.errors.splitlines()) == 1, end.errors
    assert list(tmp_path.glob("shared/new/lightning-3d-*")) == []


def test_root_folder_that_machines_do_not_share_is_refused(tmp_path: Path) -> None:
    for end in two_machines(tmp_path, NOTHING, seen=False):
        assert end.code == 1
        assert "is not one folder for all: rank 0 has made" in end.errors, end.errors
        assert "which rank 2, 3 cannot see" in end.errors
