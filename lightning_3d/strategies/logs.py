"""`self.log` and torchmetrics under a pipeline: recorded on the last stage, merged once, logged alike on every rank.

A logged number becomes its mean over the micro-batches' samples; with `reduce_fx="sum"`, "max" or "min" its sum,
maximum or minimum; another `reduce_fx` is called on the stacked values. A torchmetrics object is updated by the last
stage alone, synchronised over data-parallel ranks alone, and its value goes to the other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torchmetrics import Metric

from lightning_3d.errors import ModelError
from lightning_3d.parallel.microbatch import weighted_mean
from lightning_3d.parallel.placeholder import is_placeholder


@dataclass
class Entry:
    """One name that was logged; a plain record, for it travels between ranks."""

    name: str
    values: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    metric: str | None = None

    def merged(self, device: torch.device) -> Any:
        """One value for the batch, on the device, which is not waited for."""
        known = [(value, size) for value, size in zip(self.values, self.sizes, strict=True) if value is not None]
        if not known:
            return None
        doubles = [_double(value, device) for value, _ in known]
        reduce = self.options.get("reduce_fx", "mean")
        kinds: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
            "sum": torch.sum, sum: torch.sum, torch.sum: torch.sum,
            "max": torch.amax, max: torch.amax, torch.max: torch.amax,
            "min": torch.amin, min: torch.amin, torch.min: torch.amin,
        }  # fmt: skip
        if reduce in ("mean", "avg", torch.mean):
            result = weighted_mean([double.mean() for double in doubles], [size for _, size in known])
        else:
            result = kinds.get(reduce, reduce)(torch.stack(doubles))
        return result.to(torch.float64 if _is_double(self.values) else torch.float32)


class LogRecorder:
    """Takes the place of a module's `log` while micro-batches run.

    Args:
        module: whose `self.log` and `self.log_dict` are meant.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._names = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
        self._entries: dict[tuple[str, Any], Entry] = {}
        self._size = 0
        self.keep = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Calls inside are kept or dropped, none reaches Lightning."""
        self._entries.clear()
        self._module.__dict__["log"] = self._log
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    @contextmanager
    def microbatch(self, size: int, *, keep: bool) -> Iterator[None]:
        """Calls inside belong to a micro-batch of `size` samples; only the last stage's are kept."""
        self._size, self.keep = size, keep
        try:
            yield
        finally:
            self.keep = False

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if not self.keep:
            return
        if is_placeholder(value):
            raise ModelError(
                f"self.log({name!r}, ...) is given what was computed from an intermediate result of the model that "
                "another pipeline rank has. Log what comes from the model's output, or set pipeline_parallel_size=1."
            )
        if args:
            options = {**dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False)), **options}
        entry = self._entries.setdefault((name, options.get("on_epoch")), Entry(name, options=options))
        if isinstance(value, Metric):
            entry.metric = self._names.get(id(value), "")
            value = value._forward_cache
        weight = options.get("batch_size") or self._size
        entry.values.append(value)
        entry.sizes.append(weight)

    def take(self) -> list[tuple[str, Any, dict[str, Any], str | None]]:
        """Name, merged value, options and metric of all that was kept."""
        taken = []
        for entry in self._entries.values():
            options = dict(entry.options)
            if options.get("batch_size") is not None:
                options["batch_size"] = sum(entry.sizes)
            taken.append((entry.name, entry.merged(self._module.device), options, entry.metric))
        return taken

    def emit(self, taken: list[tuple[str, Any, dict[str, Any], str | None]]) -> None:
        """Log through Lightning what the last stage has taken; equal on all ranks of the pipeline."""
        for name, value, options, metric in taken:
            if metric is None:
                self._module.log(name, value.to(self._module.device), **options)
                continue
            part: Any = self._module.get_submodule(metric)
            part._forward_cache = None if value is None else value.to(self._module.device)
            self._module.log(name, part, **options)


def share_metrics(
    module: L.LightningModule,
    *,
    pipeline_group: dist.ProcessGroup,
    data_group: dist.ProcessGroup,
    running: Callable[[], bool],
) -> None:
    """Make every torchmetrics object of a module give the last stage's value on all ranks.

    Args:
        running: whether micro-batches run now; the last stage is then alone.
    """
    source = pipeline_group.size() - 1
    is_last = pipeline_group.rank() == source
    for part in module.modules():
        if not isinstance(part, Metric) or "_lightning_3d_shared" in part.__dict__:
            continue
        # Ranks that differ in another axis hold copies.
        part.process_group = data_group
        part.__dict__["_lightning_3d_shared"] = True
        if pipeline_group.size() == 1:
            continue

        def compute(*args: Any, original: Any = part.compute, **kwargs: Any) -> Any:
            if running():
                return original(*args, **kwargs)
            # A pickled tensor of a GPU would come back on the sender's.
            box = [move_data_to_device(original(*args, **kwargs), torch.device("cpu")) if is_last else None]
            dist.broadcast_object_list(box, group=pipeline_group, group_src=source)
            return move_data_to_device(box[0], module.device)

        part.compute = compute  # type: ignore[method-assign]


def _double(value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and (value.device == device or value.dim()):
        return value.detach().to(device, torch.float64, non_blocking=True)
    # What the host knows is filled in by the device itself.
    return torch.full((), float(value), device=device, dtype=torch.float64)


def _is_double(values: list[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in values)
