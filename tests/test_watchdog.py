"""The watchdog goes on where the board cannot be written, others are gone, or clocks differ."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from watched import Left, alone, dog, stand_still

from lightning_3d.strategies.processes import attempts, board, hang_report, watchdog
from lightning_3d.strategies.processes.board import Board, Post
from lightning_3d.strategies.processes.listening import Listener
from lightning_3d.strategies.processes.stopping import AgreedStop
from lightning_3d.strategies.processes.supervise import write_report
from lightning_3d.whereabouts import HERE


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from alone(monkeypatch)


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
    found.fail(ValueError("the cause"))
    post = Board(tmp_path).read(0)
    assert post is not None and post.failure == "ValueError: the cause"
    HERE.enter("teardown")
    found.close(done=False)
    found.tell_of_failure()
    told = capfd.readouterr().err  # type: ignore[attr-defined]
    assert told == "rank 0 of 2 raised ValueError: the cause; it was in training, batch 3.\n"


@pytest.mark.parametrize("first", ["end", "failure"])
def test_failure_after_the_others_have_ended_is_told_once(first: str, tmp_path: Path, capfd: object) -> None:
    Board(tmp_path).post(Post(rank=1, pid=os.getpid(), time=time.time(), done=first == "end", host=board.MACHINE))
    failing = dog(tmp_path)
    write_report("ValueError: the cause")
    failing.fail(ValueError("the cause"))
    told = "rank 0 of 2 raised ValueError: the cause; it was in training, batch 3.\n"
    assert capfd.readouterr().err == (told if first == "end" else "")  # type: ignore[attr-defined]
    ending = dog(tmp_path, rank=1)
    HERE.failure = ""
    ending.close(done=True)
    assert capfd.readouterr().err == ("" if first == "end" else told)  # type: ignore[attr-defined]


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
