"""Optimizers over a mix of sharded and whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def step_by_kind(optimizer: Optimizer) -> None:
    """Let an optimizer step once for each kind of parameter that it has.

    The fast paths of torch's optimizers (foreach, fused) take lists of tensors, which must all be whole, or all be
    sharded over one mesh. Groups, options and states stay as the user made them.
    """
    if len({_kind(p) for group in optimizer.param_groups for p in group["params"]}) < 2:
        return
    step = optimizer.step

    def step_each(closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = optimizer.param_groups
        everything = [group["params"] for group in groups]
        kinds = list(dict.fromkeys(_kind(p) for parameters in everything for p in parameters))
        try:
            for kind in kinds:
                for group, parameters in zip(groups, everything, strict=True):
                    group["params"] = [p for p in parameters if _kind(p) == kind]
                step()
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters
        return loss

    # Schedulers look for this mark to warn of a step that they do not count.
    step_each._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step_each  # type: ignore[method-assign]


def _kind(parameter: torch.Tensor) -> Hashable:
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
