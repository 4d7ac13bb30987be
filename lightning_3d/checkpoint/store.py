"""Checkpoint folders: written by all ranks, there whole or not at all, loaded in any layout.

NAME/                    what `is_committed` accepts
    .metadata, *.distcp  tensors and options by name (torch.distributed.checkpoint)
    extra.pt             all that is equal on every rank: loops, callbacks, schedulers, hyper-parameters
    rank_00000.pt ...    what belongs to one rank: random states
    checkpoint.json      step, epoch and layout, for people and for `newest`
.NAME.TOKEN.saving/      a save under way, or one that was killed; never picked
.NAME.unfinished/        one that was killed, set aside by a later start
.NAME.removed/           a removal under way
.NAME.replaced/          the former NAME between two renames, where the file system cannot swap two names

Below a URL, the files of NAME/ are one folder deeper (see `shelf`).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from lightning_3d.checkpoint import unpickling
from lightning_3d.checkpoint.places import METADATA, SUMMARY, Folder, Place, delete, drafts, place, put, sibling
from lightning_3d.checkpoint.together import alone, together
from lightning_3d.checkpoint.writing import EXTRA, FORMAT, Contents, packed, rank_file, write
from lightning_3d.errors import CheckpointError

__all__ = [
    "EXTRA", "METADATA", "SUMMARY", "AnyPlace", "committed", "is_committed", "link", "load_extra", "load_rank_state",
    "load_tensors", "newest", "put_back", "read_tensors", "remove", "require_committed", "save", "saved_tensors",
    "set_aside_leftovers", "summary",
]  # fmt: skip

AnyPlace = str | os.PathLike[str] | Place


def save(
    path: AnyPlace,
    state: dict[str, Any],
    *,
    extra: dict[str, Any],
    rank_state: dict[str, Any],
    summary: dict[str, Any],
) -> None:
    """Write a checkpoint; it exists under `path` once and only once every rank has written all of it; collective.

    Args:
        path: equal on all ranks; what was there before stays until the new one is whole.
        state: tensors (sharded or whole) and small objects by name. Entries of one name are copies of one value.
        extra: rank 0's is kept.
        rank_state: each rank's is kept.
        summary: JSON values; rank 0's is kept.

    Raises:
        CheckpointError: on every rank, if any rank could not write; nothing under `path` has changed then.
    """
    where = _place(path)
    contents = together(
        lambda: Contents(state, extra=packed(extra), rank_state=packed(rank_state), summary=summary),
        f"saving checkpoint {where}",
    )
    write(where, contents)


def load_tensors(path: AnyPlace, state: dict[str, Any], *, weights_only: bool = True) -> None:
    """Fill `state` in place from a checkpoint, each rank reading what its tensors need; collective.

    Args:
        path: a committed checkpoint.
        state: keys of the checkpoint, with tensors of the saved shapes; other values are replaced.
        weights_only: of values that are no tensors, only plain ones.
    """
    where = _place(path)
    planner = unpickling.PlainValuesPlanner(weights_only=weights_only)
    together(lambda: dcp.load(state, storage_reader=_reader(where), planner=planner), f"loading checkpoint {where}")


def read_tensors(path: AnyPlace, state: dict[str, Any], *, weights_only: bool = True) -> None:
    """As `load_tensors`, but of whole tensors and by this rank alone, which waits for no other."""
    where = _place(path)
    planner = unpickling.PlainValuesPlanner(weights_only=weights_only)

    def read() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=_reader(where), planner=planner, no_dist=True)

    alone(read, f"loading checkpoint {where}")


def saved_tensors(path: AnyPlace) -> dict[str, TensorStorageMetadata | Any]:
    """Names in a checkpoint, with size and dtype where the value is a tensor."""
    return dict(_reader(_place(path)).read_metadata().state_dict_metadata)


def load_extra(path: AnyPlace, *, weights_only: bool = True) -> dict[str, Any]:
    """What `save` was given as `extra`.

    Raises:
        CheckpointError: there is more in it than `weights_only` allows.
    """
    where = _place(path)
    with where.open(EXTRA) as file:
        return unpickling.load(file, name=f"{where}/{EXTRA}", weights_only=weights_only)


def load_rank_state(path: AnyPlace, *, rank: int, weights_only: bool = True) -> dict[str, Any] | None:
    """What rank `rank` gave `save`, or None if no such rank saved."""
    where = _place(path)
    try:
        with where.open(rank_file(rank)) as file:
            return unpickling.load(file, name=f"{where}/{rank_file(rank)}", weights_only=weights_only)
    except FileNotFoundError:
        return None


def summary(path: AnyPlace) -> dict[str, Any]:
    """Step, epoch and layout of a committed checkpoint."""
    return _place(path).summary()


def is_committed(path: AnyPlace) -> bool:
    """Whether `path` is a whole checkpoint of ours."""
    return _place(path).is_whole()


def require_committed(path: AnyPlace) -> None:
    """
    Raises:
        CheckpointError: nothing whole is at `path`, and it says what is there; or a later version has written it.
    """
    where = _place(path)
    if isinstance(where, Folder):
        put_back(where.path.parent)
    if where.is_whole():
        return _require_known_format(where)
    if isinstance(where, Folder) and where.path.is_file():
        raise CheckpointError(
            f"{where} is one file, no folder that this strategy has saved. What reads plain files is "
            "trainer.fit(..., ckpt_path=...), to go on, and ThreeDStrategy(initial_weights=...), to start from weights."
        )
    exists = isinstance(where, Folder) and where.path.is_dir()
    what = "is a folder but holds no whole checkpoint" if exists else "does not exist"
    beside = ", ".join(map(str, where.parent.whole()))
    raise CheckpointError(f"{where} {what}. Whole checkpoints beside it: {beside or 'none'}.")


def committed(*folders: AnyPlace) -> list[Place]:
    """Whole checkpoints in folders, by step and then by time; puts back what a killed replacement had moved aside."""
    places = [_place(folder) for folder in folders]
    for where in places:
        if isinstance(where, Folder):
            put_back(where.path)
    return sorted((found for where in places for found in where.whole()), key=lambda found: found.age())


def newest(*folders: AnyPlace) -> Place | None:
    """The committed checkpoint of the highest step in folders, or None."""
    found = committed(*folders)
    return found[-1] if found else None


def put_back(folder: Path) -> None:
    """Give checkpoints their names again that a kill between two renames had left without; by any number of ranks."""
    if not folder.is_dir():
        return
    for replaced in folder.glob(".*.replaced"):
        path = folder / replaced.name.removeprefix(".").removesuffix(".replaced")
        if not path.exists() and not path.is_symlink():
            with contextlib.suppress(OSError):
                os.rename(replaced, path)


def set_aside_leftovers(folder: Path) -> list[Path]:
    """Clean up after killed saves and removals; by one rank, while nobody saves into the folder.

    Returns:
        Saves that were never finished, under the names at which they now lie, for the user to be told once. Those
        that an earlier start had set aside are deleted, so that a job that is often killed does not fill its disk.
    """
    put_back(folder)
    if not folder.is_dir():
        return []
    for kind in ("removed", "replaced"):
        for path in folder.glob(f".*.{kind}"):
            delete(path)
    left = list(drafts(folder))
    if left:
        for path in folder.glob(".*.unfinished"):
            delete(path)
    found = set()
    for draft, name in left:
        # What a swap has left is the former checkpoint: the new one is in its place.
        new = Folder(folder / name)
        if Folder(draft).summary() and new.is_whole() and Folder(draft).age() <= new.age():
            delete(draft)
            continue
        aside = sibling(folder / name, "unfinished")
        delete(aside)
        os.rename(draft, aside)
        found.add(aside)
    return sorted(found)


def link(path: Path, target: Path) -> None:
    """A symbolic link to a checkpoint, in one step instead of what has its name; by one rank."""
    # What a kill leaves of it is deleted by the next start.
    new = sibling(path, "removed")
    delete(new)
    os.symlink(os.path.relpath(target, path.parent), new)
    former = put(new, path)
    if former is not None:
        delete(former)


def remove(path: AnyPlace) -> None:
    """Delete a checkpoint; by one rank. A kill in between leaves nothing that looks whole."""
    _place(path).remove()


def _place(path: AnyPlace) -> Place:
    return place(path) if isinstance(path, str | os.PathLike) else path


def _require_known_format(where: Place) -> None:
    found = where.summary().get("format", FORMAT)
    if found not in range(1, FORMAT + 1):
        raise CheckpointError(
            f"{where} has format {found!r}, and this version of lightning_3d reads formats up to {FORMAT}. "
            "Load it with the version that wrote it, or a later one."
        )


def _reader(where: Place) -> Any:
    reader: Any = where.reader()

    def read_metadata(*args: Any, **kwargs: Any) -> Metadata:
        # torch would unpickle whatever the file names.
        with where.open(METADATA) as file:
            metadata = unpickling.load_metadata(file, name=f"{where}/{METADATA}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = reader.load_id
        return metadata

    reader.read_metadata = read_metadata
    return reader
