"""Where a checkpoint is: a folder of this machine, or one below a URL that fsspec knows (s3://..., memory://...).

A folder is written as a sibling and committed by one rename. Object stores have no rename, so there a checkpoint is
written as a part of its folder and committed by a small file that names the part and is written last:

    NAME/checkpoint.json    which part counts, step, epoch, layout
    NAME/part-TOKEN/        what a save writes; the next one under this name writes another

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
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from lightning_3d.errors import CheckpointError, ConfigError

SUMMARY, METADATA = "checkpoint.json", ".metadata"

_DRAFT = re.compile(r"\.(.+?)(?:\.[0-9a-f]{8})?\.saving")
_PART = "part-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


class Place(Protocol):
    """One checkpoint's place. What changes it is called by one rank, but for `write` and `writer`."""

    def __str__(self) -> str: ...

    def begin(self) -> str:
        """Make room for a new checkpoint beside the old one; the name of the draft, new each time, for all ranks."""

    def holds(self, draft: str, name: str) -> bool:
        """Whether this rank sees a file of a draft that another has written."""

    def writer(self, draft: str) -> FileSystemWriter:
        """Of tensors into a draft."""

    def write(self, draft: str, name: str, content: bytes) -> None:
        """One more file of a draft; on the disk when this returns."""

    def commit(self, draft: str, summary: Mapping[str, Any]) -> None:
        """The draft becomes the checkpoint, in one step. What was there before is removed afterwards."""

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

    def beside(self) -> list[str]:
        """Names of the committed checkpoints in the same folder."""


def place(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Place:
    """
    Args:
        path: of a folder, or a URL.
        storage_options: for fsspec's file system; local paths take none.

    Raises:
        CheckpointError: no such protocol, or its package is not installed.
        ConfigError: options for a local path.
    """
    text = os.fspath(path)
    if "://" in text:
        from fsspec.core import url_to_fs

        try:
            fs, inner = url_to_fs(text, **(storage_options or {}))
        except (ValueError, ImportError) as error:
            raise CheckpointError(
                f"{text}: {error} Give a local path, or install what serves that protocol."
            ) from error
        if text.startswith(("file://", "local://")):
            return Folder(Path(inner))
        return Shelf(text.rstrip("/"), fs, inner.rstrip("/"), dict(storage_options or {}))
    if storage_options:
        raise ConfigError(
            f"storage_options={dict(storage_options)!r} are for URLs, but {text} is a local path. Leave them out."
        )
    return Folder(Path(text))


class Folder:
    """A checkpoint on a file system that can rename."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def begin(self) -> str:
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
        self.write(draft, SUMMARY, json.dumps(summary, indent=1).encode())
        _sync_folder(Path(draft))
        former = _put(Path(draft), self.path)
        try:
            _sync_folder(self.path.parent)
        except OSError:
            _put_back(Path(draft), self.path, former)
            raise
        # The new checkpoint is there; what stays of the old one is removed by the next save under this name.
        if former is not None:
            with contextlib.suppress(OSError):
                delete(former)

    def remove(self) -> None:
        removed = sibling(self.path, "removed")
        delete(removed)
        if self.path.is_symlink() or not self.path.is_dir():
            delete(self.path)
            return
        os.rename(self.path, removed)
        delete(removed)

    def is_whole(self) -> bool:
        return not self.path.name.startswith(".") and (self.path / METADATA).exists() and bool(self.summary())

    def summary(self) -> dict[str, Any]:
        return _readable(lambda: (self.path / SUMMARY).read_bytes())

    def reader(self) -> FileSystemReader:
        return FileSystemReader(self.path)

    def open(self, name: str) -> IO[bytes]:
        return (self.path / name).open("rb")

    def beside(self) -> list[str]:
        if not self.path.parent.is_dir():
            return []
        return sorted(str(path) for path in self.path.parent.iterdir() if Folder(path).is_whole())


class Shelf:
    """A checkpoint in a store that writes whole objects but cannot rename.

    Args:
        url: of the checkpoint.
        fs: fsspec's file system.
        path: the URL as `fs` wants it.
        options: that made `fs`.
    """

    def __init__(self, url: str, fs: Any, path: str, options: dict[str, Any]) -> None:
        self.url, self.path = url, path
        self._fs, self._options = fs, options

    def __str__(self) -> str:
        return self.url

    def begin(self) -> str:
        current = self.summary().get("part")
        for part in self._names(self.path):
            if part.startswith(_PART) and part != current:
                self._delete(f"{self.path}/{part}")
        return f"{_PART}{secrets.token_hex(4)}"

    def holds(self, draft: str, name: str) -> bool:
        self._fs.invalidate_cache()
        return self._fs.exists(f"{self.path}/{draft}/{name}")

    def writer(self, draft: str) -> FileSystemWriter:
        # An object is stored when it is closed: there is nothing to flush to a disk of this machine.
        return FsspecWriter(f"{self.url}/{draft}", sync_files=False, **self._options)

    def write(self, draft: str, name: str, content: bytes) -> None:
        self._fs.makedirs(f"{self.path}/{draft}", exist_ok=True)
        self._fs.pipe_file(f"{self.path}/{draft}/{name}", content)

    def commit(self, draft: str, summary: Mapping[str, Any]) -> None:
        former = self.summary().get("part")
        self._fs.pipe_file(f"{self.path}/{SUMMARY}", json.dumps({**summary, "part": draft}, indent=1).encode())
        if former is not None:
            with contextlib.suppress(OSError):
                self._delete(f"{self.path}/{former}")

    def remove(self) -> None:
        self._delete(f"{self.path}/{SUMMARY}")
        self._delete(self.path)

    def is_whole(self) -> bool:
        return "part" in self.summary()

    def summary(self) -> dict[str, Any]:
        self._fs.invalidate_cache()
        return _readable(lambda: self._fs.cat_file(f"{self.path}/{SUMMARY}"))

    def reader(self) -> FileSystemReader:
        return FsspecReader(f"{self.url}/{self._part()}", **self._options)

    def open(self, name: str) -> IO[bytes]:
        return self._fs.open(f"{self.path}/{self._part()}/{name}", "rb")

    def beside(self) -> list[str]:
        parent, _, _ = self.url.rpartition("/")
        inner, _, _ = self.path.rpartition("/")
        shelves = [Shelf(f"{parent}/{name}", self._fs, f"{inner}/{name}", self._options) for name in self._names(inner)]
        return sorted(str(shelf) for shelf in shelves if shelf.is_whole())

    def _part(self) -> str:
        return self.summary()["part"]

    def _names(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [os.path.basename(found.rstrip("/")) for found in self._fs.ls(path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)


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


def _put(draft: Path, path: Path) -> Path | None:
    """Give a folder its place; where to find what was there before, if anything."""
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
