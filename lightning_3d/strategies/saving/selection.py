"""Lightning's checkpoint callbacks point to whole checkpoints only, and to the same on all ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.places import place_among

_BEST = (
    "best_k_models", "kth_best_model_path", "kth_value", "best_model_path", "best_model_score", "current_score",
    "last_model_path",
)  # fmt: skip


class Selection:
    """What the ModelCheckpoints of a Trainer know of: it goes back to what was committed where a save fails.

    They note a checkpoint before it is saved, since the note is part of what is saved.
    """

    def __init__(self) -> None:
        self._committed: list[tuple[ModelCheckpoint, dict[str, Any]]] = []
        self._proposed: list[tuple[ModelCheckpoint, dict[str, Any]]] = []

    def propose(self, callbacks: Iterable[Checkpoint], *, saving: str | None = None) -> None:
        """What they know of now, of which the newest, if any, is being saved."""
        self._proposed = [
            (callback, _noted(callback, saving)) for callback in callbacks if isinstance(callback, ModelCheckpoint)
        ]

    def linked(self, callback: ModelCheckpoint) -> None:
        """A callback has noted its link after it had the newest saved: the two belong together."""
        for other, noted in self._proposed:
            if other is callback:
                noted["last_model_path"] = callback.last_model_path

    def commit(self) -> None:
        """The newest is saved."""
        self._committed = self._proposed

    def restore(self) -> None:
        """The newest could not be saved."""
        for callback, noted in self._committed:
            vars(callback).update(noted, best_k_models=dict(noted["best_k_models"]))


def _noted(callback: ModelCheckpoint, saving: str | None) -> dict[str, Any]:
    # With the step: one that was not saved may be saved once more. The last is what a link is to point to.
    noted = {name: getattr(callback, name) for name in (*_BEST, "_last_global_step_saved", "_last_checkpoint_saved")}
    if saving in (callback.best_model_path, callback.last_model_path, *callback.best_k_models):
        # Lightning notes this one only when the save that it asked for returns.
        noted["_last_checkpoint_saved"] = saving
    return {**noted, "best_k_models": dict(noted["best_k_models"])}


def tell_leftovers(folder: Path) -> None:
    """Set aside what killed saves have left in a folder, and warn of it once; by one rank."""
    try:
        found = store.set_aside_leftovers(folder)
    except OSError as error:
        rank_zero_warn(f"what killed saves have left in {folder} could not be set aside: {error}.")
        return
    if found:
        rank_zero_warn(
            f"{len(found)} saves were never finished and are set aside: {', '.join(map(str, found))}. "
            "They are never loaded; the next start that finds others deletes them."
        )


def agree_on_best(callbacks: Iterable[Checkpoint], *, broadcast: Callable[[Any], Any], device: torch.device) -> None:
    """Rank 0's list of best checkpoints on every rank: each knows of the files that are there; collective."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            own = {name: getattr(callback, name) for name in _BEST}
            agreed = broadcast(move_data_to_device(own, torch.device("cpu")))
            vars(callback).update(move_data_to_device(agreed, device))


def pick_last_of_committed(
    trainer: L.Trainer, *, storage_options: dict[str, Any] | None, note: Callable[[str | None], None]
) -> None:
    """Let ckpt_path="last" mean the latest whole checkpoint, wherever the callbacks save.

    Lightning takes the name with the latest time: of a save that was killed too, and of local folders only.

    Args:
        note: is told, whenever a run begins, which that is, or None where it is not asked for.
    """
    connector: Any = trainer._checkpoint_connector
    if hasattr(connector._parse_ckpt_path, "__wrapped__"):
        return
    parse = connector._parse_ckpt_path

    @wraps(parse)
    def parse_committed(state_fn: TrainerFn, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        found = _last(trainer, storage_options) if ckpt_path == "last" else None
        note(found)
        return parse(state_fn, ckpt_path, *args, **kwargs) if found is None else found

    connector._parse_ckpt_path = parse_committed


def note_ckpt_path(trainer: L.Trainer, note: Callable[[str | os.PathLike[str] | None], None]) -> None:
    """Be told, whenever a run begins, from which checkpoint; `trainer.ckpt_path` is set only when that is loaded."""
    connector: Any = trainer._checkpoint_connector
    if hasattr(connector._select_ckpt_path, "__wrapped__"):
        return
    select = connector._select_ckpt_path

    @wraps(select)
    def select_noted(*args: Any, **kwargs: Any) -> Any:
        found = select(*args, **kwargs)
        note(found)
        return found

    connector._select_ckpt_path = select_noted


def _last(trainer: L.Trainer, storage_options: dict[str, Any] | None) -> str | None:
    found: dict[str, float] = {}
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        folder = os.fspath(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        pattern = re.compile(rf"{re.escape(callback.CHECKPOINT_NAME_LAST)}(-.*)?{re.escape(callback.FILE_EXTENSION)}")
        for whole in store.committed(place_among(folder, storage_options=storage_options)):
            if pattern.fullmatch(whole.name):
                found[str(whole)] = whole.summary().get("time", 0.0)
    for other in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(other, OnExceptionCheckpoint):
            where = place_among(other.ckpt_path, storage_options=storage_options)
            if where.is_whole():
                found[other.ckpt_path] = where.summary().get("time", 0.0)
    return max(found, key=lambda path: found[path], default=None)
