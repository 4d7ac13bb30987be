"""An optimizer's state by parameter name, flat, so that any layout can load any other's.

state.<parameter>.<entry>           a tensor shaped and sharded as its parameter, or a scalar
param_groups.<parameter>.<option>   the options of the group that the parameter is in
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightning_3d.errors import CheckpointError

Names = Mapping[torch.Tensor, str]


def flatten(optimizer: Optimizer, *, names: Names) -> dict[str, Any]:
    """State and options by parameter name; tensors are the optimizer's own, not copies."""
    flat: dict[str, Any] = {}
    for parameter, group in _parameters(optimizer, names):
        name = names[parameter]
        for entry, value in optimizer.state.get(parameter, {}).items():
            flat[f"state.{name}.{entry}"] = value
        for option, value in group.items():
            if option != "params":
                flat[f"param_groups.{name}.{option}"] = value
    return flat


def template(optimizer: Optimizer, *, names: Names, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What to load for this optimizer: room for each saved entry of its parameters, placed as the parameter is.

    Args:
        saved: names and sizes in the checkpoint, without the optimizer's prefix.

    Raises:
        CheckpointError: parameters that the checkpoint's optimizer did not have.
    """
    wanted = {names[parameter]: parameter for parameter, _ in _parameters(optimizer, names)}
    room: dict[str, Any] = {}
    known: set[str] = set()
    for key, entry in saved.items():
        kind, _, rest = key.partition(".")
        name, _, _ = rest.rpartition(".")
        if name not in wanted:
            continue
        known.add(name)
        room[key] = _room(wanted[name], entry) if kind == "state" else None
    if missing := sorted(set(wanted) - known):
        raise CheckpointError(f"the checkpoint has no optimizer state for {', '.join(missing)}.")
    return room


def restore_(optimizer: Optimizer, flat: Mapping[str, Any], *, names: Names) -> None:
    """Give an optimizer the state and options that were loaded into its `template`."""
    for parameter, group in _parameters(optimizer, names):
        name = names[parameter]
        prefix = f"state.{name}."
        entries = {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}
        if entries:
            optimizer.state[parameter] = entries
        prefix = f"param_groups.{name}."
        group.update({key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)})


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group, in order."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def restore_empty_groups_(optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
    """Give groups that have no parameter on this rank their options: `restore_` finds groups by their parameters."""
    if len(saved) != len(optimizer.param_groups):
        return
    for group, known in zip(optimizer.param_groups, saved, strict=True):
        if not any(parameter.numel() for parameter in group["params"]):
            group.update(known)


def _parameters(optimizer: Optimizer, names: Names) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # A stand-in for the parameters that other ranks have holds nothing, and has no name.
            if parameter in names or parameter.numel():
                yield parameter, group


def _room(parameter: torch.Tensor, saved: Any) -> torch.Tensor | None:
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if saved.size == parameter.shape and saved.size:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    # A step count is kept on the CPU by torch's optimizers unless they are fused or capturable.
    return torch.zeros(saved.size, dtype=dtype)
