"""A thread in every rank: it tells where the rank is, and ends it when the job has failed or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_3d.strategies.processes import hang_report
from lightning_3d.strategies.processes.board import Board, Post
from lightning_3d.strategies.processes.stopping import AgreedStop
from lightning_3d.strategies.processes.supervise import REPORT_VARIABLE, write_report
from lightning_3d.whereabouts import HERE

POLL_SECONDS = 0.5
# How long a run whose end is decided may take to unwind: callbacks, loggers. A launcher of ours is quicker.
UNWIND_SECONDS = 15.0
# How long the ranks have to write their stacks.
STACKS_SECONDS = 3.0

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (str(Path(os.__file__).parent), _PACKAGE, "site-packages", "dist-packages", "<frozen")
_TALKING = str(Path(dist.__file__).parent)
_WRITING = str(Path(dist.__file__).parent / "checkpoint")
_HOST = socket.gethostname()


class Watchdog(threading.Thread):
    """Watches this rank's main thread and the posts of the others.

    Args:
        board: of the job.
        timeout_seconds: for a wait for other ranks, or a step, without progress. Work outside of steps that others do
            not wait for (a long save, a callback) may take longer.
        reports: the folder for the report of a hang.
        stop: votes when all are asked to stop.
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
        # So that the report is out when the time is.
        self._patience = timeout_seconds - min(2.0, timeout_seconds / 4)
        self._reports = reports
        self._stop_agreement = stop
        self._coordinates: Mapping[str, int] = {}
        self._stages: Mapping[int, Sequence[int]] = {}
        self._leaving = leaving
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._posting = threading.Lock()
        self._token: Any = None
        self._still_since = time.monotonic()
        self._doomed_since: float | None = None
        self._told = False

    def run(self) -> None:
        self._post()
        while not self._ended.wait(POLL_SECONDS):
            # A folder that went, a rank that has just ended: the next look will do.
            with contextlib.suppress(OSError, ValueError):
                self.look()

    def place(self, coordinates: Mapping[str, int], *, stages: Mapping[int, Sequence[int]]) -> None:
        """The ranks have met: this one's place in the mesh, and the ranks that hold each stage of its pipeline."""
        self._coordinates, self._stages = coordinates, stages
        self._post()

    def close(self, *, done: bool) -> None:
        """No more watching; tells the others how this rank's run has ended."""
        if not self._ended.is_set():
            self._ended.set()
            self._post(done=done)

    def look(self) -> None:
        """Once: post, vote, and act on what the others say and on this rank's own standstill."""
        self._stop_agreement.answer()
        self._post()
        if self._board.said("verdict") is not None:
            self._leave()
        if self._board.said("hang") is not None:
            self._write_stacks()
            return
        self._end_with_the_job()
        waits = HERE.waiting_since is not None or self._waits_in_torch()
        steps = HERE.batch is not None
        if time.monotonic() - self._still_since > self._patience and (waits or steps):
            if self._board.claim("hang"):
                self._judge()
            else:
                self._write_stacks()

    # ------------------------------------------------------------------ posts

    def _post(self, *, done: bool = False) -> None:
        with self._posting:
            frame = self._frame()
            sequence = _sequence_numbers()
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
                waiting=HERE.waiting_since is not None or self._waits_in_torch(),
                awaits=tuple(self._stages.get(HERE.awaits, ())) if HERE.awaits is not None else (),
                sequence=sequence,
                failure=HERE.failure,
                done=done,
                vote=self._stop_agreement.vote,
                host=_HOST,
            )
            self._board.post(post)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._main or 0)

    def _waits_in_torch(self) -> bool:
        """Whether the main thread's last Python is torch's code for talking: meeting, making groups, a store."""
        frame = self._frame()
        name = "" if frame is None else frame.f_code.co_filename
        return name.startswith(_TALKING) and not name.startswith(_WRITING)

    # ------------------------------------------------------------------ failures

    def _end_with_the_job(self) -> None:
        """When a rank of this job has failed, end this one too, should it not come to that by itself."""
        if self._doomed_since is None:
            if not self.tell_of_failure():
                return
            self._doomed_since = time.monotonic()
        if time.monotonic() - self._doomed_since > UNWIND_SECONDS:
            self._leave()

    def tell_of_failure(self) -> bool:
        """Whether a rank has failed; the first to ask tells, unless a supervisor of ours will do it better."""
        first = self._failed()
        if first is not None and REPORT_VARIABLE not in os.environ and self._board.claim("told"):
            reason = f"raised {first.failure}" if first.failure else "was killed"
            print(
                f"{first.name} of {self._world_size} {reason}; last seen in {first.where}.", file=sys.stderr, flush=True
            )
        return first is not None

    def _failed(self) -> Post | None:
        for post in self._board.read_all(self._world_size).values():
            if post.failure or (not post.done and post.host == _HOST and not _runs(post.pid)):
                return post
        return None

    def _leave(self) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        self._leaving()
        # The main thread hangs, so it can't be asked to go.
        os._exit(1)

    # ------------------------------------------------------------------ hangs

    def _judge(self) -> NoReturn:
        """As the first to notice: collect what all say, tell it, and end the job."""
        self._write_stacks()
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 2)
            self._post()
            posts = self._board.read_all(self._world_size).values()
            able = [post.rank for post in posts if not hang_report.silent(post, now=time.time())]
            if all((self._reports / f"rank_{rank:05d}.txt").exists() for rank in able):
                break
        found, now = self._board.read_all(self._world_size), time.time()
        short = hang_report.headline(found, world_size=self._world_size, timeout_seconds=self._timeout, now=now)
        summary = hang_report.summarise(
            found, world_size=self._world_size, timeout_seconds=self._timeout, now=now, details=str(self._reports)
        )
        with contextlib.suppress(OSError):
            (self._reports / "summary.txt").write_text(f"{summary}\n")
        print(summary, file=sys.stderr, flush=True)
        write_report(f"HangError: {short}")
        self._board.claim("verdict", summary)
        for post in found.values():
            # A stopped process takes no other signal, and its peers' launcher may be that very process.
            if post.host == _HOST and hang_report.silent(post, now=now):
                with contextlib.suppress(OSError):
                    os.kill(post.pid, signal.SIGKILL)
        self._leave()

    def _write_stacks(self) -> None:
        path = self._reports / f"rank_{self._rank:05d}.txt"
        if path.exists():
            return
        self._reports.mkdir(parents=True, exist_ok=True)
        frames = sys._current_frames()
        lines = [f"rank {self._rank}: {HERE.describe()}", f"collectives begun, by group: {_sequence_numbers()}", ""]
        for thread in threading.enumerate():
            if thread is not self and thread.ident in frames:
                lines += [f"thread {thread.name}", *traceback.format_stack(frames[thread.ident])]
        _write_flight_record(self._reports / f"rank_{self._rank:05d}.flight_recorder")
        partial = path.with_suffix(".partial")
        partial.write_text("\n".join(lines))
        partial.replace(path)


def _write_flight_record(path: Path) -> None:
    """What torch noted of the last collectives on CUDA; torch's `fr_trace` reads it."""
    if dist.is_initialized() and torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if dump is not None:
            path.write_bytes(dump())


def _sequence_numbers() -> dict[str, int]:
    """Collectives begun, by the name of the group; the names are equal on all its members."""
    found = {}
    groups: list[tuple[Any, str]] = list(distributed_c10d._world.pg_names.items())
    for group, name in groups:
        with contextlib.suppress(RuntimeError):
            found[str(name)] = group._get_sequence_number_for_group()
    return found


def _line(frame: FrameType | None) -> tuple[Any, ...]:
    return () if frame is None else (frame.f_code.co_filename, frame.f_lasti)


def _place(frame: FrameType | None) -> str:
    """The innermost line that is the user's, as far as names of files tell; else the innermost."""
    innermost = frame
    while frame is not None and any(part in frame.f_code.co_filename for part in _LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _runs(pid: int) -> bool:
    """Whether a process of this machine runs; a stopped one does, one that is dead but not reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return True
