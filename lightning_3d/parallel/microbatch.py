"""Cutting a batch into micro-batches, and putting together what a step returned for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from lightning_3d.errors import DataError


def batch_size(batch: Any) -> int:
    """Samples of a batch: the first dimension that most of its tensors share.

    Raises:
        DataError: a batch without a tensor that has a dimension.
    """
    sizes = [leaf.shape[0] for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not sizes:
        raise DataError("a pipeline cuts the first dimension of the batch's tensors, but the batch has no such tensor.")
    return Counter(sizes).most_common(1)[0][0]


def split_batch(batch: Any, count: int) -> list[Any]:
    """`count` micro-batches whose sizes differ by at most one, each with containers of its own.

    Tensors are cut along their first dimension; numbers, strings, None and tensors without dimensions come to each.

    Raises:
        DataError: a tensor whose first dimension is not the batch's; more parts than samples.
    """
    size = batch_size(batch)
    if count > size:
        raise DataError(f"{size} samples cannot make {count} micro-batches. Set num_microbatches to at most {size}.")
    leaves, spec = tree_flatten_with_path(batch)
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] != size:
            raise DataError(
                f"batch{keystr(path)} has shape {tuple(leaf.shape)}, but the batch has {size} samples: a pipeline cuts "
                "every tensor along its first dimension. Put the batch dimension first, or make it in the step."
            )
    cut = [
        leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) and leaf.dim() else (leaf,) * count
        for _, leaf in leaves
    ]
    return [tree_unflatten([parts[index] for parts in cut], spec) for index in range(count)]


def merge_outputs(outputs: Sequence[Any], *, sizes: Sequence[int]) -> Any:
    """What a step would have returned for the whole batch.

    Tensors whose first dimension is the micro-batch's are joined; scalars become their mean over samples; other values
    stay if they are equal, else the list of them is returned.
    """
    if any(output is None for output in outputs):
        return None
    flat = [tree_flatten(output) for output in outputs]
    if any(spec != flat[0][1] for _, spec in flat):
        return list(outputs)
    merged = [_merge(values, sizes) for values in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(merged, flat[0][1])


def _merge(values: tuple[Any, ...], sizes: Sequence[int]) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        if all(value.dim() and value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
            return torch.cat([value.detach() for value in values])
        if all(value.dim() == 0 for value in values):
            return weighted_mean(values, sizes)
        return [value.detach() for value in values]
    return values[0] if all(value == values[0] for value in values) else list(values)


def weighted_mean(values: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The mean of scalars over samples."""
    stacked = torch.stack([value.detach() for value in values])
    weights = torch.tensor(sizes, device=stacked.device, dtype=torch.float64) / sum(sizes)
    return (stacked.double() * weights).sum().to(torch.promote_types(stacked.dtype, torch.float32))
