"""One decision on all ranks where the value that decides was not synchronised, or was computed from a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_3d.parallel.local import WholeScalars

_BEST = (
    "best_k_models", "kth_best_model_path", "kth_value", "best_model_path", "best_model_score", "current_score",
    "last_model_path",
)  # fmt: skip


def agree_on_best(callbacks: Iterable[Checkpoint], *, broadcast: Callable[[Any], Any], device: torch.device) -> None:
    """Rank 0's list of best checkpoints on every rank: each knows of the files that are there; collective."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            own = {name: getattr(callback, name) for name in _BEST}
            agreed = broadcast(move_data_to_device(own, torch.device("cpu")))
            vars(callback).update(move_data_to_device(agreed, device))


def agree_on_plateaus(configs: Iterable[LRSchedulerConfig], *, reduce: Callable[[Any], Any]) -> None:
    """Schedulers that watch a metric see its mean over the ranks, or learning rates would drift apart."""
    for config in configs:
        if config.reduce_on_plateau:
            kind = type(config.scheduler)

            def step(self: Any, metrics: Any, *args: Any, kind: Any = kind, **kwargs: Any) -> None:
                kind.step(self, reduce(torch.as_tensor(metrics)), *args, **kwargs)

            # Not an attribute of the object: those are saved.
            config.scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})


def show_whole_scalars(plugin: Any) -> None:
    """Hooks that look at gradients (`grad_norm`, say) get whole norms of sharded ones, as ordinary tensors."""
    for name in ("post_backward", "_after_closure"):
        hook = MethodType(getattr(type(plugin), name), plugin)
        setattr(plugin, name, _under_whole_scalars(hook))


def _under_whole_scalars(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        with WholeScalars():
            return hook(*args, **kwargs)

    return call
