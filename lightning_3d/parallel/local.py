"""This rank's part of a tensor that may be sharded, and whole numbers from all parts."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank holds of a parameter, gradient or optimizer state; itself where it is whole."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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
