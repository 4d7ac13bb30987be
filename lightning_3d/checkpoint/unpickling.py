"""Reading pickles without running what they name: a checkpoint from elsewhere may hold anything."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import PosixPath, PurePosixPath
from typing import IO, Any, NoReturn

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_3d.errors import CheckpointError


def load(file: IO[bytes], *, name: str, weights_only: bool) -> Any:
    """`torch.load` on the CPU, with an error that says what to do.

    Args:
        name: of the file, for the error.
        weights_only: tensors and plain values only.

    Raises:
        CheckpointError: something else is in there.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        found = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), "")
        raise CheckpointError(
            f"{name} holds more than tensors and plain values, and loading that can run code of whoever wrote it "
            f"({found or 'unknown classes'}). If you trust the file, pass weights_only=False, as in "
            "trainer.fit(..., ckpt_path=..., weights_only=False), or to the command line --trust (lightning-3d export) "
            "or trust=true (lightning-3d generate)."
        ) from error


class PlainValuesPlanner(DefaultLoadPlanner):
    """torch's plan of a load, but values that are no tensors are unpickled as `load` does.

    Args:
        weights_only: tensors and plain values only.
    """

    def __init__(self, *, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.original_state_dict[key] = load(value, name=f"entry {key}", weights_only=self._weights_only)


def load_metadata(file: IO[bytes], *, name: str) -> Metadata:
    """The table of contents that torch writes, which names nothing but its own classes.

    Raises:
        CheckpointError: it names something else, or is another thing.
    """
    found = _MetadataUnpickler(file, name=name).load()
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{name} is no table of contents of a checkpoint, but {type(found).__name__}.")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], *, name: str) -> None:
        super().__init__(file)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        # pickle itself would follow the dots of a name, to methods and to all that a module knows.
        if (module, name) in _MAKERS:
            return _MAKERS[module, name]
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise CheckpointError(f"{self._name} names {module}.{name}, which no checkpoint needs. It was not loaded.")


class _Maker(type):
    """In place of a class or function that a pickle names: it can be called, and that is all.

    A pickle can also set attributes of what it has, and those of the class itself would stay for the whole process:
    of every path where it may lie, say.
    """

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise CheckpointError(f"a table of contents sets {name} of {cls.__name__}, which no checkpoint needs.")


def _maker(name: str, make: Callable[..., Any]) -> _Maker:
    return _Maker(name, (), {"__slots__": (), "__new__": lambda cls, *args: make(*args)})


class _Encoding:
    """Equal to a member of torch's enum, which is one for the whole process as a class is."""

    __slots__ = ("_member",)

    def __init__(self, member: _MEM_FORMAT_ENCODING) -> None:
        object.__setattr__(self, "_member", member)

    def __eq__(self, other: object) -> bool:
        return other is self._member  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise CheckpointError(f"a table of contents sets {name} of a memory format, which no checkpoint needs.")


def _encoding(value: int) -> _Encoding:
    return _Encoding(_MEM_FORMAT_ENCODING(value))


def _member(enum: Any, name: str) -> _Encoding:
    if enum is not _MAKERS[metadata.__name__, "_MEM_FORMAT_ENCODING"]:
        raise CheckpointError(f"a table of contents asks for {name} of what is no enum, which no checkpoint needs.")
    return _Encoding(_MEM_FORMAT_ENCODING[name])


_CLASSES = (
    metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.TensorProperties,
    filesystem._StorageInfo, filesystem._StoragePrefix,
)  # fmt: skip
_LAYOUTS = {str(found): found for found in vars(torch).values() if isinstance(found, torch.layout)}

# What torch writes into a checkpoint's table of contents.
_MAKES: dict[tuple[str, str], Callable[..., Any]] = {
    # Their attributes are set afterwards.
    **{(one.__module__, one.__name__): partial(one.__new__, one) for one in _CLASSES},
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): _encoding,
    # How Python before 3.11.4 names a member.
    ("builtins", "getattr"): _member,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
}
_MAKERS = {key: _maker(key[1], make) for key, make in _MAKES.items()}
