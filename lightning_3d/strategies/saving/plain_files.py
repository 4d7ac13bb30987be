"""What this strategy did not save itself: plain Lightning's .ckpt, state_dict files and Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_3d.checkpoint.names import saved_name
from lightning_3d.checkpoint.optimizer_state import OTHERS, keyed, options_of, others_of, require_shardable
from lightning_3d.checkpoint.places import Folder, place
from lightning_3d.checkpoint.together import together
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.models.weight_files import INDEX, SINGLE, open_torch_file, open_weights
from lightning_3d.parallel.local import local_tensor, part_like
from lightning_3d.strategies.saving.copies import parts_of_copies
from lightning_3d.strategies.saving.saved_groups import require_as_many
from lightning_3d.strategies.saving.weights import (
    by_own_names,
    found_within,
    held_by_second_name,
    load_weights_,
    parameter_names,
)

if TYPE_CHECKING:
    from lightning_3d.strategies.checkpointing import CheckpointingStrategy


def check_initial_weights(path: str | Path | None) -> Path | None:
    """
    Raises:
        ConfigError: this is no path, or there is nothing on this machine at it.
    """
    if path is None:
        return None
    if not isinstance(path, str | Path):
        raise ConfigError(f"initial_weights={path!r} must be a path. Set initial_weights=None to start without.")
    where = place(path)
    if not isinstance(where, Folder):
        raise ConfigError(
            f"initial_weights={str(path)!r} is no file or folder of this machine, from which weights are mapped. Copy "
            "it to this machine, and give the copy's path."
        )
    found = where.path
    if not found.exists():
        raise ConfigError(
            f"initial_weights={str(path)!r}: there is no such file or folder, and names on a hub are not downloaded. "
            "Fetch a model first, with hf download NAME --local-dir FOLDER, and give that folder."
        )
    return found


def is_plain(path: Path) -> bool:
    """Whether this is a file, or a folder of safetensors or of a Hugging Face model."""
    return path.is_file() or any((path / name).is_file() for name in (INDEX, SINGLE, "config.json"))


def load(strategy: CheckpointingStrategy, path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Lightning's checkpoint dictionary from a file or folder of another format; collective.

    Tensors of the model are whole and mapped from the file: `load_weights_` reads this rank's parts. Of further states
    of the module, averages of its weights, say, this rank's parts are given.

    Raises:
        CheckpointError: nothing readable is there, it does not fit, or it has no optimizer state that `fit` needs.
    """
    assert strategy.lightning_module is not None
    fitting = strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING
    checkpoint: dict[str, Any] = {}
    if path.is_file() and path.suffix != ".safetensors":
        checkpoint = open_torch_file(path, weights_only=weights_only)
    if "state_dict" not in checkpoint:
        checkpoint = {"state_dict": found_within(strategy, open_weights(path))}
    checkpoint["state_dict"] = by_own_names(strategy, checkpoint["state_dict"])
    checkpoint.update(parts_of_copies(strategy, checkpoint))
    if fitting and "optimizer_states" not in checkpoint:
        raise CheckpointError(
            f"{path} holds weights alone, no optimizer state and no loops to go on with. To start from its weights, "
            f"leave out ckpt_path and set ThreeDStrategy(initial_weights={str(path)!r})."
        )
    if fitting:
        saved = checkpoint["optimizer_states"]
        orders = [names_by_group(strategy, optimizer) for optimizer in strategy.optimizers]

        def by_name() -> list[dict[str, Any]]:
            require_as_many(strategy, len(saved))
            return [_by_name(strategy, order, state) for order, state in zip(orders, saved, strict=True)]

        checkpoint["optimizer_states"] = together(by_name, f"loading checkpoint {path}")
        checkpoint["optimizer_groups"] = [[options_of(group) for group in state["param_groups"]] for state in saved]
    return checkpoint


def load_initial_weights_(strategy: CheckpointingStrategy, path: Path) -> None:
    """Start from the weights of a file or folder of any format but our own, which has another reader; collective."""
    assert strategy.lightning_module is not None
    state = found_within(strategy, open_weights(path))
    load_weights_(strategy, state, strict=strategy.lightning_module.strict_loading, source=str(path))


def names_by_group(strategy: CheckpointingStrategy, optimizer: Optimizer) -> list[list[str]] | None:
    """What the whole model's parameters are saved as, in each group of an optimizer, in order.

    Collective under a pipeline.

    None where stages have unlike numbers of groups, or a group is not in the model's order, which alone tells in which
    order one process would have it.
    """
    assert strategy.lightning_module is not None
    names = parameter_names(strategy)
    mine = [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]
    group = strategy.mesh["pp"].get_group()
    if group.size() == 1:
        return mine
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, mine, group=group)
    order = {saved_name(name): index for index, name in enumerate(strategy.share.parameter_names)}
    # A stage that holds a tied parameter under its second name has it out of order; the first holder tells its place.
    second = held_by_second_name(strategy)
    firsts = [[name for name in part if name not in second] for part in mine]
    orders: list[Any] = [None] * group.size()
    dist.all_gather_object(orders, [part == sorted(part, key=order.__getitem__) for part in firsts], group=group)
    ordered = all(one for rank in orders for one in rank)
    if not ordered or len({len(rank) for rank in ranks}) != 1:
        return None
    return [
        sorted({name for part in parts for name in part}, key=order.__getitem__) for parts in zip(*ranks, strict=True)
    ]


def _by_name(
    strategy: CheckpointingStrategy, order: list[list[str]] | None, saved: Mapping[str, Any]
) -> dict[str, Any]:
    """An optimizer's state by parameter name (as `optimizer_state.flatten` has it), this rank's parts of it."""
    numbers = [group["params"] for group in saved["param_groups"]]
    theirs, ours = [len(part) for part in numbers], [len(names) for names in order or []]
    if order is None or ours != theirs:
        raise CheckpointError(
            f"there are optimizer groups of {theirs} parameters; here: {ours or 'in no order of the module'}. "
            "Build the same optimizer, its groups in the order of the module's parameters."
        )
    parameters = {name: parameter for parameter, name in parameter_names(strategy).items()}
    flat: dict[str, Any] = {}
    for names, part, group in zip(order, numbers, saved["param_groups"], strict=True):
        for name, number in zip(names, part, strict=True):
            if name not in parameters:
                continue
            flat.update(keyed("param_groups", name, options_of(group)))
            for key, value in keyed("state", name, saved["state"].get(number, {})).items():
                flat[key] = _part(value, parameters[name], key=key)
    if others := others_of(saved):
        flat[OTHERS] = others
    return flat


def _part(value: Any, parameter: torch.Tensor, *, key: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape or not value.dim():
        require_shardable(parameter, value.shape, key=key)
        return value.clone()
    room = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
    local_tensor(room).copy_(part_like(value, room))
    return room
