"""`ModelCheckpoint(save_last="link")`: the link points to whole checkpoints only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d.checkpoint import store
from lightning_3d.strategies.saving.selection import Selection


class Links:
    """Lightning links to a checkpoint once it has asked for it: its save may be under way, or wait for its turn.

    Args:
        selection: of the same callbacks.
        asked: called on all ranks when a callback has asked for a link.
    """

    def __init__(self, selection: Selection, *, asked: Callable[[], None]) -> None:
        self._selection, self._asked = selection, asked
        self._callbacks: list[ModelCheckpoint] = []
        # Where a link is to point, by its path; on rank 0.
        self._waiting: dict[str, str] = {}

    def take_over(self, callbacks: Iterable[Checkpoint]) -> None:
        """From Lightning's callbacks, which call a function of theirs to link."""
        self._callbacks = [
            callback for callback in callbacks if isinstance(callback, ModelCheckpoint) and callback.save_last == "link"
        ]
        for callback in self._callbacks:
            callback._link_checkpoint = partial(self._ask, callback)  # type: ignore[method-assign]

    def _ask(self, callback: ModelCheckpoint, trainer: L.Trainer, filepath: str, linkpath: str) -> None:
        self._selection.linked(callback)
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self._waiting[linkpath] = filepath
        self._asked()

    @property
    def paths(self) -> list[str]:
        """Of links that wait for what they are to point to; on rank 0."""
        return list(self._waiting)

    def point_to(self, path: str) -> bool:
        """Whether a callback's link points to a checkpoint."""
        return os.path.abspath(path) in {_target(callback.last_model_path) for callback in self._callbacks}

    def move(self) -> None:
        """Let links point to what they wait for, where that is whole; by one rank."""
        for link, target in list(self._waiting.items()):
            if not store.is_committed(target):
                continue
            del self._waiting[link]
            try:
                store.link(Path(link), Path(target))
            except OSError as error:
                # Training can go on, and other ranks know nothing of this.
                rank_zero_warn(f"{link} could not be made to point to {target}: {error}. Set save_last=True.")

    def forget(self) -> None:
        """What was not saved is not linked to."""
        self._waiting.clear()


def _target(link: str) -> str | None:
    return os.path.abspath(Path(link).parent / os.readlink(link)) if os.path.islink(link) else None
