"""Gives each rank's loader its part of the global batches, and a place to go on from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_3d.errors import DataError
from lightning_3d.strategies.batches.global_batches import Progress, ShardedBatchSampler, ShardedSampler
from lightning_3d.strategies.batches.streams import shard_stream, unpacking


def shard_dataloader(
    dataloader: object, *, num_replicas: int, rank: int, seed: int, progress: Callable[[], Progress]
) -> object:
    """The same loader over this rank's batches, able to continue inside an epoch; other iterables are left alone.

    Loaders that already have a DistributedSampler decide for themselves what a rank sees.

    Raises:
        DataError: batches that cannot be shared out over the ranks.
    """
    if not isinstance(dataloader, DataLoader):
        return dataloader
    if isinstance(dataloader.dataset, IterableDataset):
        stream: Any = copy.copy(dataloader)
        stream.__dict__.update(
            shard_stream(dataloader, num_replicas=num_replicas, rank=rank, seed=seed, progress=progress)
        )
        stream.__dict__["_iterator"] = None
        stream.__class__ = unpacking(type(dataloader))
        return stream
    original: Any = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    tracked = isinstance(original, _IndexBatchSamplerWrapper)
    inner = original._batch_sampler if tracked else original
    for sampler in (inner, getattr(inner, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            _check_distributed(sampler, num_replicas=num_replicas, rank=rank)
            return dataloader
    if not hasattr(original, "__len__"):
        if num_replicas == 1:
            return dataloader
        raise DataError(
            f"{type(original).__name__} has no length, so its batches cannot be shared out over ranks. Give it a "
            "__len__, or shard the data yourself and set Trainer(use_distributed_sampler=False)."
        )
    settings: dict[str, Any] = {
        "num_replicas": num_replicas,
        "rank": rank,
        "seed": seed,
        "progress": progress,
        "generators": _generators(dataloader, inner, getattr(inner, "sampler", None)),
    }
    # A copy, so that a loader of any class keeps all that its own constructor gave it; its attributes are locked.
    sharded: Any = copy.copy(dataloader)
    attributes = sharded.__dict__
    attributes["_iterator"] = None
    share: ShardedBatchSampler
    if dataloader.batch_sampler is not None:
        share = ShardedBatchSampler(inner, **settings)
        attributes["batch_sampler"] = _IndexBatchSamplerWrapper(share) if tracked else share
    elif isinstance(inner, BatchSampler):
        share = attributes["sampler"] = ShardedBatchSampler(inner, **settings)
    else:
        _check_whole_batches(len(inner), num_replicas=num_replicas)
        share = attributes["sampler"] = ShardedSampler(inner, **settings)
    if dataloader.generator is None:
        attributes["generator"] = share.worker_seeds
    attributes["state_dict"] = share.state_dict
    attributes["load_state_dict"] = share.load_state_dict
    return sharded


def _generators(*holders: Any) -> list[torch.Generator]:
    found = (getattr(holder, "generator", None) for holder in holders)
    return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))


def _check_distributed(sampler: DistributedSampler, *, num_replicas: int, rank: int) -> None:
    if (sampler.num_replicas, sampler.rank) != (num_replicas, rank):
        raise DataError(
            f"DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}) on data-parallel rank "
            f"{rank} of {num_replicas}. Leave the sampler out (this strategy shards loaders itself), or build it with "
            "**trainer.strategy.distributed_sampler_kwargs."
        )


def _check_whole_batches(count: int, *, num_replicas: int) -> None:
    if count % num_replicas:
        raise DataError(
            f"a DataLoader with batch_size=None has {count} items, which cannot be shared out evenly over "
            f"{num_replicas} data-parallel ranks without repeating or dropping one. Use a number of items that "
            f"{num_replicas} divides, or set batch_size=1."
        )
