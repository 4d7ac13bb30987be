"""Whether ranks trained what one process trains: what a run did, and how far two runs are apart.

Nothing here asks the strategy for a mean or a sum that it could get wrong. Each rank keeps its own losses, and their
mean is taken where all ranks' records lie side by side; norms, metrics and weights must be right on every rank.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.parallel.held import HeldBytes, held_bytes
from lightning_3d.parallel.share import Share
from lightning_3d.strategies.three_d import ThreeDStrategy

# Of the largest weight: less, and a comparison of weights would say nothing.
LEAST_MOVED = 1e-4


@dataclass
class RunRecord:
    """What one rank saw of a run.

    Attributes:
        losses: of each batch, this rank's own rows only.
        gradient_norms: of each optimizer step, of the whole model, before clipping.
        metrics: what validation after the last step logged.
        initial, final: the whole model's parameters and persistent buffers by name.
        parameters: which of them are parameters.
        held: before the last optimizer step.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    held: HeldBytes = field(default_factory=lambda: HeldBytes(0, 0, 0))


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that pass; None for what is only reported.

    Attributes:
        loss, gradient_norm, metrics: relative to the reference's value.
        weights: relative to the reference's largest weight.
    """

    loss: float
    gradient_norm: float | None = None
    weights: float | None = None
    metrics: float | None = None

    @classmethod
    def exact(cls, difference: float) -> Tolerance:
        """The same for all."""
        return cls(loss=difference, gradient_norm=difference, weights=difference, metrics=difference)


@dataclass(frozen=True)
class Comparison:
    """How far a layout's ranks are from the reference, at most; infinite where there is nothing to compare with.

    Attributes:
        moved: how far the weights went from their initial values, relative to the largest.
        held: the largest of any rank, of each kind of state.
    """

    loss: float
    gradient_norm: float
    weights: float
    metrics: float
    moved: float
    held: HeldBytes

    def excesses(self, tolerance: Tolerance) -> list[str]:
        """What fails, each with its figure; empty for a pass. What is not a number never passes."""
        found = []
        for name in ("loss", "gradient_norm", "weights", "metrics"):
            value, limit = getattr(self, name), getattr(tolerance, name)
            if limit is not None and not value <= limit:
                found.append(f"{name.replace('_', ' ')} differs by {value:.1e}, more than {limit:.0e}")
        if not self.moved >= LEAST_MOVED:
            found.append(f"the weights moved by {self.moved:.1e} only, less than {LEAST_MOVED:.0e}")
        return found


class Recorder(L.Callback):
    """Fills a `RunRecord` while a Trainer fits.

    Args:
        start_from: initial values by name, for tensors that do not exist before `configure_model`; others keep theirs.
    """

    def __init__(self, start_from: Mapping[str, Tensor] | None = None) -> None:
        self.record = RunRecord()
        self._start_from = start_from
        self._built_before: frozenset[str] = frozenset()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._built_before = frozenset(pl_module.state_dict())

    @torch.no_grad()
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, tensor in pl_module.state_dict().items():
            if self._start_from is not None and name not in self._built_before and isinstance(tensor, Tensor):
                tensor.copy_(self._start_from[name])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.record.initial = _whole_state(trainer)
        self.record.parameters = frozenset(name for name, _ in pl_module.named_parameters())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Manual optimization need not return a loss.
        if isinstance(outputs, Mapping) and "loss" in outputs:
            self.record.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, ThreeDStrategy):
            norm, share = strategy.gradient_norm(), strategy.share
        else:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            norm, share = torch.nn.utils.get_total_norm(gradients), Share(pl_module)
        self.record.gradient_norms.append(float(norm))
        self.record.held = held_bytes(share, trainer.optimizers)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.record.final = _whole_state(trainer)


def fit(trainer: L.Trainer, recorder: Recorder, module: L.LightningModule, *, data: L.LightningDataModule) -> RunRecord:
    """Train and then validate, where model and data can; the Trainer must have `recorder` among its callbacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data)
        if is_overridden("validation_step", module) and is_overridden("val_dataloader", data):
            for logged in trainer.validate(module, datamodule=data, verbose=False):
                recorder.record.metrics.update({name: float(value) for name, value in logged.items()})
    return recorder.record


def quiet_lightning() -> None:
    """Only errors of Lightning's own log; for a process that compares runs and tells of them itself."""
    # DTensor's: gathering a whole weight from several axes takes several collectives, which is no news here.
    for name in ("lightning.pytorch", "lightning.fabric", "torch.distributed.tensor._redistribute"):
        logging.getLogger(name).setLevel(logging.ERROR)


def compare(reference: RunRecord, ranks: Sequence[RunRecord]) -> Comparison:
    """How far all ranks of a layout are from one process.

    Data-parallel ranks have equally many rows of each batch, so the mean of their losses is the loss of all rows.
    """
    losses = torch.tensor([rank.losses for rank in ranks], dtype=torch.double).mean(0).tolist() if _even(ranks) else []
    scale = _largest(_only(reference.final, reference).values()) or 1.0
    return Comparison(
        loss=_relative(losses, reference.losses),
        gradient_norm=_worst(_relative(rank.gradient_norms, reference.gradient_norms) for rank in ranks),
        weights=_worst(
            (
                _apart([rank.initial for rank in ranks], reference.initial) / scale,
                _apart([rank.final for rank in ranks], reference.final) / scale,
            )
        ),
        metrics=_worst(_relative_by_name(rank.metrics, reference.metrics) for rank in ranks),
        moved=_worst(_apart([_only(rank.initial, rank)], _only(rank.final, rank)) for rank in ranks) / scale,
        held=HeldBytes(
            parameters=max(rank.held.parameters for rank in ranks),
            gradients=max(rank.held.gradients for rank in ranks),
            optimizer=max(rank.held.optimizer for rank in ranks),
        ),
    )


def _whole_state(trainer: L.Trainer) -> dict[str, Tensor]:
    # Lightning moves to the CPU what it has sharded itself; ours are DTensors, gathered by all ranks together.
    state = trainer.strategy.lightning_module_state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().to("cpu", copy=True)
        for name, value in tensors.items()
    }


def _only(state: Mapping[str, Tensor], record: RunRecord) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name in record.parameters}


def _even(ranks: Sequence[RunRecord]) -> bool:
    return len({len(rank.losses) for rank in ranks}) == 1


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest |ours - theirs| / |theirs|; infinite for lists of unlike length."""
    if len(ours) != len(theirs):
        return float("inf")
    return _worst(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(ours, theirs, strict=True) if a != b)


def _relative_by_name(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    if ours.keys() != theirs.keys():
        return float("inf")
    return _relative([ours[name] for name in theirs], list(theirs.values()))


def _apart(ranks: Sequence[Mapping[str, Tensor]], whole: Mapping[str, Tensor]) -> float:
    """The largest difference of any element on any rank; infinite where names or shapes do not fit.

    A rank may hold some of the names only, as a stage of a pipeline does; together all must be there.
    """
    if {name for rank in ranks for name in rank} != whole.keys():
        return float("inf")
    pairs = [(tensor, whole[name]) for rank in ranks for name, tensor in rank.items()]
    if any(ours.shape != theirs.shape for ours, theirs in pairs):
        return float("inf")
    # Equal infinities (of a mask, say) do not differ.
    return _largest(torch.where(a == b, 0.0, a.double() - b.double()) for a, b in pairs)


def _largest(tensors: Iterable[Tensor]) -> float:
    return _worst(float(tensor.detach().double().abs().max()) for tensor in tensors if tensor.numel())


def _worst(values: Iterable[float]) -> float:
    """The largest, where not-a-number is the worst of all; 0 for none."""
    found = list(values)
    return float(torch.tensor(found, dtype=torch.double).max()) if found else 0.0
