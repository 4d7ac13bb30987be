"""ModelCheckpoints of one folder choose different names, as in plain Lightning."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from lightning_3d.checkpoint.places import is_url


def keep_names_apart(
    callbacks: Iterable[Checkpoint], *, asked_for: Callable[[], Iterable[str]], is_redone: Callable[[str | Path], bool]
) -> None:
    """Let a name be taken once its checkpoint is asked for: Lightning looks at the disk, where that comes later.

    Args:
        asked_for: paths of the checkpoints and links that are not there yet; called on rank 0.
        is_redone: whether what is at a path is to be saved anew there; likewise.
    """
    savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]

    def is_free(path: str | Path) -> bool:
        return not any(_notes(saver, path) for saver in savers) and is_redone(path)

    for saver in savers:
        saver.file_exists = partial(_is_taken, saver, asked_for, is_free)  # type: ignore[method-assign]


def _is_taken(
    callback: ModelCheckpoint,
    asked_for: Callable[[], Iterable[str]],
    is_free: Callable[[str | Path], bool],
    filepath: str | Path,
    trainer: L.Trainer,
) -> bool:
    there = type(callback).file_exists(callback, filepath, trainer)
    # Rank 0 decides: names hold values that may differ from rank to rank.
    taken = trainer.is_global_zero and (
        _comparable(filepath) in map(_comparable, asked_for()) or (there and not is_free(filepath))
    )
    return trainer.strategy.reduce_boolean_decision(taken, all=False)


def _notes(saver: ModelCheckpoint, path: str | Path) -> bool:
    """Whether a callback keeps what is there, whoever has saved it."""
    kept = (*saver.best_k_models, saver.best_model_path, saver.last_model_path)
    return _comparable(path) in {_comparable(other) for other in kept if other}


def _comparable(path: str | Path) -> str:
    return os.fspath(path).rstrip("/") if is_url(path) else os.path.abspath(path)
