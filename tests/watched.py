"""A watchdog in a process that is no rank, and does not end by it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_3d.strategies.processes import watchdog
from lightning_3d.strategies.processes.board import Board
from lightning_3d.strategies.processes.stopping import AgreedStop
from lightning_3d.strategies.processes.watchdog import Watchdog
from lightning_3d.whereabouts import HERE


class Left(BaseException):
    """Instead of the end of this process."""


def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a fixture: this process is a rank in training, which does not end."""

    def leave(code: int) -> None:
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watchdog, "STACKS_SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "JUDGE_SECONDS", 0.3)
    monkeypatch.setattr(HERE, "failure", "")
    before = (HERE.phase, HERE.batch, HERE.bounded)
    HERE.enter("training", batch=3)
    yield
    HERE.phase, HERE.batch, HERE.bounded = before


def dog(
    folder: Path, *, rank: int = 0, timeout_seconds: float = 1.0, world_size: int = 2, reports: Path | None = None
) -> Watchdog:
    board = Board(folder)
    return Watchdog(
        board,
        rank=rank,
        world_size=world_size,
        timeout_seconds=timeout_seconds,
        reports=reports or folder / "reports",
        stop=AgreedStop(board, world_size=world_size),
        leaving=lambda: None,
    )


def stand_still(found: Watchdog, *, seconds: float) -> None:
    found.look()
    found._still_since -= seconds
