"""What the other ranks post, timed by the clock of who reads: clocks of machines may differ by seconds."""

from __future__ import annotations

import time
from dataclasses import replace

from lightning_3d.strategies.processes.board import Board, Post


class Listener:
    """Reads all posts, and notes when each was new.

    Args:
        world_size: ranks.
    """

    def __init__(self, board: Board, *, world_size: int) -> None:
        self._board = board
        self._world_size = world_size
        # By rank: the time that its post tells, and when that was read first, on the monotonic clock.
        self._heard: dict[int, tuple[float, float]] = {}

    def read_all(self) -> dict[int, Post]:
        """The posts by rank; their `time` is this process's, of the moment at which they were new to it."""
        now = time.monotonic()
        posts = self._board.read_all(self._world_size)
        for rank, post in posts.items():
            if self._heard.get(rank, (None, now))[0] != post.time:
                self._heard[rank] = (post.time, now)
        return {rank: replace(post, time=time.time() - (now - self._heard[rank][1])) for rank, post in posts.items()}
