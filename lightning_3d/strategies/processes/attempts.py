"""What a process that is about to end still does: if it fails, or blocks, the end comes all the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


def attempt(function: Callable[[], Any], *, seconds: float) -> None:
    """Call it in a thread, and wait for it no longer than that: a full disk, a dead file server, a pipe nobody reads.

    Its error is dropped.
    """

    def body() -> None:
        try:
            function()
        except Exception:
            return

    thread = threading.Thread(target=body, name="lightning-3d-attempt", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # No more threads.
        return
    thread.join(seconds)


def flush(*, seconds: float = 1.0) -> None:
    """Both streams; one may be locked by a thread that hangs in writing to it."""
    for stream in (sys.stdout, sys.stderr):
        attempt(stream.flush, seconds=seconds)
