"""Logits that stay split over the vocabulary: `F.cross_entropy` runs on the shards, anything else gets the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from lightning_3d.parallel.local import refuse_second_derivative

# Operations that leave the last dimension alone: the result is split as before.
_KEEPS_SPLIT = {
    torch.Tensor.float, torch.Tensor.double, torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.contiguous,
}  # fmt: skip
# Questions that the shape, dtype and device of the whole answer.
_DESCRIBES = {"__len__", "size", "dim", "ndimension", "is_floating_point", "element_size", "numel"}
_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "itemsize", "names"}
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


class SplitLogits(torch.Tensor):
    """This rank's part of logits along their last dimension, with the shape of the whole.

    Reshaping over leading dimensions, slicing them and casting keep the split. `F.cross_entropy` over the last
    dimension computes from the parts; every other function gets the gathered, ordinary tensor.
    """

    _part: torch.Tensor
    _group: ProcessGroup
    _sizes: list[int]
    _gather: Callable[..., torch.Tensor]
    _changed: torch.Tensor | None = None

    @staticmethod
    def wrap(
        part: torch.Tensor, *, group: ProcessGroup, sizes: list[int], gather: Callable[..., torch.Tensor]
    ) -> SplitLogits:
        shape = (*part.shape[:-1], sum(sizes))
        # Only its shape, dtype and device are looked at: the values are those of the part.
        empty = torch.empty(1, dtype=part.dtype, device=part.device).expand(shape)
        made = torch.Tensor._make_subclass(SplitLogits, empty)
        made._part, made._group, made._sizes, made._gather = part, group, sizes, gather
        return made

    def whole(self) -> torch.Tensor:
        return self._changed if self._changed is not None else self._gather(self._part, self._group, self._sizes)

    def _like(self, part: torch.Tensor) -> SplitLogits:
        return SplitLogits.wrap(part, group=self._group, sizes=self._sizes, gather=self._gather)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        name = getattr(func, "__name__", "")
        if isinstance(first, SplitLogits):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
            if attribute in ("requires_grad", "grad_fn", "is_leaf"):
                return func(first._part)
            if name in _DESCRIBES or attribute in _ATTRIBUTES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if _is_in_place(name):
                # From here on these logits are the gathered ones.
                first._changed = first.whole()
                result = func(first._changed, *args[1:], **kwargs)
                return first if result is first._changed else result
            if first._changed is None:
                if func is F.cross_entropy and _is_plain_loss(first, args, kwargs):
                    return _split_cross_entropy(first, *args[1:], **kwargs)
                kept = _keep_split(first, func, name, args, kwargs)
                if kept is not None:
                    return kept
        unwrapped_args, unwrapped_kwargs = torch.utils._pytree.tree_map_only(
            SplitLogits, lambda logits: logits.whole(), (args, kwargs)
        )
        return func(*unwrapped_args, **unwrapped_kwargs)


def _keep_split(logits: SplitLogits, func: Any, name: str, args: Any, kwargs: Any) -> SplitLogits | None:
    total = logits.shape[-1]
    part = logits._part
    if func in _KEEPS_SPLIT:
        return logits._like(func(part))
    if (
        name in ("to", "type")
        and not kwargs
        and all(isinstance(value, torch.dtype | torch.device) for value in args[1:])
    ):
        return logits._like(part.to(*args[1:]))
    if name in ("view", "reshape"):
        shape = args[1] if len(args) == 2 and isinstance(args[1], tuple | list | torch.Size) else args[1:]
        if len(shape) and shape[-1] == total and -1 not in shape[-1:]:
            return logits._like(part.reshape(*shape[:-1], part.shape[-1]))
    if name == "flatten":
        start = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
        end = args[2] if len(args) > 2 else kwargs.get("end_dim", -1)
        if end % logits.dim() < logits.dim() - 1:
            return logits._like(part.flatten(start, end))
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        leading = [item for item in index if item is not Ellipsis]
        plain = all(isinstance(item, slice | int) for item in leading)
        whole_last = len(index) < logits.dim() or index[-1] == slice(None)
        before_dots = Ellipsis not in index or (index[0] is Ellipsis and index[-1] == slice(None))
        if plain and whole_last and before_dots:
            return logits._like(part[args[1]])
    return None


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _is_plain_loss(logits: SplitLogits, args: Any, kwargs: Any) -> bool:
    target = args[1] if len(args) > 1 else kwargs.get("target")
    return (
        logits.dim() == 2
        and isinstance(target, torch.Tensor)
        and target.dim() == 1
        and not target.is_floating_point()
        and len(args) <= 2
        and not kwargs.get("label_smoothing")
        and all(kwargs.get(name) is None for name in ("weight", "size_average", "reduce"))
    )


def _split_cross_entropy(
    logits: SplitLogits,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    **_: Any,
) -> torch.Tensor:
    first = sum(logits._sizes[: logits._group.rank()])
    part = logits._part
    counted = target != ignore_index
    check_inside(target.masked_fill(~counted, 0), sum(logits._sizes), what="targets of cross_entropy")
    # As torch does inside of its own kernel; under autocast its result is single precision too.
    losses = _SplitLoss.apply(part.to(torch.promote_types(part.dtype, torch.float32)), target, first, logits._group)
    losses = losses.masked_fill(~counted, 0.0)
    if reduction == "mean":
        losses = losses.sum() / counted.sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses if torch.is_autocast_enabled(part.device.type) else losses.to(part.dtype)


def check_inside(indices: torch.Tensor, total: int, *, what: str) -> None:
    """Refuse what no rank has, and what would be zero on all of them in silence.

    Raises:
        IndexError: an index below 0 or not below `total`; on CUDA the device stops at a later call, as it does for
            torch's own lookups, since a check here would have to wait for it.
    """
    if not indices.numel():
        return
    least, most = indices.aminmax()
    if indices.is_cuda:
        torch._assert_async((least >= 0) & (most < total), f"{what} are not all in 0 to {total - 1}")
    elif least < 0 or most >= total:
        raise IndexError(f"{what} must be in 0 to {total - 1}, but are from {int(least)} to {int(most)}.")


class _SplitLoss(torch.autograd.Function):
    """Cross-entropy of each row from this rank's columns; two all-reduces of one number per row."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, target: torch.Tensor, first: int, group: ProcessGroup) -> torch.Tensor:
        peak = part.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        weights = (part - peak[:, None]).exp_()
        index = target - first
        inside = (index >= 0) & (index < part.shape[-1])
        index = index.clamp(0, part.shape[-1] - 1)
        chosen = part.gather(-1, index[:, None]).squeeze(-1) - peak
        sums = torch.stack([weights.sum(-1), chosen.masked_fill(~inside, 0.0)])
        dist.all_reduce(sums, group=group)
        weights /= sums[0][:, None]
        # Of each row's loss by its logits: what the softmax gives to the target is too much by 1.
        weights.scatter_add_(-1, index[:, None], -inside[:, None].to(weights))
        ctx.save_for_backward(weights)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivative()
        (weights,) = ctx.saved_tensors
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        return (weights * gradient[:, None] if again else weights.mul_(gradient[:, None])), None, None, None
