"""Sequence parallelism: between the split regions of a block, each tensor-parallel rank has its part of the sequence.

The stack of blocks takes and gives whole sequences; inside it, what is not split by heads or features (norms, residual
sums, dropout) works on (batch, sequence / ranks, ...). A split region is entered by a gather and left by a
reduce-scatter, where plain tensor parallelism all-reduces: the same bytes, and activations a rank's share as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.errors import ModelError
from lightning_3d.parallel.local import refuse_second_derivative
from lightning_3d.parallel.tensor import Region, apply_replicate, copy_in, records, reduce_out

# Activations are (batch, sequence, ..., features).
_SEQUENCE = 1

# On a tensor: whether it is a part of the sequence ("part") or equal on all ranks ("whole").
_KIND = "_lightning_3d_kind"

_Lengths = tuple[int, ...]
_Function = Callable[[torch.Tensor], torch.Tensor]

_AS_LONG = "as long as a rank's part of the sequence: it could be one, or whole, as another argument is."
_WAYS_OUT = (
    "Give split layers in blocks the sequence, or another argument of the block as it is, or pad one of the two; or "
    "set sequence_parallel=False."
)


class SequenceRegion(Region):
    """Split regions inside of blocks whose activations are split along the sequence.

    Beside its part of the sequence a block may be given tensors that are whole (a vector that conditions it, the memory
    of an encoder). Which is which is known of the arguments themselves, and of what was computed from them by its
    lengths: all dimensions between the first and the last. What could be either is refused.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._part: _Lengths | None = None
        self._whole_sequence: _Lengths | None = None
        self._others: set[_Lengths] = set()

    def begin(self, part: torch.Tensor, *, first: bool) -> None:
        """A block of the stack is about to run on this part of the sequence."""
        self._part = _lengths(part)
        self._whole_sequence = (self._part[0] * self.size, *self._part[1:])
        if first:
            self._others = set()

    def other(self, tensor: torch.Tensor, block: nn.Module, *, first: bool) -> torch.Tensor:
        """Another argument of a block: of what is whole each rank has a part of the gradient."""
        kind = getattr(tensor, _KIND, None)
        if kind == "part":
            # The output of an earlier block.
            return tensor
        # Outside of the stack all is whole.
        if kind is None and not first and _lengths(tensor) == self._part:
            raise ModelError(f"{type(block).__name__} is given {_told(tensor)}, {_AS_LONG} {_WAYS_OUT}")
        self._others.add(_lengths(tensor))
        copied = copy_in(tensor, self.group) if records(tensor) else tensor
        for known in (tensor, copied):
            setattr(known, _KIND, "whole")
        return copied

    def is_part(self, tensor: torch.Tensor, reader: str) -> bool:
        """Whether it is a part of the sequence; else it is whole.

        Raises:
            ModelError: it could be either, or neither.
        """
        kind = getattr(tensor, _KIND, None)
        if kind is not None:
            return kind == "part"
        lengths = _lengths(tensor)
        if lengths == self._part and lengths not in self._others:
            return True
        if lengths != self._part and (lengths == self._whole_sequence or lengths in self._others):
            return False
        why = _AS_LONG if lengths == self._part else "neither as long as the sequence nor as another argument."
        raise ModelError(f"{reader} reads {_told(tensor)}, {why} {_WAYS_OUT}")

    def gathered_at(self, tensor: torch.Tensor, reader: str) -> torch.Tensor:
        """What a reader is given, whole."""
        return _Gather.apply(tensor, self.group, True) if self.is_part(tensor, reader) else tensor

    def could_be_part(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that a reader is given beside its first must be looked at: masks and tables need not."""
        return records(tensor) or _lengths(tensor) == self._part

    def _into(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.gathered_at(tensor, "a split layer in a block")

    def out_of(self, tensor: torch.Tensor) -> torch.Tensor:
        lengths = _lengths(tensor)
        if lengths == self._whole_sequence:
            return _Scatter.apply(tensor, self.group, True)
        if lengths in self._others:
            # Of another argument: the sum stays whole, and is used on parts.
            return copy_in(reduce_out(tensor, self.group), self.group)
        raise ModelError(
            f"a split layer in a block gives {_told(tensor)}, neither as long as the sequence nor as another argument "
            f"of the block. {_WAYS_OUT}"
        )

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        # Used on parts of the sequence.
        return copy_in(tensor, self.group)

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
        readers: modules that hold split projections and hand them their own arguments (attention, MLP): they get the
            whole sequence, for they reshape by its length.
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
    whole: dict[int, torch.Tensor] = {}
    name = type(reader).__name__

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        # One gather of a tensor that is given twice, as query and key.
        if id(tensor) not in whole:
            whole[id(tensor)] = region.gathered_at(tensor, name)
        return whole[id(tensor)]

    args, kwargs = _with_first(args, kwargs, gathered)
    return _with_others(args, kwargs, lambda tensor: gathered(tensor) if region.could_be_part(tensor) else tensor)


def _with_first(args: Any, kwargs: Any, function: _Function) -> Any:
    if args:
        return (_mapped(function, args[0]), *args[1:]), kwargs
    first = next(iter(kwargs))
    return args, {**kwargs, first: _mapped(function, kwargs[first])}


def _with_others(args: Any, kwargs: Any, function: _Function) -> Any:
    first = None if args else next(iter(kwargs))
    others = {key: value if key == first else _mapped(function, value) for key, value in kwargs.items()}
    return (*args[:1], *(_mapped(function, value) for value in args[1:])), others


def _mapped(function: _Function, value: Any) -> Any:
    """A nest of values with its floating-point tensors replaced; itself where there are none."""
    return tree_map(lambda leaf: function(leaf) if _is_floating(leaf) else leaf, value)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _before(region: SequenceRegion, first: bool, block: nn.Module, args: Any, kwargs: Any) -> Any:
    hidden = args[0] if args else next(iter(kwargs.values()))
    Region.enter(region, hidden, training=block.training)
    if first:
        if hidden.dim() <= _SEQUENCE + 1 or hidden.shape[_SEQUENCE] % region.size:
            raise ModelError(
                f"activations of shape {tuple(hidden.shape)} cannot be split along the sequence over "
                f"tensor_parallel_size={region.size} ranks. Pad the sequence to a multiple of {region.size}, or set "
                "sequence_parallel=False."
            )
        hidden = _Scatter.apply(hidden, region.group, False)
        args, kwargs = _with_first(args, kwargs, lambda _: hidden)
    region.begin(hidden, first=first)
    return _with_others(args, kwargs, lambda tensor: region.other(tensor, block, first=first))


def _after(region: SequenceRegion, last: bool, block: nn.Module, args: Any, output: Any) -> Any:
    hidden, *others = output if isinstance(output, tuple) else (output,)
    Region.leave(region, hidden)
    for other in tree_leaves(others):
        if _is_floating(other) and records(other):
            raise ModelError(
                f"{type(block).__name__} returns {_told(other)} that needs a gradient besides its first, which other "
                f"ranks have computed from other parts of the sequence. {_WAYS_OUT}"
            )
    if last:
        hidden = _Gather.apply(hidden, region.group, False)
    else:
        setattr(hidden, _KIND, "part")
    return (hidden, *others) if isinstance(output, tuple) else hidden


def _lengths(tensor: torch.Tensor) -> _Lengths:
    return tuple(tensor.shape[1:-1])


def _told(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


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
