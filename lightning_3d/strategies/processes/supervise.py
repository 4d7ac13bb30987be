"""Watches the processes of a job on this machine: the first failure is told once, and nothing is left running."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightning_3d.strategies.processes.board import Board, told
from lightning_3d.whereabouts import HERE

# Where a rank writes what it died of, so that the cause is known before its peers' complaints about lost connections.
REPORT_VARIABLE = "LIGHTNING_3D_REPORT"

POLL_SECONDS = 0.05
# A peer may notice a failure and end before the rank that failed has written its report.
SETTLE_SECONDS = 0.5
# For peers of a failed rank: they hang in a collective, and have nothing left to save.
FAILURE_GRACE_SECONDS = 3.0
# For ranks that are asked to stop: they finish a step, and may want to write a checkpoint. A second signal is quicker.
STOP_GRACE_SECONDS = 120.0

# Of an error, in one line; its traceback has all of it.
_LONGEST_LINE = 1000

_PR_SET_PDEATHSIG = 1


class Process(Protocol):
    """What `subprocess.Popen` and a forked child have in common."""

    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


@dataclass(frozen=True)
class Failure:
    """The first rank of a job that failed.

    Args:
        rank: its number, on this machine.
        exit_code: as a shell tells it: 128 + n for signal n.
        reason: one line: what it raised, which signal killed it, or its exit code.
        traceback: of the exception; empty where it left none.
        where: what it was in, or was last seen in, in words; empty where nobody knows.
    """

    rank: int
    exit_code: int
    reason: str
    traceback: str = ""
    where: str = ""

    def sentence(self, world_size: int) -> str:
        """What happened, where, in one line without an end."""
        text = f"rank {self.rank} of {world_size} {self.reason}"
        return f"{text}; {self.where}" if self.where else text


class ForkedProcess:
    """A child made by `os.fork`, with the face of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        # As Popen has: of two threads that wait for one child, the later would find no such child.
        self._asking = threading.Lock()

    def poll(self) -> int | None:
        # Never waiting for the lock, which a signal handler may find held by what it interrupts.
        if self._code is None and self._asking.acquire(blocking=False):
            try:
                if self._code is None:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self._code = os.waitstatus_to_exitcode(status) if pid else None
            finally:
                self._asking.release()
        return self._code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def supervise(
    processes: Sequence[Process],
    *,
    report_paths: Sequence[Path],
    deadline: float | None = None,
    stopped_by: Sequence[int] = (),
) -> Failure | None:
    """Wait until every process has ended well, or one has failed; then end the others.

    Args:
        processes: one per rank, in order.
        report_paths: where each would write its report (see `report_errors`).
        deadline: on the clock of `time.monotonic`; None waits for ever.
        stopped_by: grows when `stopping_on_signals` has asked all to stop: then no way of ending is a failure.

    Raises:
        TimeoutError: the deadline passed; its one argument is the list of ranks that had not ended.
    """
    try:
        while True:
            codes = [process.poll() for process in processes]
            if all(code == 0 or (stopped_by and code is not None) for code in codes):
                return None
            if stopped_by:
                time.sleep(POLL_SECONDS)
                continue
            if any(codes) or any(path.exists() for path in report_paths):
                time.sleep(SETTLE_SECONDS)
                failure = first_failure([process.poll() for process in processes], report_paths=report_paths)
                if failure is not None and not stopped_by:
                    return failure
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError([rank for rank, code in enumerate(codes) if code is None])
            time.sleep(POLL_SECONDS)
    finally:
        end(processes, grace_seconds=FAILURE_GRACE_SECONDS)


def first_failure(codes: Sequence[int | None], *, report_paths: Sequence[Path]) -> Failure | None:
    """Which rank failed first, or None while none has; `codes` are exit codes, None for ranks that run.

    A rank that a signal killed is a cause and never an effect (peers only raise); after it counts the earliest report.
    But what the watchdogs say of a hang goes first: they kill a stopped rank themselves.
    """
    boards = [_board_of(path) for path in report_paths]
    hung = any(board.said("verdict") is not None for board in boards)
    for rank, code in enumerate(codes):
        if code is not None and code < 0 and not hung:
            return Failure(rank, 128 - code, f"was killed by {_signal_name(-code)}", where=_where(boards[rank], rank))
    reports = [(rank, report) for rank, path in enumerate(report_paths) if (report := _read_report(path))]
    if reports:
        rank, report = min(reports, key=lambda pair: pair[1]["time"])
        reason = f"reports {report['error']}" if hung else f"raised {report['error']}"
        where = "" if hung else _where(boards[rank], rank, now=report.get("where", ""))
        return Failure(rank, codes[rank] or 1, reason, report["traceback"], where)
    for rank, code in enumerate(codes):
        if code:
            return Failure(rank, code, f"ended with exit code {code}", where=_where(boards[rank], rank))
    return None


def _board_of(report: Path) -> Board:
    """The board of the newest run of a job whose reports are in this folder; see `board_of_run`."""
    runs = sorted(report.parent.glob("run-*"))
    return Board(runs[-1] if runs else report.parent)


def board_of_run(folder: Path, number: int) -> Board:
    """The board of the run (fit, validate, ...) of this number in a script."""
    return Board(folder / f"run-{number:04d}")


def _where(board: Board, rank: int, *, now: str = "") -> str:
    """What a rank was in, with its place in the mesh; `now` is newer than its last post."""
    post = board.read(rank)
    if not now and post is None:
        return ""
    text = f"it was in {now}" if now or post is None else f"last seen in {post.where}"
    return f"{text}{told(post.coordinates)}" if post else text


def end(processes: Sequence[Process], *, grace_seconds: float) -> None:
    """SIGTERM to every process that still runs, SIGKILL to what is left after the grace; all are reaped."""
    _signal_all(processes, signal.SIGTERM)
    wait_all(processes, seconds=grace_seconds)
    _signal_all(processes, signal.SIGKILL)
    wait_all(processes, seconds=10.0)


def wait_all(processes: Sequence[Process], *, seconds: float) -> bool:
    """Whether all processes ended within that time."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _signal_all(processes: Sequence[Process], sig: int) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(sig)


@contextlib.contextmanager
def stopping_on_signals(processes: Sequence[Process]) -> Iterator[list[int]]:
    """Pass SIGINT, SIGTERM and SIGHUP on, once each; what does not stop in time, or is told twice, is killed.

    Yields:
        The signals that arrived, in order. Outside the main thread Python allows no handlers, and nothing is passed on.
    """
    received: list[int] = []

    def pass_on(sig: int, frame: object) -> None:
        received.append(sig)
        _signal_all(processes, sig if len(received) == 1 else signal.SIGKILL)
        if len(received) == 1:
            signal.setitimer(signal.ITIMER_REAL, STOP_GRACE_SECONDS)

    def kill_all(sig: int, frame: object) -> None:
        _signal_all(processes, signal.SIGKILL)

    handlers = {signal.SIGINT: pass_on, signal.SIGTERM: pass_on, signal.SIGHUP: pass_on, signal.SIGALRM: kill_all}
    previous: dict[int, object] = {}
    try:
        for sig, handler in handlers.items():
            with contextlib.suppress(ValueError):
                previous[sig] = signal.signal(sig, handler)
        yield received
    finally:
        if previous:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in previous.items():
            signal.signal(number, old)  # type: ignore[arg-type]


@contextlib.contextmanager
def report_errors(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Write an exception that passes through to the report that the supervisor of this rank reads, and let it pass."""
    try:
        yield
    except Exception as error:
        # Where one block lies in another, the inner one has told it, or has at least seen where it came from: by now
        # the run may be torn down.
        if not getattr(error, "_lightning_3d_reported", False):
            where = getattr(error, "_lightning_3d_where", None) or HERE.describe()
            told = write_report(_one_line(error), traceback.format_exc(), path=path, where=where)
            with contextlib.suppress(AttributeError):
                error._lightning_3d_where = where  # type: ignore[attr-defined]
                error._lightning_3d_reported = told  # type: ignore[attr-defined]
        raise


def _one_line(error: BaseException) -> str:
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} ..."


def write_report(
    summary: str, details: str = "", *, path: str | os.PathLike[str] | None = None, where: str | None = None
) -> bool:
    """Say what this rank dies of: to its supervisor, if there is a place for that, which is returned, and to others.

    Args:
        where: it was when that happened; None means now.
    """
    HERE.failure = HERE.failure or summary
    target = path or os.environ.get(REPORT_VARIABLE)
    if target:
        report = {"time": time.monotonic(), "error": summary, "traceback": details, "where": where or HERE.describe()}
        partial = Path(f"{target}.partial")
        with contextlib.suppress(FileNotFoundError):
            partial.write_text(json.dumps(report))
            partial.replace(target)
    return bool(target)


def _read_report(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens. Linux only; a no-op elsewhere.

    It is to be called in the child, by the thread that the parent made it with.
    """
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_LIBC: ctypes.CDLL | None = None


def _libc() -> ctypes.CDLL:
    # Loaded by the parent, so that the child between fork and exec takes no lock.
    global _LIBC
    if _LIBC is None:
        _LIBC = ctypes.CDLL(None)
    return _LIBC


if sys.platform == "linux":
    _libc()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
