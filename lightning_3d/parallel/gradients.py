"""One global gradient norm, over all axes, equal on every rank and to the norm of one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_3d.parallel.local import local_tensor
from lightning_3d.parallel.share import Share


@torch.no_grad()
def global_norm(
    parameters: Iterable[nn.Parameter], *, norm_type: float = 2.0, share: Share | None = None
) -> torch.Tensor:
    """The norm of all gradients as if they lay in one vector, a scalar on the gradients' device; collective.

    Each number counts once: parts are summed over the axes that a parameter is sharded on, never over those that hold
    copies. Parameters without a gradient are passed over; without any gradient the norm is 0.

    Args:
        parameters: this rank's; ranks that share a parameter must pass it in the same order.
        norm_type: p of the p-norm, `inf` for the largest absolute value.
        share: tells which ranks have other parameters, and which parameters other ranks have too.
    """
    parameters = list(parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    gradients = [p.grad for p in parameters if p.grad is not None and (share is None or share.counts(p))]
    largest = norm_type == float("inf")
    total = torch.zeros((), device=device)
    for groups, members in _by_sharding(gradients).items():
        part = _power_sum([local_tensor(gradient) for gradient in members], norm_type)
        for group in groups:
            dist.all_reduce(part, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        total = torch.maximum(total, part) if largest else total + part
    if share is not None and share.norm_group is not None:
        # One precision for ranks that may have parts in different ones, or none.
        total = total.double()
        dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=share.norm_group)
    return total if largest else total.pow(1.0 / norm_type)


@torch.no_grad()
def largest_part(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The largest absolute value of this rank's parts of the gradients; NaN where one has a NaN; local."""
    parts = [_power_sum(gradients, float("inf")) for gradients in _by_dtype(parameters).values()]
    return torch.stack([part.double() for part in parts]).max() if parts else torch.zeros(())


@torch.no_grad()
def clip_by_norm_(
    parameters: Iterable[nn.Parameter], *, max_norm: float, norm_type: float = 2.0, share: Share | None = None
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before; collective."""
    parameters = list(parameters)
    norm = global_norm(parameters, norm_type=norm_type, share=share)
    # As torch.nn.utils.clip_grad_norm_ does it.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in _by_dtype(parameters).values():
        torch._foreach_mul_(gradients, scale.to(gradients[0]))
    return norm


def _by_dtype(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            found.setdefault(parameter.grad.dtype, []).append(local_tensor(parameter.grad))
    return found


def _power_sum(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The sum of all |x|^p, or the largest |x|; at least single precision, for sums of many squares lose digits."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), device=tensors[0].device, dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    if norm_type == float("inf"):
        return _largest(filled)
    norms = torch.stack(torch._foreach_norm(filled, norm_type))
    norms = norms.to(torch.promote_types(norms.dtype, torch.float32))
    return norms.pow(norm_type).sum()


def _largest(tensors: list[torch.Tensor]) -> torch.Tensor:
    if tensors[0].device.type == "cpu" and not tensors[0].is_complex():
        # Twenty times as fast there as the norm, which this is; NaN comes through both.
        norms = torch.stack([bound for tensor in tensors for bound in tensor.aminmax()]).abs()
    else:
        norms = torch.stack(torch._foreach_norm(tensors, float("inf")))
    return norms.max().to(torch.promote_types(norms.dtype, torch.float32))


@torch.no_grad()
def clip_by_value_(parameters: Iterable[nn.Parameter], *, max_value: float) -> None:
    """Clamp every element of every gradient to [-max_value, max_value]; local."""
    for gradients in _by_dtype(parameters).values():
        torch._foreach_clamp_min_(gradients, -max_value)
        torch._foreach_clamp_max_(gradients, max_value)


def _by_sharding(gradients: list[torch.Tensor]) -> dict[tuple[ProcessGroup, ...], list[torch.Tensor]]:
    """Gradients by the process groups that their parts are spread over; empty for a whole tensor."""
    found: dict[tuple[ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups: tuple[ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            groups = tuple(mesh.get_group(i) for i, p in enumerate(gradient.placements) if not p.is_replicate())
        found.setdefault(groups, []).append(gradient)
    return found
