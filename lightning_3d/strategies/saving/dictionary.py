"""Lightning's checkpoint dictionary as what one rank gives to a checkpoint folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_3d.checkpoint import optimizer_state as flat_state
from lightning_3d.checkpoint.names import saved_name
from lightning_3d.checkpoint.random_state import random_state
from lightning_3d.checkpoint.writing import FORMAT, Contents, packed
from lightning_3d.strategies.saving import plain_files

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy


def contents(strategy: CheckpointingStrategy, checkpoint: dict[str, Any]) -> Contents:
    """Weights, optimizer states and all copies of weights become entries by name; the rest is packed."""
    strategy.share.reshard()
    assert strategy.lightning_module is not None
    own = strategy.lightning_module.state_dict()
    state = {f"model.{saved_name(key)}": value for key, value in checkpoint.pop("state_dict").items()}
    # Callbacks that average weights keep two of each.
    for key in [key for key, value in checkpoint.items() if _is_copy(value, own)]:
        state.update({f"copies.{key}.{saved_name(name)}": value for name, value in checkpoint.pop(key).items()})
    # Once more by their order, for groups that hold no parameter on a rank that loads them.
    checkpoint["optimizer_groups"] = [flat_state.options(optimizer) for optimizer in strategy.optimizers]
    # And the order of their parameters, which is how plain Lightning names them.
    checkpoint["optimizer_parameters"] = [plain_files.names_by_group(strategy, one) for one in strategy.optimizers]
    for index, flat in enumerate(checkpoint.pop("optimizer_states", [])):
        state.update({f"optimizer.{index}.{key}": value for key, value in flat.items()})
    return Contents(
        tensors=state,
        extra=packed(checkpoint),
        rank_state=packed(random_state()),
        summary={
            "format": FORMAT,
            "global_step": checkpoint.get("global_step", 0),
            "epoch": checkpoint.get("epoch", 0),
            "layout": strategy.layout.name,
            "world_size": strategy.layout.world_size,
            "time": time.time(),
        },
    )


def _is_copy(value: Any, own: Mapping[str, Any]) -> bool:
    """Whether an entry is one more state of the module, sharded as its own."""
    if not isinstance(value, Mapping) or not value:
        return False
    return value.keys() <= own.keys() and all(isinstance(tensor, torch.Tensor) for tensor in value.values())
