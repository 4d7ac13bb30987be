"""Between Lightning's checkpoint dictionary and the folders of `lightning_3d.checkpoint.store`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_3d.checkpoint import optimizer_state as flat_state
from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.names import saved_name
from lightning_3d.checkpoint.places import place
from lightning_3d.checkpoint.together import together
from lightning_3d.errors import CheckpointError
from lightning_3d.strategies.saving import plain_files
from lightning_3d.strategies.saving.weights import load_weights_, parameter_names

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy

__all__ = ["leave_finished_epoch", "load", "load_initial_weights_", "load_optimizers", "optimizer_state"]


def optimizer_state(strategy: CheckpointingStrategy, optimizer: Any) -> dict[str, Any]:
    """State of one optimizer by parameter name."""
    strategy.share.reshard()
    inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return flat_state.flatten(inner, names=_names(strategy))


def load(strategy: CheckpointingStrategy, path: str, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder back into Lightning's checkpoint dictionary; collective.

    Args:
        path: of a folder or file, or a URL.
        weights_only: tensors and plain values only; the default, as in Lightning.

    What fits the model is loaded into its own tensors. Entries that do not fit are loaded whole, so that a module's
    `on_load_checkpoint` may rename or reshape them.
    """
    assert strategy.lightning_module is not None
    if "://" not in path and plain_files.is_plain(Path(path)):
        return plain_files.load(strategy, Path(path), weights_only=weights_only)
    restricted = weights_only is not False
    where = place(path, storage_options=strategy.options_for(path))
    store.require_committed(where)
    strategy.share.reshard()
    saved = store.saved_tensors(where)
    fitting = strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING
    if fitting and strategy.optimizers and not _below(saved, "optimizer."):
        local = "its copy on this machine" if "://" in path else str(where)
        raise CheckpointError(
            f"{where} holds weights only (save_weights_only=True), no optimizer state to go on with. To start from "
            f"its weights, leave out ckpt_path and set ThreeDStrategy(initial_weights={local!r})."
        )
    checkpoint = together(lambda: store.load_extra(where, weights_only=restricted), f"loading checkpoint {where}")
    model = _model_room(strategy.lightning_module, _below(saved, "model."), elsewhere=strategy.share.elsewhere)
    optimizers = []
    if fitting:
        _add_later_groups_(strategy, checkpoint)
        for index, optimizer in enumerate(strategy.optimizers):
            below = _below(saved, f"optimizer.{index}.")
            if below:
                optimizers.append(flat_state.template(optimizer, names=_names(strategy), saved=below))
    state = {f"model.{key}": value for key, value in model.items()}
    for index, flat in enumerate(optimizers):
        state.update({f"optimizer.{index}.{key}": value for key, value in flat.items()})
    copies = _room_for_copies(strategy.lightning_module, _below(saved, "copies.")) if fitting else {}
    state.update({f"copies.{key}": value for key, value in copies.items()})
    store.load_tensors(where, state, weights_only=restricted)

    own = {saved_name(name): name for name in strategy.lightning_module.state_dict()}
    checkpoint["state_dict"] = {own.get(key, key): state[f"model.{key}"] for key in model}
    if optimizers:
        checkpoint["optimizer_states"] = [
            {key: state[f"optimizer.{index}.{key}"] for key in flat} for index, flat in enumerate(optimizers)
        ]
        for optimizer, groups in zip(strategy.optimizers, checkpoint.get("optimizer_groups", []), strict=False):
            flat_state.restore_empty_groups_(optimizer, groups)
    for key in copies:
        entry, _, name = key.partition(".")
        checkpoint.setdefault(entry, {})[own[name]] = state[f"copies.{key}"]
    # Streams of random numbers continue in the same layout; another has other streams.
    if store.summary(where)["layout"] == strategy.layout.name:
        checkpoint["random_state"] = store.load_rank_state(where, rank=dist.get_rank(), weights_only=restricted)
    return checkpoint


def load_initial_weights_(strategy: CheckpointingStrategy, path: Path) -> None:
    """Give a module that was just laid out the weights of a checkpoint folder, or of what `plain_files` reads."""
    if plain_files.is_plain(path):
        plain_files.load_initial_weights_(strategy, path)
        return
    module = strategy.lightning_module
    assert module is not None
    store.require_committed(path)
    model = _model_room(module, _below(store.saved_tensors(path), "model."), elsewhere=strategy.share.elsewhere)
    state: dict[str, Any] = {f"model.{key}": value for key, value in model.items()}
    store.load_tensors(path, state)
    own = {saved_name(name): name for name in module.state_dict()}
    state = {own.get(key, key): value for key, value in _below(state, "model.").items()}
    load_weights_(strategy, state, strict=module.strict_loading, source=str(path))


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


def leave_finished_epoch(trainer: L.Trainer) -> None:
    """Go on with the next epoch after a checkpoint of an epoch's end.

    Lightning does so only where max_steps is not set: else it runs the finished epoch's end once more, and the data of
    the next epoch are passed over.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if epochs.ready == epochs.started == epochs.processed:
        _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]


def _names(strategy: CheckpointingStrategy) -> dict[torch.Tensor, str]:
    return {parameter: saved_name(name) for parameter, name in parameter_names(strategy).items()}


def _below(saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}


def _model_room(module: nn.Module, saved: Mapping[str, Any], *, elsewhere: Collection[str]) -> dict[str, Any]:
    own = {saved_name(name): value for name, value in module.state_dict().items()}
    others = {saved_name(name) for name in elsewhere}
    room: dict[str, Any] = {}
    for key, entry in saved.items():
        if key in others:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            room[key] = None
        elif key in own and own[key].shape == entry.size:
            room[key] = own[key]
        else:
            room[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return room


def _add_later_groups_(strategy: CheckpointingStrategy, checkpoint: Mapping[str, Any]) -> None:
    """Groups that were added in the course of the saved run (what a finetuning callback has unfrozen, say)."""
    named = {name: parameter for parameter, name in _names(strategy).items()}
    saved = zip(checkpoint.get("optimizer_groups", []), checkpoint.get("optimizer_parameters", []), strict=False)
    for optimizer, (options, names) in zip(strategy.optimizers, saved, strict=False):
        for index in range(len(optimizer.param_groups), len(names or [])):
            parameters = [named[saved_name(name)] for name in names[index] if saved_name(name) in named]
            for parameter in parameters:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": parameters, **options[index]})


def _room_for_copies(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """For this rank's parts of further states of the module: ENTRY.NAME."""
    own = {saved_name(name): value for name, value in module.state_dict().items()}
    names = {key: key.partition(".")[2] for key in saved}
    return {key: torch.zeros_like(own[name], requires_grad=False) for key, name in names.items() if name in own}
