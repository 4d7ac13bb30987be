"""No rank outlives the process that started it, in whatever way that ends."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


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
