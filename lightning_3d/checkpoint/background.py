"""Writes a checkpoint while training goes on: from a copy, in a thread, with a process group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lightning_3d.checkpoint.places import Place
from lightning_3d.checkpoint.together import together
from lightning_3d.checkpoint.writing import Contents, write
from lightning_3d.errors import CheckpointError


class BackgroundWriter:
    """At most one checkpoint is under way. All ranks call the same methods in the same order.

    Args:
        new_group: of all ranks, for the host's memory; collective.
    """

    def __init__(self, *, new_group: Callable[[], dist.ProcessGroup]) -> None:
        self._new_group = new_group
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._stager: DefaultStager | None = None
        self._thread: threading.Thread | None = None
        self._place: Place | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way, or done but not waited for."""
        return self._thread is not None

    @property
    def under_way(self) -> Place | None:
        """Where it is to be, while a checkpoint is under way."""
        return self._place if self.busy else None

    def start(self, place: Place, contents: Contents) -> None:
        """Copy the tensors now, write them later; collective.

        Raises:
            CheckpointError: on every rank: the copy failed on one, or the write before this one did.
        """
        self.wait()
        if self._groups is None and dist.is_initialized():
            # The thread's talk must not meet that of the steps: collectives of one group have one order.
            self._groups = (self._new_group(), self._new_group())
        copied = together(lambda: self._copy(contents), f"copying checkpoint {place}")
        self._place, self._error = place, None
        # No daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._write, args=(place, copied), name="checkpoint")
        self._thread.start()

    def poll(self) -> bool:
        """Whether the checkpoint under way was found finished, at the same call on every rank; collective.

        Raises:
            CheckpointError: on every rank: it could not be written.
        """
        if self._thread is None:
            return False
        if self._groups is not None:
            done = torch.tensor(int(not self._thread.is_alive()))
            dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._groups[1])
            if not done:
                return False
        elif self._thread.is_alive():
            return False
        return self.wait()

    def wait(self) -> bool:
        """Until the checkpoint under way is finished; whether there was one.

        Raises:
            CheckpointError: on every rank: it could not be written.
        """
        if self._thread is None:
            return False
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise CheckpointError(str(error)) from error
        if error is not None:
            raise CheckpointError(f"saving checkpoint {self._place} failed: {type(error).__name__}: {error}") from error
        return True

    def close(self) -> bool:
        """As `wait`; and forget the copy and the groups, which end with the job's.

        Raises:
            CheckpointError: as `wait`.
        """
        try:
            return self.wait()
        finally:
            if self._stager is not None:
                self._stager.close()
            self._stager = self._groups = None

    def _copy(self, contents: Contents) -> Contents:
        if self._stager is None:
            # Its memory, pinned beside a GPU, serves every save.
            pinned = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(pinned, False, False, False))
        tensors: Any = self._stager.stage(dict(contents.tensors))
        return replace(contents, tensors=tensors)

    def _write(self, place: Place, contents: Contents) -> None:
        try:
            write(place, contents, group=None if self._groups is None else self._groups[0])
        except BaseException as error:
            self._error = error
