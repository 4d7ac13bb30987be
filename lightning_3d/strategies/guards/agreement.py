"""One decision on all ranks where the value that decides was not synchronised, or was computed from a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_3d.parallel.local import WholeScalars


def agree_on_plateaus(
    configs: Iterable[LRSchedulerConfig], *, reduce: Callable[..., Any], device: torch.device
) -> None:
    """Schedulers that watch a metric see its mean over all ranks, or learning rates would drift apart.

    All of the job: also ranks that hold parts of one model may have logged what differs.

    Args:
        device: on which ranks talk; a metric may be elsewhere.
    """
    for config in configs:
        if config.reduce_on_plateau:
            kind = type(config.scheduler)

            def step(self: Any, metrics: Any, *args: Any, kind: Any = kind, **kwargs: Any) -> None:
                # A copy, for the callback's own would be reduced in place.
                own = torch.as_tensor(metrics).detach().to(device, copy=True)
                kind.step(self, reduce(own, group=dist.group.WORLD), *args, **kwargs)

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
