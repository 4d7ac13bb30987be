"""A disk that fails, or takes the process with it, at a chosen write, flush or rename."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_3d.checkpoint import places


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class FaultyDisk:
    """Counts this process's writes, flushes, renames and new folders while it is in use.

    Args:
        fail_at: the operation, counted from 0, instead of which `fault` is called; None only counts.
        can_swap: whether two names can be swapped in one step.
    """

    def __init__(self, *, fail_at: int | None = None, fault: Callable[[], Any] = full, can_swap: bool = True) -> None:
        self.operations: list[str] = []
        self._fail_at, self._fault, self._can_swap = fail_at, fault, can_swap

    def count(self, operation: str) -> bool:
        """Whether this operation is the one that fails."""
        self.operations.append(operation)
        return len(self.operations) - 1 == self._fail_at

    @contextmanager
    def in_use(self) -> Iterator[FaultyDisk]:
        real = builtins.open, io.open, os.fsync, os.rename, os.mkdir, places._RENAMEAT2

        def open_counted(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            opened = real[0](file, mode, *args, **kwargs)
            return _File(opened, self) if set(mode) & set("wax+") else opened

        builtins.open = io.open = open_counted  # type: ignore[assignment]
        os.fsync = self._counted("flush", real[2])
        os.rename = self._counted("rename", real[3])
        os.mkdir = self._counted("mkdir", real[4])
        places._RENAMEAT2 = self._counted("swap", real[5]) if real[5] and self._can_swap else None
        try:
            yield self
        finally:
            builtins.open, io.open, os.fsync, os.rename, os.mkdir, places._RENAMEAT2 = real

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # A folder that is there already is none of the disk's business.
            if not (name == "mkdir" and os.path.exists(args[0])) and self.count(name):
                self._fault()
            return function(*args, **kwargs)

        return call


class _File:
    """A file for writing; half of what a failing write was given still reaches it."""

    def __init__(self, file: Any, disk: FaultyDisk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()

    def write(self, data: Any) -> Any:
        if self._disk.count("write"):
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._disk._fault()
        return self._file.write(data)
