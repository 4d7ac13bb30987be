"""Between Lightning's checkpoint dictionary and the folders of `lightning_3d.checkpoint.store`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_3d.checkpoint import optimizer_state as flat_state
from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.random_state import random_state, set_random_state
from lightning_3d.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy

__all__ = ["load", "load_model", "load_optimizers", "optimizer_state", "remove", "save", "set_random_state"]

FORMAT = 1


def optimizer_state(strategy: CheckpointingStrategy, optimizer: Any) -> dict[str, Any]:
    """State of one optimizer by parameter name."""
    strategy.share.reshard()
    inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return flat_state.flatten(inner, names=_names(strategy))


def save(strategy: CheckpointingStrategy, checkpoint: dict[str, Any], path: Path) -> None:
    """Write Lightning's checkpoint as a folder; collective."""
    strategy.share.reshard()
    state = {f"model.{key}": value for key, value in checkpoint.pop("state_dict").items()}
    # Once more by their order, for groups that hold no parameter on a rank that loads them.
    checkpoint["optimizer_groups"] = [flat_state.options(optimizer) for optimizer in strategy.optimizers]
    for index, flat in enumerate(checkpoint.pop("optimizer_states", [])):
        state.update({f"optimizer.{index}.{key}": value for key, value in flat.items()})
    store.save(
        path,
        state,
        extra=checkpoint,
        rank_state=random_state(),
        summary={
            "format": FORMAT,
            "global_step": checkpoint.get("global_step", 0),
            "epoch": checkpoint.get("epoch", 0),
            "layout": strategy.layout.name,
            "world_size": strategy.layout.world_size,
        },
    )


def load(strategy: CheckpointingStrategy, path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder back into Lightning's checkpoint dictionary; collective.

    What fits the model is loaded into its own tensors. Entries that do not fit are loaded whole, so that a module's
    `on_load_checkpoint` may rename or reshape them.
    """
    assert strategy.lightning_module is not None
    store.require_committed(path)
    strategy.share.reshard()
    saved = store.saved_tensors(path)
    model = _model_room(strategy.lightning_module, _below(saved, "model."), elsewhere=strategy.share.elsewhere)
    optimizers = []
    if strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING:
        for index, optimizer in enumerate(strategy.optimizers):
            below = _below(saved, f"optimizer.{index}.")
            if below:
                optimizers.append(flat_state.template(optimizer, names=_names(strategy), saved=below))
    state = {f"model.{key}": value for key, value in model.items()}
    for index, flat in enumerate(optimizers):
        state.update({f"optimizer.{index}.{key}": value for key, value in flat.items()})
    store.load_tensors(path, state)

    checkpoint = store.load_extra(path, weights_only=bool(weights_only))
    checkpoint["state_dict"] = {key: state[f"model.{key}"] for key in model}
    if optimizers:
        checkpoint["optimizer_states"] = [
            {key: state[f"optimizer.{index}.{key}"] for key in flat} for index, flat in enumerate(optimizers)
        ]
        for optimizer, groups in zip(strategy.optimizers, checkpoint.get("optimizer_groups", []), strict=False):
            flat_state.restore_empty_groups_(optimizer, groups)
    # Streams of random numbers continue in the same layout; another has other streams.
    if store.summary(path)["layout"] == strategy.layout.name:
        checkpoint["random_state"] = store.load_rank_state(path, rank=dist.get_rank())
    return checkpoint


def load_model(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Give a module its state, sharding what came whole.

    Raises:
        CheckpointError: missing, unexpected or misshapen entries, all of them.
    """
    targets = module.state_dict()
    placed = {key: _place(value, targets.get(key)) for key, value in state_dict.items()}
    try:
        module.load_state_dict(placed, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit {type(module).__name__}: {error}") from error


def load_optimizers(strategy: CheckpointingStrategy, states: list[dict[str, Any]]) -> None:
    """
    Raises:
        CheckpointError: another number of optimizers than was saved.
    """
    if len(states) != len(strategy.optimizers):
        raise CheckpointError(
            f"the checkpoint has {len(states)} optimizers, configure_optimizers() gave {len(strategy.optimizers)}."
        )
    for optimizer, flat in zip(strategy.optimizers, states, strict=True):
        flat_state.restore_(optimizer, flat, names=_names(strategy))


def remove(path: Path) -> None:
    """Delete a checkpoint; by one rank."""
    store.remove(path)


def _names(strategy: CheckpointingStrategy) -> dict[torch.Tensor, str]:
    assert strategy.lightning_module is not None
    aliases = strategy.share.aliases
    return {parameter: aliases.get(name, name) for name, parameter in strategy.lightning_module.named_parameters()}


def _below(saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}


def _model_room(module: nn.Module, saved: Mapping[str, Any], *, elsewhere: Collection[str]) -> dict[str, Any]:
    own = module.state_dict()
    room: dict[str, Any] = {}
    for key, entry in saved.items():
        if key in elsewhere:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            room[key] = None
        elif key in own and own[key].shape == entry.size:
            room[key] = own[key]
        else:
            room[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return room


def _place(value: Any, target: Any) -> Any:
    came_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not (came_whole and isinstance(target, DTensor) and value.shape == target.shape):
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
