"""What a killed run had saved after its last checkpoint is saved anew under the same names by the run that goes on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any


class Redone:
    """Which checkpoints the run that goes on has saved before, in the steps that it does again; of rank 0.

    A kill between the save of a best checkpoint and that of the last one leaves them. Their names are not taken: else,
    with each kill, one more would stay beside those that a ModelCheckpoint is to keep. What other runs have saved is
    not touched, nor is anything where `ckpt_path` names a checkpoint, from which a user may branch off.
    """

    def __init__(self) -> None:
        self._last: str | None = None
        self._attempt = ""
        # The summary of the last checkpoint, where the run goes on with that.
        self._start: Mapping[str, Any] = {}

    def last(self, path: str | None) -> None:
        """What the run that begins goes on with, if that is ckpt_path="last"."""
        self._last = path

    def begin(self) -> None:
        """A run sets up; it has loaded nothing so far."""
        self._attempt, self._start = secrets.token_hex(8), {}

    def resume(self, path: str, read: Callable[[], Mapping[str, Any]]) -> None:
        """A run goes on with a checkpoint, whose summary can be read."""
        self._start = _tolerant(read) if path == self._last else {}

    @property
    def origin(self) -> dict[str, Any]:
        """For the summary of what is saved: by which attempt, and when the last that it went on with was saved."""
        return {"attempt": self._attempt, "resumed_from": self._start.get("time")}

    def holds(self, read: Callable[[], Mapping[str, Any]]) -> bool:
        """Whether a checkpoint, whose summary can be read, comes of the same run and of a step that is done again."""
        if self._start.get("time") is None:
            return False
        summary, start = _tolerant(read), self._start
        attempt = summary.get("attempt")
        if attempt in (None, self._attempt):
            return False
        same = attempt == start.get("attempt") or summary.get("resumed_from") == start["time"]
        return same and all(summary.get(key, 0) > start.get(key, 0) for key in ("time", "global_step"))


def _tolerant(read: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """What cannot be read, on one rank, is no reason to end the job: its name is taken."""
    try:
        return read()
    # What a store's client raises is of no common class.
    except Exception:
        return {}
