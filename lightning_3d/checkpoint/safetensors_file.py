"""Writes safetensors tensor by tensor: safetensors' own writer wants all of a file in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_3d.errors import CheckpointError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip

Entries = Mapping[str, tuple[torch.Size, torch.dtype]]


def can_hold(dtype: torch.dtype) -> bool:
    """Whether the format has this dtype."""
    return dtype in _NAMES


def write_safetensors(path: Path, entries: Entries, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write one file, whose header is made of `entries` before the first tensor is there.

    Args:
        path: of the file; flushed to the disk when this returns.
        entries: shape and dtype of each tensor, in order.
        tensors: in the same order; each may be freed once the next is asked for.

    Raises:
        CheckpointError: a dtype that the format does not have.

    Source: the format's description, https://github.com/huggingface/safetensors.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in entries.items():
        if not can_hold(dtype):
            raise CheckpointError(f"{name} is of dtype {dtype}, which safetensors does not have. Use --to ckpt.")
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The tensors begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for (name, (shape, dtype)), (given, tensor) in zip(entries.items(), tensors, strict=True):
            assert given == name and tensor.shape == shape
            whole = tensor.detach().to(dtype).contiguous().reshape(-1)
            if whole.numel():
                file.write(whole.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
