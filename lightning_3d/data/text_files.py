"""Which text files a run reads, and which of them are held out for validation.

Both choices follow a hash of each file's relative name, so that they are the same on every rank, machine and run.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.errors import DataError

# Not the library itself: what was installed beside it, and tests, of which some are deliberately not valid text.
_NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class TextFile:
    """A file's place, and what tells whether it changed."""

    path: Path
    name: str
    size_bytes: int
    modified_ns: int

    def read(self) -> str:
        """The file's text.

        Raises:
            DataError: it cannot be read, or is not UTF-8.
        """
        try:
            return self.path.read_bytes().decode("utf-8")
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error}). Fix its permissions or leave it out.") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}. "
                "Convert it, for example with `iconv -t utf-8`, or leave it out."
            ) from error


def find_text_files(patterns: Sequence[str | Path] | None) -> list[TextFile]:
    """The files that paths and globs name, each once; None means the Python standard library's own sources.

    Raises:
        DataError: a pattern that matches no file, or a file that is empty or cannot be read.
    """
    if patterns is None:
        root = Path(sysconfig.get_path("stdlib") or os.path.dirname(os.__file__))
        # An empty __init__.py is no mistake of the user's here, nor is a file in an old encoding.
        files = [_text_file(path, root=root) for path in _standard_library(root) if path.stat().st_size]
        if not files:
            raise DataError(
                f"The Python standard library's sources are not in {root}. Name text files with files=[...]."
            )
        return files
    if isinstance(patterns, str | Path) or not patterns:
        raise DataError(f"files={patterns!r} must be a list of paths or globs, for example ['texts/**/*.txt'].")
    paths: set[Path] = set()
    for pattern in patterns:
        expanded = os.path.expanduser(str(pattern))
        # A name may hold brackets without being a glob.
        matches = [expanded] if os.path.isfile(expanded) else glob.glob(expanded, recursive=True)
        matched = {Path(match).resolve() for match in matches if os.path.isfile(match)}
        if not matched:
            raise DataError(
                f"files: {str(pattern)!r} matches no file (from {os.getcwd()}). "
                "Give a path or a glob such as 'texts/**/*.txt'; a folder alone is neither."
            )
        paths |= matched
    root = Path(os.path.commonpath([path.parent for path in paths]))
    files = [_text_file(path, root=root) for path in sorted(paths)]
    for file in files:
        if not file.size_bytes:
            raise DataError(f"{file.path} is empty. Leave it out of files, or fill it.")
        if not os.access(file.path, os.R_OK):
            raise DataError(f"{file.path} cannot be read. Fix its permissions or leave it out of files.")
    return files


def choose_up_to(files: Sequence[TextFile], *, max_bytes: int, seed: int) -> list[TextFile]:
    """A sample of whole files that holds at most `max_bytes`, spread over all of them, in order of name.

    Raises:
        DataError: not even one file fits.
    """
    chosen, total = [], 0
    for file in sorted(files, key=lambda file: _rank(file, purpose="choose", seed=seed)):
        if total + file.size_bytes <= max_bytes:
            chosen.append(file)
            total += file.size_bytes
    if not chosen:
        smallest = min(file.size_bytes for file in files)
        raise DataError(f"max_bytes={max_bytes} is less than the smallest file. Set it to {smallest} or more.")
    return sorted(chosen, key=lambda file: file.name)


def split_held_out(
    files: Sequence[TextFile], *, validation_fraction: float, seed: int
) -> tuple[list[TextFile], list[TextFile]]:
    """Training files and held-out files, at least one of each.

    Raises:
        DataError: fewer than two files.
    """
    if len(files) < 2:
        names = ", ".join(str(file.path) for file in files)
        raise DataError(
            f"Validation holds out whole files, but there is only one: {names}. "
            "Name at least two, raise max_bytes, or cut the file, for example with `split -n l/10`."
        )
    held_out_count = min(max(1, round(validation_fraction * len(files))), len(files) - 1)
    ranked = sorted(files, key=lambda file: _rank(file, purpose="hold out", seed=seed))
    held_out = set(ranked[:held_out_count])
    return [file for file in files if file not in held_out], [file for file in files if file in held_out]


def _standard_library(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _NOT_STANDARD_LIBRARY)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)


def _text_file(path: Path, *, root: Path) -> TextFile:
    status = path.stat()
    return TextFile(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns)


def _rank(file: TextFile, *, purpose: str, seed: int) -> tuple[str, str]:
    return hashlib.sha256(f"{purpose}\0{seed}\0{file.name}".encode()).hexdigest(), file.name
