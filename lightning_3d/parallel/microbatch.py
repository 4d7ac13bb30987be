"""Cutting a batch into micro-batches, and putting together what a step returned for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_3d.errors import DataError


def batch_size(batch: Any) -> int:
    """Samples of a batch: the first dimension that most of its tensors share.

    Raises:
        DataError: a batch without a tensor that has a dimension.
    """
    sizes = [leaf.shape[0] for _, leaf in _leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not sizes:
        raise DataError("a pipeline cuts the first dimension of the batch's tensors, but the batch has no such tensor.")
    return Counter(sizes).most_common(1)[0][0]


def split_batch(batch: Any, count: int) -> list[Any]:
    """`count` micro-batches whose sizes differ by at most one, each with containers of its own.

    Tensors are cut along their first dimension, and so are lists that have one string or number for each sample.
    Numbers, strings, None and tensors without dimensions come to each micro-batch.

    Raises:
        DataError: a tensor whose first dimension is not the batch's; more parts than samples.
    """
    size = batch_size(batch)
    if count > size:
        raise DataError(f"{size} samples cannot make {count} micro-batches. Set num_microbatches to at most {size}.")
    for path, leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] != size:
            raise DataError(
                f"batch{path} has shape {tuple(leaf.shape)}, but the batch has {size} samples: a pipeline cuts every "
                "tensor along its first dimension. Put the batch dimension first, or make it in the step."
            )
    bounds = torch.arange(size).tensor_split(count)
    return [_cut(batch, size, int(part[0]), int(part[-1]) + 1) for part in bounds]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same nest of values in containers of its own, with `function` applied to its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _like(value, {key: map_tensors(function, item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return _like(value, [map_tensors(function, item) for item in value])
    return value


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
    stacked = torch.stack([value.detach() for value in values])
    weights = torch.tensor(sizes, device=stacked.device, dtype=torch.float64) / sum(sizes)
    return (stacked.double() * weights).sum().to(torch.promote_types(stacked.dtype, torch.float32))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


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
    """Whether a list has one plain value for each of `size` samples, as the default collation makes of strings."""
    plain = (str, bytes, int, float, type(None))
    return len(value) == size and all(isinstance(item, plain) for item in value)


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
