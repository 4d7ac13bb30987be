"""SIGTERM and Ctrl-C: all ranks stop between the same two steps, where a checkpoint is whole."""

from __future__ import annotations

import signal
import threading
import time

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_3d.strategies.processes.board import Board

# Watchdogs answer twice a second. A rank that does not is hung or dead, which is told elsewhere.
VOTE_SECONDS = 20.0

_STOP = "stop"


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
        self._asked: int | None = None
        self.vote: int | None = None
        # Whether this rank's run ends at an agreed place: only then may all write a checkpoint together.
        self.agreed = False

    @property
    def signal(self) -> int | None:
        """By which all are asked to stop; None while they are not."""
        text = self._board.said(_STOP)
        return int(text) if text else self._asked

    def error(self) -> BaseException:
        """What a run that stops raises: the exit code of a process is 1 after SIGINT, else 143."""
        return KeyboardInterrupt() if self.signal == signal.SIGINT else SIGTERMException(128 + signal.SIGTERM)

    def request(self, sig: int) -> None:
        """All ranks are to stop."""
        self._asked = int(sig)
        self._board.claim(_STOP, str(self._asked))

    def answer(self) -> bool:
        """Vote if somebody has asked to stop; by the watchdog. Whether this was a new vote."""
        if self.vote is not None:
            return False
        if self._asked is not None:
            # Once more, if a disk was full.
            self._board.claim(_STOP, str(self._asked))
        if self._board.said(_STOP) is None:
            return False
        with self._lock:
            self.vote = self._passed
        return True

    def boundary(self) -> None:
        """By the main thread at each boundary.

        Raises:
            KeyboardInterrupt, SIGTERMException: this is where all ranks stop. The latter ends a process with 143.
        """
        with self._lock:
            self._passed += 1
            if self.vote is None:
                return
        if self._passed == self._last_boundary():
            self.agreed = True
            raise self.error()

    def _last_boundary(self) -> int:
        deadline = time.monotonic() + VOTE_SECONDS
        while time.monotonic() < deadline:
            votes = [post.vote for post in self._board.read_all(self._world_size).values()]
            known = [vote for vote in votes if vote is not None]
            if len(known) == self._world_size:
                return max(known) + 1
            time.sleep(0.05)
        raise TimeoutError(
            f"to stop, {self._world_size} ranks had to answer, but {len(known)} did in {VOTE_SECONDS} s."
        )
