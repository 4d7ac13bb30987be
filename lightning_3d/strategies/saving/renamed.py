"""What parameters were saved as that `on_load_checkpoint` is to rename: it does not rename an optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_3d.checkpoint.names import saved_name
from lightning_3d.strategies.saving.plain_files import names_by_group
from lightning_3d.strategies.saving.weights import names_of_whole, parameter_names

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy


def renamed(strategy: CheckpointingStrategy, checkpoint: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, str]:
    """Old names by new ones, of parameters that have the same place in their group and the same shape.

    Collective under a pipeline. Where no hook renames them, the error of the weights lists them all.

    Args:
        saved: the model's entries in the checkpoint.
    """
    assert strategy.lightning_module is not None
    parameters = {name: parameter for parameter, name in parameter_names(strategy).items()}
    whole = names_of_whole(strategy)
    found: dict[str, str] = {}
    for optimizer, order in zip(strategy.optimizers, checkpoint["optimizer_parameters"], strict=False):
        own = names_by_group(strategy, optimizer)
        for news, olds in zip(own or [], order or [], strict=False):
            pairs = [(new, old) for new, old in zip(news, map(saved_name, olds), strict=False) if new != old]
            fits = len(news) == len(olds) and all(
                new not in saved
                and old in saved
                and old not in whole
                and (new not in parameters or parameters[new].shape == saved[old].size)
                for new, old in pairs
            )
            found.update(pairs if fits else [])
    # Of weights that are left out, the state is not another's.
    return found if strategy.lightning_module.strict_loading else {}
