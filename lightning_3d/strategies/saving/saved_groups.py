"""The optimizers that a checkpoint goes on with have the groups that were saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_3d.checkpoint.names import saved_name
from lightning_3d.errors import CheckpointError
from lightning_3d.models.weight_files import some

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy


def follow_saved_groups_(
    strategy: CheckpointingStrategy, checkpoint: Mapping[str, Any], *, names: Mapping[Tensor, str]
) -> None:
    """Add the groups that were added in the course of the saved run (what a finetuning callback has unfrozen, say).

    Args:
        names: what each parameter was saved as.

    Raises:
        CheckpointError: another number of optimizers, or other groups than were saved: what each had would be given to
            parameters that were not in it.
    """
    groups, orders = checkpoint["optimizer_groups"], checkpoint["optimizer_parameters"]
    require_as_many(strategy, len(groups))
    named = {name: parameter for parameter, name in names.items()}
    for number, (optimizer, options, order) in enumerate(zip(strategy.optimizers, groups, orders, strict=True)):
        if order is None:
            # Stages had unlike numbers of groups, or theirs were in no known order: options by parameter tell.
            continue
        saved = [{saved_name(name) for name in part} & named.keys() for part in order]
        own = [{names[p] for p in group["params"] if p in names} for group in optimizer.param_groups]
        for index, mine in enumerate(own):
            _require_same(mine, saved[index] if index < len(saved) else None, optimizer=number, group=index)
        for index in range(len(own), len(saved)):
            parameters = [named[name] for name in map(saved_name, order[index]) if name in named]
            for parameter in parameters:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": parameters, **options[index]})


def require_as_many(strategy: CheckpointingStrategy, saved: int) -> None:
    """
    Raises:
        CheckpointError: there are not as many optimizers as were saved.
    """
    if saved != len(strategy.optimizers):
        raise CheckpointError(
            f"it has {saved} optimizers, configure_optimizers() gave {len(strategy.optimizers)}. Build those that were "
            "saved, or start from the weights alone (initial_weights)."
        )


def _require_same(mine: set[str], saved: set[str] | None, *, optimizer: int, group: int) -> None:
    if saved == mine:
        return
    added, missing = sorted(mine - (saved or set())), sorted((saved or set()) - mine)
    told = [f"here also {some(added)}" if added else "", f"but not {some(missing)}" if missing else ""]
    known = "was not saved" if saved is None else "is not the saved one"
    raise CheckpointError(
        f"group {group} of optimizer {optimizer} {known}: {' '.join(filter(None, told)) or 'it is empty'}. Make the "
        "groups that the saved optimizer had, or start from the weights alone (initial_weights)."
    )
