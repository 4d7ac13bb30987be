"""Nests of values from one rank to the others of its group, step after step, almost all of it as one small tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_3d.parallel.microbatch import rebuilt

# Whole numbers up to here are equal to their double.
_EXACT = 2**53


@dataclass(frozen=True)
class _Number:
    """The place of a scalar in what travels as doubles: a tensor of this dtype, or a Python number."""

    kind: torch.dtype | type


@dataclass(frozen=True)
class _Array:
    """The place of a tensor that travels by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Relay:
    """Tells all ranks of a group what one of them has; collective.

    Scalars travel together in one tensor of doubles, whose first tells whether the nest is built as the last one of
    its kind. Only where it is not, its structure is pickled and sent, with all values that are neither numbers nor
    tensors. The source never waits for its device; the others wait once.

    Args:
        source: rank in the group.
        device: of the tensors.
    """

    def __init__(self, group: ProcessGroup, *, source: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._device = device
        self._known: dict[str, Any] = {}

    def share(self, value: Any, *, kind: str) -> Any:
        """The source's `value`, its tensors detached and on this rank's device; what the others pass is not looked at.

        Args:
            kind: equal on all ranks; nests of one kind are expected to be alike.
        """
        if self._group.size() == 1:
            return rebuilt(value, _detached)
        if self._group.rank() == self._source:
            self._send(value, kind)
            return rebuilt(value, _detached)
        return self._receive(kind)

    def _send(self, value: Any, kind: str) -> None:
        numbers: list[Any] = []
        arrays: list[torch.Tensor] = []
        structure, known = _take_apart(value, numbers, arrays), self._known.get(kind)
        if known is None or not _alike(structure, known):
            if known is not None:
                # As long as the others expect.
                self._broadcast(torch.ones(1 + len(_places(known, _Number)), dtype=torch.float64, device=self._device))
            dist.broadcast_object_list([structure], group=self._group, group_src=self._source)
            self._known[kind] = structure
        self._broadcast(torch.stack([_double(0.0, self._device), *(_double(n, self._device) for n in numbers)]))
        for array in arrays:
            self._broadcast(array.to(self._device))

    def _receive(self, kind: str) -> Any:
        known = self._known.get(kind)
        packed = None if known is None else self._receive_numbers(known)
        if packed is None or packed[0]:
            box = [None]
            dist.broadcast_object_list(box, group=self._group, group_src=self._source)
            known = self._known[kind] = box[0]
            packed = self._receive_numbers(known)
        arrays = [torch.empty(p.shape, dtype=p.dtype, device=self._device) for p in _places(known, _Array)]
        for array in arrays:
            self._broadcast(array)
        return self._put_together(known, packed, arrays)

    def _receive_numbers(self, structure: Any) -> torch.Tensor:
        packed = torch.empty(1 + len(_places(structure, _Number)), dtype=torch.float64, device=self._device)
        self._broadcast(packed)
        return packed

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, group=self._group, group_src=self._source)

    def _put_together(self, structure: Any, packed: torch.Tensor, arrays: list[torch.Tensor]) -> Any:
        numbers_left, arrays_left = iter(packed[1:].unbind()), iter(arrays)

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, _Array):
                return next(arrays_left)
            if not isinstance(leaf, _Number):
                return leaf
            number = next(numbers_left)
            return number.to(leaf.kind) if isinstance(leaf.kind, torch.dtype) else leaf.kind(number.item())

        return rebuilt(structure, fill)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _double(number: Any, device: torch.device) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, torch.float64)
    # Filled there, which does not wait as a copy would.
    return torch.full((), number, dtype=torch.float64, device=device)


# Values that cannot change in place.
_CONSTANT = (
    str, bytes, bool, int, float, type(None), type, FunctionType, BuiltinFunctionType, torch.dtype, torch.device,
    _Number, _Array,
)  # fmt: skip


def _take_apart(value: Any, numbers: list[Any], arrays: list[torch.Tensor]) -> Any:
    """The nest with places instead of numbers and tensors, which are added to the two lists in its order."""

    def place(leaf: Any) -> Any:
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided:
            if leaf.dim() == 0 and (leaf.is_floating_point() or leaf.dtype in (torch.bool, torch.int32)):
                numbers.append(leaf)
                return _Number(leaf.dtype)
            arrays.append(leaf.detach().contiguous())
            return _Array(tuple(leaf.shape), leaf.dtype)
        if type(leaf) is float or (type(leaf) is int and abs(leaf) < _EXACT):
            numbers.append(leaf)
            return _Number(type(leaf))
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

    return rebuilt(value, place)


def _places(structure: Any, kind: type) -> list[Any]:
    found: list[Any] = []
    rebuilt(structure, lambda leaf: found.append(leaf) if isinstance(leaf, kind) else None)
    return found


def _alike(one: Any, other: Any) -> bool:
    """Whether two structures are equal; in doubt not, which costs a message."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_alike(*items) for items in zip(one, other, strict=True))
    # Others may have changed in place since they were sent.
    return isinstance(one, _CONSTANT) and bool(one == other)
