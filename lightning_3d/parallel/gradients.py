"""One global gradient norm, over all axes, equal on every rank and to the norm of one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from lightning_3d.parallel.local import local_tensor


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter], *, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as if they lay in one vector, a scalar on the gradients' device; collective.

    Each number counts once: parts are summed over the axes that a parameter is sharded on, never over those that hold
    copies. Parameters without a gradient are passed over; without any gradient the norm is 0.

    Args:
        parameters: this rank's; all ranks must pass the same ones in the same order.
        norm_type: p of the p-norm, `inf` for the largest absolute value.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    largest = norm_type == float("inf")
    total = None
    for groups, members in _by_sharding(gradients).items():
        norms = torch.stack(torch._foreach_norm([local_tensor(g) for g in members], norm_type))
        # Sums of many squares lose digits in half precision.
        norms = norms.to(torch.promote_types(norms.dtype, torch.float32))
        part = norms.max() if largest else norms.pow(norm_type).sum()
        for group in groups:
            dist.all_reduce(part, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        total = part if total is None else torch.maximum(total, part) if largest else total + part
    assert total is not None
    return total if largest else total.pow(1.0 / norm_type)


@torch.no_grad()
def clip_by_norm_(parameters: Iterable[nn.Parameter], *, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before; collective."""
    parameters = list(parameters)
    norm = global_norm(parameters, norm_type=norm_type)
    # As torch.nn.utils.clip_grad_norm_ does it.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    for gradient in gradients:
        gradient.mul_(scale.to(gradient))
    return norm


@torch.no_grad()
def clip_by_value_(parameters: Iterable[nn.Parameter], *, max_value: float) -> None:
    """Clamp every element of every gradient to [-max_value, max_value]; local."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    for gradient in gradients:
        gradient.clamp_(-max_value, max_value)


def _by_sharding(gradients: list[torch.Tensor]) -> dict[tuple[ProcessGroup, ...], list[torch.Tensor]]:
    """Gradients by the process groups that their parts are spread over; empty for a whole tensor."""
    found: dict[tuple[ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups: tuple[ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            groups = tuple(mesh.get_group(i) for i, p in enumerate(gradient.placements) if isinstance(p, Shard))
        found.setdefault(groups, []).append(gradient)
    return found
