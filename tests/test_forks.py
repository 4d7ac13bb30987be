"""A process forks when no thread of ours holds a lock that the child would wait for."""

from __future__ import annotations

import os
import threading
import time

from lightning_3d.strategies.processes.forks import UNDISTURBED


def test_a_fork_waits_until_a_thread_of_ours_holds_no_lock() -> None:
    inner, begun = threading.Lock(), threading.Event()

    def work() -> None:
        with UNDISTURBED, inner:
            begun.set()
            time.sleep(0.3)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        # As a loader's worker would.
        os._exit(0 if inner.acquire(timeout=0) and UNDISTURBED.acquire(timeout=0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    assert UNDISTURBED.acquire(timeout=0)
    UNDISTURBED.release()
