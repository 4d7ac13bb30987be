"""Names a rank that computes longer than those that do the same work, so that all wait for it."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d.errors import ConfigError
from lightning_3d.whereabouts import HERE

# Steps before the first that count: compiling, first allocations.
_WARM_UP = 5
# Ranks tell each other their times once in so many steps, so a slow one is named up to two after its window.
_TOLD_EVERY = 3
# Tellings from which the noise is known, and those from which a rank without a peer learns what it takes itself.
_REMEMBERED, _LEARNED = 30, 7


class SlowRanks:
    """Judges the last steps' times.

    A rank is slow if in every step of the last `window` but one it took more than `factor` times as long as the median
    of its peers, the other ranks of its stage, and longer than the noise between them explains; it has recovered when
    half of them are not. A rank alone on its stage is held against all others, each measured by what it took at first.

    Args:
        stages: of each rank; those of one stage do the same work.
        factor: at least.
        window: of how many steps. Ranks that share processors are slow for a few steps by chance, hardly for eight.
    """

    def __init__(self, stages: Sequence[int], *, factor: float, window: int) -> None:
        ranks = range(len(stages))
        self._peers = [[other for other in ranks if other != rank and stages[other] == stages[rank]] for rank in ranks]
        self._alone = [not peers for peers in self._peers]
        self._others = [[other for other in ranks if other != rank] for rank in ranks]
        self._factor = factor
        # Of each rank, in each of the last steps.
        self._ratios: deque[list[float]] = deque(maxlen=window)
        self._slow: set[int] = set()
        self._noise: deque[list[float]] = deque(maxlen=_REMEMBERED)
        self._learned: list[list[float]] = []

    def judge(self, seconds: Sequence[Sequence[float]]) -> dict[int, float]:
        """Slow ranks, and how many times as long as others they took.

        Args:
            seconds: of each step since the last call, of each rank; without what it waited for others.
        """
        self._ratios.extend(self._against_others(step) for step in seconds)
        window = len(self._ratios)
        if window < (self._ratios.maxlen or 0):
            return {}
        limit = max(self._factor, math.exp(2 * self._spread()))
        # One step may be an exception: a peer's own hiccup hides a slow rank.
        needed = max(1, window - 1)
        exceeded = [sum(ratio > limit for ratio in ratios) for ratios in zip(*self._ratios, strict=True)]
        self._slow = {
            rank for rank, count in enumerate(exceeded) if count >= (window // 2 + 1 if rank in self._slow else needed)
        }
        if not self._slow:
            self._learn(seconds)
        return {rank: statistics.median(step[rank] for step in self._ratios) for rank in self._slow}

    def _learn(self, seconds: Sequence[Sequence[float]]) -> None:
        # A rank that still learns has no ratio yet.
        known = [
            ratios
            for ratios, alone in zip(zip(*self._ratios, strict=True), self._alone, strict=True)
            if not alone or self._has_learned
        ]
        self._noise.append([deviation for ratios in known for deviation in _deviations(ratios)])
        if not self._has_learned:
            self._learned.append([statistics.median(column) for column in zip(*seconds, strict=True)])

    @property
    def _has_learned(self) -> bool:
        return len(self._learned) == _LEARNED

    def _against_others(self, step: Sequence[float]) -> list[float]:
        usual = [1.0] * len(step)
        if self._has_learned:
            usual = [max(statistics.median(column), 1e-9) for column in zip(*self._learned, strict=True)]
        found = []
        for rank, own in enumerate(step):
            if not self._alone[rank]:
                found.append(own / max(statistics.median(step[peer] for peer in self._peers[rank]), 1e-9))
            elif self._has_learned and self._others[rank]:
                change = statistics.median(step[other] / usual[other] for other in self._others[rank])
                found.append(own / usual[rank] / max(change, 1e-9))
            else:
                found.append(1.0)
        return found

    def _spread(self) -> float:
        """The standard deviation of the logarithm of a rank's ratios, as the middle half of them tells it."""
        known = [value for window in self._noise for value in window]
        # 1.4826 for a normal distribution, and what deviations from a median of eight are too small.
        return 1.4826 * 1.2 * statistics.median(known) if known else 0.0


def _deviations(ratios: Sequence[float]) -> list[float]:
    logarithms = [math.log(max(ratio, 1e-9)) for ratio in ratios]
    middle = statistics.median(logarithms)
    return [abs(value - middle) for value in logarithms]


class Stragglers(L.Callback):
    """Warns of a rank that is slow for a whole window of steps, within two more, once until it has recovered.

    What counts is the time from asking for a batch to the end of its step, without waiting for other ranks. On CUDA
    that is the host's time: a slow loader or processor is seen, a slow GPU only where the host waits for it.

    Costs one all-gather of three numbers every three batches.

    Args:
        factor: how many times as long as its peers a rank must take.
        window: for how many batches, one exception among them.

    Raises:
        ConfigError: a factor of 1 or less, a window below 1.
    """

    def __init__(self, factor: float = 1.5, window: int = 8) -> None:
        if not factor > 1:
            raise ConfigError(f"factor={factor!r} must be more than 1: 1.5 for half as long again.")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ConfigError(f"window={window!r} is not a whole number from 1 on. Set 8, say.")
        self.factor = factor
        self.window = window
        # (batch, rank, ratio) of every warning.
        self.named: list[tuple[int, int, float]] = []
        self._judge: SlowRanks | None = None
        self._stages: list[int] = []
        self._seconds: list[float] = []
        self._batches = 0
        self._slow: set[int] = set()
        self._start = self._waited = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._judge = None
        if trainer.world_size > 1 and dist.is_initialized():
            stages: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(stages, getattr(trainer.strategy, "pipeline_parallel_rank", 0))
            self._stages = stages
            self._judge = SlowRanks(stages, factor=self.factor, window=self.window)
        self._batches, self._seconds, self._slow = -_WARM_UP, [], set()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start, self._waited = time.monotonic(), HERE.waited_seconds
        if HERE.loading_since is not None:
            self._start, self._waited = HERE.loading_since, HERE.waited_before_loading

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._judge is None:
            return
        self._batches += 1
        if self._batches <= 0:
            return
        self._seconds.append(time.monotonic() - self._start - (HERE.waited_seconds - self._waited))
        if len(self._seconds) == min(_TOLD_EVERY, self.window):
            own = torch.tensor(self._seconds, device=pl_module.device, dtype=torch.float32)
            parts = [torch.empty_like(own) for _ in range(trainer.world_size)]
            dist.all_gather(parts, own)
            self._seconds = []
            self._tell(torch.stack(parts, 1).tolist(), batch=trainer.fit_loop.epoch_loop.total_batch_idx)

    def _tell(self, seconds: list[list[float]], *, batch: int) -> None:
        assert self._judge is not None
        slow = self._judge.judge(seconds)
        for rank in sorted(slow.keys() - self._slow):
            self.named.append((batch, rank, slow[rank]))
            stage = f" (stage {self._stages[rank]})" if max(self._stages) else ""
            own = statistics.median(step[rank] for step in seconds)
            rank_zero_warn(
                f"rank {rank}{stage} is slow: in the last {self.window} batches it took {slow[rank]:.1f} times "
                f"as long as its peers, {own:.3g} s; the others wait for it. Look at its machine and its data."
            )
        self._slow = set(slow)
