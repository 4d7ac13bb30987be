"""Lightning's checkpoint dictionary as what one rank gives to a checkpoint folder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint import optimizer_state as flat_state
from lightning_3d.checkpoint.names import saved_name
from lightning_3d.checkpoint.plain import MODEL, OPTIMIZER, copy_key
from lightning_3d.checkpoint.random_state import random_state
from lightning_3d.checkpoint.writing import FORMAT, Contents, packed
from lightning_3d.errors import CheckpointError
from lightning_3d.strategies.saving import plain_files
from lightning_3d.strategies.saving.copies import copies_in
from lightning_3d.strategies.saving.weights import names_of_whole

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy


def contents(strategy: CheckpointingStrategy, checkpoint: dict[str, Any], *, origin: Mapping[str, Any]) -> Contents:
    """Weights, optimizer states and all copies of weights become entries by name; the rest is packed.

    Args:
        origin: for the summary, see `Redone`.

    Raises:
        CheckpointError: there are parts of sharded tensors in the rest, of which rank 0's alone would be kept.
    """
    strategy.share.reshard()
    state = {f"{MODEL}{saved_name(key)}": value for key, value in checkpoint.pop("state_dict").items()}
    # Callbacks that average weights keep two of each.
    for key in copies_in(strategy, checkpoint):
        state.update({copy_key(key, saved_name(name)): value for name, value in checkpoint.pop(key).items()})
    # What plain Lightning would have called them.
    compiled = [name for name in names_of_whole(strategy).values() if name != saved_name(name)]
    if compiled:
        checkpoint["compiled_names"] = compiled
    # Once more by their order, for groups that hold no parameter on a rank that loads them.
    checkpoint["optimizer_groups"] = [
        [flat_state.options_of(group) for group in optimizer.param_groups] for optimizer in strategy.optimizers
    ]
    # And the order of their parameters, which is how plain Lightning names them.
    checkpoint["optimizer_parameters"] = [plain_files.names_by_group(strategy, one) for one in strategy.optimizers]
    for index, flat in enumerate(checkpoint.pop("optimizer_states", [])):
        state.update({f"{OPTIMIZER}{index}.{key}": value for key, value in flat.items()})
    for key, value in [*checkpoint.items(), *state.items()]:
        if key not in state or not isinstance(value, torch.Tensor):
            _refuse_parts(value, key)
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
            **origin,
        },
    )


def _refuse_parts(value: Any, place: str) -> None:
    if isinstance(value, DTensor) and place.startswith(OPTIMIZER):
        raise CheckpointError(
            f"the entry {place} of an optimizer's state holds this rank's part of a sharded tensor inside of another "
            "value. Keep each in an entry of its parameter's state, state[parameter][NAME] = tensor, or train in a "
            "layout that keeps parameters whole (dpN, ppN, or one process)."
        )
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"the entry {place} of the checkpoint is this rank's part of a sharded tensor. Add value.full_tensor() "
            "instead, or, in on_save_checkpoint, checkpoint[KEY] = {name: tensor} with the module's own names and "
            "shapes, which is saved as the weights are."
        )
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, inner in items:
        _refuse_parts(inner, f"{place}.{key}")
