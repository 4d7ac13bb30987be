"""This rank's part of a tensor that may be sharded, and whole numbers from all parts and to the device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import ModelError


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank holds of a parameter, gradient or optimizer state; itself where it is whole."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def part_like(whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank holds in `target`; a view, so that of a mapped file no more is read.

    Args:
        whole: shaped as `target` is as a whole; need not be on its device or of its dtype.
    """
    if not isinstance(target, DTensor):
        return whole
    # A rank holds one box of a tensor, also where two axes cut the same dimension.
    shape = target._local_tensor.shape
    chunks = target.__create_chunk_list__() if target._local_tensor.numel() else []
    if not chunks:
        return whole.new_empty(shape)
    for dim, (start, length) in enumerate(zip(chunks[0].offsets, shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers as a vector on a device, which is not waited for, as a copy from ordinary memory to a GPU would."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


@overload
def use_local(parameter: torch.Tensor) -> torch.Tensor: ...
@overload
def use_local(parameter: None) -> None: ...
def use_local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a parameter, as something to compute with: its gradient becomes the parameter's."""
    return _UseLocal.apply(parameter) if isinstance(parameter, DTensor) else parameter


class _UseLocal(torch.autograd.Function):
    """`DTensor.to_local` without its checks of the gradient, which take longer than a small layer's backward."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.spec = parameter._spec
        part = parameter._local_tensor
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        refuse_second_derivative()
        # The record of the parameter tells its strides too.
        return DTensor(gradient.contiguous(), ctx.spec, requires_grad=False)


def refuse_second_derivative() -> None:
    """To be called in backwards that are not differentiable: theirs would be wrong in silence.

    Raises:
        ModelError: a graph of this backward is being made.
    """
    # torch's `once_differentiable` costs more than all else that these backwards do in Python.
    if torch.is_grad_enabled():
        raise ModelError(
            "a second derivative is taken through a layer that is split over tensor-parallel ranks (create_graph=True, "
            "as for a gradient penalty), which these do not have. Set tensor_parallel_size=1."
        )


class WholeScalars(TorchFunctionMode):
    """Inside, a single number computed from a sharded tensor (a norm, a maximum) is a whole, ordinary tensor.

    DTensor leaves it as partial results, which neither `torch.tensor` nor a logger takes. Collective: all ranks that
    hold parts must compute the same numbers.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.full_tensor() if isinstance(result, DTensor) and result.dim() == 0 else result
