"""One pipeline stage's part of the model in plain torch, for the peers; all of it where there is one stage."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.job import Job, next_token_loss
from lightning_3d.models.gpt import GPT

# Layers of each stage: the head does about as much as two layers, and the same cut is best for all contenders.
LAYERS = {1: (8,), 2: (5, 3)}


class Part(nn.Module):
    """The layers of a stage, with the embedding on the first and the head on the last.

    Shapes:
        tokens (batch, sequence) int64 on the first stage, else hidden (batch, sequence, hidden)
        -> logits (batch, sequence, vocab) on the last stage, else hidden
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        model: GPT = job.build_model()
        counts = LAYERS[job.layout.pipeline]
        start = sum(counts[: job.stage])
        self.is_first, self.is_last = job.stage == 0, job.stage == len(counts) - 1
        self.layers = model.layers[start : start + counts[job.stage]]
        self.embed: nn.Module | None = model.embed if self.is_first else None
        self.norm: nn.Module | None = model.norm if self.is_last else None
        self.head: nn.Module | None = model.head if self.is_last else None
        self.register_buffer("cos", model.rotary_cos, persistent=False)
        self.register_buffer("sin", model.rotary_sin, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        for layer in self.layers:
            hidden = layer(hidden, self.cos, self.sin)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.before_head(self.norm(hidden)))
        return hidden

    def before_head(self, hidden: Tensor) -> Tensor:
        """Where a split head begins to differ."""
        return hidden

    def loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Mean loss of tokens (batch, sequence + 1)."""
        return next_token_loss(logits, rows)
