"""Sequence parallelism: between the split regions of a block, each tensor-parallel rank has its part of the sequence.

The stack of blocks takes and gives whole sequences; inside it, what is not split by heads or features (norms, residual
sums, dropout) works on (batch, sequence / ranks, ...). A split region is entered by a gather and left by a
reduce-scatter, where plain tensor parallelism all-reduces: the same bytes, and activations a rank's share as large.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lightning_3d.errors import ModelError
from lightning_3d.parallel.local import refuse_second_derivative
from lightning_3d.parallel.tensor import Region, apply_replicate, copy_in

# Activations are (batch, sequence, ...).
_SEQUENCE = 1


class SequenceRegion(Region):
    """Split regions inside of blocks whose activations are split along the sequence."""

    def _into(self, tensor: torch.Tensor) -> torch.Tensor:
        return _Gather.apply(tensor, self.group, True)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole sequence, which the split modules that read it next take as it is."""
        whole = self._into(tensor)
        self._copied = weakref.ref(whole), whole._version, whole
        return whole

    def out_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return _Scatter.apply(tensor, self.group, True)

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        # Added to a part of the sequence: its gradient is a part of the sum.
        return copy_in(parameter, self.group)

    def enter(self, hidden: torch.Tensor, *, training: bool) -> None:
        """The whole block is one region: `apply_sequence_parallel` enters and leaves it."""

    def leave(self, hidden: torch.Tensor) -> None:
        self.forget()


def apply_sequence_parallel(
    blocks: list[nn.Module], region: SequenceRegion, *, planned: Iterable[nn.Module], readers: Iterable[nn.Module]
) -> None:
    """Let a stack of blocks, called one after the other, work on parts of the sequence.

    Args:
        blocks: of one pipeline stage, in order.
        planned: modules that the tensor-parallel plan deals with; others with parameters see parts of the sequence,
            and get the sum of their gradients.
        readers: modules that hold split projections and hand them their own first argument (attention, MLP): they get
            the whole sequence, for they reshape by its length.
    """
    known = set(planned)
    for block in blocks:
        for part in block.modules():
            if part not in known and any(True for _ in part.parameters(recurse=False)):
                apply_replicate("", part, region)
    for reader in readers:
        if reader not in blocks:
            reader.register_forward_pre_hook(partial(_read, region), with_kwargs=True)
    for block in blocks:
        block.register_forward_pre_hook(partial(_before, region, block is blocks[0]), with_kwargs=True)
        block.register_forward_hook(partial(_after, region, block is blocks[-1]))


def _read(region: SequenceRegion, reader: nn.Module, args: Any, kwargs: Any) -> Any:
    return _with_first(args, kwargs, region.gather(args[0] if args else next(iter(kwargs.values()))))


def _with_first(args: Any, kwargs: Any, value: torch.Tensor) -> Any:
    return ((value, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): value})


def _before(region: SequenceRegion, first: bool, block: nn.Module, args: Any, kwargs: Any) -> Any:
    hidden = args[0] if args else next(iter(kwargs.values()))
    Region.enter(region, hidden, training=block.training)
    if not first:
        return None
    if hidden.dim() <= _SEQUENCE or hidden.shape[_SEQUENCE] % region.size:
        raise ModelError(
            f"activations of shape {tuple(hidden.shape)} cannot be split along the sequence over "
            f"tensor_parallel_size={region.size} ranks. Pad the sequence to a multiple of {region.size}, or set "
            "sequence_parallel=False."
        )
    return _with_first(args, kwargs, _Scatter.apply(hidden, region.group, False))


def _after(region: SequenceRegion, last: bool, block: nn.Module, args: Any, output: Any) -> Any:
    hidden = output[0] if isinstance(output, tuple) else output
    Region.leave(region, hidden)
    if not last:
        return None
    whole = _Gather.apply(hidden, region.group, False)
    return (whole, *output[1:]) if isinstance(output, tuple) else whole


class _Gather(torch.autograd.Function):
    """Parts of the sequence to the whole.

    What follows differs between ranks (`summed`: gradients are parts of a sum, reduced and scattered) or is equal on
    all (each takes its part of the gradient).
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup, summed: bool) -> torch.Tensor:
        ctx.group, ctx.summed = group, summed
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivative()
        return (_reduce_scatter if ctx.summed else _part)(gradient, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """This rank's part of a sequence: of the sum of all ranks' partial results (`summed`), or of equal ones."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup, summed: bool) -> torch.Tensor:
        ctx.group = group
        return (_reduce_scatter if summed else _part)(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivative()
        return _gather(gradient, ctx.group), None, None


def _part(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return tensor.chunk(group.size(), dim=_SEQUENCE)[group.rank()].contiguous()


def _gather(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return torch.cat(parts, dim=_SEQUENCE)


def _reduce_scatter(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    parts = [part.contiguous() for part in tensor.chunk(group.size(), dim=_SEQUENCE)]
    result = torch.empty_like(parts[0])
    dist.reduce_scatter(result, parts, group=group)
    return result
