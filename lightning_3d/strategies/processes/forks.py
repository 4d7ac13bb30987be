"""A thread of ours is never half-way when this process forks, to start a loader's workers, say.

A child has the locks that other threads hold at that moment, and nobody in it to open them: those of Python's own
modules, and of libraries. It would wait for ever.
"""

from __future__ import annotations

import os
import threading

# A thread that is stuck itself, in a dead file server, say, must not keep others from forking.
_LONGEST_SECONDS = 1.0

# To be held by a thread while it works; a fork waits for it.
UNDISTURBED = threading.RLock()
_held: list[bool] = []


def _before() -> None:
    _held.append(UNDISTURBED.acquire(timeout=_LONGEST_SECONDS))


def _after() -> None:
    if _held.pop():
        UNDISTURBED.release()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
