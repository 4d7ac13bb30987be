"""Under torchrun as under our own processes: faults, stopped ranks and signals end a job soon, with the cause told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_jobs import Fault, runs

from lightning_3d.checkpoint import store

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
TIMEOUT = 10.0


@dataclass
class Real:
    """A real job of four ranks, zero1x2-pp2, in a folder."""

    folder: Path
    process: subprocess.Popen[bytes]
    pids: list[int]

    def end(self) -> tuple[int, str]:
        """Wait for its exit code; all that it printed."""
        try:
            code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            for pid in [self.process.pid, *self.pids]:
                if runs(pid):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError((self.folder / "told").read_text()) from None
        time.sleep(1.5)
        told = (self.folder / "told").read_text()
        assert [pid for pid in self.pids if runs(pid)] == [], told
        return code, told


def start(folder: Path, fault: Fault, *, launcher: list[str] = TORCHRUN, **settings: object) -> Real:
    """Start it as a user's shell does, and wait until all of its ranks are there."""
    script = Path(__file__).parent / "faulty_jobs.py"
    arguments = [str(folder), fault.phase, str(fault.rank), fault.kind, json.dumps(settings)]
    with (folder / "told").open("w") as told:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script), *arguments],
            stdout=told,
            stderr=told,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    deadline = time.monotonic() + 120
    files = [folder / f"pid-{rank}" for rank in range(4)]
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None and time.monotonic() < deadline, (folder / "told").read_text()
        time.sleep(0.1)
    return Real(folder, process, [int(file.read_text()) for file in files])


SCRIPT: list[str] = []


@pytest.mark.parametrize(
    ("launcher", "fault"),
    [
        (SCRIPT, Fault("forward", 0, "SIGKILL")),
        (SCRIPT, Fault("validation", 2, "exception")),
        (SCRIPT, Fault("save", 3, "SIGKILL")),
        (TORCHRUN, Fault("setup", 1, "exception")),
        (TORCHRUN, Fault("forward", 0, "SIGKILL")),
        (TORCHRUN, Fault("forward", 0, "exception")),
        (TORCHRUN, Fault("schedule", 3, "SIGKILL")),
        (TORCHRUN, Fault("save", 3, "SIGKILL")),
        (TORCHRUN, Fault("validation", 2, "SIGKILL")),
        (TORCHRUN, Fault("teardown", 2, "exception")),
    ],
    ids=lambda value: (
        f"{value.phase}-{value.rank}-{value.kind}" if isinstance(value, Fault) else "torchrun" if value else "script"
    ),
)
def test_fault_ends_real_processes_within_30_seconds(launcher: list[str], fault: Fault, tmp_path: Path) -> None:
    job = start(tmp_path, fault, launcher=launcher, timeout_seconds=60)
    code, told = job.end()
    # Of which 1.5 s were waited.
    assert code != 0 and time.time() - (tmp_path / "happened").stat().st_mtime < 30, told
    what = "was killed" if fault.kind == "SIGKILL" else "raised ValueError: the cause"
    # Of a rank (stage, data) that torchrun watches, a peer tells, unless torchrun is quicker to tell it itself.
    name = f"rank {fault.rank} (stage {fault.rank // 2}, data {fault.rank % 2})"
    tellings = told.count(f"rank {fault.rank} of 4 {what}") + told.count(f"{name} of 4 {what}")
    by_torchrun = f"rank      : {fault.rank} (local_rank: {fault.rank})\n  exitcode  : -9" in told
    assert tellings == 1 or (launcher and tellings == 0 and by_torchrun), told
    if fault.kind == "exception":
        place = {"forward": "training, batch"}.get(fault.phase, fault.phase)
        assert f"{what}; it was in {place}" in told, told


@pytest.mark.parametrize(("rank", "phase"), [(0, "forward"), (3, "schedule"), (2, "save")])
def test_stopped_rank_is_named_within_the_timeout_and_ended(rank: int, phase: str, tmp_path: Path) -> None:
    job = start(tmp_path, Fault(phase, rank, "SIGSTOP"), timeout_seconds=TIMEOUT)
    code, told = job.end()
    assert code != 0
    name = f"rank {rank} (stage {rank // 2}, data {rank % 2})"
    assert f"no progress for 10 s: {name} has not been heard of for" in told, told
    stopped_at = (tmp_path / "happened").stat().st_mtime
    assert time.time() - stopped_at < 30
    (summary,) = tmp_path.glob("hang_reports/*/summary.txt")
    assert TIMEOUT / 2 < summary.stat().st_mtime - stopped_at < TIMEOUT


@pytest.mark.parametrize(("sig", "to"), [("SIGTERM", "agent"), ("SIGINT", "all"), ("SIGTERM", "rank")])
def test_signal_ends_all_at_one_step_with_a_checkpoint(sig: str, to: str, tmp_path: Path) -> None:
    job = start(tmp_path, Fault("none", -2, ""), timeout_seconds=60, until_stopped=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("step-*"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    if to == "all":
        os.killpg(job.process.pid, getattr(signal, sig))
    else:
        os.kill(job.process.pid if to == "agent" else job.pids[2], getattr(signal, sig))
    asked_at = time.time()
    code, told = job.end()
    assert code != 0 and time.time() - asked_at < 30, told
    # Of a rank; torchrun prints its own.
    assert "]: Traceback" not in told, told
    steps = {(tmp_path / f"step-{rank}").read_text() for rank in range(4)}
    assert len(steps) == 1
    (saved,) = store.committed(tmp_path / "checkpoints")
    assert store.summary(saved)["global_step"] == int(steps.pop())
