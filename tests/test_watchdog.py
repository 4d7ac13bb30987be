"""The watchdog goes on where the board cannot be written, others are gone, or clocks differ."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_3d.strategies.processes import attempts, hang_report, watchdog
from lightning_3d.strategies.processes.board import Board, Post
from lightning_3d.strategies.processes.listening import Listener
from lightning_3d.strategies.processes.stopping import AgreedStop
from lightning_3d.strategies.processes.supervise import write_report
from lightning_3d.strategies.processes.watchdog import Watchdog
from lightning_3d.whereabouts import HERE


class Left(BaseException):
    """Instead of the end of this process."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def leave(code: int) -> None:
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watchdog, "STACKS_SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "JUDGE_SECONDS", 0.3)
    monkeypatch.setattr(HERE, "failure", "")
    before = (HERE.phase, HERE.batch, HERE.bounded)
    HERE.enter("training", batch=3)
    yield
    HERE.phase, HERE.batch, HERE.bounded = before


def dog(folder: Path, *, timeout_seconds: float = 1.0, world_size: int = 2, reports: Path | None = None) -> Watchdog:
    board = Board(folder)
    return Watchdog(
        board,
        rank=0,
        world_size=world_size,
        timeout_seconds=timeout_seconds,
        reports=reports or folder / "reports",
        stop=AgreedStop(board, world_size=world_size),
        leaving=lambda: None,
    )


def stand_still(found: Watchdog, *, seconds: float) -> None:
    found.look()
    found._still_since -= seconds


def test_board_that_cannot_be_written_is_mute(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    board = Board(tmp_path / "file" / "folder")
    board.post(Post(rank=0, pid=1, time=0.0))
    board.leave(0)
    AgreedStop(board, world_size=1).request(15)
    assert not board.claim("hang") and board.said("hang") is None and board.read_all(1) == {}


def test_something_is_said_once_where_files_have_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    first, second = Board(tmp_path), Board(tmp_path)
    assert first.claim("stop", "15") and not second.claim("stop", "2") and second.said("stop") == "15"
    assert [path.name for path in tmp_path.iterdir()] == ["stop"]


def test_a_look_that_was_begun_before_the_end_does_not_unsay_it(tmp_path: Path) -> None:
    found = dog(tmp_path)
    found.look()
    found.close(done=True)
    found._post()
    post = Board(tmp_path).read(0)
    assert post is not None and post.done


def test_request_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    board = Board(tmp_path / "later")
    stop = AgreedStop(board, world_size=1)
    stop.request(15)
    assert not stop.answer()
    board.folder.mkdir()
    assert stop.answer() and board.said("stop") == "15" and stop.vote == 0


def test_hang_is_told_by_each_rank_where_the_board_cannot_be_written(tmp_path: Path, capfd: object) -> None:
    (tmp_path / "file").write_text("")
    found = dog(tmp_path / "file" / "folder")
    stand_still(found, seconds=2.0)
    with pytest.raises(Left):
        found.look()
    told = capfd.readouterr().err  # type: ignore[attr-defined]
    assert told.startswith("no progress for 1 s: rank 0 is in training, batch 3")


@pytest.mark.parametrize("fault", ["folder", "stream"])
def test_verdict_comes_although_telling_fails(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")

    class Full:
        def write(self, text: str) -> None:
            raise OSError("full")

        flush = write

    if fault == "stream":
        monkeypatch.setattr(sys, "stderr", Full())
        monkeypatch.setattr(sys, "stdout", Full())
    found = dog(tmp_path, reports=tmp_path / "file" / "reports" if fault == "folder" else None)
    stand_still(found, seconds=2.0)
    with pytest.raises(Left):
        found.look()
    assert Board(tmp_path).said("verdict") is not None


def test_failed_rank_is_told_with_the_place_of_its_error_however_late(tmp_path: Path, capfd: object) -> None:
    found = dog(tmp_path)
    write_report("ValueError: the cause")
    found.fail("ValueError")
    post = Board(tmp_path).read(0)
    assert post is not None and post.failure == "ValueError: the cause"
    HERE.enter("teardown")
    found.close(done=False)
    found.tell_of_failure()
    told = capfd.readouterr().err  # type: ignore[attr-defined]
    assert told == "rank 0 of 2 raised ValueError: the cause; it was in training, batch 3.\n"


def test_next_rank_judges_where_the_first_to_notice_is_gone(tmp_path: Path, capfd: object) -> None:
    assert Board(tmp_path).claim("hang")
    found = dog(tmp_path, timeout_seconds=1000.0)
    found.look()
    assert Board(tmp_path).said("verdict") is None
    time.sleep(0.35)
    with pytest.raises(Left):
        found.look()
    assert Board(tmp_path).said("verdict") is not None


def test_standstill_is_allowed_less_once_all_are_asked_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STOP_GRACE_SECONDS", 0.5)
    found = dog(tmp_path, timeout_seconds=1000.0)
    stand_still(found, seconds=100.0)
    found.look()
    found._stop_agreement.request(15)
    # It counts from the request on.
    found.look()
    time.sleep(0.6)
    with pytest.raises(Left):
        found.look()


def test_callback_may_stand_still(tmp_path: Path) -> None:
    HERE.enter("callbacks after a step")
    found = dog(tmp_path)
    stand_still(found, seconds=100.0)
    found.look()
    assert Board(tmp_path).said("hang") is None


def test_attempt_that_blocks_or_fails_is_given_up() -> None:
    start = time.monotonic()
    attempts.attempt(lambda: time.sleep(60), seconds=0.1)
    attempts.attempt(lambda: 1 / 0, seconds=10.0)
    assert time.monotonic() - start < 20


def test_ranks_of_a_machine_whose_clock_is_wrong_are_not_silent(tmp_path: Path) -> None:
    board = Board(tmp_path)
    listener = Listener(board, world_size=1)
    post = Post(rank=0, pid=1, time=time.time() - 3600.0)
    board.post(post)
    assert not hang_report.silent(listener.read_all()[0], now=time.time())
    assert hang_report.silent(listener.read_all()[0], now=time.time() + 10.0)
    board.post(replace(post, time=post.time + 0.5))
    assert not hang_report.silent(listener.read_all()[0], now=time.time())


def test_finished_rank_is_no_cause() -> None:
    now = time.time()
    posts = {
        0: Post(rank=0, pid=1, time=now, where="teardown", done=True),
        1: Post(rank=1, pid=1, time=now, where="teardown"),
    }
    assert hang_report.causes(posts, now=now) == [1]


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
    assert capfd.readouterr().err == "rank 1 of 3 on hostB was killed by a signal; last seen in training, batch 1.\n"
