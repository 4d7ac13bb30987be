"""This rank's part of a tensor that may be sharded."""

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank holds of a parameter, gradient or optimizer state; itself where it is whole."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
