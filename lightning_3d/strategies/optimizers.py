"""Optimizers over a mix of sharded and whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_NOTHING = "lightning_3d_nothing"


def step_by_kind(optimizer: Optimizer) -> None:
    """Let an optimizer step once for each kind of parameter that it has.

    The fast paths of torch's optimizers (foreach, fused) take lists of tensors, which must all be whole, or all be
    sharded over one mesh. Groups, options and states stay as the user made them. Only torch's own optimizers are
    changed, which keep nothing in their groups that a second call would count twice. Hooks of the optimizer are called
    once for a step.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        return
    hooked: Any = type(optimizer).step
    step = hooked.__wrapped__ if getattr(hooked, "hooked", False) else hooked

    @Optimizer.profile_hook_step
    def step_each(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        # A scheduler's own wrapper, which this one has replaced, notes that for it.
        optimizer._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = optimizer.param_groups
        everything = [group["params"] for group in groups]
        # At each step: groups may have been added since.
        kinds = list(dict.fromkeys(_kind(p) for parameters in everything for p in parameters))
        try:
            for kind in kinds:
                for group, parameters in zip(groups, everything, strict=True):
                    group["params"] = [p for p in parameters if _kind(p) == kind]
                step(optimizer)
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters
        return loss

    # Schedulers look for this mark to warn of a step that they do not count.
    step_each._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step_each, optimizer)  # type: ignore[method-assign]


@contextmanager
def optimizers_of_a_part(module: nn.Module) -> Iterator[None]:
    """Around `configure_optimizers` where a rank has a part of the model, in which nothing may be trained.

    An optimizer that is left without parameters there (all of a stage is frozen, say) gets one of size 0.
    """
    like = next(module.parameters(), torch.zeros(0))
    nothing = nn.Parameter(torch.zeros(0, dtype=like.dtype, device=like.device))
    if not any(p.requires_grad for p in module.parameters()):
        module.register_parameter(_NOTHING, nothing)
    create = Optimizer.__init__

    def create_with_something(self: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        params = list(params)
        create(self, params or [nothing], *args, **kwargs)

    Optimizer.__init__ = create_with_something  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = create  # type: ignore[method-assign]
        module._parameters.pop(_NOTHING, None)


def _kind(parameter: torch.Tensor) -> Hashable:
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
