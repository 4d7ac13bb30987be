"""Cutting a batch into micro-batches, and putting together what a step returned for each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_3d.errors import DataError


def batch_size(batch: Any) -> int:
    """Samples of a batch: the first dimension of its tensors, or the length of lists with an item for each sample.

    Raises:
        DataError: a batch without a tensor that has a dimension.
    """
    counts = Counter(leaf.shape[0] for _, leaf in _leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    if not counts:
        raise DataError("a pipeline cuts the first dimension of the batch's tensors, but the batch has no such tensor.")
    sizes = [size for size, _ in counts.most_common()]
    # What does not fit anywhere is refused by name, with the size that most tensors have.
    return next((size for size in [*sizes, *_lengths(batch)] if _fits(batch, size)), sizes[0])


def split_batch(batch: Any, count: int) -> list[Any]:
    """`count` micro-batches whose sizes differ by at most one, each with containers of its own.

    Tensors are cut along their first dimension. Lists are cut if they have a string, a number, or a tensor or nest of
    another first dimension for each sample; a list of tensors that share a first dimension, and nothing beside it, is
    taken for the fields of a batch. Numbers, strings, None and tensors without dimensions come to each
    micro-batch.

    Raises:
        DataError: a tensor whose first dimension is not the batch's; more parts than samples.
    """
    size = batch_size(batch)
    if count > size:
        raise DataError(f"{size} samples cannot make {count} micro-batches. Set num_microbatches to at most {size}.")
    for path, leaf in _leaves(batch, size=size):
        if not _fits(leaf, size):
            raise DataError(
                f"batch{path} has shape {tuple(leaf.shape)}, but the batch has {size} samples: a pipeline cuts every "
                "tensor along its first dimension. Put the batch dimension first, or make it in the step."
            )
    stops = list(itertools.accumulate(part_sizes(size, count)))
    return [_cut(batch, size, start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def part_sizes(size: int, count: int) -> list[int]:
    """Samples of each of `count` micro-batches of a batch."""
    return [size // count + (index < size % count) for index in range(count)]


def rebuilt(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same nest of values in containers of its own, with `function` applied to what is no container."""
    if isinstance(value, Mapping):
        return _like(value, {key: rebuilt(item, function) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return _like(value, [rebuilt(item, function) for item in value])
    return function(value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same nest of values in containers of its own, with `function` applied to its tensors."""
    return rebuilt(value, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def merge_outputs(outputs: Sequence[Any], *, sizes: Sequence[int]) -> Any:
    """What a step would have returned for the whole batch.

    Tensors whose first dimension is the micro-batch's are joined, and so are lists with an item for each sample.
    Scalar tensors and floats become their mean over samples. Other values stay if they are equal for all
    micro-batches; else the list of them is returned.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        return list(outputs)
    if isinstance(first, torch.Tensor):
        return _merge_tensors(outputs, sizes)
    if isinstance(first, float):
        return float(weighted_mean([torch.tensor(value, dtype=torch.float64) for value in outputs], sizes))
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        return _like(first, {key: merge_outputs([output[key] for output in outputs], sizes=sizes) for key in first})
    if isinstance(first, list | tuple):
        if all(_is_per_sample(output, size) for output, size in zip(outputs, sizes, strict=True)):
            return _like(first, [item for output in outputs for item in output])
        if all(len(output) == len(first) for output in outputs):
            return _like(first, [merge_outputs(items, sizes=sizes) for items in zip(*outputs, strict=True)])
        return list(outputs)
    return first if all(_equal(output, first) for output in outputs) else list(outputs)


def weighted_mean(values: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The mean of scalars over samples."""
    # Numbers that the host knows go with the operations: to copy them to a GPU would be to wait for it.
    total = sum(sizes)
    parts = [value.detach().double() * (size / total) for value, size in zip(values, sizes, strict=True)]
    return torch.stack(parts).sum().to(torch.promote_types(values[0].dtype, torch.float32))


def _leaves(value: Any, path: str = "", *, size: int | None = None) -> Iterator[tuple[str, Any]]:
    """What a nest holds, with its place; with a `size`, not what stands in lists of so many samples."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]", size=size)
    elif isinstance(value, list | tuple):
        if size is None or not _is_per_sample(value, size):
            for index, item in enumerate(value):
                yield from _leaves(item, f"{path}[{index}]", size=size)
    else:
        yield path, value


def _lengths(value: Any) -> Iterator[int]:
    """Of all lists in a nest."""
    if isinstance(value, list | tuple):
        yield len(value)
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _lengths(item)


def _fits(value: Any, size: int) -> bool:
    """Whether a nest can be cut into parts of a batch of `size` samples."""
    if isinstance(value, torch.Tensor):
        return not value.dim() or value.shape[0] == size
    if isinstance(value, Mapping):
        return all(_fits(item, size) for item in value.values())
    if isinstance(value, list | tuple):
        return _is_per_sample(value, size) or all(_fits(item, size) for item in value)
    return True


def _cut(value: Any, size: int, start: int, stop: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.dim() else value
    if isinstance(value, Mapping):
        return _like(value, {key: _cut(item, size, start, stop) for key, item in value.items()})
    if isinstance(value, list | tuple):
        if _is_per_sample(value, size):
            return _like(value, list(value[start:stop]))
        return _like(value, [_cut(item, size, start, stop) for item in value])
    return value


def _is_per_sample(value: Any, size: int) -> bool:
    """Whether a list has an item for each of `size` samples.

    Either a plain value, as the default collation makes of strings, or alike nests of tensors that are no parts of a
    batch: images of unlike sizes, say. Fields of a batch are unlike each other, or have its size.
    """
    if len(value) != size or hasattr(value, "_fields"):
        return False
    plain = (str, bytes, int, float, type(None))
    if all(isinstance(item, plain) for item in value):
        return True
    return len({_kind(item) for item in value}) == 1 and not all(_fits(item, size) for item in value)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    if isinstance(value, Mapping):
        return type(value), tuple((key, _kind(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_kind, value))
    return type(value)


def _like(container: Any, items: Any) -> Any:
    """A container of the same type: mappings keep their class (a BatchEncoding, say), named tuples their names."""
    if type(container) is dict:
        return items
    kind: Any = type(container)
    return kind(*items) if hasattr(container, "_fields") else kind(items)


def _merge_tensors(values: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
    if all(value.dim() and value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat([value.detach() for value in values])
    if all(value.dim() == 0 for value in values):
        return weighted_mean(values, sizes)
    return [value.detach() for value in values]


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError):
        return False
