"""SIGTERM and Ctrl-C while a run goes on: heard also where the main thread is in a collective for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Makes SIGTERM, SIGINT and the like requests, until `close`; a second SIGINT interrupts at once.

    Python calls handlers between two lines of the main thread; while that waits in C++, none is called. So each signal
    is written into a pipe as well, which the watchdog reads. Handlers can be set in the main thread only; elsewhere
    nothing changes.

    Args:
        request: called with the number of a signal, by either thread, more than once.
        numbers: the signals.
        users: handlers of the script, which are called too.
    """

    def __init__(
        self,
        request: Callable[[int], Any],
        *,
        numbers: Sequence[int] = STOP_SIGNALS,
        users: Mapping[int, Any] | None = None,
    ) -> None:
        self._request = request
        self._numbers = tuple(numbers)
        self._users = {sig: user for sig, user in (users or {}).items() if _is_users(user)}
        self._owner = os.getpid()
        self._handled: list[int] = []
        self._heard: list[int] = []
        self._insisted_at: float | None = None
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.Lock()
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._previous_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            _TAKEN.append(self)
            self._previous = {sig: signal.signal(sig, self._handle) for sig in self._numbers}

    def hear(self) -> None:
        """Request what has arrived; by a thread that waits for nothing."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._pipe is not None:
                self._heard += [sig for sig in os.read(self._pipe[0], 4096) if sig in self._numbers]
        for sig in set(self._heard):
            self._request(sig)
        if self._insisted_at is None and self._heard.count(signal.SIGINT) > 1:
            self._insisted_at = time.monotonic()

    @property
    def insisted_seconds(self) -> float:
        """Since the second SIGINT; 0 before."""
        return 0.0 if self._insisted_at is None else time.monotonic() - self._insisted_at

    def take_back(self) -> None:
        """Lightning ignores SIGINT from the first on, and a save that follows may wait for ever."""
        if self._previous and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)

    def close(self) -> None:
        for sig, handler in self._previous.items():
            # None: installed by something other than Python.
            signal.signal(sig, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        self.hear()
        with self._lock:
            if self._pipe is not None:
                _TAKEN.remove(self)
                signal.set_wakeup_fd(self._previous_pipe)
                for end in self._pipe:
                    os.close(end)
                self._pipe = None

    def _handle(self, sig: int, frame: Any) -> None:
        if os.getpid() != self._owner:
            # A worker of a data loader, forked from us: its loader ends it, as Ctrl-C in a terminal reaches all.
            if sig == signal.SIGTERM:
                os._exit(128 + sig)
            return
        self._handled.append(sig)
        if self._handled.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt
        self._request(sig)
        if sig in self._users:
            self._users[sig](sig, frame)


_TAKEN: list[Signals] = []


def _forget() -> None:
    """In a fork: what it is told must not be written into its parent's pipe."""
    if _TAKEN:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)


def _is_users(handler: Any) -> bool:
    return callable(handler) and handler is not signal.default_int_handler
