"""An optimizer's state by parameter name, flat, so that any layout can load any other's.

state.<parameter>.<entry>           a tensor shaped and sharded as its parameter, a scalar, or any nest of values
param_groups.<parameter>.<option>   the options of the group that the parameter is in
others                              what belongs to no parameter (see `others_of`), where there is any

Names of entries and options may have dots: a parameter's name is never the beginning of another's.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.errors import CheckpointError

Names = Mapping[torch.Tensor, str]

OTHERS = "others"


def flatten(optimizer: Optimizer, *, names: Names) -> dict[str, Any]:
    """State and options by parameter name; tensors are the optimizer's own, not copies.

    Raises:
        CheckpointError: an entry's key is neither a string nor a literal of Python's.
    """
    packed = optimizer.state_dict()
    if not packed:
        # What stands for no optimizer.
        return {}
    # As `load_state_dict` numbers them.
    numbers: dict[torch.Tensor, Any] = {}
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        numbers.update(zip(group["params"], packed_group["params"], strict=True))
    flat: dict[str, Any] = {}
    for parameter, group in _parameters(optimizer, names):
        name = names[parameter]
        flat.update(keyed("state", name, packed["state"].get(numbers[parameter], {})))
        flat.update(keyed("param_groups", name, options_of(group)))
    if others := others_of(packed):
        flat[OTHERS] = others
    return flat


def others_of(packed: Mapping[str, Any]) -> dict[str, Any]:
    """What a `state_dict()` of an optimizer holds beside its parameters' state and options; empty if nothing.

    Returns:
        Entries of its own, and under "state" those whose key is no parameter's number. They are alike on all ranks.
    """
    numbers = {number for group in packed["param_groups"] for number in group["params"]}
    state = {key: value for key, value in packed["state"].items() if key not in numbers}
    others = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return {**others, "state": state} if others or state else {}


def keyed(kind: str, name: str, entries: Mapping[Any, Any]) -> dict[str, Any]:
    """A parameter's entries or options, under their keys in the flat state.

    >>> keyed("state", "net.weight", {"step": 1, 0: 2})
    {'state.net.weight.step': 1, 'state.net.weight.#0': 2}
    """
    return {f"{kind}.{name}.{_text(key, name=name)}": value for key, value in entries.items()}


def parted(key: str, *, names: Collection[str]) -> tuple[str, str, Any]:
    """Kind, parameter and entry of a key of the flat state; the parameter is empty where it is none of `names`.

    >>> parted("state.net.weight.ema.short", names={"net.weight"})
    ('state', 'net.weight', 'ema.short')
    >>> parted("state.net.weight.#of mine", names={"net.weight"})
    ('state', 'net.weight', '#of mine')
    """
    kind, _, rest = key.partition(".")
    end = rest.find(".")
    while end >= 0 and rest[:end] not in names:
        end = rest.find(".", end + 1)
    entry: Any = rest[end + 1 :]
    if entry.startswith("#"):
        # Else a string that was saved as it is.
        with contextlib.suppress(ValueError, SyntaxError):
            entry = ast.literal_eval(entry[1:])
    return kind, rest[: max(end, 0)], entry


def template(optimizer: Optimizer, *, names: Names, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What to load for this optimizer: room for each saved entry of its parameters, placed as the parameter is.

    Args:
        saved: names and sizes in the checkpoint, without the optimizer's prefix.

    Raises:
        CheckpointError: parameters that the checkpoint's optimizer did not have, or entries that cannot be sharded as
            their parameters are.
    """
    wanted = {names[parameter]: parameter for parameter, _ in _parameters(optimizer, names)}
    room: dict[str, Any] = {}
    known: set[str] = set()
    for key, entry in saved.items():
        kind, name, _ = parted(key, names=wanted)
        if kind == OTHERS:
            room[key] = None
        # Those of other stages.
        if not name:
            continue
        known.add(name)
        room[key] = _room(wanted[name], entry, key=key) if kind == "state" else _option_room(entry)
    if missing := sorted(set(wanted) - known):
        raise CheckpointError(f"the checkpoint has no optimizer state for {', '.join(missing)}.")
    return room


def restore_(
    optimizer: Optimizer, flat: Mapping[str, Any], *, names: Names, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Give an optimizer the state and options that were loaded into its `template`.

    torch's own `load_state_dict` does it: its rules tell where an entry lies and of which dtype it is, and what an
    optimizer does besides when it is loaded is done.

    Args:
        groups: options of each group, for those that have no parameter on this rank.

    Raises:
        CheckpointError: parameters of one group were saved with unlike options, or an entry is for no parameter here.
    """
    others = dict(flat.get(OTHERS, {}))
    found: dict[str, dict[str, dict[Any, Any]]] = {"state": {}, "param_groups": {}}
    known = {names[parameter] for parameter, _ in _parameters(optimizer, names)}
    for key, value in flat.items():
        if key == OTHERS:
            continue
        kind, name, entry = parted(key, names=known)
        if not name:
            raise CheckpointError(f"{key} was loaded, but the optimizer has no such parameter.")
        found[kind].setdefault(name, {})[entry] = value
    state: dict[Any, Any] = dict(others.pop("state", {}))
    packed: list[dict[str, Any]] = []
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        saved: dict[str, Any] | None = None
        first = number
        for parameter in group["params"]:
            name = names.get(parameter, "")
            if name in found["state"]:
                state[number] = found["state"][name]
            mine = found["param_groups"].get(name)
            if saved is not None and mine is not None and saved != mine:
                raise CheckpointError(
                    f"{name} was saved with other options than the rest of group {index}: {mine}, not {saved}. "
                    "Make the groups that the saved optimizer had."
                )
            saved = mine if saved is None else saved
            number += 1
        # Groups are known by their parameters; by their order, where this rank has none of them.
        if saved is None and len(groups) == len(optimizer.param_groups):
            saved = dict(groups[index])
        packed.append({**options_of(group), **(saved or {}), "params": list(range(first, number))})
    optimizer.load_state_dict({**others, "state": state, "param_groups": packed})


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group: without its parameters, which are not the same on all ranks."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _parameters(optimizer: Optimizer, names: Names) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # A stand-in for the parameters that other ranks have holds nothing, and has no name.
            if parameter in names or parameter.numel():
                yield parameter, group


def _text(key: Any, *, name: str) -> str:
    if isinstance(key, str) and not key.startswith("#"):
        return key
    with contextlib.suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(key)) == key:
            return f"#{key!r}"
    raise CheckpointError(
        f"the optimizer's state of {name} has an entry {key!r}, which is no name that can be saved. Use a string."
    )


def _room(parameter: torch.Tensor, saved: Any, *, key: str) -> torch.Tensor | None:
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if saved.size == parameter.shape and saved.size:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    require_shardable(parameter, saved.size, key=key)
    return torch.zeros(saved.size, dtype=dtype)


def _option_room(saved: Any) -> torch.Tensor | None:
    """A learning rate may be a tensor."""
    return torch.zeros(saved.size, dtype=saved.properties.dtype) if isinstance(saved, TensorStorageMetadata) else None


def require_shardable(parameter: torch.Tensor, size: torch.Size, *, key: str) -> None:
    """
    Raises:
        CheckpointError: an entry of a sharded parameter's state is shaped otherwise, so that nobody knows its shards.
    """
    if isinstance(parameter, DTensor) and size != parameter.shape and size.numel() > 1:
        raise CheckpointError(
            f"{key} is shaped {tuple(size)}, its parameter {tuple(parameter.shape)}. Such a state cannot be sharded: "
            "go on in a layout that keeps parameters whole (dpN, ppN, or one process), or with an optimizer whose "
            "moments are shaped as its parameters. If this optimizer's are, it was built over other parameters, or in "
            "another order."
        )
