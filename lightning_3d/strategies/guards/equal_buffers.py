"""Buffers that each data-parallel rank changes by itself, such as a BatchNorm's running mean."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed import ProcessGroup

from lightning_3d.parallel.local import local_tensor


@torch.no_grad()
def share_buffers_(module: nn.Module, *, group: ProcessGroup) -> None:
    """The first rank's buffers on all data-parallel ranks, in place, as DistributedDataParallel has them; collective.

    A buffer whose shape or dtype differs between ranks stays as it is: a cache that grows with a rank's batches.

    Args:
        module: this rank's share of it.
        group: the data-parallel ranks.
    """
    # Whether one was written to cannot be asked: batch norm's kernels change theirs behind autograd's back.
    buffers = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}
    mine = {name: (tuple(buffer.shape), str(buffer.dtype)) for name, buffer in buffers.items()}
    everyones: list[dict[str, tuple[tuple[int, ...], str]]] = [{}] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    for name, buffer in sorted(buffers.items(), key=lambda item: item[0]):
        if all(kinds.get(name) == mine[name] for kinds in everyones):
            value = local_tensor(buffer).clone(memory_format=torch.contiguous_format)
            dist.broadcast(value, group=group, group_src=0)
            local_tensor(buffer).copy_(value)


def warn_of_local_statistics(module: nn.Module) -> None:
    """Tell once of layers that normalise over the samples of one data-parallel rank."""
    names = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
    ]
    if names:
        rank_zero_warn(
            f"{', '.join(names[:4])} normalise over the samples of one data-parallel rank, not over the batch, and "
            "evaluations and checkpoints have the first rank's running statistics. Set Trainer(sync_batchnorm=True), "
            "or use a norm within samples."
        )
