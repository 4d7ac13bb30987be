"""Weights that come whole, from files of other formats or a user's hook, into the shares of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.names import find_prefix, own_names, saved_name, without_stale
from lightning_3d.errors import CheckpointError
from lightning_3d.models.weight_files import equal_values
from lightning_3d.parallel.local import local_tensor, part_like

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy


def load_weights_(strategy: CheckpointingStrategy, state: Mapping[str, Any], *, strict: bool, source: str) -> None:
    """Give the module its state, each rank its part of what came whole; collective.

    A name that is missing beside another name of the same parameter is no fault: they are tied. Of several the first
    counts; it is a fault if they differ.

    Args:
        state: by the module's own names; whole tensors, or already sharded as the module's.
        source: what the state is, for errors.

    Raises:
        CheckpointError: on every rank, one list of all that is missing, unexpected or of another shape.
    """
    module = strategy.lightning_module
    assert module is not None
    strategy.share.reshard()
    own, elsewhere = module.state_dict(), strategy.share.elsewhere
    mine = {name: value for name, value in state.items() if name not in elsewhere}
    unlike: list[str] = []
    for names in tied_names(module, strategy.share.aliases):
        here, stored = [name for name in names if name in own], [name for name in names if name in state]
        if not here or not stored:
            continue
        first, *others = stored
        mine.update(dict.fromkeys(here, state[first]))
        unlike += [
            f"{other} differs from {first}, but the two are one here."
            for other in others
            if not _equal_parts(state[first], state[other], own[here[0]])
        ]
    parts = {name: placed(value, own.get(name)) for name, value in mine.items()}
    problems: list[str] = []
    try:
        with torch.no_grad():
            left = module.load_state_dict(parts, strict=strict)
        problems = [f"missing: {name}" for name in left.missing_keys]
        problems += [f"unexpected: {name}" for name in left.unexpected_keys]
        fatal = strict and bool(unlike)
    except RuntimeError as error:
        problems, fatal = [line.strip() for line in str(error).split("\n")[1:] if line.strip()] or [str(error)], True
    problems += unlike
    told: list[tuple[list[str], bool]] = [(problems, fatal)] * dist.get_world_size()
    dist.all_gather_object(told, (problems, fatal))
    lines = list(dict.fromkeys(line for lines, _ in told for line in lines))
    if any(bad for _, bad in told):
        raise CheckpointError(
            f"{source} does not fit {type(module).__name__}. {' '.join(lines)} "
            "Rename entries in on_load_checkpoint(), or set strict_loading=False on the module to load what fits."
        )
    if lines:
        rank_zero_warn(f"strict_loading=False: of {source}, not loaded: {'; '.join(lines)}.")


def parameter_names(strategy: CheckpointingStrategy) -> dict[torch.Tensor, str]:
    """What each parameter that this rank has is saved as: by its first name in the whole model."""
    assert strategy.lightning_module is not None
    named, aliases = strategy.lightning_module.named_parameters(), strategy.share.aliases
    return {parameter: saved_name(aliases.get(name, name)) for name, parameter in named}


def held_by_second_name(strategy: CheckpointingStrategy) -> set[str]:
    """What tied parameters are saved as that this rank has under another name: their first is on another stage."""
    assert strategy.lightning_module is not None
    aliases = strategy.share.aliases
    return {saved_name(aliases[name]) for name, _ in strategy.lightning_module.named_parameters() if name in aliases}


def names_of_whole(strategy: CheckpointingStrategy) -> dict[str, str]:
    """Names of the whole model's state, by what they are saved as."""
    assert strategy.lightning_module is not None
    return own_names([*strategy.lightning_module.state_dict(), *strategy.share.elsewhere])


def by_own_names(strategy: CheckpointingStrategy, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Stored weights under the names of the module, compiled or not as either may be; others keep theirs."""
    own = names_of_whole(strategy)
    return {own.get(saved_name(name), name): value for name, value in stored.items()}


def found_within(strategy: CheckpointingStrategy, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of a model, under the names of the module that holds it; without caches that are computed anew.

    Raises:
        CheckpointError: they fit in several places.
    """
    module = strategy.lightning_module
    assert module is not None
    own = names_of_whole(strategy)
    stored = {saved_name(name): value for name, value in stored.items()}
    patterns = [
        pattern
        for part in module.modules()
        for pattern in getattr(part, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    kept = [name for name in stored if name in own] + without_stale([n for n in stored if n not in own], patterns)
    prefix = find_prefix(kept, own)
    return {own.get(prefix + name, prefix + name): stored[name] for name in kept}


def placed(value: Any, target: Any) -> Any:
    """What came whole, as this rank's part of it in a DTensor placed as `target`; anything else as it is."""
    came_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not (came_whole and isinstance(target, DTensor) and value.shape == target.shape):
        return value
    return DTensor.from_local(
        part_like(value, target).to(target.device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def _equal_parts(one: Any, other: Any, target: torch.Tensor) -> bool:
    """Of two values for one parameter, whether what this rank takes is equal."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return False
    one, other = (
        local_tensor(value) if isinstance(value, DTensor) or value.shape != target.shape else part_like(value, target)
        for value in (one, other)
    )
    return equal_values(one, other)


def tied_names(module: nn.Module, aliases: Mapping[str, str]) -> Iterator[list[str]]:
    """Names of one parameter each, where there are several, also where another rank has the others."""
    groups: dict[str, dict[str, None]] = {}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = aliases.get(name) or first.setdefault(id(parameter), name)
        groups.setdefault(original, {original: None})[name] = None
    return (list(names) for names in groups.values() if len(names) > 1)
