"""Initial weights: those of strategy="auto" for models built in `__init__`, else equal for every layout."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows, TinyGPT
from torch import nn
from training import ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.errors import ModelError
from lightning_3d.parallel.init import (
    Recording,
    check_initialized,
    materialize_,
    meta_tensors,
    record_initialization,
)


def build(constructor: Any, *, seed: int = 7) -> nn.Module:
    recording = Recording(seed)
    with record_initialization(recording):
        module = constructor()
    assert all(p.is_meta for p in module.parameters())
    sources = meta_tensors(module)
    check_initialized(sources, recording)
    materialize_(module, sources=sources, recording=recording, device=torch.device("cpu"))
    return module


class Odd(nn.Module):
    """Ways of giving parameters and buffers their values that no rule by class or name would find."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4)
        nn.init.constant_(self.projection.weight[1], 3.0)
        self.learned = nn.Parameter(torch.tensor([0.5, 1.5]))
        self.bare = nn.Parameter(torch.randn(3))
        self.twice = nn.Parameter(self.bare.detach() * 2)
        self.embedding = nn.Embedding(5, 4, padding_idx=2)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.embedding.weight
        self.register_buffer("table", torch.outer(torch.arange(3.0), torch.ones(2)).cos(), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


def test_replayed_values_are_what_the_constructor_wrote() -> None:
    odd = build(Odd)
    assert torch.equal(odd.projection.weight[1], torch.full((4,), 3.0))
    assert odd.projection.weight[0].abs().max() <= 0.5 and odd.projection.weight[0].std() > 0
    assert odd.learned.tolist() == [0.5, 1.5]
    assert torch.equal(odd.twice, odd.bare * 2)
    assert odd.embedding.weight[2].tolist() == [0.0] * 4 and odd.embedding.weight[1].abs().min() > 0
    assert odd.tied.weight is odd.embedding.weight
    assert torch.equal(odd.table, torch.outer(torch.arange(3.0), torch.ones(2)).cos())
    assert odd.count.dtype == torch.long and int(odd.count) == 0
    first, second = odd.encoder.layers
    assert torch.equal(first.linear1.weight, second.linear1.weight), "nn.TransformerEncoder copies one layer"
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in odd.parameters())


def test_replayed_values_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = build(Odd).state_dict()
    torch.manual_seed(2)
    same, other = build(Odd).state_dict(), build(Odd, seed=8).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["bare"], other["bare"])


def test_random_numbers_of_the_job_are_not_used_up() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build(Odd)
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_without_an_initial_value_are_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Linear(2, 2)
            self.hole = nn.Parameter(torch.empty(3))

    with pytest.raises(ModelError, match=r"no initial value for hole: .*torch\.zeros"):
        build(Bare)


def test_asking_for_a_value_while_building_is_refused_with_the_way_out() -> None:
    with pytest.raises(ModelError, match="device='cpu'"):
        build(lambda: nn.Dropout(torch.linspace(0, 1, 3)[1].item()))


def initial(layout: str | None, lazy: bool) -> dict[str, torch.Tensor]:
    L.seed_everything(1, verbose=False)
    module = TinyGPT(lazy=lazy)
    trainer = trainer_for(layout, max_steps=0)
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data if layout else 1))
    assert lazy or (layout is None) or module.model is not None
    return whole_weights(module)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["single", "dp2", "zero1x2", "zero3x2", "hsdp2x2"])
def test_a_model_built_in_init_starts_as_under_auto(layout: str) -> None:
    expected = run(None, initial, False)[0]
    for got in run(layout, initial, False):
        assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["dp2", "zero2x2", "zero3x4", "hsdp2x2"])
def test_a_model_built_in_configure_model_starts_alike_in_every_layout(layout: str) -> None:
    expected = run("single", initial, True)[0]
    assert expected["model.layers.0.attention.wq.weight"].std() > 0
    for got in run(layout, initial, True):
        assert all(torch.equal(got[name], expected[name]) for name in expected)
