"""Runs a step stage by stage through torch's pipeline schedules.

What travels between stages is one flat tensor, so that micro-batches of different sizes share a schedule; what travels
into the schedule is the micro-batch's number, so that a batch may be any nest of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from lightning_3d.checkpoint.random_state import random_state, set_random_state
from lightning_3d.errors import ModelError
from lightning_3d.parallel.cursor import Stage, StageDone
from lightning_3d.parallel.share import Share
from lightning_3d.parallel.stages import SplitModule
from lightning_3d.whereabouts import HERE

# The user's step for one micro-batch: the loss on the last stage (any tensor where nothing is trained).
Step = Callable[[int], torch.Tensor]

# In the errors that torch's stages raise from a step's own.
_WRAPPED = ("failed to run forward", "failed to run stage backward")

# Kinds of batches of which is known what travels between stages.
_MOST_SIGNATURES = 1024

# Stages that each rank has, where a schedule interleaves them.
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved1f1b": 2}


@dataclass(frozen=True)
class Wire:
    """The flat tensor between two stages: room for the largest micro-batch."""

    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ScheduleKey:
    """What a schedule depends on: one is kept for each.

    Args:
        wires: by the index of the stage that receives.
        count: of micro-batches.
    """

    wires: tuple[Wire, ...]
    count: int
    training: bool
    loss_dtype: torch.dtype


class Pipeline:
    """One rank's stages of a pipeline.

    Args:
        split: the module, dealt out.
        shares: for each local stage, how its gradients are combined over data parallelism.
        group: the ranks of the pipeline.
        schedule: as in `Layout`.
    """

    def __init__(
        self, split: SplitModule, *, shares: list[Share], group: ProcessGroup, schedule: str, device: torch.device
    ) -> None:
        self.split = split
        self.shares = shares
        self._group = group
        self._schedule = schedule
        self._device = device
        self._schedules: dict[ScheduleKey, Any] = {}
        # The largest wires seen, by their dtypes, and the dtypes that batches of a signature need.
        self._wires: dict[tuple[torch.dtype, ...], tuple[Wire, ...]] = {}
        self._known: dict[Any, tuple[torch.dtype, ...]] = {}
        self._step: Step | None = None
        self._seed = ""
        self._sync = True

    @property
    def has_last_stage(self) -> bool:
        return any(stage.last for stage in self.split.stages)

    def run(
        self,
        step: Step,
        *,
        sizes: list[int],
        signature: Any,
        seed: str,
        training: bool,
        sync: bool = True,
        loss_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Forward, and backward if `training`, of all micro-batches; gradients add to those that are there; collective.

        Args:
            sizes: samples of each micro-batch.
            signature: equal for batches whose activations have equal shapes.
            seed: of the batch, equal on all ranks of the pipeline.
            sync: whether this batch ends an accumulation window.
        """
        self._step, self._seed, self._sync = step, seed, sync
        if signature not in self._known:
            if len(self._known) == _MOST_SIGNATURES:
                # The oldest: a batch may tell its own number.
                del self._known[next(iter(self._known))]
            self._known[signature] = self._grow(self._probe(step, sizes))
        key = ScheduleKey(self._wires[self._known[signature]], len(sizes), training, loss_dtype)
        if key not in self._schedules:
            self._schedules[key] = self._build(key)
        indices = torch.arange(len(sizes))
        targets = {"target": indices} if training else {}
        try:
            with self._random_streams():
                self._schedules[key].step(index=indices, return_outputs=False, **targets)
        except RuntimeError as error:
            if error.__cause__ is not None and any(text in str(error).lower() for text in _WRAPPED):
                # The user's own, or one of ours that says what to do.
                raise error.__cause__ from None
            raise
        finally:
            self._step = None

    def serve(self, stage: Stage, wire: torch.Tensor | None, index: int) -> torch.Tensor:
        """The user's step for micro-batch `index`, as far as this stage goes."""
        assert self._step is not None
        cursor = self.split.cursor
        with self.split.serving(stage), cursor.serving(stage, wire=wire, seed=f"{self._seed}/{index}"):
            try:
                result = self._step(index)
            except StageDone as done:
                return done.hidden
            cursor.check_finished()
            return result

    def syncs(self, last_backward: bool) -> bool:
        """Whether a micro-batch's backward completes the window's gradients."""
        return last_backward and self._sync

    # ------------------------------------------------------------------ parts

    def _grow(self, wires: tuple[Wire, ...]) -> tuple[torch.dtype, ...]:
        """Make room for a new shape of batch; all ranks see the same shapes in the same order."""
        key = tuple(wire.dtype for wire in wires)
        before = self._wires.get(key, wires)
        largest = tuple(Wire(max(a.numel, b.numel), a.dtype) for a, b in zip(before, wires, strict=True))
        self._wires[key] = largest
        if largest != before:
            # Schedules keep buffers for what they receive: those that were outgrown go.
            self._schedules = {key: kept for key, kept in self._schedules.items() if key.wires != before}
        return key

    def _probe(self, step: Step, sizes: list[int]) -> tuple[Wire, ...]:
        """The wires of a new shape of batch, from a run in which no part of the model computes; equal on all ranks."""
        if len(self.split.all_stages) == 1:
            return ()
        cursor = self.split.cursor
        largest: dict[int, Wire] = {}
        for index in {size: index for index, size in enumerate(sizes)}.values():
            with self.split.probing() as stage, torch.no_grad(), self._random_streams():
                try:
                    with cursor.serving(stage, wire=None, seed="probe", probing=True):
                        step(index)
                        cursor.check_finished()
                except StageDone:
                    pass
            for other in self.split.all_stages[1:]:
                hidden = cursor.shapes[other.blocks.start]
                known = largest.get(other.index)
                if known is None or known.numel < hidden.numel():
                    largest[other.index] = Wire(hidden.numel(), hidden.dtype)
        return tuple(largest[index] for index in sorted(largest))

    @contextmanager
    def _random_streams(self) -> Iterator[None]:
        """What micro-batches draw leaves the process's own streams as they were."""
        before = random_state()
        try:
            yield
        finally:
            set_random_state(before)

    def _build(self, key: ScheduleKey) -> Any:
        stages: list[Any] = [
            _TorchStage(self, stage, share, key, group=self._group, device=self._device)
            for stage, share in zip(self.split.stages, self.shares, strict=True)
        ]
        loss = _first if key.training else None
        if len(stages) > 1:
            kind: Any = ScheduleInterleaved1F1B if key.training else ScheduleLoopedBFS
            return kind(stages, key.count, loss_fn=loss, scale_grads=False)
        few = key.count < len(self.split.all_stages)
        kind = Schedule1F1B if key.training and self._schedule == "1f1b" and not few else ScheduleGPipe
        return kind(stages[0], key.count, loss_fn=loss, scale_grads=False)


class _StageModule(nn.Module):
    """What torch's schedule calls for a micro-batch of one stage."""

    def __init__(self, pipeline: Pipeline, stage: Stage, share: Share, key: ScheduleKey) -> None:
        super().__init__()
        # Not as a submodule: torch's stage would take the share's module for its own to reduce.
        self._run = partial(share.run, pipeline.serve, stage)
        self._index = stage.index
        self._sends = None if stage.last else key.wires[stage.index]
        self._loss_dtype = key.loss_dtype

    def forward(self, *wire: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        HERE.act("forward", stage=self._index, microbatch=int(index))
        result = self._run(wire[0] if wire else None, int(index))
        if self._sends is None:
            return result.to(self._loss_dtype)
        flat = result.reshape(-1)
        missing = self._sends.numel - flat.numel()
        if missing < 0 or flat.dtype != self._sends.dtype:
            raise ModelError(
                f"a stage sends {flat.dtype} of shape {tuple(result.shape)}, where {self._sends.dtype} of at most "
                f"{self._sends.numel} numbers was expected from the first micro-batch like it: the shape or dtype "
                "of activations depends on values in the batch. Pad to a length that the batch's shape tells."
            )
        return F.pad(flat, (0, missing)) if missing else flat


class _TorchStage(PipelineStage):
    """A stage whose shapes are known and whose gradients are reduced as the share of data parallelism says."""

    def __init__(
        self,
        pipeline: Pipeline,
        stage: Stage,
        share: Share,
        key: ScheduleKey,
        *,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        def example(wire: Wire) -> torch.Tensor:
            return torch.empty(wire.numel, dtype=wire.dtype, device="meta", requires_grad=key.training)

        loss = torch.empty((), dtype=key.loss_dtype, device="meta", requires_grad=key.training)
        super().__init__(
            _StageModule(pipeline, stage, share, key),
            stage.index,
            len(pipeline.split.all_stages),
            device,
            input_args=() if stage.first else (example(key.wires[stage.index - 1]),),
            output_args=(loss,) if stage.last else (example(key.wires[stage.index]),),
            group=group,
        )
        self._pipeline = pipeline
        self._share = share

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if not self.is_first:
            HERE.act("input", stage=self.stage_index, microbatch=fwd_chunk_id, awaits=self.stage_index - 1)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if not self.is_last:
            HERE.act("gradient", stage=self.stage_index, microbatch=bwd_chunk_id, awaits=self.stage_index + 1)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        HERE.act("backward", stage=self.stage_index, microbatch=bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        # Micro-batches of a pipeline are to ZeRO what batches of an accumulation window are.
        window = nullcontext() if self._pipeline.syncs(last_backward) else self._share.no_sync()
        with window, self._share.backward_pass():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)


def _first(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The step's own loss is the stage's output."""
    return output
