"""Where a checkpoint is: a folder of this machine, or one below a URL that fsspec knows (s3://..., memory://...).

A folder is written as a sibling and committed by one rename; below a URL, a file says what counts (see `shelf`).

A draft's name is new each time. So a rank that finds it sees the file system that rank 0 sees, and no network file
system's memory of a former draft stands in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from lightning_3d.errors import CheckpointError, ConfigError

SUMMARY, METADATA = "checkpoint.json", ".metadata"
# Protocols of this machine's own files.
_LOCAL = ("file://", "local://")

_DRAFT = re.compile(r"\.(.+?)(?:\.[0-9a-f]{8})?\.saving")
# What is on its way to a name or from it. Other hidden names are as good as any: Lightning's finders save under some.
_SIBLING = re.compile(r"\..+\.(saving|unfinished|removed|replaced)")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


class Place(Protocol):
    """A path on some file system, and one checkpoint's place.

    What changes it is called by one rank, but for `write` and `writer`.
    """

    def __str__(self) -> str: ...

    def __truediv__(self, name: str) -> Place: ...

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> Place: ...

    def read_bytes(self) -> bytes:
        """
        Raises:
            FileNotFoundError: no file is here.
        """

    def begin(self) -> str:
        """Make room for a new checkpoint beside the old one; the name of the draft, new each time, for all ranks.

        Raises:
            CheckpointError: drafts and leftovers have names as this one.
        """

    def holds(self, draft: str, name: str) -> bool:
        """Whether this rank sees a file of a draft that another has written."""

    def writer(self, draft: str) -> FileSystemWriter:
        """Of tensors into a draft."""

    def write(self, draft: str, name: str, content: bytes) -> None:
        """One more file of a draft; on the disk when this returns."""

    def commit(self, draft: str, summary: Mapping[str, Any]) -> None:
        """The draft becomes the checkpoint, in one step. What was there before is removed afterwards.

        Where this fails, the draft is dropped, unless it may have become the checkpoint all the same.
        """

    def drop(self, draft: str) -> None:
        """Delete a draft of which nothing will come. What cannot be deleted stays, as after a kill."""

    def remove(self) -> None:
        """A kill in between leaves nothing that looks whole."""

    def is_whole(self) -> bool:
        """Whether a committed checkpoint is here."""

    def summary(self) -> dict[str, Any]:
        """Step, epoch and layout of the committed checkpoint; empty where there is none, or it is half written."""

    def reader(self) -> FileSystemReader:
        """Of the committed checkpoint's tensors."""

    def open(self, name: str) -> IO[bytes]:
        """
        Raises:
            FileNotFoundError: the committed checkpoint has no such file.
        """

    def age(self) -> tuple[int, float]:
        """Step and time of the committed checkpoint, to sort by."""

    def whole(self) -> list[Place]:
        """The committed checkpoints in the folder of this name."""


def place(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Place:
    """
    Args:
        path: of a folder, or a URL.
        storage_options: for fsspec's file system; local paths take none.

    Raises:
        CheckpointError: no such protocol, its package is not installed, or a name that is a pattern.
        ConfigError: options for a local path, as a URL of this machine's files is too.
    """
    text = os.fspath(path)
    if storage_options and not _takes_options(text):
        raise ConfigError(
            f"storage_options={dict(storage_options)!r} are for URLs of other file systems, but {text} is a local "
            "path. Leave them out."
        )
    if is_url(text):
        from fsspec.core import url_to_fs

        try:
            fs, inner = url_to_fs(text, **(storage_options or {}))
        # The last is what a file system says to options that it does not know, or lacks.
        except (ValueError, ImportError, TypeError) as error:
            raise CheckpointError(
                f"{text}: {error}. Give a local path, install what serves that protocol, or set other storage options."
            ) from error
        if text.startswith(_LOCAL):
            return Folder(Path(inner))
        from lightning_3d.checkpoint.shelf import Shelf

        if any(sign in inner for sign in "*?["):
            raise CheckpointError(f"{text}: fsspec takes * ? [ for patterns of several names. Give another name.")
        return Shelf(text.rstrip("/"), fs, inner.rstrip("/"), dict(storage_options or {}))
    return Folder(Path(text))


def place_among(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None) -> Place:
    """As `place`, of one of several paths whose URLs of other file systems, if any, the options are for."""
    return place(path, storage_options=storage_options if _takes_options(path) else None)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names its protocol."""
    return "://" in os.fspath(path)


def _takes_options(path: str | os.PathLike[str]) -> bool:
    return is_url(path) and not os.fspath(path).startswith(_LOCAL)


class Folder:
    """A checkpoint on a file system that can rename."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Folder({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __truediv__(self, name: str) -> Folder:
        return Folder(self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> Folder:
        # Of "." and "..", pathlib says ".".
        return Folder(self.path.parent if len(self.path.parts) > 1 else Path(os.path.abspath(self.path)).parent)

    def read_bytes(self) -> bytes:
        return self.path.read_bytes()

    def begin(self) -> str:
        if _SIBLING.fullmatch(self.name):
            raise CheckpointError(f"{self} would be taken for what is left of another save. Give another name.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for former, name in drafts(self.path.parent):
            if name == self.path.name:
                delete(former)
        draft = sibling(self.path, f"{secrets.token_hex(4)}.saving")
        draft.mkdir()
        return str(draft)

    def holds(self, draft: str, name: str) -> bool:
        return Path(draft, name).is_file()

    def writer(self, draft: str) -> FileSystemWriter:
        return FileSystemWriter(draft)

    def write(self, draft: str, name: str, content: bytes) -> None:
        with Path(draft, name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, draft: str, summary: Mapping[str, Any]) -> None:
        try:
            self.write(draft, SUMMARY, json.dumps(summary, indent=1).encode())
            _sync_folder(Path(draft))
            former = put(Path(draft), self.path)
        except OSError:
            self.drop(draft)
            raise
        try:
            _sync_folder(self.path.parent)
        except OSError:
            _put_back(Path(draft), self.path, former)
            self.drop(draft)
            raise
        # The new checkpoint is there; what stays of the old one is removed by the next save under this name.
        if former is not None:
            with contextlib.suppress(OSError):
                delete(former)

    def drop(self, draft: str) -> None:
        shutil.rmtree(draft, ignore_errors=True)

    def remove(self) -> None:
        removed = sibling(self.path, "removed")
        delete(removed)
        if self.path.is_symlink() or not self.path.is_dir():
            delete(self.path)
            return
        os.rename(self.path, removed)
        delete(removed)

    def is_whole(self) -> bool:
        return not _SIBLING.fullmatch(self.name) and (self.path / METADATA).exists() and bool(self.summary())

    def summary(self) -> dict[str, Any]:
        return _readable(lambda: (self.path / SUMMARY).read_bytes())

    def reader(self) -> FileSystemReader:
        return FileSystemReader(self.path)

    def open(self, name: str) -> IO[bytes]:
        return (self.path / name).open("rb")

    def age(self) -> tuple[int, float]:
        return self.summary().get("global_step", 0), (self.path / SUMMARY).stat().st_mtime

    def whole(self) -> list[Place]:
        if not self.path.is_dir():
            return []
        return [found for path in sorted(self.path.iterdir()) if (found := Folder(path)).is_whole()]


def sibling(path: Path, kind: str) -> Path:
    """The hidden neighbour of a folder that is being saved, replaced or removed."""
    return path.parent / f".{path.name}.{kind}"


def drafts(folder: Path) -> Iterator[tuple[Path, str]]:
    """Saves under way or never finished in a folder, each with the name of what it was to become."""
    for path in sorted(folder.glob(".*.saving")):
        if found := _DRAFT.fullmatch(path.name):
            yield path, found[1]


def delete(path: Path) -> None:
    """A folder, a file or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


def _readable(read: Callable[[], bytes]) -> dict[str, Any]:
    try:
        return json.loads(read())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # Half of it, where a kill, a full disk or a loss of power came in between.
        return {}


def put(draft: Path, path: Path) -> Path | None:
    """Give a folder or link its place, in one step where the system can.

    Returns:
        Where to find what was there before, if anything.
    """
    if not path.exists() and not path.is_symlink():
        os.rename(draft, path)
        return None
    if _exchange(draft, path):
        return draft
    replaced = sibling(path, "replaced")
    delete(replaced)
    os.rename(path, replaced)
    try:
        os.rename(draft, path)
    except OSError:
        os.rename(replaced, path)
        raise
    return replaced


def _put_back(draft: Path, path: Path, former: Path | None) -> None:
    if former == draft:
        _exchange(draft, path)
        return
    os.rename(path, draft)
    if former is not None:
        os.rename(former, path)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    if _RENAMEAT2 is None:
        return False
    if _RENAMEAT2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _find_renameat2() -> Callable[..., int] | None:
    try:
        return ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return None


_RENAMEAT2 = _find_renameat2()


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
