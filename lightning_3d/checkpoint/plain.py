"""A checkpoint folder as plain Lightning's dictionary: whole tensors, optimizer states by number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.names import own_names, saved_name
from lightning_3d.checkpoint.optimizer_state import OTHERS, parted
from lightning_3d.checkpoint.places import Folder, place
from lightning_3d.errors import CheckpointError

T = TypeVar("T")

MODEL, OPTIMIZER, COPIES = "model.", "optimizer.", "copies."


def read_plain(
    path: store.AnyPlace, *, optimizer: bool, map_location: Any = None, weights_only: bool = True
) -> dict[str, Any]:
    """The whole checkpoint, as `torch.load` of a plain .ckpt would give it; this rank waits for no other.

    Args:
        path: of a committed checkpoint.
        optimizer: whether optimizer states and averages of weights are wanted.
        map_location: where tensors go that are read on the CPU: a device, or a mapping that may have one for "cpu".
        weights_only: of what is no tensor, plain values only.

    Raises:
        CheckpointError: nothing whole is there, or its optimizer states have no order (see `assemble`).
    """
    store.require_committed(path)
    names = [name for name in store.saved_tensors(path) if optimizer or name.startswith(MODEL)]
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    # A function of storages, Lightning's own default, leaves on the CPU what is there.
    device = torch.device("cpu") if map_location is None or callable(map_location) else torch.device(map_location)
    values = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in read_in_turn(path, names, weights_only=weights_only)
    }
    return assemble(store.load_extra(path, weights_only=weights_only), values, optimizer=optimizer)


def is_folder(url: str) -> bool:
    """Whether there is a folder that `read_plain` can open, or say what it is; False too where nobody can tell."""
    with contextlib.suppress(CheckpointError):
        where = place(url)
        return where.path.is_dir() if isinstance(where, Folder) else where.is_whole()
    return False


def read_in_turn(
    path: store.AnyPlace,
    names: Sequence[str],
    *,
    batch_bytes: int = 256 * 2**20,
    weights_only: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Entries of a checkpoint in the order of `names`, of which no more than `batch_bytes` are held at a time.

    One that is larger alone is read alone. Other ranks, if there are any, take no part.
    """
    saved = store.saved_tensors(path)
    batch: dict[str, Any] = {}
    held = 0
    for name in names:
        entry = saved[name]
        size = entry.size.numel() * entry.properties.dtype.itemsize if is_tensor(entry) else 0
        if batch and held + size > batch_bytes:
            store.read_tensors(path, batch, weights_only=weights_only)
            yield from batch.items()
            batch, held = {}, 0
        batch[name] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor(entry) else None
        held += size
    if batch:
        store.read_tensors(path, batch, weights_only=weights_only)
        yield from batch.items()


def assemble(extra: Mapping[str, Any], values: Mapping[str, Any], *, optimizer: bool) -> dict[str, Any]:
    """Plain Lightning's dictionary from a folder's `extra` and its entries by name.

    Raises:
        CheckpointError: the optimizer's groups were not in the module's order under a pipeline, so that nobody knows
            the numbers of their parameters.
    """
    checkpoint = dict(extra)
    groups = checkpoint.pop("optimizer_groups", [])
    orders = checkpoint.pop("optimizer_parameters", [])
    # Positions of loaders that are shared out over ranks, which stock loaders know nothing of.
    checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)
    # Of a compiled module, whose own names they must be again: it is loaded by stock code, as is what it saves.
    own = own_names(checkpoint.pop("compiled_names", []))
    checkpoint["state_dict"] = {own.get(name, name): value for name, value in below(values, MODEL).items()}
    if not optimizer:
        return checkpoint
    states = below(values, OPTIMIZER)
    if states:
        checkpoint["optimizer_states"] = [
            _numbered(below(states, f"{index}."), order, options)
            for index, (order, options) in enumerate(zip(orders, groups, strict=True))
        ]
    for entry, copy in by_copy(below(values, COPIES)).items():
        checkpoint[entry] = {own.get(name, name): value for name, value in copy.items()}
    return checkpoint


def copy_key(entry: str, name: str) -> str:
    """What a tensor of a further state of the module is saved as; dots in the entry's name are no separators."""
    return f"{COPIES}{entry.replace('%', '%25').replace('.', '%2E')}.{name}"


def by_copy(values: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """What is below `COPIES`, by entry and name.

    >>> by_copy({copy_key("my.ema", "net.weight").removeprefix(COPIES): 1})
    {'my.ema': {'net.weight': 1}}
    """
    found: dict[str, dict[str, T]] = {}
    for key, value in values.items():
        entry, _, name = key.partition(".")
        found.setdefault(unquote(entry), {})[name] = value
    return found


def below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Entries under a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _numbered(flat: Mapping[str, Any], order: list[list[str]] | None, options: list[dict[str, Any]]) -> dict[str, Any]:
    if order is None:
        raise CheckpointError(
            "the optimizer's groups are not in the order of the module's parameters, and a pipeline saved them: how "
            "plain Lightning numbers them is not known. Export the weights alone (--weights-only), or resume without a "
            "pipeline and save again."
        )
    named = [[saved_name(name) for name in names] for names in order]
    numbers = {name: number for number, name in enumerate(name for names in named for name in names)}
    others = dict(flat.get(OTHERS) or {})
    state: dict[Any, Any] = dict(others.pop("state", {}))
    for key, value in flat.items():
        kind, name, entry = parted(key, names=numbers)
        if kind == "state":
            state.setdefault(numbers[name], {})[entry] = value
    return {
        **others,
        "state": state,
        "param_groups": [
            {**group, "params": [numbers[name] for name in names]} for group, names in zip(options, named, strict=True)
        ],
    }


def is_tensor(entry: Any) -> bool:
    """Whether an entry of `store.saved_tensors` is a tensor and no other value."""
    return isinstance(entry, TensorStorageMetadata)
