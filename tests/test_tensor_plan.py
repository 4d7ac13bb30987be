"""Which modules tensor parallelism splits, and what it says where it cannot."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from modules import VOCAB, TinyGPT
from parity import (
    assert_encoder_equal,
    fit_encoder,
    fit_gpt,
    replicas,
)
from pipelined_modules import HF_CONFIGS, MLP, Encoder, HuggingFace, Sentences
from torch import nn
from torch.distributed.tensor import DTensor
from training import ordered, run, trainer_for

from lightning_3d.errors import LaunchError, ModelError
from lightning_3d.models.gpt import GPT, GPTConfig
from lightning_3d.parallel.tensor_plan import resolve_plan, without_cut_pairs

# ---------------------------------------------------------------------- finding a plan


def test_plan_of_a_module_inside_another_has_full_names() -> None:
    plan = resolve_plan(TinyGPT())
    assert plan["model.embed"] == "vocabulary"
    assert plan["model.layers.2.attention.wo"] == "rowwise"
    assert len(plan) == 2 + 3 * 7


def test_hugging_face_plan_is_completed_by_the_embedding() -> None:
    plan = resolve_plan(HuggingFace("llama", labels=False))
    assert plan["model.model.embed_tokens"] == "vocabulary"
    assert plan["model.lm_head"] == "colwise_gather_output"
    assert plan["model.model.layers.3.mlp.down_proj"] == "rowwise"


def test_gpt2_has_a_plan_of_ours() -> None:
    plan = resolve_plan(HuggingFace("gpt2", labels=False))
    assert plan["model.transformer.h.0.attn.c_attn"] == "packed_qkv"
    assert plan["model.lm_head"] == "colwise_gather_output"


def test_linears_of_a_sequential_are_paired_where_nothing_between_mixes_features() -> None:
    assert resolve_plan(MLP()) == {"net.0": "colwise", "net.2": "rowwise"}
    mixing = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert resolve_plan(mixing) == {"2": "colwise", "4": "rowwise"}


def test_pairs_that_a_pipeline_cuts_are_left_whole() -> None:
    plan = {"net.0": "colwise", "net.2": "rowwise", "net.3": "colwise", "net.5": "rowwise", "head": "colwise"}
    stages = {"net.0": 0, "net.1": 0, "net.2": 1, "net.3": 1, "net.4": 1, "net.5": 1}
    assert without_cut_pairs(plan, stages=stages) == {"net.3": "colwise", "net.5": "rowwise", "head": "colwise"}
    # Summed over ranks that each compute it whole, a gradient would count twice.
    between = {"net.1.scale": "replicate", "net.4": "replicate"}
    kept = without_cut_pairs({**plan, **between}, stages=stages)
    assert kept == {"net.3": "colwise", "net.4": "replicate", "net.5": "rowwise", "head": "colwise"}


class Planned(nn.Module):
    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.plan = plan

    def tensor_parallel_plan(self) -> dict[str, str]:
        return self.plan


def test_plan_of_ones_own_comes_before_all_others() -> None:
    outer = nn.Sequential(Planned({"first": "colwise", "second": "rowwise"}), nn.Linear(4, 4))
    assert resolve_plan(outer) == {"0.first": "colwise", "0.second": "rowwise"}


def test_entry_that_matches_nothing_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"(?s)entry 'frist' matches no module.*def tensor_parallel_plan"):
        resolve_plan(Planned({"frist": "colwise", "second": "rowwise"}))
    with pytest.raises(ModelError, match="'0.sec' matches no module"):
        # Not a prefix.
        resolve_plan(nn.Sequential(Planned({"sec": "colwise"})))


def test_module_that_nobody_knows_is_told_how_to_write_a_plan() -> None:
    with pytest.raises(ModelError) as error:
        resolve_plan(Encoder())
    for part in ("Encoder does not say", "embedding", "blocks.0.mlp.0", "def tensor_parallel_plan", '"rowwise"'):
        assert part in str(error.value)


# ---------------------------------------------------------------------- errors on ranks


class Tiny(L.LightningModule):
    """A plan that is given, over modules that are given."""

    def __init__(self, plan: dict[str, str], **modules: nn.Module) -> None:
        super().__init__()
        self.plan = plan
        for name, module in modules.items():
            self.add_module(name, module)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return self.plan

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        raise AssertionError("no step should run")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build_unfit(kind: str) -> L.LightningModule:
    if kind == "unknown style":
        return Tiny({"net": "columns"}, net=nn.Linear(4, 4))
    if kind == "style of another module":
        return Tiny({"net": "vocabulary"}, net=nn.Linear(4, 4))
    if kind == "outputs":
        return Tiny({"net": "colwise"}, net=nn.Linear(4, 6))
    if kind == "inputs":
        return Tiny({"net": "rowwise"}, net=nn.Linear(6, 4))
    if kind == "hugging face heads":
        HF_CONFIGS["llama"].update(num_attention_heads=6, num_key_value_heads=6, hidden_size=48)
        return HuggingFace("llama", labels=False)
    if kind == "tied to a module without an entry":
        tied = Tiny({"embed": "vocabulary"}, embed=nn.Embedding(8, 4), head=nn.Linear(4, 8, bias=False))
        tied.head.weight = tied.embed.weight
        return tied
    if kind == "tied to a module that is split otherwise":
        tied = Tiny({"embed": "vocabulary", "head": "rowwise"}, embed=nn.Embedding(8, 4), head=nn.Linear(4, 8))
        tied.head.weight = tied.embed.weight
        return tied
    if kind == "gradients by frequency":
        return Tiny({"embed": "vocabulary"}, embed=nn.Embedding(8, 4, scale_grad_by_freq=True))
    heads = {"heads": (6, 6), "heads of keys": (12, 3)}[kind]
    module = TinyGPT()
    module.model = GPT(
        GPTConfig(vocab_size=VOCAB, hidden_size=48, num_layers=2, num_heads=heads[0], num_kv_heads=heads[1])
    )
    return module


def fit_unfit(layout: str, kind: str) -> None:
    trainer_for(layout, max_steps=1).fit(build_unfit(kind), ordered(Sentences(8), replicas=1))


UNFIT = {
    "unknown style": "net: the tensor-parallel style 'columns' is unknown. Known: colwise, .*vocabulary",
    "style of another module": "net is a Linear; the style 'vocabulary' splits an nn.Embedding",
    "outputs": "net has 6 outputs, which do not divide by tensor_parallel_size=4. .* one of 1, 2, 3, 6",
    "inputs": "net has 6 inputs, which do not divide by tensor_parallel_size=4. .* one of 1, 2, 3, 6",
    "heads": r"layers.0.attention.wq has 6 heads, which do not divide by tensor_parallel_size=4. .* one of 1, 2, 3, 6",
    "heads of keys": r"layers.0.attention.wk has 3 heads, which can neither be split over nor copied to 4 ranks",
    "hugging face heads": r"self_attn.q_proj has 6 heads, which do not divide .* one of 1, 2, 3, 6",
    "gradients by frequency": "embed has scale_grad_by_freq=True, which a split embedding does not do",
    "tied to a module without an entry": "head shares a parameter with a module that the plan splits.*entry",
    "tied to a module that is split otherwise": "head.weight is split along dimension 0 .* 1",
}


@pytest.mark.distributed
@pytest.mark.parametrize("kind", UNFIT)
def test_model_that_does_not_fit_is_refused_on_all_ranks(kind: str) -> None:
    with pytest.raises(LaunchError, match=f"(?s)ModelError: .*{UNFIT[kind]}"):
        run("tp4", fit_unfit, kind, timeout_seconds=40)


@pytest.mark.distributed
def test_encoder_without_a_plan_is_refused_on_ranks_too() -> None:
    with pytest.raises(LaunchError, match=r"(?s)ModelError: Encoder does not say .*def tensor_parallel_plan"):
        run("tp2", fit_encoder, 2, timeout_seconds=40)


# ---------------------------------------------------------------------- a plan of one's own


class OwnAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            projection(hidden).view(batch, length, -1, 4).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=~mask[:, None, None, :])
        output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class OwnBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = OwnAttention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm1(hidden), mask)
        return hidden + self.mlp(self.norm2(hidden))


class PlannedEncoder(Encoder):
    """The encoder that nobody tuned, once its plan is written: torch's own attention stays whole."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"embedding": "vocabulary", "blocks.*.mlp.0": "colwise", "blocks.*.mlp.3": "rowwise"}


class SplitEncoder(Encoder):
    """The same with an attention that can be split."""

    def configure_model(self) -> None:
        if not self.built:
            super().configure_model()
            self.blocks = nn.ModuleList(OwnBlock(16) for _ in range(4))

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {
            "embedding": "vocabulary",
            "blocks.*.attention.query": "colwise",
            "blocks.*.attention.key": "colwise",
            "blocks.*.attention.value": "colwise",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.0": "colwise",
            "blocks.*.mlp.2": "rowwise",
        }


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (PlannedEncoder, "tp2"),
        pytest.param(PlannedEncoder, "zero3x2-tp2-pp2", marks=pytest.mark.slow),
        *((SplitEncoder, layout) for layout in ("tp2", "tp4", "tp2-pp2")),
    ],
)
def test_encoder_trains_as_in_one_process_once_its_plan_is_written(kind: type[Encoder], layout: str) -> None:
    expected, ranks = run(None, fit_encoder, 2, kind)[0], run(layout, fit_encoder, 2, kind)
    assert_encoder_equal(ranks, expected)
    first = "mlp.0" if kind is PlannedEncoder else "attention.query"
    assert all(any(name.endswith(f"{first}.weight") for name in got["split"]) for got in ranks)


# ---------------------------------------------------------------------- what is a DTensor


def split_axes(layout: str) -> set[str]:
    module = TinyGPT()
    axes: set[str] = set()

    class Look(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            for parameter in module.parameters():
                if isinstance(parameter, DTensor):
                    axes.update(parameter.device_mesh.mesh_dim_names or ("unnamed",))

    trainer_for(layout, max_steps=1, callbacks=[Look()]).fit(
        module,
        ordered(torch.zeros(8, 17, dtype=torch.int64), replicas=replicas(layout)),  # type: ignore[arg-type]
    )
    return axes


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "axes"),
    [("single", set()), ("dp2", set()), ("pp2", set()), ("zero3x2", {"dp_shard"}), ("tp2", {"tp"}),
     ("zero3x2-tp2", {"dp_shard", "tp"})],
)  # fmt: skip
def test_parameters_are_dtensors_on_the_axes_that_split_them_alone(layout: str, axes: set[str]) -> None:
    assert all(found == axes for found in run(layout, split_axes))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_model_built_in_configure_model_starts_and_trains_alike(layout: str) -> None:
    expected = run("single", fit_gpt, 1, {}, True)[0]
    for got in run(layout, fit_gpt, 1, {}, True):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert got["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-9)
