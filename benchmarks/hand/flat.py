"""One flat buffer behind many parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def flatten_parameters_(parameters: Iterable[nn.Parameter], *, multiple: int) -> Tensor:
    """Make the parameters windows on one buffer, in their order, padded with zeros to a multiple of `multiple`."""
    parameters = list(parameters)
    flat = torch.zeros(-(-sum(p.numel() for p in parameters) // multiple) * multiple)
    for parameter, window in windows(flat, parameters):
        window.copy_(parameter.data)
        parameter.data = window
    return flat


def windows(flat: Tensor, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its part of the buffer, in its shape."""
    start = 0
    for parameter in parameters:
        yield parameter, flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
