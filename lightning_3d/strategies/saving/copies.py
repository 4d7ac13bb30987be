"""Further states of the module in a checkpoint: averages of its weights, of Lightning's callbacks or the user's own.

They are saved and loaded as the weights are, each rank its part. What is a dict by the module's names but holds other
tensors than the module's own (a norm for each weight, whole tensors beside sharded weights) stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.names import own_names
from lightning_3d.checkpoint.plain import by_copy
from lightning_3d.strategies.saving.weights import by_own_names, placed

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy


def copies_in(strategy: CheckpointingStrategy, checkpoint: Mapping[str, Any]) -> list[str]:
    """The entries of a checkpoint that are one more state of the module, sharded as its own."""
    assert strategy.lightning_module is not None
    own = strategy.lightning_module.state_dict()
    return [
        key
        for key, value in checkpoint.items()
        if key != "state_dict" and _is_copy(value, own, names=own.keys(), sharded=True)
    ]


def parts_of_copies(strategy: CheckpointingStrategy, checkpoint: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of the entries of a plain checkpoint that are one more state of the module, this rank's parts."""
    assert strategy.lightning_module is not None
    own = strategy.lightning_module.state_dict()
    names = own.keys() | strategy.share.elsewhere
    found = {}
    for key, value in checkpoint.items():
        if key == "state_dict" or not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            continue
        copy = by_own_names(strategy, value)
        if _is_copy(copy, own, names=names, sharded=False):
            found[key] = {name: placed(tensor, own[name]) for name, tensor in copy.items() if name in own}
    return found


def room_for_copies(strategy: CheckpointingStrategy, saved: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Room for this rank's parts of what was saved, by entry and the name that it was saved under."""
    assert strategy.lightning_module is not None
    state = strategy.lightning_module.state_dict()
    own = own_names(state)
    return {
        entry: {
            name: torch.zeros_like(state[own[name]], dtype=known.properties.dtype, requires_grad=False)
            for name, known in copy.items()
            if name in own
        }
        for entry, copy in by_copy(saved).items()
    }


def _is_copy(value: Any, own: Mapping[str, Any], *, names: Collection[str], sharded: bool) -> bool:
    if not isinstance(value, Mapping) or not value or not all(name in names for name in value):
        return False
    return all(
        isinstance(tensor, torch.Tensor)
        and (name not in own or tensor.shape == getattr(own[name], "shape", None))
        and isinstance(tensor, DTensor) == (sharded and isinstance(own.get(name), DTensor))
        for name, tensor in value.items()
    )
