"""Watches the processes of a job on this machine: the first failure is told once, and nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lightning_3d.errors import Lightning3DError
from lightning_3d.strategies.processes.board import Board, told
from lightning_3d.whereabouts import HERE

# Where a rank writes what it died of, so that the cause is known before its peers' complaints about lost connections.
REPORT_VARIABLE = "LIGHTNING_3D_REPORT"
# The folder of a supervisor that is told what its function raises, and not what the function has caught.
FOLDER_VARIABLE = "LIGHTNING_3D_FOLDER"

POLL_SECONDS = 0.05
# A peer may notice a failure and end before the rank that failed has written its report.
SETTLE_SECONDS = 0.5
# For peers of a failed rank: they hang in a collective, and have nothing left to save.
FAILURE_GRACE_SECONDS = 3.0
# For ranks that are asked to stop: they finish a step, and may want to write a checkpoint. A second signal is quicker.
STOP_GRACE_SECONDS = 120.0
# How long the others may take once rank 0 has ended well.
EXIT_SECONDS = 60.0

# Signals that come from outside or from a fault of memory; others (SIGABRT) may follow from a peer's failure.
_FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
# Exit codes of ranks that were asked to stop: as all agreed, or before a handler was there.
_ASKING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_STOPPED_CODES = (*(-number for number in _ASKING), *(128 + number for number in _ASKING))

# Of an error, in one line; its traceback has all of it.
_LONGEST_LINE = 1000


class Process(Protocol):
    """What `subprocess.Popen` and a forked child have in common."""

    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


@dataclass(frozen=True)
class Failure:
    """The first rank of a job that failed.

    Args:
        rank: its number in the job.
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


class Ranks:
    """The processes of this machine's ranks, what they reported, and when each was last seen alive.

    Args:
        processes: one per rank of this machine, in order; None is this process.
        report_paths: where each would write its report (see `report_errors`).
        first_rank: number of the first of them in the job.
    """

    def __init__(
        self, processes: Sequence[Process | None], *, report_paths: Sequence[Path], first_rank: int = 0
    ) -> None:
        self._processes = processes
        self.report_paths = report_paths
        self.first_rank = first_rank
        self._alive_at = [time.monotonic()] * len(report_paths)

    def codes(self) -> list[int | None]:
        """Exit codes; None for what runs."""
        now = time.monotonic()
        codes = [None if process is None else process.poll() for process in self._processes]
        for number, code in enumerate(codes):
            if code is None:
                self._alive_at[number] = now
        return codes

    def failure(self, *, stopped_by: Sequence[int] = ()) -> Failure | None:
        """Which rank failed first, or None while none has.

        Args:
            stopped_by: signals by which all were asked to stop: then what is usual after that is no failure.
        """
        if not any(_bad(code, stopped_by) for code in self.codes()) and not any(map(Path.exists, self.report_paths)):
            return None
        # A peer may have noticed it first.
        time.sleep(SETTLE_SECONDS)
        codes = [code if code is None or _bad(code, stopped_by) else 0 for code in self.codes()]
        found = first_failure(
            codes, report_paths=self.report_paths, alive_at=self._alive_at, first_rank=self.first_rank
        )
        return None if found is None else replace(found, rank=self.first_rank + found.rank)

    def late(self) -> Failure | None:
        """The first rank that still runs, as the failure of a job whose rank 0 has ended long ago."""
        running = [number for number, process in enumerate(self._processes) if process and process.poll() is None]
        if not running:
            return None
        reason = f"still ran {EXIT_SECONDS:.0f} s after rank 0 had ended"
        rank = self.first_rank + running[0]
        return Failure(rank, 1, reason, where=_where(_board_of(self.report_paths[0]), rank))


def _bad(code: int | None, stopped_by: Sequence[int]) -> bool:
    if code is None or code == 0:
        return False
    # Lightning ends with 1 after Ctrl-C.
    return not stopped_by or not (code in _STOPPED_CODES or (code == 1 and stopped_by[0] == signal.SIGINT))


def supervise(
    processes: Sequence[Process],
    *,
    report_paths: Sequence[Path],
    deadline: float | None = None,
    exit_seconds: float | None = None,
    stopped_by: Sequence[int] = (),
) -> Failure | None:
    """Wait until every process has ended well, or one has failed; then end the others.

    Args:
        processes: one per rank, in order.
        report_paths: where each would write its report (see `report_errors`).
        deadline: on the clock of `time.monotonic`; None waits for ever.
        exit_seconds: how long the others may take once rank 0 has ended well; None is for ever.
        stopped_by: grows when `stopping_on_signals` has asked all to stop: a second signal kills them.

    Raises:
        TimeoutError: the deadline passed; its one argument is the list of ranks that had not ended.
    """
    ranks = Ranks(processes, report_paths=report_paths)
    first_ended_at: float | None = None
    try:
        while True:
            # Ranks that do not stop are killed by us.
            if len(stopped_by) < 2 and (failure := ranks.failure(stopped_by=stopped_by)) and len(stopped_by) < 2:
                return failure
            codes = ranks.codes()
            if all(code is not None and (code == 0 or stopped_by) for code in codes):
                return None
            if codes[0] == 0:
                first_ended_at = first_ended_at or time.monotonic()
                if exit_seconds is not None and time.monotonic() - first_ended_at > exit_seconds:
                    return ranks.late()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError([rank for rank, code in enumerate(codes) if code is None])
            time.sleep(POLL_SECONDS)
    finally:
        end(processes, grace_seconds=FAILURE_GRACE_SECONDS)


def first_failure(
    codes: Sequence[int | None], *, report_paths: Sequence[Path], alive_at: Sequence[float], first_rank: int = 0
) -> Failure | None:
    """Which rank failed first, or None while none has.

    The earliest report counts, and before it the death of a rank that reported nothing: by SIGKILL or a fault of
    memory, or by another signal if no report is older (a peer's failure may make NCCL abort). But what the watchdogs
    say of a hang goes first: they kill a stopped rank themselves.

    Args:
        codes: exit codes, None for ranks that run.
        alive_at: when each was seen alive last, on the clock of `time.monotonic`.
        first_rank: number of the first of them in the job, on whose board they post.
    """
    boards = [_board_of(path) for path in report_paths]
    hung = any(board.said("verdict") is not None for board in boards)
    reports = {rank: report for rank, path in enumerate(report_paths) if (report := _read_report(path))}
    earliest = min((report["time"] for report in reports.values()), default=float("inf"))
    for rank, code in enumerate(codes):
        if code is None or code >= 0 or hung or rank in reports:
            continue
        if -code in _FATAL or earliest > alive_at[rank]:
            where = _where(boards[rank], first_rank + rank)
            return Failure(rank, 128 - code, f"was killed by {_signal_name(-code)}", where=where)
    if reports:
        # Where another machine has judged, a broken connection may be reported before the hang is.
        hangs = {rank: report for rank, report in reports.items() if hung and report["error"].startswith("HangError")}
        rank, report = min((hangs or reports).items(), key=lambda pair: pair[1]["time"])
        reason = f"reports {report['error']}" if hung else f"raised {report['error']}"
        where = "" if hung else _where(boards[rank], first_rank + rank, now=report.get("where", ""))
        return Failure(rank, max(codes[rank] or 1, 1), reason, report["traceback"], where)
    for rank, code in enumerate(codes):
        if code:
            how = f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
            return Failure(rank, code if code > 0 else 128 - code, how, where=_where(boards[rank], first_rank + rank))
    return None


def supervised_folder() -> Path | None:
    """Where this rank's supervisor reads posts and tells failures; None where none of ours has started it."""
    report, folder = os.environ.get(REPORT_VARIABLE), os.environ.get(FOLDER_VARIABLE)
    return Path(report).parent if report else Path(folder) if folder else None


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
    signal_all(processes, signal.SIGTERM)
    wait_all(processes, seconds=grace_seconds)
    signal_all(processes, signal.SIGKILL)
    wait_all(processes, seconds=10.0)


def wait_all(processes: Sequence[Process], *, seconds: float) -> bool:
    """Whether all processes ended within that time."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def signal_all(processes: Sequence[Process], sig: int) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(sig)


@contextlib.contextmanager
def stopping_on_signals(processes: Sequence[Process]) -> Iterator[list[int]]:
    """Pass SIGINT, SIGTERM and SIGHUP on, once each; what does not stop in time, or is told twice, is killed.

    A SIGHUP that this process ignores (`nohup`) is left so, and what it starts ignores it too.

    Yields:
        The signals that arrived, in order. Outside the main thread Python allows no handlers, and nothing is passed on.
    """
    received: list[int] = []

    def pass_on(sig: int, frame: object) -> None:
        received.append(sig)
        signal_all(processes, sig if len(received) == 1 else signal.SIGKILL)
        if len(received) == 1:
            signal.setitimer(signal.ITIMER_REAL, STOP_GRACE_SECONDS)

    def kill_all(sig: int, frame: object) -> None:
        received.append(sig)
        signal_all(processes, signal.SIGKILL)

    handlers = {signal.SIGINT: pass_on, signal.SIGTERM: pass_on, signal.SIGHUP: pass_on, signal.SIGALRM: kill_all}
    previous: dict[int, object] = {}
    try:
        for sig, handler in handlers.items():
            if sig == signal.SIGHUP and signal.getsignal(sig) == signal.SIG_IGN:
                continue
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
        if not reported(error):
            where = getattr(error, "_lightning_3d_where", None) or HERE.describe()
            written = write_report(_words(error), traceback.format_exc(), path=path, where=where)
            with contextlib.suppress(AttributeError):
                error._lightning_3d_where = where  # type: ignore[attr-defined]
                error._lightning_3d_reported = written  # type: ignore[attr-defined]
        raise


def reported(error: BaseException) -> bool:
    """Whether this rank's supervisor knows it."""
    return getattr(error, "_lightning_3d_reported", False)


def _words(error: BaseException) -> str:
    described = traceback.TracebackException.from_exception(error)
    described.__notes__ = None
    text = list(described.format_exception_only())[-1].strip()
    if isinstance(error, Lightning3DError):
        # Ours say what to do, at their end.
        return text
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} ..."


def write_report(
    summary: str, details: str = "", *, path: str | os.PathLike[str] | None = None, where: str | None = None
) -> bool:
    """Say what this rank dies of: to its supervisor, if it can, which is returned, and to others.

    Args:
        where: it was when that happened; None means now.
    """
    HERE.fail(summary, where=where)
    target = path or os.environ.get(REPORT_VARIABLE)
    if target:
        report = {"time": time.monotonic(), "error": summary, "traceback": details, "where": where or HERE.describe()}
        partial = Path(f"{target}.partial")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(report))
            partial.replace(target)
            return True
    return False


def _read_report(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
