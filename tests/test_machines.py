"""On several machines each tells and ends its own ranks, and knows of the others by what they post."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watched import Left, alone, dog, stand_still

from lightning_3d.strategies.processes import board, guardian, hang_report, meeting, supervise, watchdog
from lightning_3d.strategies.processes.board import Board, Post
from lightning_3d.strategies.processes.watchdog import Watchdog
from lightning_3d.whereabouts import HERE


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from alone(monkeypatch)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen]:
    """A process that is stopped, as another rank may be."""
    monkeypatch.setattr(hang_report, "SILENT_SECONDS", 0.5)
    process = subprocess.Popen(["sleep", "300"])
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("why", ["verdict", "failure"])
def test_stopped_rank_is_killed_by_who_leaves_on_its_machine(
    why: str, stopped: subprocess.Popen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "UNWIND_SECONDS", 0.5)
    board = Board(tmp_path)
    board.post(Post(rank=1, pid=stopped.pid, time=1.0, host=watchdog.MACHINE))
    found = dog(tmp_path, timeout_seconds=1000.0, world_size=3)
    found.look()
    if why == "verdict":
        # By a rank of another machine.
        board.claim("verdict")
    else:
        board.post(Post(rank=2, pid=1, time=1.0, host="another", failure="ValueError: no"))
        found.look()
    time.sleep(0.6)
    with pytest.raises(Left):
        found.look()
    assert stopped.wait(timeout=5) == -signal.SIGKILL
    # Other machines know by that that it is gone.
    assert board.left(1)


def test_rank_that_watches_no_more_is_not_taken_for_a_stopped_one(stopped: subprocess.Popen, tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.post(Post(rank=1, pid=stopped.pid, time=1.0, host=watchdog.MACHINE))
    board.leave(1)
    found = dog(tmp_path, timeout_seconds=1000.0)
    found.look()
    board.claim("verdict")
    time.sleep(0.6)
    with pytest.raises(Left):
        found.look()
    assert stopped.poll() is None


SUMMARY = "no progress for 9 s: rank 5 (stage 1) has not been heard of for 9 s, since training, batch 2."


def leave(found: Watchdog) -> None:
    with pytest.raises(Left):
        found.look()


def test_hang_is_told_once_on_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    # A rank of another machine has judged.
    Board(tmp_path).claim("verdict", SUMMARY)
    for machine in ("a", "b"):
        monkeypatch.setattr(watchdog, "MACHINE", machine)
        leave(dog(tmp_path))
        assert capfd.readouterr().err == f"{SUMMARY}\n"
        leave(dog(tmp_path))
        assert capfd.readouterr().err == ""


def test_hang_is_not_told_again_on_the_machine_of_its_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    judge = dog(tmp_path)
    stand_still(judge, seconds=2.0)
    leave(judge)
    told = capfd.readouterr().err
    assert told.startswith("no progress for 1 s: rank 0 is in training, batch 3")
    leave(dog(tmp_path))
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(watchdog, "MACHINE", "another")
    leave(dog(tmp_path))
    assert capfd.readouterr().err == told


@pytest.mark.parametrize("supervised", [False, True])
def test_failure_is_told_once_on_each_machine(
    supervised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(watchdog, "supervised_folder", lambda: tmp_path if supervised else None)
    Board(tmp_path).post(Post(rank=1, pid=1, time=1.0, where="setup", failure="E: no", host="b", hostname="hostB"))
    for machine in ("a", "c", "b"):
        monkeypatch.setattr(watchdog, "MACHINE", machine)
        # Where the rank has a supervisor, that tells it.
        times = 0 if machine == "b" and supervised else 1
        for _ in range(2):
            dog(tmp_path).look()
        told = capfd.readouterr().err
        assert told.count("rank 1 of 2 on hostB raised E: no; ") == told.count("\n") == times


def test_rank_whose_connection_breaks_at_a_verdict_tells_that(tmp_path: Path, capfd: Any) -> None:
    # The others leave, before the watchdog of this rank looks again.
    Board(tmp_path).claim("hang")
    Board(tmp_path).claim("verdict", SUMMARY)
    with pytest.raises(Left):
        dog(tmp_path).tell_of_failure()
    assert capfd.readouterr().err == f"{SUMMARY}\n"


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:7378."


def lost(rank: int, **kwargs: Any) -> Post:
    return Post(rank=rank, pid=os.getpid(), time=time.time(), where="training", host=watchdog.MACHINE, **kwargs)


def away(rank: int, **kwargs: Any) -> Post:
    about = {"pid": 1, "time": time.time(), "where": f"training, batch {rank}", "host": "b", "hostname": "hostB"}
    return Post(rank=rank, **{**about, **kwargs})


def test_lost_connection_is_no_cause_where_another_rank_tells_one(tmp_path: Path, capfd: Any) -> None:
    board = Board(tmp_path)
    for post in (lost(1, failure=LOST), away(2, failure=LOST), away(3, failure="ValueError: no")):
        board.post(post)
    dog(tmp_path, world_size=4).look()
    assert capfd.readouterr().err.startswith("rank 3 of 4 on hostB raised ValueError: no; ")


def test_ranks_of_a_machine_that_is_lost_are_told_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(hang_report, "SILENT_SECONDS", 0.5)
    board = Board(tmp_path)
    for post in (lost(1, failure=LOST), away(2), away(3)):
        board.post(post)
    found = dog(tmp_path, world_size=4)
    found.look()
    # They may be quick to say what has happened there.
    assert capfd.readouterr().err == ""
    time.sleep(0.6)
    found.look()
    told = capfd.readouterr().err
    assert (
        told == "ranks 2, 3 of 4 on hostB have not been heard of since training, batch 2; connections to them broke.\n"
    )
    found.look()
    assert capfd.readouterr().err == ""


def test_lost_connection_is_told_where_all_machines_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    board = Board(tmp_path)
    for post in (lost(1, failure=LOST), away(2)):
        board.post(post)
    found = dog(tmp_path, world_size=3)
    found.look()
    assert capfd.readouterr().err == ""
    time.sleep(0.01)
    board.post(away(2))
    found.look()
    assert "rank 1 of 3" in (told := capfd.readouterr().err) and f"raised {LOST}" in told


def test_lost_connection_on_one_machine_is_told_at_once(tmp_path: Path, capfd: Any) -> None:
    Board(tmp_path).post(lost(1, failure=LOST))
    dog(tmp_path).look()
    assert capfd.readouterr().err.startswith(f"rank 1 of 2 raised {LOST}; ")


@pytest.mark.parametrize("watched", [True, False])
def test_rank_that_lost_a_connection_tells_why_before_it_ends(
    watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(hang_report, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(HERE, "failure", LOST)
    board = Board(tmp_path)
    board.post(away(1))
    found = dog(tmp_path)
    found._post()
    if watched:
        # A rank beside the killed one knows better.
        board.claim("told", "rank 1 of 2 on hostB was killed; last seen in training, batch 1.")
    found.tell_of_failure()
    cause = "was killed; last seen in" if watched else "has not been heard of since"
    assert capfd.readouterr().err.startswith(f"rank 1 of 2 on hostB {cause} training, batch 1")


def test_killed_rank_is_told_to_other_machines_by_who_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    board = Board(tmp_path)
    board.post(away(1, pid=process.pid))
    board.post(away(2, host="c"))
    monkeypatch.setattr(watchdog, "supervised_folder", lambda: tmp_path)
    monkeypatch.setattr(watchdog, "MACHINE", "b")
    dog(tmp_path, world_size=3).look()
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(watchdog, "MACHINE", "a")
    found = dog(tmp_path, world_size=3)
    found.look()
    assert (
        capfd.readouterr().err
        == "rank 1 of 3 on hostB was killed by a signal or os._exit; last seen in training, batch 1.\n"
    )


def test_board_is_deserted_for_other_machines_too_once_dead_ranks_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    found = Board(tmp_path)
    found.post(Post(rank=0, pid=os.getpid(), time=1.0, host=board.MACHINE))
    found.post(Post(rank=1, pid=process.pid, time=1.0, host=board.MACHINE))
    found.post(Post(rank=2, pid=process.pid, time=1.0, host="another"))
    found.leave(0)
    monkeypatch.setattr(board, "MACHINE", "yet another")
    assert found.deserted(2) and not found.deserted(3)


@pytest.mark.parametrize("kind", ["old", "used", "users", "empty"])
def test_folder_of_a_job_that_was_lost_is_removed_a_day_later(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "lightning-3d-training"
    run = folder / "run-0000"
    run.mkdir(parents=True)
    if kind != "empty":
        Board(run).post(Post(rank=0, pid=1, time=1.0))
        Board(run).post(Post(rank=1, pid=1, time=1.0))
    if kind == "users":
        (folder / "notes.txt").write_text("mine")
    for path in [*run.iterdir(), run]:
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    if kind == "used":
        os.utime(run / "rank-1.where")
    meeting.remove_deserted(tmp_path)
    assert folder.exists() == (kind != "old")


def test_rank_that_leaves_lets_those_of_its_machine_leave_first(tmp_path: Path) -> None:
    found = Board(tmp_path)
    found.post(Post(rank=1, pid=os.getpid(), time=1.0, host=watchdog.MACHINE))
    found.post(away(2))
    found.claim("verdict")
    thread = threading.Timer(0.7, lambda: Board(tmp_path).leave(1))
    thread.start()
    with pytest.raises(Left):
        dog(tmp_path, world_size=3).look()
    assert found.left(0) and found.left(1) and not found.left(2)
    thread.join()


# A rank that lives for a while with a guardian.
AWAKE = """
import subprocess, sys, time
reading, writing = __import__("os").pipe()
guardian = subprocess.Popen([sys.executable, "-c", '''{}''', sys.argv[1]], stdin=reading)
time.sleep(3.0)
assert guardian.poll() is None
guardian.kill()
"""
STOPPED = """
import os, pathlib, signal, subprocess, sys
from lightning_3d.strategies.processes.guardian import Guardian
child = subprocess.Popen(["sleep", "300"])
Guardian([child.pid], folder=pathlib.Path(sys.argv[1]), rank=2, world_size=4)
print(child.pid, flush=True)
for pid in (child.pid, os.getpid()):
    os.kill(pid, signal.SIGSTOP)
"""


def test_ranks_that_are_all_stopped_are_ended_once_another_machine_has_judged(tmp_path: Path) -> None:
    run = tmp_path / "shared" / "lightning-3d-x" / "run-0000"
    run.mkdir(parents=True)
    own = tmp_path / "own"
    own.mkdir()
    meeting.link(Board(run), own)
    meeting.link(Board(run), own)
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(own)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        child = int(process.stdout.readline())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=2.0)
        Board(run).claim("verdict", SUMMARY)
        assert process.wait(timeout=30.0) == -signal.SIGKILL
        assert process.stderr.read() == f"{SUMMARY}\n"
    assert not board.runs(child) and not own.exists()
    assert Board(run).said("verdict") == SUMMARY


def test_a_rank_that_is_not_stopped_is_not_ended_by_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "run-0000").mkdir()
    Board(tmp_path / "run-0000").claim("verdict", SUMMARY)
    watcher = (
        f"import sys, pathlib; sys.path.insert(0, {str(Path(guardian.__file__).parent)!r}); import guardian; "
        "guardian._LEAVE_SECONDS = 0.5; guardian.watch(0, pathlib.Path(sys.argv[1]), 0, 2, [])"
    )
    with subprocess.Popen([sys.executable, "-c", AWAKE.format(watcher), str(tmp_path)]) as process:
        assert process.wait(timeout=60.0) == 0


def test_rank_of_a_later_machine_is_told_with_its_own_place(tmp_path: Path) -> None:
    run = tmp_path / "run-0000"
    run.mkdir()
    for rank in (1, 3):
        Board(run).post(away(rank))
    processes = [subprocess.Popen(["true"]), subprocess.Popen(["sleep", "300"])]
    processes[1].kill()
    for process in processes:
        process.wait()
    ranks = supervise.Ranks(processes, report_paths=[tmp_path / f"rank-{n}.error" for n in (0, 1)], first_rank=2)
    failure = ranks.failure()
    assert failure is not None and (failure.rank, failure.where) == (3, "last seen in training, batch 3")
