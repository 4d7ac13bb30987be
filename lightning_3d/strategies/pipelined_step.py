"""The user's own step under a pipeline: run once per micro-batch on every stage, as far as the stage goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten

from lightning_3d.errors import ModelError
from lightning_3d.layout import Layout, fits_interleaved
from lightning_3d.parallel.microbatch import (
    batch_size,
    map_tensors,
    merge_outputs,
    part_sizes,
    split_batch,
    weighted_mean,
)
from lightning_3d.parallel.placeholder import is_placeholder
from lightning_3d.parallel.relay import Relay
from lightning_3d.parallel.staged import StagedModule
from lightning_3d.strategies.draws import StepSeeds
from lightning_3d.strategies.guards.step_guards import PartialModules, SharedBuffers
from lightning_3d.strategies.logs import LogRecorder

Context = Callable[[], AbstractContextManager[Any]]


class PipelinedStep:
    """Runs `training_step` and its like of a module that is dealt out over a pipeline.

    Args:
        module: the user's.
        share: this rank's stages of it.
        layout: resolved.
        group: the ranks of the pipeline.
        data_group: the data-parallel ranks.
        count_group: the same, on the host: ranks must not wait for a GPU to agree on a count.
        seeds: of what the steps draw.
    """

    def __init__(
        self,
        module: L.LightningModule,
        share: StagedModule,
        *,
        layout: Layout,
        group: ProcessGroup,
        data_group: ProcessGroup,
        count_group: ProcessGroup,
        seeds: StepSeeds,
    ) -> None:
        self._module = module
        self._share = share
        self._layout = layout
        self._data_group = data_group
        self._seeds = seeds
        self.running = False
        self._recorder = LogRecorder(module)
        self._relay = Relay(group, source=group.size() - 1, device=module.device)
        self._count_group = count_group
        self._partial = PartialModules(module)
        split = share.pipeline.split
        self._buffers = SharedBuffers(module, own=[part for stage in split.stages for part in split.pieces(stage)])
        self._quiet = False

    def train(
        self, args: tuple[Any, ...], *, context: Context, factor: float, first: bool, last: bool
    ) -> torch.Tensor | dict[str, Any]:
        """`training_step`, backward included; the loss that is returned carries the gradients.

        Args:
            args: of `training_step`.
            context: in which the user's step runs (precision).
            factor: that Lightning will multiply the loss by before its backward.
            first, last: whether this batch begins and ends an accumulation window.
        """
        if first:
            # The module shows the parameters that the optimizer has, whatever an evaluation has gathered.
            self._share.reshard()
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        if first:
            # The last window's, which Lightning clears only after this step.
            for parameter in parameters:
                parameter.grad = None
        loss, output = self._run(self._module.training_step, args, context=context, factor=factor, last=last)
        if last:
            self._share.combine_gradients()
        carried: list[tuple[nn.Parameter, torch.Tensor]] = []
        if first:
            # Lightning clears gradients between this step and the backward: they are put back by the loss's backward.
            carried = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter in parameters:
                parameter.grad = None
        result = _CarryGradients.apply(loss.requires_grad_(), carried, factor)
        return {**output, "loss": result} if isinstance(output, dict) else result

    def evaluate(self, function: Callable[..., Any], args: tuple[Any, ...], *, context: Context) -> Any:
        """`validation_step`, `test_step` or `predict_step`; what it returned, merged, on every rank."""
        return self._run(function, args, context=context, factor=None, last=True)[1]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What steps log inside is dropped."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    # ------------------------------------------------------------------ parts

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        context: Context,
        factor: float | None,
        last: bool,
    ) -> tuple[torch.Tensor, Any]:
        batch, *rest = args
        training = factor is not None
        total = batch_size(batch)
        count = self._count(total, training)
        microbatches, sizes = split_batch(batch, count), part_sizes(total, count)
        losses: list[Any] = [None] * len(sizes)
        outputs: list[Any] = [None] * len(sizes)
        pipeline = self._share.pipeline
        cursor = pipeline.split.cursor

        def step(index: int) -> torch.Tensor:
            # What the step changes in its batch, containers or tensors, must not reach another run of it.
            own = map_tensors(torch.clone, microbatches[index])
            keep = cursor.stage is not None and cursor.stage.last
            with context(), self._recorder.microbatch(sizes[index], keep=keep), self._partial.guarded():
                output = function(own, *rest)
            if keep and is_placeholder(output):
                raise ModelError(
                    f"{function.__name__} returned what was computed from an intermediate result of the model that "
                    "another pipeline rank has. Use the model's output alone, or set pipeline_parallel_size=1."
                )
            outputs[index] = output
            if factor is None:
                return torch.zeros((), device=self._module.device)
            losses[index] = _loss(output)
            return losses[index] * (factor * sizes[index] / total)

        self.running = True
        try:
            with self._recorder.recording():
                pipeline.run(
                    step,
                    sizes=sizes,
                    signature=_signature(batch, sizes, function.__name__),
                    seed=self._seeds.next(function.__name__),
                    training=training,
                    sync=last,
                    loss_dtype=self._loss_dtype(),
                )
        finally:
            self.running = False
        return self._share_results(losses if training else None, outputs, sizes, kind=function.__name__)

    def _share_results(
        self, losses: Any, outputs: list[Any], sizes: list[int], *, kind: str
    ) -> tuple[torch.Tensor, Any]:
        """The last stage's loss, output and logs, on every rank of the pipeline."""
        mine: Any = None
        if self._share.pipeline.has_last_stage:
            loss = weighted_mean(losses, sizes) if losses else torch.zeros((), device=self._module.device)
            merged = merge_outputs(_without_loss(outputs) if losses else outputs, sizes=sizes)
            mine = loss, merged, self._recorder.take(), self._buffers.changed()
        loss, merged, logs, buffers = self._relay.share(mine, kind=kind)
        if not self._share.pipeline.has_last_stage:
            self._buffers.update(buffers)
        if not self._quiet:
            self._recorder.emit(logs)
        return loss, merged

    def _count(self, size: int, training: bool) -> int:
        """Micro-batches of a batch of `size` samples: as asked for, or as samples and schedule allow."""
        stages = self._layout.pipeline
        asked = self._layout.num_microbatches
        count = min(asked or 2 * stages, size)
        if asked is not None and asked > size:
            rank_zero_warn(f"num_microbatches={asked}, but a batch has {size} samples: it is cut into {size}.")
        if self._layout.data_parallel_shards > 1 and (self._layout.zero_stage >= 2 or not training):
            # Each micro-batch gathers or reduces over data-parallel ranks, whose last batches may differ in size.
            fewest = torch.tensor(count)
            dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self._count_group)
            count = int(fewest)
        if training and self._layout.schedule == "interleaved1f1b" and stages > 1:
            while not fits_interleaved(count, stages):
                count -= 1
        return count

    def _loss_dtype(self) -> torch.dtype:
        double = any(p.dtype == torch.float64 for p in self._module.parameters())
        return torch.float64 if double else torch.float32


class _CarryGradients(torch.autograd.Function):
    """A loss whose gradients are known: its backward puts them where they belong."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, carried: list[tuple[nn.Parameter, torch.Tensor]], factor: float) -> Any:
        ctx.carried, ctx.factor = carried, factor
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        expected = (gradient / ctx.factor - 1).abs() <= 1e-6
        if gradient.is_cuda:
            # Told by the device itself: to read the number here would be to wait for all that it has to do.
            torch._assert_async(expected, f"{_SCALED} Expected was {ctx.factor:g}.")
        elif not expected:
            raise ModelError(f"{_SCALED} Expected was {ctx.factor:g}, found {float(gradient):g}.")
        for parameter, value in ctx.carried:
            parameter.grad = value
        return None, None, None


_SCALED = (
    "the loss was multiplied on its way to the backward by another factor than Lightning's own. Under a pipeline the "
    "backward runs inside training_step: scale the loss there."
)


def _loss(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise ModelError(
            "under a pipeline training_step must return a scalar loss, or a dict with one under 'loss'; it returned "
            f"{type(loss).__name__}."
        )
    return loss


def _without_loss(outputs: list[Any]) -> list[Any]:
    return [
        {key: value for key, value in output.items() if key != "loss"} if isinstance(output, dict) else None
        for output in outputs
    ]


def warn_of_coupled_samples(module: nn.Module) -> None:
    """Tell once of layers that normalise over samples; to be called with the whole module."""
    kinds = (nn.modules.batchnorm._BatchNorm,)
    names = [name for name, part in module.named_modules() if isinstance(part, kinds)]
    if names:
        rank_zero_warn(
            f"{', '.join(names[:4])} normalise over a micro-batch under a pipeline, not over the batch. "
            "So does every loss that couples samples. Use a norm within samples, or num_microbatches=1."
        )


def _signature(batch: Any, sizes: list[int], step: str) -> Any:
    """Equal for batches from which a step of this name makes activations of equal shapes."""
    leaves, spec = tree_flatten(map_tensors(lambda t: t, batch))
    described = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
        # A length or a switch may be among whole numbers; a weight or a time, which each batch has of its own, is not.
        if isinstance(leaf, torch.Tensor | int)
    )
    return step, described, str(spec), tuple(sizes)
