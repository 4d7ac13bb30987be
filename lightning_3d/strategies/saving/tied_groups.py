"""A parameter that several pipeline stages have is in the same optimizer group on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_3d.errors import ConfigError
from lightning_3d.strategies.saving.weights import held_by_second_name, parameter_names

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy


def agree_on_tied_groups(strategy: CheckpointingStrategy) -> None:
    """Move copies of tied parameters to the group that the first of their names is in; collective.

    On the last stage a tied head has its second name alone, so that groups made by names would put the copies into
    groups with other options, and they would drift apart.

    Raises:
        ConfigError: stages have unlike numbers of groups.
    """
    group = strategy.mesh["pp"].get_group()
    names = parameter_names(strategy)
    second = held_by_second_name(strategy)
    mine = {
        names[parameter]: (which, index)
        for which, optimizer in enumerate(strategy.optimizers)
        for index, options in enumerate(optimizer.param_groups)
        for parameter in options["params"]
        if parameter in names
    }
    held: list[Any] = [None] * group.size()
    dist.all_gather_object(held, {name: mine.get(name) for name in names.values() if name not in second}, group=group)
    first = {name: place for stage in held for name, place in stage.items()}
    for parameter, name in names.items():
        if name not in second or name not in first or first[name] == mine.get(name):
            continue
        if mine.get(name) is not None:
            which, index = mine[name]
            options = strategy.optimizers[which].param_groups[index]
            options["params"] = [other for other in options["params"] if other is not parameter]
        if first[name] is not None:
            which, index = first[name]
            if index >= len(strategy.optimizers[which].param_groups):
                raise ConfigError(
                    f"{name} is in group {index} of an optimizer on the first stage that has it, but another stage "
                    f"has {len(strategy.optimizers[which].param_groups)} groups. Make equally many on every stage, "
                    "also where one is empty."
                )
            strategy.optimizers[which].param_groups[index]["params"].append(parameter)
