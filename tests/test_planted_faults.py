"""The comparison that `lightning-3d verify` makes tells each of these faults from sound training.

A fault is planted in the forked ranks alone, as close to the wire as it can be, so that what is tested is the
comparison and not how a part of ours is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from modules import Rows, TinyGPT
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from training import run, trainer_for

from lightning_3d.cli.comparison import Comparison, Recorder, RunRecord, Tolerance, compare, fit
from lightning_3d.data.batch import data_parallel_size
from lightning_3d.parallel.local import local_tensor
from lightning_3d.parallel.zero import ShardedModule, fsdp_parameters
from lightning_3d.strategies import feeding, three_d
from lightning_3d.strategies.three_d import ThreeDStrategy

pytestmark = pytest.mark.distributed

TOLERANCE = Tolerance.exact(1e-9)
MAX_NORM = 0.3
ACCUMULATE = 2
# FSDP2 calls the second one from torch 2.13 on.
REDUCE_SCATTER = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]


class TokenRows(L.LightningDataModule):
    def _loader(self, count: int) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(count), batch_size=8 // data_parallel_size(self.trainer))

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return self._loader(48)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return self._loader(21)


def train(layout: str | None, plant: Callable[[], None] | None = None) -> RunRecord:
    L.seed_everything(1, verbose=False)
    if plant is not None:
        plant()
    recorder = Recorder()
    trainer = trainer_for(
        layout,
        max_steps=3,
        precision="64-true",
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=MAX_NORM,
        val_check_interval=10**9,
        check_val_every_n_epoch=None,
        callbacks=[recorder],
    )
    return fit(trainer, recorder, TinyGPT(), data=TokenRows())


# ---------------------------------------------------------------------- faults of the gradients' reduction


class Done:
    """A collective that has nothing left to do."""

    def wait(self, *_: Any) -> bool:
        return True


def drop_all_reduce() -> None:
    """Gradients of whole parameters stay each rank's own: those that are sent while the backward goes on."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        return Done() if async_op else real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


def drop_reduce_scatter() -> None:
    """Gradients of shards are each rank's own part of its own gradient."""

    def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: Any = None, **_: Any) -> None:
        output.copy_(input.view(group.size(), -1)[group.rank()])

    for name in REDUCE_SCATTER:
        setattr(dist, name, reduce_scatter)


def drop_all_reduce_between_replicas() -> None:
    """Of HSDP, whose shards are reduced and whose replicas then differ."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        # Not those of norms (one number) and of whole parameters (sent while the backward goes on).
        dropped = tensor.numel() > 1 and not async_op
        return None if dropped else real(tensor, *args, async_op=async_op, **kwargs)

    dist.all_reduce = all_reduce


def scale_all_reduce(factor: float) -> Callable[[], None]:
    def plant() -> None:
        real = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if async_op:
                tensor.mul_(factor)
            return real(tensor, *args, async_op=async_op, **kwargs)

        dist.all_reduce = all_reduce

    return plant


def scale_reduce_scatter(factor: float) -> Callable[[], None]:
    def plant() -> None:
        real = getattr(dist, REDUCE_SCATTER[-1])

        def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return real(output, input.mul_(factor), *args, **kwargs)

        for name in REDUCE_SCATTER:
            setattr(dist, name, reduce_scatter)

    return plant


def lose_earlier_micro_batches() -> None:
    """Only the last micro-batch of an accumulation window reaches the optimizer."""
    real = ThreeDStrategy.training_step

    def training_step(self: ThreeDStrategy, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.share.module.parameters():
            parameter.grad = None
        for parameter in fsdp_parameters(root_of(self)):
            parameter.unsharded_accumulated_grad = None
            parameter.sharded_param.grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        return real(self, *args, **kwargs)

    ThreeDStrategy.training_step = training_step  # type: ignore[method-assign]


def root_of(strategy: ThreeDStrategy) -> nn.Module:
    share = strategy.share
    return share._root if isinstance(share, ShardedModule) else share.module


# ---------------------------------------------------------------------- faults of the step


def clip_by_local_norm() -> None:
    """Each rank clips by the norm of the shards that it holds."""

    def clip(parameters: Any, *, max_norm: float, **_: Any) -> torch.Tensor:
        gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    three_d.clip_by_norm_ = clip


def norm_of_local_shards() -> None:
    """What is logged as the gradient norm is that of a rank's own shards."""

    def local_norm(parameters: Any, **_: Any) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([local_tensor(p.grad) for p in parameters if p.grad is not None])

    three_d.global_norm = local_norm


def keep_one_shard() -> None:
    """One shard of one parameter on the last rank is as it was before the step."""
    real = ThreeDStrategy.optimizer_step

    def optimizer_step(self: ThreeDStrategy, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        shard = local_tensor(optimizer.param_groups[0]["params"][1])
        before = shard.detach().clone()
        result = real(self, optimizer, closure, *args, **kwargs)
        if dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                shard.copy_(before)
        return result

    ThreeDStrategy.optimizer_step = optimizer_step  # type: ignore[method-assign]


def keep_whole_parameters() -> None:
    """Whole parameters are not gathered again after the step, which changes the shards only."""
    real = ShardedModule.run
    gathered_first: dict[int, torch.Tensor] = {}

    def run_stale(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
        shards = [local_tensor(parameter.sharded_param) for parameter in fsdp_parameters(self._root)]
        current = [shard.detach().clone() for shard in shards]
        with torch.no_grad():
            for shard in shards:
                shard.copy_(gathered_first.setdefault(shard.data_ptr(), shard.detach().clone()))
        for module in self._sharded:
            module.unshard()
        with torch.no_grad():
            for shard, value in zip(shards, current, strict=True):
                shard.copy_(value)
        return real(self, *args, **kwargs)

    ShardedModule.run = run_stale  # type: ignore[method-assign]


# ---------------------------------------------------------------------- faults of weights, data and metrics


def repeat_initial_shards() -> None:
    """Every rank starts with rank 0's slice of each parameter."""
    real = three_d.compose

    def compose(*args: Any, **kwargs: Any) -> Any:
        share = real(*args, **kwargs)
        for parameter in share.module.parameters():
            if isinstance(parameter, DTensor):
                dist.broadcast(local_tensor(parameter).detach(), src=0)
        return share

    three_d.compose = compose


def repeat_rows() -> None:
    """All ranks get rank 0's rows."""
    real = feeding.shard_dataloader
    feeding.shard_dataloader = lambda loader, **kwargs: real(loader, **{**kwargs, "rank": 0})


def keep_metrics_local() -> None:
    """Logged values are not averaged over the ranks."""
    ThreeDStrategy.reduce = lambda self, tensor, *_, **__: tensor  # type: ignore[method-assign]


# name: (layout, what plants it, the figure that must give it away)
FAULTS: dict[str, tuple[str, Callable[[], None], str]] = {
    "dropped all-reduce": ("dp2", drop_all_reduce, "gradient_norm"),
    "dropped reduce-scatter, zero1": ("zero1x2", drop_reduce_scatter, "gradient_norm"),
    "dropped reduce-scatter, zero3": ("zero3x2", drop_reduce_scatter, "gradient_norm"),
    "scalars not averaged": ("zero3x2", drop_all_reduce, "weights"),
    "dropped all-reduce between replicas": ("hsdp2x2", drop_all_reduce_between_replicas, "gradient_norm"),
    "doubled divisor": ("dp2", scale_all_reduce(0.5), "gradient_norm"),
    "doubled divisor, zero2": ("zero2x2", scale_reduce_scatter(0.5), "gradient_norm"),
    "missing divisor": ("dp2", scale_all_reduce(2.0), "gradient_norm"),
    "missing divisor, zero3": ("zero3x2", scale_reduce_scatter(2.0), "gradient_norm"),
    "earlier micro-batches lost": ("dp2", lose_earlier_micro_batches, "gradient_norm"),
    "earlier micro-batches lost, zero1": ("zero1x2", lose_earlier_micro_batches, "gradient_norm"),
    "earlier micro-batches lost, zero3": ("zero3x2", lose_earlier_micro_batches, "gradient_norm"),
    "clipping by the local norm": ("zero3x2", clip_by_local_norm, "weights"),
    "norm of local shards": ("zero3x2", norm_of_local_shards, "gradient_norm"),
    "stale shard after the step": ("zero3x2", keep_one_shard, "weights"),
    "stale whole parameters": ("zero1x2", keep_whole_parameters, "loss"),
    "initial weights repeated on shards": ("zero3x2", repeat_initial_shards, "weights"),
    "all ranks get the same rows": ("dp2", repeat_rows, "loss"),
    "validation loss of one rank": ("dp2", keep_metrics_local, "metrics"),
}


@pytest.fixture(scope="module")
def reference() -> RunRecord:
    record: RunRecord = run(None, train)[0]
    assert min(record.gradient_norms) > MAX_NORM, "clipping must act, or a fault of it could not show"
    assert len(record.losses) == 3 * ACCUMULATE
    assert "val_loss" in record.metrics
    return record


@pytest.mark.parametrize("layout", sorted({layout for layout, _, _ in FAULTS.values()}))
def test_sound_training_passes(layout: str, reference: RunRecord) -> None:
    assert compare(reference, run(layout, train)).excesses(TOLERANCE) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_told(fault: str, reference: RunRecord) -> None:
    layout, plant, figure = FAULTS[fault]
    comparison: Comparison = compare(reference, run(layout, train, plant))
    assert getattr(comparison, figure) > 1e3 * TOLERANCE.loss
    assert any(excess.startswith(figure.replace("_", " ")) for excess in comparison.excesses(TOLERANCE))
