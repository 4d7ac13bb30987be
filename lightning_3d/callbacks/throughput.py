"""Logs how much data all ranks together work through in a second."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from torch import Tensor

from lightning_3d.whereabouts import HERE

_TOKEN_FIELDS = ("tokens", "input_ids")


class Throughput(L.Callback):
    """Logs `tokens_per_second` where batches hold token ids, else `samples_per_second`, over all data-parallel ranks.

    It is logged every `log_every_n_steps` optimizer steps of the Trainer, as the mean since the last time. A batch's
    time is from asking for it to the end of its step (under other strategies than ours, from having it). Validation and
    writing checkpoints do not count.
    """

    def __init__(self) -> None:
        self._name = ""
        self._amount = 0
        self._seconds = 0.0
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start = time.monotonic() if HERE.loading_since is None else HERE.loading_since
        # Counted before the step, which may take things out of its batch.
        self._name, amount = count_batch(batch)
        self._amount += amount

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seconds += time.monotonic() - self._start
        # The Trainer's own question, so that a value is there exactly when loggers are handed one.
        if not trainer._logger_connector.should_update_logs or trainer.fit_loop._should_accumulate():
            return
        if self._seconds > 0 and self._amount:
            ranks = _data_parallel_size(trainer)
            pl_module.log(f"{self._name}_per_second", ranks * self._amount / self._seconds, batch_size=1)
        self._amount, self._seconds = 0, 0.0


def count_batch(batch: Any) -> tuple[str, int]:
    """What a batch counts in, and how many: ``("tokens", n)`` or ``("samples", n)``.

    >>> import torch
    >>> count_batch({"tokens": torch.zeros(4, 8, dtype=torch.int64)})
    ('tokens', 32)
    >>> count_batch((torch.zeros(4, 8), torch.zeros(4)))
    ('samples', 4)
    """
    if isinstance(batch, Mapping):
        for field in _TOKEN_FIELDS:
            value = batch.get(field)
            if isinstance(value, Tensor) and not value.is_floating_point():
                return "tokens", value.numel()
    tensor = _first_tensor(batch)
    return "samples", 0 if tensor is None or tensor.ndim == 0 else tensor.shape[0]


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return next((tensor for item in batch if (tensor := _first_tensor(item)) is not None), None)
    return None


def _data_parallel_size(trainer: L.Trainer) -> int:
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return trainer.world_size if sampler is None else int(sampler["num_replicas"])
