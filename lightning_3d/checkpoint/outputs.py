"""What is written for others, a file or a folder of this machine or below a URL: there when all of it is written."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_3d.checkpoint.places import Folder, Place, delete, place, sibling
from lightning_3d.checkpoint.shelf import Shelf
from lightning_3d.errors import CheckpointError

# Where they are, a loader takes the folder for whole.
_READ_FIRST = ("config.json", "adapter_config.json")


@contextmanager
def replacing(out: str | os.PathLike[str] | Place) -> Iterator[Path]:
    """A draft on this machine, which gets its place once all of it is written.

    Of a folder below a URL, file after file gets its name, each of them whole and the configs last, which are what
    loaders read first.

    Raises:
        CheckpointError: something is at `out` already, or it cannot be written to.
    """
    where = place(out) if isinstance(out, str | os.PathLike) else out
    refuse_existing(where)
    try:
        with _uploaded(where) if isinstance(where, Shelf) else _renamed(where) as draft:
            yield draft
    except OSError as error:
        first = f" (a file of {tempfile.gettempdir()} first)" if isinstance(where, Shelf) else ""
        raise CheckpointError(f"{where} could not be written{first}: {error}. Nothing of it is left.") from error


@contextmanager
def _renamed(out: Place) -> Iterator[Path]:
    assert isinstance(out, Folder)
    out.path.parent.mkdir(parents=True, exist_ok=True)
    draft = sibling(out.path, "saving")
    delete(draft)
    try:
        yield draft
        os.rename(draft, out.path)
    finally:
        delete(draft)


@contextmanager
def _uploaded(out: Shelf) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lightning-3d-") as folder:
        draft = Path(folder, out.name)
        yield draft
        _upload(draft, out)


def refuse_existing(out: Place) -> None:
    """
    Raises:
        CheckpointError: something is at `out`, or nobody can tell.
    """
    try:
        there = out.path.exists() if isinstance(out, Folder) else _exists(out)
    except Exception as error:
        raise CheckpointError(f"{out} cannot be reached: {type(error).__name__}: {error}") from error
    if there:
        raise CheckpointError(f"{out} exists. Give another name, or remove it first.")


def _exists(out: Place) -> bool:
    assert isinstance(out, Shelf)
    out.fs.invalidate_cache()
    return bool(out.fs.exists(out.path))


def _upload(draft: Path, out: Shelf) -> None:
    """Send all files under a hidden name, then give them theirs: a file that is being sent may be visible in part."""
    names = [path.relative_to(draft).as_posix() for path in draft.rglob("*") if path.is_file()]
    ends = [f"/{name}" for name in sorted(names, key=lambda name: (name in _READ_FIRST, name))] or [""]
    hidden, begun = f"{out.parent.path}/.{out.name}.saving", False
    try:
        _remove(out.fs, hidden)
        for end in ends:
            _make_parent(out.fs, hidden + end)
            out.fs.put_file(f"{draft}{end}", hidden + end)
        refuse_existing(out)
        begun = True
        for end in ends:
            _make_parent(out.fs, out.path + end)
            out.fs.mv(hidden + end, out.path + end)
    except BaseException as error:
        if begun:
            _remove(out.fs, out.path)
        if not isinstance(error, Exception) or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{out} could not be written: {type(error).__name__}: {error}") from error
    finally:
        _remove(out.fs, hidden)


def _make_parent(fs: Any, path: str) -> None:
    if parent := path.rpartition("/")[0]:
        fs.makedirs(parent, exist_ok=True)


def _remove(fs: Any, path: str) -> None:
    # What is not there is an error of no common class; what stays is hidden, and is removed by the next attempt.
    with contextlib.suppress(Exception):
        fs.rm(path, recursive=True)
