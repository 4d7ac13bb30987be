"""Optimizers over a mix of sharded and whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.parallel.local import local_tensor

_NOTHING = "lightning_3d_nothing"
# Each number of a parameter is updated from its own gradient and states alone.
_NUMBER_BY_NUMBER = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.ASGD,
    torch.optim.RMSprop,
    torch.optim.Rprop,
}
# States of those that are one number for a parameter, of whatever shape that is.
_COUNTERS = {"step", "mu_product", "eta", "mu"}


def step_over_shards(optimizer: Optimizer) -> None:
    """Let one of torch's own optimizers step over a mix of whole and sharded parameters.

    Its fast paths (foreach, fused) take lists of tensors, which must all be whole, or all be sharded over one mesh.
    Where the update goes number by number it is given this rank's parts as ordinary tensors, all at once; DTensor's
    dispatch would take longer than the update of a small layer. Others step once for each kind of parameter. Groups,
    options and states stay as the user made them; hooks of the optimizer are called once for a step. Optimizers from
    elsewhere are not changed: they may keep in their groups what a second call would count twice.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        return
    own: Any = vars(optimizer).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        rank_zero_warn(
            f"the step of this {type(optimizer).__name__} was replaced on the object, and is not called: over sharded "
            "parameters it is the class's. Use register_step_pre_hook and register_step_post_hook, or a subclass."
        )
    hooked: Any = type(optimizer).step
    step = hooked.__wrapped__ if getattr(hooked, "hooked", False) else hooked
    shown = _parts if type(optimizer) in _NUMBER_BY_NUMBER else _kinds

    @Optimizer.profile_hook_step
    def step_each(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        # A scheduler's own wrapper, which this one has replaced, notes that for it.
        optimizer._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # At each step: groups may have been added since.
        everything = [group["params"] for group in optimizer.param_groups]
        try:
            for _ in shown(optimizer, everything):
                step(optimizer)
        finally:
            for group, parameters in zip(optimizer.param_groups, everything, strict=True):
                group["params"] = parameters
        return loss

    # Schedulers look for this mark to warn of a step that they do not count.
    step_each._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step_each, optimizer)  # type: ignore[method-assign]


def _kinds(optimizer: Optimizer, everything: list[list[torch.Tensor]]) -> Iterator[None]:
    """The groups' parameters, one kind after the other."""
    for kind in dict.fromkeys(_kind(p) for parameters in everything for p in parameters):
        for group, parameters in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = [p for p in parameters if _kind(p) == kind]
        yield


def _parts(optimizer: Optimizer, everything: list[list[torch.Tensor]]) -> Iterator[None]:
    """The groups' parameters as this rank's parts of them, with the gradients and states of these; once."""
    state = optimizer.state
    sharded = [p for parameters in everything for p in parameters if isinstance(p, DTensor) and p.grad is not None]
    try:
        for parameter in sharded:
            part = parameter._local_tensor
            part.grad = _gradient_part(parameter)
            if parameter in state:
                state[part] = {name: local_tensor(value) for name, value in state[parameter].items()}
        for group, parameters in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = [local_tensor(p) for p in parameters]
        yield
    finally:
        for parameter in sharded:
            part = parameter._local_tensor
            part.grad = None
            for name, value in state.pop(part, {}).items():
                kept = state[parameter]
                if name not in kept or local_tensor(kept[name]) is not value:
                    kept[name] = _whole_again(name, value, parameter)


def _gradient_part(parameter: DTensor) -> torch.Tensor:
    """The gradient of this rank's part, whatever the user's hooks have made of it."""
    gradient: Any = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_tensor(gradient)


def _whole_again(name: str, value: Any, parameter: DTensor) -> Any:
    """A state of a part as one of the parameter, sharded alike."""
    if name in _COUNTERS or not isinstance(value, torch.Tensor) or value.shape != parameter._local_tensor.shape:
        return value
    return DTensor(value, parameter._spec, requires_grad=False)


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
