"""Sequence parallelism changes what a rank holds between split layers, and nothing that is computed."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from modules import VOCAB, Rows, TinyGPT
from parity import (
    largest_difference,
    replicas,
    united,
)
from pipelined_modules import HuggingFace
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.errors import LaunchError

pytestmark = pytest.mark.distributed


def fit(layout: str | None, kind: str, length: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    torch.set_default_dtype(torch.float64)
    recorder = Recorder()
    module = TinyGPT() if kind == "gpt" else HuggingFace(kind, labels=False)
    widths: list[int] = []
    trainer = trainer_for(
        layout,
        sequence_parallel=True,
        max_steps=4,
        precision="64-true",
        gradient_clip_val=0.3,
        callbacks=[recorder],
    )
    for name, part in module.named_modules():
        if name.endswith(("feed_forward_norm", "post_attention_layernorm", "ln_2")):
            part.register_forward_hook(lambda _, __, output: widths.append(output.shape[1]))
    rows = [Rows()[index][: length + 1] for index in range(40)]
    trainer.fit(module, ordered(rows, replicas=replicas(layout)))  # type: ignore[arg-type]
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "weights": whole_weights(module),
        "widths": set(widths),
    }


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("gpt", "tp2"), ("gpt", "tp4"), ("gpt", "tp2-pp2"), ("gpt", "zero3x2-tp2"), ("llama", "tp2"), ("gpt2", "tp2")],
)
def test_parts_of_the_sequence_train_as_the_whole(kind: str, layout: str) -> None:
    expected, ranks = run(None, fit, kind, 16)[0], run(layout, fit, kind, 16)
    # transformers computes norms and rotary tables in float32.
    tolerance = 1e-9 if kind == "gpt" else 1e-6
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert got["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        assert got["widths"] == {16 // Layout.parse(layout).tensor}
    if kind == "gpt":
        assert largest_difference(united(ranks), expected["weights"]) < 1e-9


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LaunchError, match="multiple of 2, or set sequence_parallel=False"):
        run("tp2", fit, "gpt", 15)


# ---------------------------------------------------------------------- blocks with other arguments


class Attention(nn.Module):
    """Of a sequence to itself or to another; norms its own input, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, 32, bias=index == 3) for index in range(4))

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.norm(hidden)
        memory = hidden if memory is None else memory
        q, k, v = (
            layer(value).unflatten(-1, (-1, 8)).transpose(1, 2)
            for layer, value in ((self.wq, hidden), (self.wk, memory), (self.wv, memory))
        )
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Conditioned(nn.Module):
    """A block that is shifted and scaled by a vector, attends to a memory or takes a skip connection."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.norm_memory = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = Attention()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)
        self.ada = nn.Linear(32, 64)
        self.skip = nn.Linear(64, 32)
        self.ada_in, self.ada_out = nn.Linear(32, 64), nn.Linear(64, 64)

    def forward(self, hidden: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        if self.kind == "checkpointed":
            return checkpoint(self.compute, hidden, other, use_reentrant=False)
        return self.compute(hidden, other)

    def compute(self, hidden: torch.Tensor, other: torch.Tensor | None) -> Any:
        if "vector" in self.kind:
            assert other is not None
            split = "split" in self.kind
            shift, scale = (self.ada_out(F.silu(self.ada_in(other))) if split else self.ada(other)).chunk(2, dim=-1)
            hidden = hidden + self.attention(self.norm(hidden) * (1 + scale[:, None]) + shift[:, None])
        elif self.kind == "skip":
            hidden = hidden if other is None else self.skip(torch.cat([hidden, other], -1))
            hidden = hidden + self.attention(hidden)
        else:
            assert other is not None
            memory = self.norm_memory(other) if self.kind == "normed memory" else other
            hidden = hidden + self.attention(self.norm(hidden), memory)
        hidden = hidden + self.fc2(F.gelu(self.fc1(self.norm(hidden))))
        return (hidden, hidden.square().mean()) if self.kind == "vector and a loss" else hidden


class Encoded(L.LightningModule):
    def __init__(self, kind: str, memory: int) -> None:
        super().__init__()
        self.kind, self.memory = kind, memory
        self.embed, self.encode = nn.Embedding(VOCAB, 32), nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Conditioned(kind) for _ in range(4))
        self.head = nn.Linear(32, VOCAB)

    def tensor_parallel_plan(self) -> dict[str, str]:
        split = {f"attention.w{name}": "colwise" for name in "qkv"}
        split |= {"attention.wo": "rowwise", "fc1": "colwise", "fc2": "rowwise"}
        if self.kind == "gathered vector":
            split["ada"] = "colwise_gather_output"
        if self.kind == "split vector":
            split |= {"ada_in": "colwise", "ada_out": "rowwise"}
        return {f"blocks.*.{name}": style for name, style in split.items()}

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden, seen = self.embed(rows[:, :-1]), []
        other = F.silu(self.encode(self.embed(rows[:, : self.memory])))
        other = other.mean(1) if "vector" in self.kind else other
        extra = torch.zeros(())
        for index, block in enumerate(self.blocks):
            if self.kind == "skip":
                hidden = block(hidden, seen[3 - index]) if index >= 2 else block(hidden)
                seen.append(hidden)
            elif self.kind == "vector and a loss":
                hidden, loss = block(hidden, other)
                extra = extra + loss
            else:
                hidden = block(hidden, other=other) if index % 2 else block(hidden, other)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), rows[:, 1:].flatten()) + extra
        # What is outside of the blocks uses it as well.
        loss = loss + 0.1 * other.square().mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def fit_encoded(layout: str | None, kind: str, memory: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), Encoded(kind, memory)
    trainer = trainer_for(layout, sequence_parallel=True, max_steps=3, precision="64-true", callbacks=[recorder])
    trainer.fit(module, ordered(Rows(24), replicas=replicas(layout)))
    return {"losses": recorder.losses, "norms": recorder.norms, "weights": whole_weights(module)}


@pytest.mark.parametrize(
    ("kind", "memory", "layout"),
    [
        ("vector", 4, "tp2"), ("vector", 4, "zero3x2-tp2"), ("gathered vector", 4, "tp2"), ("split vector", 4, "tp2"),
        ("skip", 4, "tp2"), ("skip", 4, "tp4"),
        ("memory", 6, "tp2"), ("memory", 16, "tp2"), ("memory", 8, "tp4"),
        ("normed memory", 6, "tp2"), ("normed memory", 16, "tp2"), ("checkpointed", 6, "tp2"),
    ],
)  # fmt: skip
def test_other_arguments_of_blocks_train_as_in_one_process(kind: str, memory: int, layout: str) -> None:
    expected, ranks = run(None, fit_encoded, kind, memory)[0], run(layout, fit_encoded, kind, memory)
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9


@pytest.mark.parametrize(
    ("kind", "memory", "told"),
    [
        # Of the length of a part; it is the normed sequence that could be either.
        ("memory", 8, r"Attention reads a tensor of shape \(8, 8, 32\), as long as a rank's part of the sequence"),
        ("normed memory", 8, r"\(8, 8, 32\).* as long as a rank's part of the sequence"),
        ("vector and a loss", 4, "Conditioned returns a tensor .* besides its first"),
    ],
)
def test_what_could_be_a_part_of_the_sequence_or_not_is_refused(kind: str, memory: int, told: str) -> None:
    with pytest.raises(LaunchError, match=f"(?s)ModelError: .*{told}.*sequence_parallel=False"):
        run("tp2", fit_encoded, kind, memory)
