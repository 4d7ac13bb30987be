"""Ranks that run other code or settings than the rest are told at the start; later they would wait for each other."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from torch.distributed import ProcessGroup

from lightning_3d.errors import ConfigError

# Settings of the Trainer that change how many steps, collectives or samples there are, or what they compute.
_TRAINER = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "precision", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "overfit_batches", "val_check_interval", "check_val_every_n_epoch",
    "num_sanity_val_steps", "reload_dataloaders_every_n_epochs", "log_every_n_steps", "world_size", "num_nodes",
)  # fmt: skip


def describe_job(trainer: L.Trainer, *, ckpt_path: Any, settings: Mapping[str, Any]) -> dict[str, str]:
    """What must be equal on all ranks whenever a Trainer begins something, by name.

    Args:
        ckpt_path: that is to be loaded.
        settings: of the strategy.
    """
    found: dict[str, Any] = {
        "version of Python": platform.python_version(),
        "version of torch": torch.__version__,
        "version of lightning": L.__version__,
        "version of lightning_3d": _version("lightning-3d"),
        "what the Trainer does": trainer.state.fn,
        # Each rank has looked for "last" and "best" by itself.
        "ckpt_path": ckpt_path,
        "seed": os.environ.get("PL_GLOBAL_SEED"),
    }
    found |= {f"strategy's {name}": value for name, value in settings.items()}
    found |= {f"Trainer's {name}": getattr(trainer, name, None) for name in _TRAINER}
    found["Trainer's callbacks that save or stop"] = [
        type(callback).__name__
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, Checkpoint | EarlyStopping)
    ]
    return {name: str(value) for name, value in found.items()}


def describe_module(module: L.LightningModule) -> dict[str, str]:
    """What must be equal on all ranks before a module is laid out, by name."""
    found: dict[str, Any] = {
        "class of the module": type(module).__qualname__,
        "automatic_optimization": module.automatic_optimization,
    }
    found |= {f"code of {kind.__qualname__}": _code(kind) for kind in type(module).__mro__ if _is_of_the_user(kind)}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            frozen = "" if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter) else ", frozen"
            found[f"{name} of the model"] = f"{tuple(tensor.shape)} {tensor.dtype}{frozen}"
    return {name: str(value) for name, value in found.items()}


def describe_optimizers(optimizers: Iterable[Any]) -> dict[str, str]:
    """The options of all parameter groups, by name; of numbers and words alone."""
    found = {}
    for index, optimizer in enumerate(optimizers):
        found[f"class of optimizer {index}"] = type(optimizer).__qualname__
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, str | int | float | bool | tuple | type(None)):
                    found[f"{name} of group {number} of optimizer {index}"] = str(value)
    return found


def refuse_differences(mine: Mapping[str, str], *, group: ProcessGroup | None = None) -> None:
    """Compare what the ranks of a group tell of themselves.

    Raises:
        ConfigError: on all ranks, where one of them describes itself otherwise; it names the first thing that differs,
            ranks and values. Collective.
    """
    size = dist.get_world_size(group)
    digests: list[Any] = [None] * size
    dist.all_gather_object(digests, hashlib.sha256(repr(list(mine.items())).encode()).hexdigest(), group=group)
    if len(set(digests)) == 1:
        return
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, dict(mine), group=group)
    names = dict.fromkeys(name for each in everything for name in each)
    values: dict[str, list[int]] = {}
    name = next((name for name in names if len({each.get(name) for each in everything}) > 1), None)
    if name is None:
        raise ConfigError("ranks registered the parts of the model in different orders. Build it alike on all ranks.")
    for rank, each in enumerate(everything):
        of_job = rank if group is None else dist.get_global_rank(group, rank)
        values.setdefault(each.get(name, "nothing"), []).append(of_job)
    told = ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
    raise ConfigError(
        f"ranks differ in {name}: {told}. Start all of them with the same code, settings and versions, and let nothing "
        "that is built depend on the rank."
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        # Run from its sources.
        return None


def _is_of_the_user(kind: type) -> bool:
    return kind.__module__.split(".")[0] not in ("builtins", "torch", "lightning", "pytorch_lightning", "typing")


def _code(kind: type) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return None
