"""What all contenders are given: the model's sizes, the weights, the batches, the optimizer's settings and a clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.layout import Layout
from lightning_3d.models.gpt import GPT, GPTConfig

SEQUENCE = 128
VOCABULARY = 8192

# 12.6 million parameters.
MODEL = GPTConfig(
    vocab_size=VOCABULARY, hidden_size=256, num_layers=8, num_heads=8, ffn_size=1024, max_sequence_length=SEQUENCE
)
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


@dataclass(frozen=True)
class Job:
    """One training of one contender.

    Attributes:
        layout: resolved.
        batch: samples in a step, over all ranks.
    """

    layout: Layout
    steps: int
    batch: int
    rank: int

    @property
    def data_parallel_rank(self) -> int:
        """Tensor parallelism is the innermost axis, the pipeline the outermost."""
        return self.rank // self.layout.tensor % self.layout.data

    @property
    def tensor_parallel_rank(self) -> int:
        return self.rank % self.layout.tensor

    @property
    def stage(self) -> int:
        """Of the pipeline."""
        return self.rank // (self.layout.tensor * self.layout.data)

    @property
    def local_batch(self) -> int:
        return self.batch // self.layout.data

    @property
    def microbatches(self) -> int:
        """Of a step under a pipeline: two for each stage."""
        return 2 * self.layout.pipeline

    def build_model(self) -> GPT:
        """The same weights on every rank of every contender."""
        torch.manual_seed(1234)
        return GPT(MODEL)

    def rows(self) -> Tensor:
        """Tokens (steps * batch, SEQUENCE + 1) in the order of training: a walk that can be learnt, with noise."""
        generator = torch.Generator().manual_seed(99)
        count = self.steps * self.batch
        rows = torch.randint(VOCABULARY, (count, SEQUENCE + 1), generator=generator)
        noisy = torch.rand(count, SEQUENCE, generator=generator) < 0.1
        for position in range(SEQUENCE):
            walked = (rows[:, position] * 3 + 7) % 64
            rows[:, position + 1] = torch.where(noisy[:, position], rows[:, position + 1], walked)
        return rows

    def local_batches(self) -> list[Tensor]:
        """This rank's part of each step's batch, (local_batch, SEQUENCE + 1)."""
        parts = self.rows().view(self.steps, self.layout.data, self.local_batch, SEQUENCE + 1)
        return list(parts[:, self.data_parallel_rank])


def next_token_loss(logits: Tensor, rows: Tensor) -> Tensor:
    """Mean cross-entropy of (batch, sequence, vocabulary) against (batch, sequence + 1) tokens."""
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@dataclass
class Clock:
    """Seconds of each step; `tick` after a step, then `note`, whose own time does not count.

    Attributes:
        wall_seconds, cpu_seconds: of each step on this rank; the CPU's are those of all threads.
        losses: of this rank's samples; None where a rank does not see the loss.
    """

    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    _wall: float = 0.0
    _cpu: float = 0.0

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def tick(self) -> None:
        self.wall_seconds.append(time.perf_counter() - self._wall)
        self.cpu_seconds.append(time.process_time() - self._cpu)
        self.start()

    def note(self, loss: Tensor | None) -> None:
        self.losses.append(None if loss is None else float(loss))
        self.start()
