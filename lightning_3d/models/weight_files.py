"""Weights on disk as tensors that are mapped and not read: a copy of a part of one reads that part of the file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import CheckpointError, ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def open_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file or folder of weights by name, mapped into memory, on the CPU.

    Args:
        path: a Hugging Face folder with safetensors (one file, or shards with an index), one .safetensors file, or a
            file of `torch.save`: a state_dict, or a plain Lightning .ckpt, whose `state_dict` is taken.

    Raises:
        ModelError: a folder without safetensors, or whose index names files that are missing.
        CheckpointError: there is no such file, or it holds no state_dict.
    """
    if path.is_dir():
        return open_safetensors(path)
    if path.suffix == ".safetensors" and path.is_file():
        return _mapped(path)
    content = open_torch_file(path, weights_only=True)
    state = content.get("state_dict", content)
    named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)} if named else {}
    if not tensors:
        raise CheckpointError(
            f"{path} holds no state_dict: a mapping from names to tensors, or one under 'state_dict'."
        )
    return tensors


def open_safetensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of all of a folder's safetensors files by name, mapped into memory.

    Raises:
        ModelError: no safetensors are there, or files that the index names are missing.
    """
    found: dict[str, Tensor] = {}
    for file, names in _weight_files(folder).items():
        stored = _mapped(folder / file)
        found.update({name: stored[name] for name in names or stored if name in stored})
    return found


def open_torch_file(path: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """What `torch.save` wrote, its tensors mapped where the file's format allows it.

    Raises:
        CheckpointError: no such file, or one that torch cannot read.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}.")
    try:
        # The caller may be building under torch.device("meta"), which must not swallow the stored values.
        with torch.device("cpu"):
            try:
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                # Files in the format before torch 1.6 can only be read whole.
                content = torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than plain values and tensors: {' '.join(str(error).split())[:300]} If you trust it, "
            "give the Trainer's method weights_only=False."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as a file of torch.save: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; a checkpoint or state_dict is a dict.")
    return content


def equal_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, NaN too, once the second has the dtype of the first."""
    same_memory = one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype
    if one.shape != other.shape or same_memory:
        return one.shape == other.shape
    one, other = (value.to(one.dtype).contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(one, other)


def some(names: Sequence[str], *, most: int = 8) -> str:
    """The first names, and how many more there are."""
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"


def _weight_files(folder: Path) -> dict[str, list[str]]:
    """Safetensors files of a folder, each with the names that are its own; no names means all."""
    if (folder / INDEX).is_file():
        files: dict[str, list[str]] = {}
        for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
            files.setdefault(file, []).append(name)
        absent = sorted(file for file in files if not (folder / file).is_file())
        if absent:
            raise ModelError(f"{folder / INDEX} names files that are not there: {some(absent)}. Copy them beside it.")
        return files
    if not (folder / SINGLE).is_file():
        raise ModelError(
            f"{folder} holds neither {SINGLE} nor {INDEX}. Save the model again with "
            "save_pretrained(), which writes safetensors."
        )
    return {SINGLE: []}


def _mapped(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with torch.device("cpu"), safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
