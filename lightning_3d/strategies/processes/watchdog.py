"""A thread in every rank: it tells where the rank is, and ends it when the job has failed or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_3d.strategies.processes import failures, hang_report
from lightning_3d.strategies.processes.attempts import attempt, flush
from lightning_3d.strategies.processes.board import HOSTNAME, MACHINE, Board, Post, runs
from lightning_3d.strategies.processes.forks import UNDISTURBED
from lightning_3d.strategies.processes.listening import Listener
from lightning_3d.strategies.processes.signals import Signals
from lightning_3d.strategies.processes.stacks import sequence_numbers, stacks_file, write_stacks
from lightning_3d.strategies.processes.stopping import AgreedStop
from lightning_3d.strategies.processes.supervise import STOP_GRACE_SECONDS, supervised_folder, write_report
from lightning_3d.whereabouts import HERE

POLL_SECONDS = 0.5
# How long a run whose end is decided may take to unwind: callbacks, loggers. A launcher of ours is quicker.
UNWIND_SECONDS = 15.0
# How long the ranks have to write their stacks.
STACKS_SECONDS = 3.0
# How long who noticed a hang has to tell it, before the next rank does.
JUDGE_SECONDS = 10.0
# How long a main thread that was interrupted a second time has to end by itself.
INSIST_SECONDS = 3.0

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (str(Path(os.__file__).parent), _PACKAGE, "site-packages", "dist-packages", "<frozen")
_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")
_TALKING = str(Path(dist.__file__).parent)
_WRITING = str(Path(dist.__file__).parent / "checkpoint")


class Watchdog(threading.Thread):
    """Watches this rank's main thread and the posts of the others.

    Args:
        board: of the job.
        timeout_seconds: for a wait for other ranks, or a step, without progress. Work outside of steps that others do
            not wait for (a long save, a callback) may take longer.
        reports: the folder for the report of a hang.
        stop: votes when all are asked to stop; then a standstill is not allowed more than two minutes.
        leaving: called before this thread ends the process.
    """

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        reports: Path,
        stop: AgreedStop,
        leaving: Callable[[], Any],
    ) -> None:
        super().__init__(name="lightning-3d-watchdog", daemon=True)
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout_seconds
        self._reports = reports
        self._stop_agreement = stop
        self._coordinates: Mapping[str, int] = {}
        self._stages: Mapping[int, Sequence[int]] = {}
        self._leaving = leaving
        self.signals: Signals | None = None
        self._listener = Listener(board, world_size=world_size)
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._posting = threading.Lock()
        self._token: Any = None
        self._still_since = time.monotonic()
        self._doomed_since: float | None = None
        self._failure_known_since: float | None = None
        self._told = False
        self._hang_seen_at: float | None = None
        self._asked_at: float | None = None
        self._passed_limit = timeout_seconds
        self._last: Post | None = None

    def run(self) -> None:
        self._post()
        while not self._ended.wait(POLL_SECONDS):
            # A rank that has just ended, a post half read: the next look will do.
            with contextlib.suppress(OSError, ValueError), UNDISTURBED:
                self.look()

    def place(self, coordinates: Mapping[str, int], *, stages: Mapping[int, Sequence[int]]) -> None:
        """The ranks have met: this one's place in the mesh, and the ranks that hold each stage of its pipeline."""
        self._coordinates, self._stages = coordinates, stages
        self._post()

    def fail(self, error: BaseException) -> None:
        """This rank's run dies of that, or of what is known already; the others hear it before it unwinds."""
        # It may be an effect of a killed rank, and torchrun ends this one before its watchdog looks again.
        self.tell_of_failure()
        HERE.fail(type(error).__name__)
        self._post()
        if isinstance(error, Exception) and not failures.lost_connection(HERE.failure):
            self._tell_after_an_end()

    def close(self, *, done: bool) -> None:
        """No more watching; tells the others how this rank's run has ended."""
        if not self._ended.is_set():
            self._ended.set()
            self._post(done=done, last=True)
            if done:
                self._tell_after_an_end()
            self._board.leave(self._rank)

    def look(self) -> None:
        """Once: post, vote, and act on what the others say and on this rank's own standstill."""
        self._hear_signals()
        self._stop_agreement.answer()
        self._post()
        if self._repeats_verdict():
            self._leave()
        self._end_with_the_job()
        if self._board.said("hang") is not None:
            self._look_at_a_hang()
            return
        bounded = self._waits() or HERE.bounded
        if bounded and self._stands_still() and not _debugged(self._frame()) and self._claims("hang"):
            self._judge()

    def _hear_signals(self) -> None:
        if self.signals is not None:
            self.signals.hear()
            if self.signals.insisted_seconds > INSIST_SECONDS:
                self._leave()

    def _stands_still(self) -> bool:
        """Whether the main thread got no further for too long; once all are asked to stop, that is less."""
        limits = {self._timeout: self._still_since}
        if self._stop_agreement.signal is not None:
            self._asked_at = self._asked_at or time.monotonic()
            limits.setdefault(STOP_GRACE_SECONDS, max(self._still_since, self._asked_at))
        for limit, since in limits.items():
            # So that the report is out when the time is.
            if time.monotonic() - since > limit - min(2.0, limit / 4):
                self._passed_limit = limit
                return True
        return False

    # ------------------------------------------------------------------ posts

    def _post(self, *, done: bool = False, last: bool = False) -> None:
        with self._posting:
            if self._ended.is_set() and not last:
                # A look that was begun before the end must not unsay it.
                return
            frame = self._frame()
            sequence = sequence_numbers()
            token = (HERE.marks, HERE.waits, sequence, _line(frame))
            if token != self._token:
                self._token, self._still_since = token, time.monotonic()
            post = Post(
                rank=self._rank,
                pid=os.getpid(),
                time=time.time(),
                coordinates=self._coordinates,
                where=HERE.describe(),
                place=_place(frame),
                still_seconds=time.monotonic() - self._still_since,
                waiting=self._waits(),
                awaits=tuple(self._stages.get(HERE.awaits, ())) if HERE.awaits is not None else (),
                sequence=sequence,
                failure=HERE.failure,
                failed_in=HERE.failed_in,
                failed_at=HERE.failed_at if HERE.failure else 0.0,
                done=done,
                vote=self._stop_agreement.vote,
                host=MACHINE,
                hostname=HOSTNAME,
            )
            self._last = post
            self._board.post(post)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._main or 0)

    def _waits(self) -> bool:
        """Whether the main thread does, or its last Python is torch's code for talking: making groups, a store."""
        if HERE.waiting_since is not None:
            return True
        frame = self._frame()
        name = "" if frame is None else frame.f_code.co_filename
        return name.startswith(_TALKING) and not name.startswith(_WRITING)

    # ------------------------------------------------------------------ failures

    def _end_with_the_job(self) -> None:
        """When a rank of this job has failed, end this one too, should it not come to that by itself."""
        if self._world_size == 1:
            return
        posts = self._listener.read_all()
        if self._doomed_since is None:
            if not failures.failed(posts, machine=MACHINE) and self._board.said("told") is None:
                return
            self._doomed_since = time.monotonic()
        self._tell_cause(posts)
        if time.monotonic() - self._doomed_since > UNWIND_SECONDS:
            self._leave()

    def tell_of_failure(self) -> None:
        """By the main thread of a rank that fails, which may be an effect of something else: tell that first.

        Where it has lost a connection to another machine, it takes some seconds to know what is lost.
        """
        deadline = time.monotonic() + hang_report.SILENT_SECONDS + 2 * POLL_SECONDS
        while True:
            # Those who leave at a verdict break connections too.
            if self._repeats_verdict():
                self._leave()
            posts = self._listener.read_all()
            lost = failures.lost_connection(HERE.failure) and any(post.host != MACHINE for post in posts.values())
            if (lost or failures.failed(posts, machine=MACHINE)) and self._tell_cause(posts):
                return
            if not lost or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)

    def _tell_after_an_end(self) -> None:
        """Whose run has ended watches no more.

        So a failure is told by the rank that fails, if that sees such an end, and by the one that ends, if that sees
        such a failure; each looks once it has posted its own.
        """
        # A post half read, a board that is gone.
        with contextlib.suppress(OSError, ValueError):
            posts = self._listener.read_all() if self._world_size > 1 else {}
            if any(post.done for post in posts.values()) and failures.failed(posts, machine=MACHINE):
                self._tell_cause(posts)

    def _tell_cause(self, posts: Mapping[int, Post]) -> bool:
        """Tell why the job fails, once on each machine, unless a supervisor of ours does; whether that is done."""
        if self._told or self._board.said("hang") is not None:
            return self._told
        now = time.time()
        self._failure_known_since = self._failure_known_since or now
        # Whoever left was ended by its watchdog.
        present = {rank: post for rank, post in posts.items() if post.failure or not self._board.left(rank)}
        cause = failures.first_cause(
            present, world_size=self._world_size, machine=MACHINE, known_since=self._failure_known_since, now=now
        )
        text = self._board.said("told") or (cause.text if cause else "")
        if not text:
            return False
        self._board.claim("told", text)
        text = self._board.said("told") or text
        # A supervisor knows its own ranks only.
        here = all(post.host == MACHINE for post in posts.values()) or (cause is not None and cause.machine == MACHINE)
        supervised = supervised_folder() is not None and here
        if not supervised and self._board.claim(f"told-{MACHINE}"):
            attempt(lambda: print(text, file=sys.stderr, flush=True), seconds=2.0)
        self._told = True
        return True

    def _leave(self) -> NoReturn:
        """End this process, and those of this machine that are silent: nobody on another machine can."""
        stopped: list[Post] = []
        try:
            flush()
            attempt(lambda: stopped.extend(self._stopped_here()), seconds=2.0)
            for post in stopped:
                attempt(partial(self._board.leave, post.rank), seconds=2.0)
            attempt(self._let_neighbours_leave, seconds=2.0)
            attempt(self._leaving, seconds=2.0)
            for post in stopped:
                # It takes no other signal. It may be the launcher of this rank, which the kernel then ends as well.
                with contextlib.suppress(OSError):
                    os.kill(post.pid, signal.SIGKILL)
        finally:
            # The main thread hangs, so it can't be asked to go.
            os._exit(1)

    def _let_neighbours_leave(self) -> None:
        """Where others can't see that ranks of this machine are gone: the kernel may end them with this one."""
        posts = self._heard().values()
        here = [post.rank for post in posts if post.host == MACHINE]
        deadline = time.monotonic() + 3 * POLL_SECONDS
        while len(here) < len(posts) and time.monotonic() < deadline:
            self._board.leave(self._rank)
            if all(self._board.left(rank) for rank in here):
                return
            time.sleep(POLL_SECONDS / 10)

    def _stopped_here(self) -> list[Post]:
        now = time.time()
        return [
            post
            for post in self._heard().values()
            if post.host == MACHINE
            and post.rank != self._rank
            and hang_report.silent(post, now=now)
            and not self._board.left(post.rank)
            and runs(post.pid)
        ]

    # ------------------------------------------------------------------ hangs

    def _look_at_a_hang(self) -> None:
        """Somebody has noticed one: write stacks, and judge it if they who should have done so are gone."""
        if self._hang_seen_at is None:
            self._hang_seen_at = time.monotonic()
            attempt(lambda: write_stacks(self._reports, self._rank), seconds=STACKS_SECONDS)
        turn = int((time.monotonic() - self._hang_seen_at) // JUDGE_SECONDS)
        if turn > 0 and self._claims(f"hang-{turn}"):
            self._judge()

    def _claims(self, name: str) -> bool:
        """Whether this is the first to say so; where the board takes nothing, each is."""
        return self._board.claim(name) or self._board.said(name) is None

    def _judge(self) -> NoReturn:
        """As the first to notice: collect what all say, tell it, and end the job, whatever goes wrong in telling."""
        try:
            attempt(lambda: write_stacks(self._reports, self._rank), seconds=STACKS_SECONDS)
            self._tell(self._collect())
        finally:
            self._board.claim("verdict")
            self._leave()

    def _collect(self) -> dict[int, Post]:
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 2)
            self._post()
            found = self._listener.read_all()
            able = [
                rank for rank, post in found.items() if not post.done and not hang_report.silent(post, now=time.time())
            ]
            if all(stacks_file(self._reports, rank).exists() for rank in able):
                break
        return self._heard()

    def _heard(self) -> dict[int, Post]:
        found = self._listener.read_all()
        own = found.get(self._rank)
        # Where the disk is full, all posts are old.
        broken = own is None or hang_report.silent(own, now=time.time())
        return {self._rank: self._last} if broken and self._last is not None else found

    def _tell(self, found: dict[int, Post]) -> None:
        now = time.time()
        about: dict[str, Any] = {"world_size": self._world_size, "timeout_seconds": self._passed_limit, "now": now}
        short = hang_report.headline(found, **about)
        summary = hang_report.summarise(found, **about, details=str(self._reports))
        attempt(lambda: write_report(f"HangError: {short}"), seconds=2.0)
        attempt(lambda: (self._reports / "summary.txt").write_text(f"{summary}\n"), seconds=2.0)
        # Before the verdict, at which others on this machine would tell it.
        first_here = self._claims(f"verdict-{MACHINE}")
        self._board.claim("verdict", summary)
        if first_here:
            attempt(lambda: print(summary, file=sys.stderr, flush=True), seconds=2.0)

    def _repeats_verdict(self) -> bool:
        """Whether there is one; the first to see it on another machine than the judge's tells it there."""
        summary = self._board.said("verdict")
        if summary is None:
            return False
        headline = summary.partition("\n")[0].rstrip(".")
        if summary and self._board.claim(f"verdict-{MACHINE}"):
            attempt(lambda: write_report(f"HangError: {headline}"), seconds=2.0)
            attempt(lambda: print(summary, file=sys.stderr, flush=True), seconds=2.0)
        return True


def _debugged(frame: FrameType | None) -> bool:
    """Whether somebody looks at the code in a debugger."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).split(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _line(frame: FrameType | None) -> tuple[Any, ...]:
    return () if frame is None else (frame.f_code.co_filename, frame.f_lasti)


def _place(frame: FrameType | None) -> str:
    """The innermost line that is the user's, as far as names of files tell; else the innermost."""
    innermost = frame
    while frame is not None and any(part in frame.f_code.co_filename for part in _LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
