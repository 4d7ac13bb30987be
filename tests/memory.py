"""Measuring memory: in a process that has run nothing else, where what is freed goes back to the kernel."""

from __future__ import annotations

import ctypes
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def in_clean_process(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns in a new process, which has imported the packages and run no other test.

    A fork begins with all the memory of the process that starts it: what it then takes of the heap is no new page, and
    what it gives back of it would be counted as never used.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clean:
        return clean.submit(function, *args).result()


def keep_no_freed_memory() -> None:
    """Each tensor of 64 KiB or more of this process in pages of its own, which go back to the kernel when it is freed.

    What earlier tensors have left in the heap cannot hide what is allocated afterwards.
    """
    m_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 64 * 1024) == 1


def memory_bytes(name: str) -> int:
    """One of the kernel's counters of this process's memory: VmRSS, VmHWM (its highest), RssAnon."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
