"""Where a checkpoint below a URL is: object stores have no rename.

So it is written as a part of its folder and committed by a small file that names the part and is written last:

    NAME/checkpoint.json    which part counts, step, epoch, layout
    NAME/part-TOKEN/        what a save writes; the next one under this name writes another
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from lightning_3d.checkpoint.places import SUMMARY, Place
from lightning_3d.errors import CheckpointError

_PART = "part-"


class Shelf:
    """A checkpoint in a store that writes whole objects but cannot rename.

    Args:
        url: of the checkpoint.
        fs: fsspec's file system.
        path: the URL as `fs` wants it.
        options: that made `fs`.
    """

    def __init__(self, url: str, fs: Any, path: str, options: dict[str, Any]) -> None:
        self.url, self.path, self.fs = url, path, fs
        self._options = options

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Shelf({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shelf) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> Shelf:
        # The root is a URL that ends with its slashes.
        url = self.url + name if self.url.endswith("/") else f"{self.url}/{name}"
        return Shelf(url, self.fs, f"{self.path}/{name}" if self.path else name, self._options)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Shelf:
        protocol, _, rest = self.url.partition("://")
        return Shelf(f"{protocol}://{rest.rpartition('/')[0]}", self.fs, self.path.rpartition("/")[0], self._options)

    def read_bytes(self) -> bytes:
        return self._read(self.path)

    def begin(self) -> str:
        current = self._marker().get("part")
        for part in self._names():
            if part.startswith(_PART) and part != current:
                self.drop(part)
        return f"{_PART}{secrets.token_hex(4)}"

    def holds(self, draft: str, name: str) -> bool:
        self.fs.invalidate_cache()
        return self.fs.exists(f"{self.path}/{draft}/{name}")

    def writer(self, draft: str) -> FileSystemWriter:
        # An object is stored when it is closed: there is nothing to flush to a disk of this machine.
        return FsspecWriter(f"{self.url}/{draft}", sync_files=False, **self._options)

    def write(self, draft: str, name: str, content: bytes) -> None:
        self.fs.makedirs(f"{self.path}/{draft}", exist_ok=True)
        self.fs.pipe_file(f"{self.path}/{draft}/{name}", content)

    def commit(self, draft: str, summary: Mapping[str, Any]) -> None:
        former = self._marker().get("part")
        self.fs.pipe_file(f"{self.path}/{SUMMARY}", json.dumps({**summary, "part": draft}, indent=1).encode())
        if former is not None:
            self.drop(former)

    def drop(self, draft: str) -> None:
        # No save may fail by it: what a client raises is of no common class, and nobody reads what stays.
        with contextlib.suppress(Exception):
            self._delete(f"{self.path}/{draft}")

    def remove(self) -> None:
        self._delete(f"{self.path}/{SUMMARY}")
        self._delete(self.path)

    def is_whole(self) -> bool:
        return "part" in self._marker()

    def summary(self) -> dict[str, Any]:
        return self._marker()

    def reader(self) -> FileSystemReader:
        return FsspecReader(f"{self.url}/{self._part()}", **self._options)

    def open(self, name: str) -> IO[bytes]:
        return self.fs.open(f"{self.path}/{self._part()}/{name}", "rb")

    def age(self) -> tuple[int, float]:
        summary = self.summary()
        return summary.get("global_step", 0), summary.get("time", 0.0)

    def whole(self) -> list[Place]:
        return [found for name in sorted(self._names()) if (found := self / name).is_whole()]

    def _names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            return [os.path.basename(found.rstrip("/")) for found in self.fs.ls(self.path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:
            raise self._unreadable(error) from error

    def _part(self) -> str:
        return self._marker()["part"]

    def _marker(self) -> dict[str, Any]:
        self.fs.invalidate_cache()
        try:
            return json.loads(self._read(f"{self.path}/{SUMMARY}"))
        except (FileNotFoundError, ValueError):
            # Half of it, where a kill or a full disk came in between.
            return {}

    def _read(self, path: str) -> bytes:
        try:
            return self.fs.cat_file(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise FileNotFoundError(f"there is no file {self.url}") from error
        # What a client raises where there is no network, no bucket or no permission is of no common class.
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.url} cannot be read: {type(error).__name__}: {error}. Check the address, the network, and the "
            "credentials (storage options, or what the client reads from the environment)."
        )

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(path, recursive=True)
