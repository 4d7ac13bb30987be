"""Between Lightning's checkpoint dictionary and the folders of `lightning_3d.checkpoint.store`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_3d.checkpoint import optimizer_state as flat_state
from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.names import saved_name
from lightning_3d.checkpoint.places import Folder
from lightning_3d.checkpoint.plain import COPIES, MODEL, OPTIMIZER, below, copy_key, is_tensor
from lightning_3d.checkpoint.together import together
from lightning_3d.errors import CheckpointError
from lightning_3d.parallel.share import Share
from lightning_3d.strategies.saving import plain_files
from lightning_3d.strategies.saving.copies import room_for_copies
from lightning_3d.strategies.saving.renamed import renamed
from lightning_3d.strategies.saving.saved_groups import follow_saved_groups_
from lightning_3d.strategies.saving.weights import by_own_names, load_weights_, parameter_names, tied_names

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy

RENAMED = "renamed_parameters"

__all__ = ["load", "load_initial_weights_", "load_optimizers", "optimizer_state"]


def optimizer_state(strategy: CheckpointingStrategy, optimizer: Any) -> dict[str, Any]:
    """State of one optimizer by parameter name."""
    strategy.share.reshard()
    inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return flat_state.flatten(inner, names=parameter_names(strategy))


def load(strategy: CheckpointingStrategy, path: str, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder back into Lightning's checkpoint dictionary; collective.

    Args:
        path: of a folder or file, or a URL.
        weights_only: tensors and plain values only; the default, as in Lightning.

    What fits the model is loaded into its own tensors. Entries that do not fit are loaded whole, so that a module's
    `on_load_checkpoint` may rename or reshape them.
    """
    assert strategy.lightning_module is not None
    where = strategy.place(path)
    if isinstance(where, Folder) and plain_files.is_plain(where.path):
        return plain_files.load(strategy, where.path, weights_only=weights_only)
    restricted = weights_only is not False
    store.require_committed(where)
    strategy.share.reshard()
    saved = store.saved_tensors(where)
    fitting = strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING
    if fitting and strategy.optimizers and not below(saved, OPTIMIZER):
        local = str(where) if isinstance(where, Folder) else "its copy on this machine"
        raise CheckpointError(
            f"{where} holds weights only (save_weights_only=True), no optimizer state to go on with. To start from "
            f"its weights, leave out ckpt_path and set ThreeDStrategy(initial_weights={local!r})."
        )
    checkpoint = together(lambda: store.load_extra(where, weights_only=restricted), f"loading checkpoint {where}")
    model = _model_room(strategy.lightning_module, below(saved, MODEL), share=strategy.share)
    optimizers: list[dict[str, Any]] = []
    if fitting:
        checkpoint[RENAMED] = renamed(strategy, checkpoint, below(saved, MODEL))
        optimizers = together(lambda: _optimizers_room(strategy, checkpoint, saved), f"loading checkpoint {where}")
    state = {f"{MODEL}{key}": value for key, value in model.items()}
    for index, flat in enumerate(optimizers):
        state.update({f"{OPTIMIZER}{index}.{key}": value for key, value in flat.items()})
    copies = room_for_copies(strategy, below(saved, COPIES))
    state.update({copy_key(entry, name): value for entry, copy in copies.items() for name, value in copy.items()})
    store.load_tensors(where, state, weights_only=restricted)

    checkpoint["state_dict"] = by_own_names(strategy, {key: state[f"{MODEL}{key}"] for key in model})
    checkpoint.update({entry: by_own_names(strategy, copy) for entry, copy in copies.items()})
    if optimizers:
        checkpoint["optimizer_states"] = [
            {key: state[f"{OPTIMIZER}{index}.{key}"] for key in flat} for index, flat in enumerate(optimizers)
        ]
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
    model = _model_room(module, below(store.saved_tensors(path), MODEL), share=strategy.share)
    state: dict[str, Any] = {f"{MODEL}{key}": value for key, value in model.items()}
    store.load_tensors(path, state)
    load_weights_(strategy, by_own_names(strategy, below(state, MODEL)), strict=module.strict_loading, source=str(path))


def load_optimizers(strategy: CheckpointingStrategy, checkpoint: Mapping[str, Any]) -> None:
    """Give all optimizers what `load` has found for them; collective.

    Raises:
        CheckpointError: it does not fit them.
    """
    names, states = _names(strategy, checkpoint), checkpoint["optimizer_states"]

    def restore() -> None:
        for optimizer, flat, groups in zip(strategy.optimizers, states, checkpoint["optimizer_groups"], strict=True):
            # What is no parameter's torch leaves where it was read.
            others = move_data_to_device(flat.get(flat_state.OTHERS, {}), strategy.root_device)
            flat_state.restore_(optimizer, {**flat, flat_state.OTHERS: others}, names=names, groups=groups)

    together(restore, "loading the optimizers' states")


def _model_room(module: nn.Module, saved: Mapping[str, Any], *, share: Share) -> dict[str, Any]:
    own = {saved_name(name): value for name, value in module.state_dict().items()}
    others = {saved_name(name) for name in share.elsewhere}
    here = {
        saved_name(name): next((other for other in map(saved_name, names) if other in own), "")
        for names in tied_names(module, share.aliases)
        for name in names
    }
    taken: set[str] = set()
    room: dict[str, Any] = {}
    for key, entry in saved.items():
        name = here.get(key) or key
        if key in others and name not in own:
            continue
        if not is_tensor(entry):
            room[key] = None
        elif getattr(own.get(name), "shape", None) == entry.size:
            # Values of two names of one weight are compared before either counts.
            room[key] = torch.empty_like(own[name]) if name in taken else own[name]
            taken.add(name)
        else:
            room[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return room


def _optimizers_room(
    strategy: CheckpointingStrategy, checkpoint: Mapping[str, Any], saved: Mapping[str, Any]
) -> list[dict[str, Any]]:
    names = _names(strategy, checkpoint)
    follow_saved_groups_(strategy, checkpoint, names=names)
    return [
        flat_state.template(optimizer, names=names, saved=below(saved, f"{OPTIMIZER}{index}."))
        for index, optimizer in enumerate(strategy.optimizers)
    ]


def _names(strategy: CheckpointingStrategy, checkpoint: Mapping[str, Any]) -> dict[torch.Tensor, str]:
    """What each parameter was saved as."""
    old = checkpoint.get(RENAMED, {})
    return {parameter: old.get(name, name) for parameter, name in parameter_names(strategy).items()}
