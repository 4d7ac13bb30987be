"""Tokenised text on disk: built once, shared by every rank and job, never seen half-written.

An entry is a folder named by a hash of what it was made from. It holds tokenizer.json, train.npy, validation.npy and
manifest.json, which tells the sizes and checksums of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_3d.data.packing import join_documents
from lightning_3d.data.text_files import TextFile
from lightning_3d.data.tokenizer import END_OF_TEXT, encode_documents, load_tokenizer, train_tokenizer
from lightning_3d.errors import DataError

_VERSION = 1
_MANIFEST = "manifest.json"
_PARTS = ("tokenizer.json", "train.npy", "validation.npy")


@dataclass(frozen=True)
class TokenCache:
    """A finished entry, its streams mapped rather than read."""

    folder: Path
    vocab_size: int
    train: np.ndarray
    validation: np.ndarray


def default_cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_3d" / "text"


def entry_folder(
    cache_folder: Path,
    *,
    train: Sequence[TextFile],
    validation: Sequence[TextFile],
    vocab_size: int,
    tokenizer: Path | None = None,
) -> Path:
    """Where the entry for these files and settings lies; another name once a file, its date or a setting changes."""
    made_from: dict[str, Any] = {
        "version": _VERSION,
        "vocab_size": vocab_size,
        "train": [_identity(file) for file in train],
        "validation": [_identity(file) for file in validation],
    }
    if tokenizer is not None:
        made_from["tokenizer"] = _checksum(tokenizer)
    return cache_folder / hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:24]


def ensure_entry(
    folder: Path,
    *,
    train: Sequence[TextFile],
    validation: Sequence[TextFile],
    vocab_size: int,
    tokenizer: tuple[Path, str] | None = None,
) -> None:
    """Build the entry unless a whole one is there; one process builds while others wait; a broken one is replaced.

    Args:
        vocab_size: of the tokenizer that is trained, unless one is given.
        tokenizer: a tokenizer.json and its token for the end of a text.
    """
    if _is_whole(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cache_dir={folder.parent} cannot be made ({error}). Set cache_dir to a folder of yours."
        ) from error
    with _locked(folder.with_suffix(".lock")) as alone:
        if _is_whole(folder):
            return
        if alone:
            for left_over in folder.parent.glob(f"{folder.name}.new-*"):
                shutil.rmtree(left_over, ignore_errors=True)
        new = folder.with_suffix(f".new-{uuid.uuid4().hex}")
        new.mkdir()
        try:
            _write_entry(new, train=train, validation=validation, vocab_size=vocab_size, given=tokenizer)
            _commit(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def open_entry(folder: Path) -> TokenCache:
    """Map a finished entry.

    Raises:
        DataError: it is not there, or not whole.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return TokenCache(
            folder=folder,
            vocab_size=int(manifest["vocab_size"]),
            train=np.load(folder / "train.npy", mmap_mode="r"),
            validation=np.load(folder / "validation.npy", mmap_mode="r"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The tokenised text in {folder} is missing or broken ({error}). Call prepare_data() first, on every node "
            "whose cache_dir is its own."
        ) from error


def _write_entry(
    folder: Path,
    *,
    train: Sequence[TextFile],
    validation: Sequence[TextFile],
    vocab_size: int,
    given: tuple[Path, str] | None,
) -> None:
    train_texts = [file.read() for file in train]
    tokenizer = load_tokenizer(given[0]) if given else train_tokenizer(train_texts, vocab_size=vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    actual_size, end_of_text = tokenizer.get_vocab_size(), tokenizer.token_to_id(given[1] if given else END_OF_TEXT)
    assert end_of_text is not None  # the trainer was given it, or a given tokenizer was asked
    for part, texts in (("train", train_texts), ("validation", [file.read() for file in validation])):
        stream = join_documents(encode_documents(tokenizer, texts), end_of_text=end_of_text, vocab_size=actual_size)
        np.save(folder / f"{part}.npy", stream)
    manifest = {
        "version": _VERSION,
        "vocab_size": actual_size,
        "parts": {part: _checksum(folder / part) for part in _PARTS},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _commit(new: Path, folder: Path) -> None:
    """Rename the new entry into place; a broken one that is there is moved aside first, a whole one stays."""
    try:
        os.rename(new, folder)
    except OSError:
        if _is_whole(folder):  # without a lock, another process may have been faster
            return
        if not folder.exists():
            raise
        aside = folder.with_suffix(f".broken-{uuid.uuid4().hex}")
        os.rename(folder, aside)
        os.rename(new, folder)
        shutil.rmtree(aside, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
        parts: dict[str, str] = manifest["parts"]
        return set(parts) == set(_PARTS) and all(_checksum(folder / part) == parts[part] for part in _PARTS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(file: TextFile) -> list[object]:
    return [file.name, str(file.path), file.size_bytes, file.modified_ns]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of this file; False where the file system has none, and renaming alone must keep entries whole."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True  # closing the file lets go
