"""Reading pickles without running what they name: a checkpoint from elsewhere may hold anything."""

from __future__ import annotations

import io
import pickle
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_3d.errors import CheckpointError

# What torch writes into a checkpoint's table of contents.
_METADATA_CLASSES = {
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
    *(
        (f"torch.distributed.checkpoint.{module}", name)
        for module, names in {
            "metadata": (
                "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
                "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
            ),
            "filesystem": ("_StorageInfo", "_StoragePrefix"),
        }.items()
        for name in names
    ),
}  # fmt: skip


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
        CheckpointError: it names something else.
    """
    return _MetadataUnpickler(file, name=name).load()


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], *, name: str) -> None:
        super().__init__(file)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        first = name.partition(".")[0]
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _METADATA_CLASSES or (module, first) in _METADATA_CLASSES:
            return super().find_class(module, name)
        raise CheckpointError(f"{self._name} names {module}.{name}, which no checkpoint needs. It was not loaded.")
