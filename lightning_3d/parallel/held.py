"""Bytes that a rank holds of a model's states, counted, not estimated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_3d.parallel.local import local_tensor
from lightning_3d.parallel.share import Share
from lightning_3d.parallel.zero import fsdp_parameters


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of parameters, gradients and optimizer states on one rank; shared storage counts once."""

    parameters: int
    gradients: int
    optimizer: int


def held_bytes(share: Share, optimizers: Iterable[torch.optim.Optimizer] = ()) -> HeldBytes:
    """What is allocated at this moment, gathered copies included."""
    states = (value for o in optimizers for state in o.state.values() for value in state.values())
    return HeldBytes(
        parameters=_bytes(_parameters(share)),
        gradients=_bytes(_gradients(share)),
        optimizer=_bytes(value for value in states if isinstance(value, torch.Tensor) and value.dim() > 0),
    )


def _parameters(share: Share) -> Iterator[torch.Tensor]:
    yield from share.module.parameters()
    for parameter in _sharded(share):
        yield parameter._sharded_param_data
        if hasattr(parameter, "_unsharded_param"):
            yield parameter._unsharded_param


def _sharded(share: Share) -> list[Any]:
    return [parameter for root in share.roots for parameter in fsdp_parameters(root)]


def _gradients(share: Share) -> Iterator[torch.Tensor]:
    holders: list[Any] = list(share.module.parameters())
    for parameter in _sharded(share):
        holders.append(parameter.sharded_param)
        if hasattr(parameter, "_unsharded_param"):
            holders.append(parameter._unsharded_param)
        if parameter.unsharded_accumulated_grad is not None:
            yield parameter.unsharded_accumulated_grad
    yield from (holder.grad for holder in holders if holder.grad is not None)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {local.untyped_storage()._cdata: local.untyped_storage() for local in map(local_tensor, tensors)}
    return sum(storage.nbytes() for storage in storages.values())
