"""The comparison of `lightning-3d verify` tells each fault of tensor and pipeline parallelism from sound training.

Faults are planted in the forked ranks alone, as in the tests of data-parallel faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from modules import Points, Rows, TinyGPT
from pipelined_modules import MLP
from test_planted_faults import ACCUMULATE, MAX_NORM, TOLERANCE
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from training import run, trainer_for

from lightning_3d.cli.comparison import Comparison, Recorder, RunRecord, compare, fit
from lightning_3d.errors import LaunchError
from lightning_3d.parallel import cursor, gradients, sequence, split_logits, staged, tensor
from lightning_3d.parallel.cursor import Cursor
from lightning_3d.parallel.local import local_tensor
from lightning_3d.parallel.staged import StagedModule
from lightning_3d.parallel.tensor import Region
from lightning_3d.strategies import pipelined_step, three_d
from lightning_3d.strategies.guards.whole_gradients import WholeGradients

pytestmark = pytest.mark.distributed


class Data(L.LightningDataModule):
    def __init__(self, kind: type[Dataset]) -> None:
        super().__init__()
        self.kind: Any = kind

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.kind(48), batch_size=8)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.kind(21), batch_size=8)


class NoisyGPT(TinyGPT):
    """Draws in the step what both ends of a pipeline must know."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            rows = rows.where(torch.rand(rows.shape) < 0.7, 1)
        return super().loss(rows)


class PlainGPT(TinyGPT):
    """Its logits go into the loss as they are."""

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.model(rows[:, :-1])  # type: ignore[misc]
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


MODULES: dict[str, tuple[Callable[[], L.LightningModule], type[Dataset], dict[str, Any]]] = {
    "gpt": (TinyGPT, Rows, {}),
    "gpt, 3 micro-batches": (TinyGPT, Rows, {"num_microbatches": 3}),
    "gpt, split logits": (PlainGPT, Rows, {"loss_parallel": True}),
    "gpt, split sequence": (TinyGPT, Rows, {"sequence_parallel": True}),
    "noisy gpt": (NoisyGPT, Rows, {"num_microbatches": 4}),
    "mlp": (MLP, Points, {}),
}


def train(layout: str | None, module: str, plant: Callable[[], None] | None = None, guarded: bool = False) -> RunRecord:
    L.seed_everything(1, verbose=False)
    if plant is not None:
        plant()
        if not guarded:
            # A run would end where the copies of a parameter drift apart.
            WholeGradients.before_update = lambda *_: None  # type: ignore[method-assign]
    build, kind, options = MODULES[module]
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
        **options,
    )
    return fit(trainer, recorder, build(), data=Data(kind))


# ---------------------------------------------------------------------- faults of split modules


def add_bias_on_each_rank() -> None:
    """Each rank adds the bias to its partial result, and the sum has it as often as there are ranks."""
    Region.whole = lambda self, parameter: parameter * self.size  # type: ignore[method-assign]


def keep_parts_of_whole_weights() -> None:
    """The gradient of a weight that each rank uses a part of stays a part of it."""
    real = tensor.copy_in
    tensor.copy_in = lambda value, group: value if isinstance(value, nn.Parameter) else real(value, group)


def drop_backward_into_region() -> None:
    """Each rank's gradient of what enters a split region is its own part."""
    tensor._CopyIn.backward = staticmethod(lambda ctx, gradient: (gradient, None))  # type: ignore[method-assign]


def drop_forward_out_of_region() -> None:
    tensor._ReduceOut.forward = staticmethod(lambda ctx, value, group: value.clone())  # type: ignore[method-assign]


def reduce_backward_too() -> None:
    """As an all-reduce that differentiates itself does: gradients inside of a region are counted on each rank."""

    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None

    tensor._ReduceOut.forward = staticmethod(forward)  # type: ignore[method-assign]
    tensor._ReduceOut.backward = staticmethod(backward)  # type: ignore[method-assign]


def repeat_first_part() -> None:
    """Each rank starts with the first rank's part of a split weight."""
    real = three_d.compose

    def compose(*args: Any, **kwargs: Any) -> Any:
        share = real(*args, **kwargs)
        for parameter in share.module.parameters():
            if isinstance(parameter, DTensor):
                dist.broadcast(local_tensor(parameter).detach(), src=0)
        return share

    three_d.compose = compose


def normalise_over_own_tokens() -> None:
    """The softmax of split logits sums over a rank's own tokens."""
    real = dist.all_reduce

    def forward(ctx: Any, *args: Any) -> Any:
        dist.all_reduce = lambda value, *rest, **options: value if value.dim() == 2 else real(value, *rest, **options)
        try:
            return whole(ctx, *args)
        finally:
            dist.all_reduce = real

    whole = split_logits._SplitLoss.forward
    split_logits._SplitLoss.forward = staticmethod(forward)  # type: ignore[method-assign]


def leave_split_parts_out_of_norm() -> None:
    gradients._by_sharding = lambda all_gradients: {(): all_gradients}


def count_whole_gradients_on_each_rank() -> None:
    """The norm sums what ranks have alike as if it were parts."""
    real = gradients._by_sharding

    def by_sharding(all_gradients: Any) -> Any:
        found = real(all_gradients)
        whole = found.pop((), [])
        groups = next(iter(found))
        return {**found, groups: found[groups] + whole}

    gradients._by_sharding = by_sharding


def leave_gradients_of_norms_in_parts() -> None:
    """Under sequence parallelism a norm's gradient is that of a rank's own part of the sequence."""
    sequence.apply_replicate = lambda *_: None


# ---------------------------------------------------------------------- faults of the pipeline


def weigh_micro_batches_alike() -> None:
    """Almost: 3, 3 and 2 samples of 8 count as 2.7, 2.7 and 2.6."""
    real = pipelined_step.part_sizes
    pipelined_step.part_sizes = lambda size, count: [{3: 2.7, 2: 2.6}.get(part, part) for part in real(size, count)]


def count_tied_gradient_twice() -> None:
    StagedModule.counts = lambda self, parameter: (  # type: ignore[method-assign]
        parameter.dim() == 2 or id(parameter) not in self._copies
    )


def keep_copies_apart(dim: int) -> Callable[[], None]:
    """Gradients of parameters of this many dimensions are not summed over the stages that have a copy."""

    def plant() -> None:
        real = staged._sum_
        staged._sum_ = lambda parameter, groups: None if parameter.dim() == dim else real(parameter, groups)

    return plant


def draw_by_rank() -> None:
    """What a step draws at random differs between stages."""
    real = cursor.seed_generators
    cursor.seed_generators = lambda seed: real(f"{seed}/{dist.get_rank()}")


def receive_first_activations() -> None:
    """A stage computes with the first micro-batch's activations, whichever it serves."""
    real = Cursor.serving
    first: list[torch.Tensor] = []

    @contextmanager
    def serving(self: Cursor, stage: Any, *, wire: Any, **options: Any) -> Iterator[None]:
        if wire is not None:
            first.append(wire.detach().clone())
            wire = wire + (first[0] - wire).detach() if wire.shape == first[0].shape else wire
        with real(self, stage, wire=wire, **options):
            yield

    Cursor.serving = serving  # type: ignore[method-assign]


def norm_of_own_stage() -> None:
    StagedModule.norm_group = property(lambda self: None)  # type: ignore[method-assign,assignment]


def lose_second_batches() -> None:
    """Each batch of an accumulation window starts with no gradients."""
    real = pipelined_step.PipelinedStep.train

    def train_alone(self: Any, *args: Any, **options: Any) -> Any:
        for parameter in self._module.parameters():
            parameter.grad = None
        return real(self, *args, **options)

    pipelined_step.PipelinedStep.train = train_alone  # type: ignore[method-assign]


# name: (module, layout, what plants it, the figure that must give it away)
FAULTS: dict[str, tuple[str, str, Callable[[], None], str]] = {
    "bias added on each rank": ("mlp", "tp2", add_bias_on_each_rank, "loss"),
    "parts of a whole weight's gradient": ("gpt", "tp4", keep_parts_of_whole_weights, "gradient_norm"),
    "gradient of a region's input not reduced": ("gpt", "tp2", drop_backward_into_region, "gradient_norm"),
    "result of a region not reduced": ("gpt", "tp2", drop_forward_out_of_region, "loss"),
    "gradient reduced on the way in too": ("gpt", "tp2", reduce_backward_too, "gradient_norm"),
    "first part on each rank": ("gpt", "tp2", repeat_first_part, "weights"),
    "softmax of own tokens": ("gpt, split logits", "tp2", normalise_over_own_tokens, "loss"),
    "norm without split parts": ("gpt", "tp2", leave_split_parts_out_of_norm, "gradient_norm"),
    "norm with whole gradients on each rank": ("gpt", "tp2", count_whole_gradients_on_each_rank, "gradient_norm"),
    "gradients of norms in parts": ("gpt, split sequence", "tp2", leave_gradients_of_norms_in_parts, "gradient_norm"),
    "micro-batches weighed alike": ("gpt, 3 micro-batches", "pp2", weigh_micro_batches_alike, "gradient_norm"),
    "tied gradient twice in the norm": ("gpt", "pp2", count_tied_gradient_twice, "gradient_norm"),
    "tied gradients not summed": ("gpt", "pp2", keep_copies_apart(2), "weights"),
    "temperature's gradients not summed": ("gpt", "pp2", keep_copies_apart(0), "weights"),
    "draws that differ between stages": ("noisy gpt", "pp2", draw_by_rank, "loss"),
    "stale activations": ("gpt", "pp2", receive_first_activations, "loss"),
    "norm of one stage": ("gpt", "pp2", norm_of_own_stage, "gradient_norm"),
    "earlier batches of a window lost": ("gpt", "pp2", lose_second_batches, "gradient_norm"),
    "stale activations, tp2-pp2": ("gpt", "tp2-pp2", receive_first_activations, "loss"),
    "tied gradients not summed, tp2-pp2": ("gpt", "tp2-pp2", keep_copies_apart(2), "weights"),
}


@pytest.fixture(scope="module")
def references() -> dict[str, RunRecord]:
    found = {}
    for name in MODULES:
        # Random numbers are told by micro-batch, so that one process of our strategy is the reference.
        record: RunRecord = run("single" if "noisy" in name else None, train, name)[0]
        assert min(record.gradient_norms) > (0 if name == "mlp" else MAX_NORM), "clipping must act"
        assert len(record.losses) == 3 * ACCUMULATE
        found[name] = record
    return found


@pytest.mark.parametrize(("module", "layout"), sorted({(module, layout) for module, layout, _, _ in FAULTS.values()}))
def test_sound_training_passes(module: str, layout: str, references: dict[str, RunRecord]) -> None:
    assert compare(references[module], run(layout, train, module)).excesses(TOLERANCE) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_told(fault: str, references: dict[str, RunRecord]) -> None:
    module, layout, plant, figure = FAULTS[fault]
    comparison: Comparison = compare(references[module], run(layout, train, module, plant))
    assert getattr(comparison, figure) > 1e3 * TOLERANCE.loss
    assert any(excess.startswith(figure.replace("_", " ")) for excess in comparison.excesses(TOLERANCE))


@pytest.mark.parametrize("fault", ["parts of a whole weight's gradient", "gradients of norms in parts"])
def test_fault_by_which_copies_drift_apart_ends_the_run_itself(fault: str) -> None:
    module, layout, plant, _ = FAULTS[fault]
    with pytest.raises(LaunchError, match="ModelError: the gradient of .* differs between tensor-parallel ranks"):
        run(layout, train, module, plant, True)
