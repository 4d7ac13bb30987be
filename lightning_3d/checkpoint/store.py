"""Checkpoint folders: written by all ranks beside their place, committed by one rename, loaded in any layout.

NAME/                    what `is_committed` accepts
.metadata, *.distcp  tensors and options by name (torch.distributed.checkpoint)
extra.pt             all that is equal on every rank: loops, callbacks, schedulers, hyper-parameters
rank_00000.pt ...    what belongs to one rank: random states
checkpoint.json      step, epoch and layout, for people and for `newest`
.NAME.saving/            a save under way, or one that was killed; never picked
.NAME.replaced/          the former NAME between the two renames that replace it
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_3d.errors import CheckpointError

SUMMARY, EXTRA, METADATA = "checkpoint.json", "extra.pt", ".metadata"


def save(
    path: Path,
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
    rank = _rank()
    partial = _sibling(path, "saving")

    def clear() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        # Copies of one tensor come from the lowest rank, so that buffers belong to one another.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        dcp.save(state, checkpoint_id=partial, planner=planner)

    def write_rest() -> None:
        _write(partial / f"rank_{rank:05d}.pt", lambda file: torch.save(rank_state, file))
        if rank == 0:
            _write(partial / EXTRA, lambda file: torch.save(extra, file))
            _write(partial / SUMMARY, lambda file: file.write(json.dumps(summary, indent=1).encode()))

    def commit() -> None:
        if rank == 0:
            _sync_folder(partial)
            _replace(path, partial)

    for step in (clear, write, write_rest, commit):
        _together(step, f"saving checkpoint {path}")


def _replace(path: Path, partial: Path) -> None:
    replaced = _sibling(path, "replaced")
    if path.exists() or path.is_symlink():
        _remove(replaced)
        os.rename(path, replaced)
    try:
        os.rename(partial, path)
    except OSError:
        if replaced.exists() or replaced.is_symlink():
            os.rename(replaced, path)
        raise
    _sync_folder(path.parent)
    # The new checkpoint is there; what stays of the old one is removed by the next save under this name.
    with contextlib.suppress(OSError):
        _remove(replaced)


def load_tensors(path: Path, state: dict[str, Any]) -> None:
    """Fill `state` in place from a checkpoint, each rank reading what its tensors need; collective.

    Args:
        path: a committed checkpoint.
        state: keys of the checkpoint, with tensors of the saved shapes; other values are replaced.
    """
    _together(lambda: dcp.load(state, checkpoint_id=path), f"loading checkpoint {path}")


def saved_tensors(path: Path) -> dict[str, TensorStorageMetadata | Any]:
    """Names in a checkpoint, with size and dtype where the value is a tensor."""
    return dict(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


def load_extra(path: Path, *, weights_only: bool = False) -> dict[str, Any]:
    """What `save` was given as `extra`."""
    return torch.load(path / EXTRA, map_location="cpu", weights_only=weights_only)


def load_rank_state(path: Path, *, rank: int) -> dict[str, Any] | None:
    """What rank `rank` gave `save`, or None if no such rank saved."""
    file = path / f"rank_{rank:05d}.pt"
    return torch.load(file, map_location="cpu", weights_only=False) if file.exists() else None


def summary(path: Path) -> dict[str, Any]:
    """Step, epoch and layout of a committed checkpoint."""
    return json.loads((path / SUMMARY).read_text())


def is_committed(path: Path) -> bool:
    """Whether `path` is a whole checkpoint folder of ours."""
    return path.is_dir() and not path.name.startswith(".") and all((path / f).exists() for f in (METADATA, SUMMARY))


def require_committed(path: Path) -> None:
    """
    Raises:
        CheckpointError: nothing whole is at `path`; says what is there.
    """
    if is_committed(path):
        return
    if path.is_file():
        raise CheckpointError(f"{path} is one file; this strategy resumes from the folders that it saves itself.")
    what = "is a folder but holds no whole checkpoint" if path.is_dir() else "does not exist"
    others = [str(p) for p in committed(path.parent)] if path.parent.is_dir() else []
    raise CheckpointError(f"{path} {what}. Whole checkpoints beside it: {', '.join(others) or 'none'}.")


def committed(folder: Path) -> list[Path]:
    """Whole checkpoints in a folder, by step and then by time; puts back what a killed replacement had moved aside."""
    if not folder.is_dir():
        return []
    for replaced in folder.glob(".*.replaced"):
        path = folder / replaced.name.removeprefix(".").removesuffix(".replaced")
        # Another rank may be doing the same.
        if not path.exists() and not path.is_symlink():
            with contextlib.suppress(OSError):
                os.rename(replaced, path)
    found = [path for path in folder.iterdir() if is_committed(path)]
    return sorted(found, key=lambda path: (summary(path)["global_step"], (path / SUMMARY).stat().st_mtime))


def newest(folder: Path) -> Path | None:
    """The committed checkpoint of the highest step in a folder, or None."""
    found = committed(folder)
    return found[-1] if found else None


def remove(path: Path) -> None:
    """Delete a checkpoint; by one rank. A kill in between leaves nothing that looks whole."""
    removed = _sibling(path, "removed")
    _remove(removed)
    if path.is_symlink() or not path.is_dir():
        _remove(path)
        return
    os.rename(path, removed)
    _remove(removed)


def _sibling(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no sync of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _together(action: Callable[[], Any], what: str) -> None:
    """Run `action` on every rank; if one fails, all raise the same error, and none goes on alone."""
    failure: tuple[int, str] | None = None
    try:
        action()
    except CheckpointException as error:
        # torch tells every rank of the ranks that failed.
        origin = min(error.failures)
        failure = origin, _told(error.failures[origin][0])
    except Exception as error:
        failure = _rank(), _told(error)
    failures: list[tuple[int, str] | None] = [failure]
    if dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    told = [failure for failure in failures if failure is not None]
    if told:
        rank, text = min(told)
        raise CheckpointError(f"{what} failed on rank {rank}: {text}")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
