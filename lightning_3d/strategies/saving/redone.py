"""What a killed run had saved after its last checkpoint is saved anew under the same names by the run that goes on."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any


class Redone:
    """Which checkpoints the run that goes on has saved before, in the steps that it does again.

    A kill between the save of a best checkpoint and that of the last one leaves them. Their names are not taken: with
    each kill, one more would stay beside those that a ModelCheckpoint is to keep. What other runs have saved is not
    touched, nor is anything where `ckpt_path` names a checkpoint, from which a user may branch off.
    """

    def __init__(self) -> None:
        self._last: str | None = None
        self._attempt = ""
        self._from: Mapping[str, Any] = {}

    def last(self, path: str | None) -> None:
        """What the run that begins goes on with, if that is ckpt_path="last"."""
        self._last = path

    def begin(self) -> None:
        """A run sets up; it has loaded nothing so far."""
        self._attempt, self._from = secrets.token_hex(8), {}

    def resume(self, path: str, summary: Mapping[str, Any]) -> None:
        """A run goes on with a checkpoint."""
        self._from = {**summary, "is_last": path == self._last}

    @property
    def origin(self) -> dict[str, Any]:
        """For the summary of what is saved: by which attempt, and at what time its own origin was saved."""
        return {"attempt": self._attempt, "resumed_from": self._from.get("time")}

    def holds(self, summary: Mapping[str, Any]) -> bool:
        """Whether a checkpoint comes of the same run, after the one that this attempt goes on with."""
        attempt, start = summary.get("attempt"), self._from.get("time")
        if not self._from.get("is_last") or start is None or attempt in (None, self._attempt):
            return False
        same = attempt == self._from.get("attempt") or summary.get("resumed_from") == start
        return same and summary.get("time", 0.0) > start
