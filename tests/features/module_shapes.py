"""Modules of all shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from features.case import Block, Net, alike, case, fit, fresh
from lightning_3d.errors import ModelError


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.shift = nn.Parameter(torch.zeros(6))

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = torch.tanh(layer(features))
        return features + self.shift


class ByMethod(Net):
    """Calls a method of a child, and uses parameters as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.mixer = nn.Parameter(torch.eye(6))

    def output(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder.encode(features) @ self.mixer
        return F.linear(hidden, self.head.weight, self.head.bias) * self.scale


class Plain(Net):
    """No repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block()])
        self.blocks[2].linear.weight = self.blocks[0].linear.weight  # type: ignore[union-attr]


class Recomputed(Net):
    def output(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = checkpoint(block, features, use_reentrant=False)  # type: ignore[assignment]
        return self.head(features) * self.scale


@case
def a_child_s_method_and_a_raw_parameter(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(ByMethod))[1]


class Reaching(Net):
    """Reaches into a block for a weight of it."""

    def output(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(features @ self.blocks[0].linear.weight) * self.scale  # type: ignore[operator, union-attr]


@alike
def a_weight_taken_out_of_a_block_is_refused_where_it_is_sharded(layout: str | None, folder: Path) -> Any:
    if layout == "dp2":
        return fit(layout, fresh(Reaching))[1]
    with pytest.raises(ModelError, match="used outside of that block's forward.*zero_stage=0"):
        fit(layout, fresh(Reaching))
    return None


@case
def no_repeated_blocks(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(Plain), gradient_clip_val=0.1)[1]


@case
def a_weight_shared_by_two_blocks(layout: str | None, folder: Path) -> Any:
    module = fresh(Shared)
    got = fit(layout, module, gradient_clip_val=0.1)[1]
    assert torch.equal(got["weights"]["blocks.0.linear.weight"], got["weights"]["blocks.2.linear.weight"])
    return got


@case
def recomputed_activations(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(Recomputed))[1]


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def output(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(super().output(features))


@alike
def batch_norm(layout: str | None, folder: Path) -> Any:
    module = fresh(Normed)
    trainer, got = fit(layout, module)
    assert got["losses"][-1] < got["losses"][0] and int(module.norm.num_batches_tracked) == trainer.global_step
    return got["losses"], {name: value for name, value in got["weights"].items() if "running" not in name}
