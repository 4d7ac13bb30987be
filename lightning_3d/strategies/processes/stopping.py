"""SIGTERM and Ctrl-C: all ranks stop between the same two steps, where a checkpoint is whole."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_3d.strategies.processes.board import Board

# Watchdogs answer twice a second. A rank that does not is hung or dead, which is told elsewhere.
VOTE_SECONDS = 20.0

_STOP = "stop"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class AgreedStop:
    """Ranks agree on the boundary at which they stop, without a collective in any step.

    A boundary lies before each optimizer step's first batch; all ranks pass the same ones. Whoever is told to stop says
    so on the board. Then each rank's watchdog votes: it tells the last boundary that its main thread has passed. A rank
    that has voted waits at its next boundary for all votes, and goes on to the one after the highest. A rank that still
    computes needs nobody who waits there, since those have done all that belongs to the steps before it.

    Args:
        world_size: ranks that vote.
    """

    def __init__(self, board: Board, *, world_size: int) -> None:
        self._board = board
        self._world_size = world_size
        self._lock = threading.Lock()
        self._passed = 0
        self.vote: int | None = None
        # Whether this rank's run ends at an agreed place: only then may all write a checkpoint together.
        self.agreed = False

    def request(self, sig: int) -> None:
        """All ranks are to stop."""
        self._board.claim(_STOP, str(int(sig)))

    def answer(self) -> bool:
        """Vote if somebody has asked to stop; by the watchdog. Whether this was a new vote."""
        if self.vote is not None or self._board.said(_STOP) is None:
            return False
        with self._lock:
            self.vote = self._passed
        return True

    def boundary(self, *, abort: Callable[[], Any] = lambda: None) -> None:
        """By the main thread at each boundary.

        Args:
            abort: called while it waits for votes; may raise.

        Raises:
            KeyboardInterrupt, SIGTERMException: this is where all ranks stop. The latter ends a process with 143.
        """
        with self._lock:
            self._passed += 1
            if self.vote is None:
                return
        if self._passed == self._last_boundary(abort):
            self.agreed = True
            if int(self._board.said(_STOP) or signal.SIGTERM) == signal.SIGINT:
                raise KeyboardInterrupt
            raise SIGTERMException(128 + signal.SIGTERM)

    def _last_boundary(self, abort: Callable[[], Any]) -> int:
        deadline = time.monotonic() + VOTE_SECONDS
        while time.monotonic() < deadline:
            votes = [post.vote for post in self._board.read_all(self._world_size).values()]
            known = [vote for vote in votes if vote is not None]
            if len(known) == self._world_size:
                return max(known) + 1
            abort()
            time.sleep(0.05)
        raise TimeoutError(
            f"to stop, {self._world_size} ranks had to answer, but {len(known)} did in {VOTE_SECONDS} s."
        )


@contextmanager
def interrupting(request: Callable[[int], Any]) -> Iterator[None]:
    """SIGTERM and the first SIGINT become requests; a second SIGINT interrupts at once.

    Python allows handlers in the main thread only; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, received = os.getpid(), []

    def handle(sig: int, frame: Any) -> None:
        if os.getpid() != owner:
            # A worker of a data loader, forked from us: its loader ends it, as Ctrl-C in a terminal reaches all.
            if sig == signal.SIGTERM:
                os._exit(128 + sig)
            return
        received.append(sig)
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt
        request(sig)

    previous = {sig: signal.signal(sig, handle) for sig in _SIGNALS}
    try:
        yield
    finally:
        for sig, handler in previous.items():
            # None: installed by something other than Python.
            signal.signal(sig, signal.SIG_DFL if handler is None else handler)
