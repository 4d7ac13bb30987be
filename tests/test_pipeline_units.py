"""The parts of a pipeline, and what it refuses: on all ranks, within seconds, by name."""

from __future__ import annotations

import itertools
import time
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from modules import GAN, Points, TinyGPT
from parity import (
    largest_difference,
    replicas,
    united,
)
from pipelined_modules import MLP, Encoder, HuggingFace
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d.errors import DataError, LaunchError, ModelError
from lightning_3d.parallel.microbatch import batch_size, merge_outputs, part_sizes, split_batch
from lightning_3d.parallel.trunk import cost, cut, find_trunk

# ---------------------------------------------------------------------- the trunk


@pytest.mark.parametrize(
    ("module", "container", "blocks", "before", "after", "everywhere"),
    [
        (TinyGPT(), "model.layers", 3, ("model.embed",), ("model.norm", "model.head"), ("temperature",)),
        (Encoder(), "blocks", 4, ("embedding",), ("norm", "head"), ("position", "temperature")),
        (MLP(), "net", 6, (), (), ()),
        (
            HuggingFace("llama", labels=False), "model.model.layers", 4, ("model.model.embed_tokens",),
            ("model.lm_head", "model.model.norm"), (),
        ),
        (
            HuggingFace("gpt2", labels=False), "model.transformer.h", 4,
            ("model.transformer.wte", "model.transformer.wpe"), ("model.lm_head", "model.transformer.ln_f"), (),
        ),
    ],
    ids=["gpt", "encoder", "sequential", "llama", "gpt2"],
)  # fmt: skip
def test_trunk_is_found(
    module: nn.Module, container: str, blocks: int, before: tuple, after: tuple, everywhere: tuple
) -> None:
    trunk = find_trunk(module)
    assert trunk.container == container
    assert trunk.blocks == tuple(map(str, range(blocks)))
    assert (trunk.before, trunk.after, trunk.everywhere) == (before, after, everywhere)


def test_trunk_that_a_module_names_comes_first() -> None:
    class Named(TinyGPT):
        def pipeline_blocks(self) -> nn.Module:
            return self.small

    module = Named()
    module.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert find_trunk(module).container == "small"
    Named.pipeline_blocks = lambda self: nn.ModuleList()  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"Named.pipeline_blocks\(\) returned no submodule"):
        find_trunk(module)


def test_module_without_a_trunk_is_told_what_to_define() -> None:
    with pytest.raises(ModelError, match=r"Bilinear has no list of blocks .*Define `pipeline_blocks\(self\)`"):
        find_trunk(nn.Bilinear(2, 2, 2))


def all_cuts(count: int, parts: int) -> list[list[range]]:
    found = []
    for inner in itertools.combinations(range(1, count), parts - 1):
        edges = [0, *inner, count]
        found.append([range(a, b) for a, b in itertools.pairwise(edges)])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_cut_has_each_block_once_and_the_cheapest_most_expensive_stage(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 9, (), generator=generator))
    costs = torch.randint(1, 20, (count,), generator=generator).double().tolist()
    first, last = torch.randint(0, 30, (2,), generator=generator).double().tolist()

    def worst(ranges: list[range]) -> float:
        sums = [sum(costs[i] for i in r) for r in ranges]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    for parts in range(1, count + 1):
        ranges = cut(costs, parts=parts, first=first, last=last)
        assert [i for r in ranges for i in r] == list(range(count))
        assert len(ranges) == parts and all(len(r) for r in ranges)
        assert worst(ranges) == min(map(worst, all_cuts(count, parts)))


def test_lookup_costs_a_tenth_of_a_product_of_its_size() -> None:
    assert cost(nn.Embedding(100, 10)) == pytest.approx(101)
    assert cost(nn.Linear(100, 10, bias=False)) == pytest.approx(1001)
    assert cost(nn.ReLU()) == 1


# ---------------------------------------------------------------------- micro-batches


def test_micro_batches_differ_by_one_sample_at_most_and_come_in_containers_of_their_own() -> None:
    tokens = torch.arange(26).view(13, 2)
    batch = {"tokens": tokens, "scale": torch.tensor(2.0), "names": ["a", None], "pair": (tokens[:, 0], 7)}
    parts = split_batch(batch, 3)
    assert [batch_size(part) for part in parts] == [5, 4, 4]
    assert torch.equal(torch.cat([part["tokens"] for part in parts]), tokens)
    for part in parts:
        assert part["scale"] == 2.0 and part["names"] == ["a", None] and part["pair"][1] == 7
    parts[0]["names"].append("more")
    parts[0].pop("tokens")
    assert len(batch["names"]) == 2 and "tokens" in batch and "tokens" in parts[1]


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 samples cannot make 4 micro-batches. Set num_microbatches to at most 3"):
        split_batch([torch.zeros(3)], 4)
    with pytest.raises(DataError, match="no such tensor"):
        split_batch(["text", torch.tensor(1.0)], 2)
    with pytest.raises(DataError, match=r"batch\['table'\] has shape \(5,\), but the batch has 4 samples"):
        split_batch({"a": torch.zeros(4, 2), "b": torch.zeros(4), "table": torch.zeros(5)}, 2)


def test_lists_with_a_tensor_or_nest_for_each_sample_are_cut_as_lists() -> None:
    images = [torch.full((3, 8, width), float(width)) for width in range(4, 9)]
    targets = [{"boxes": torch.zeros(count, 4), "labels": torch.zeros(count)} for count in (5, 1, 0, 2, 5)]
    for batch in ([images, targets], [images, torch.zeros(5)], {"targets": targets}):
        assert batch_size(batch) == 5 and part_sizes(5, 2) == [3, 2]
    first, second = split_batch([images, targets], 2)
    assert [image.shape[-1] for image in first[0] + second[0]] == [4, 5, 6, 7, 8]
    assert [len(target["boxes"]) for target in first[1] + second[1]] == [5, 1, 0, 2, 5]
    # Fields of a batch that happen to be as many as its samples.
    fields = [torch.zeros(2, 3), torch.ones(2, 3)]
    assert [len(field) for part in split_batch(fields, 2) for field in part] == [1, 1, 1, 1]
    with pytest.raises(DataError, match=r"batch\[1\] has shape \(5,\), but the batch has 2 samples"):
        split_batch([torch.zeros(2, 3), torch.zeros(5)], 2)


def test_outputs_become_those_of_the_whole_batch() -> None:
    outputs = [
        {"rows": torch.ones(2, 3), "mean": torch.tensor(1.0), "kind": "x", "count": 2},
        {"rows": torch.zeros(1, 3), "mean": torch.tensor(4.0), "kind": "x", "count": 1},
    ]
    merged = merge_outputs(outputs, sizes=[2, 1])
    assert merged["rows"].shape == (3, 3)
    assert float(merged["mean"]) == 2.0
    assert merged["kind"] == "x" and merged["count"] == [2, 1]
    assert merge_outputs([None, None], sizes=[1, 1]) is None
    found = [[torch.zeros(3, 4), torch.zeros(1, 4)], [torch.zeros(0, 4)]]
    assert [len(boxes) for boxes in merge_outputs(found, sizes=[2, 1])] == [3, 1, 0]


# ---------------------------------------------------------------------- steps that a pipeline runs, and refuses


class Block(nn.Module):
    def __init__(self, width: int, dropout: float, checkpointed: bool | None) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout), nn.Tanh(), nn.Linear(width, width))
        self.checkpointed = checkpointed

    def forward(self, hidden: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        if self.checkpointed is None:
            return hidden + self.mlp(hidden)
        return hidden + checkpoint(self.mlp, hidden, use_reentrant=self.checkpointed)


class CheckpointedBlock(Block):
    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=bool(self.checkpointed))

    def forward(self, hidden: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        return hidden + self.mlp(hidden)


class Chain(L.LightningModule):
    """Residual blocks with parameters of the module itself before, after and on both sides of them."""

    def __init__(self, kind: str = "", *, blocks: int = 4, dropout: float = 0.0, checkpointed: Any = None) -> None:
        super().__init__()
        self.kind, width = kind, 8
        if kind == "manual optimization":
            self.automatic_optimization = False
        self.early = nn.Linear(width, width)
        self.embed = nn.Linear(6, width)
        block = CheckpointedBlock if kind == "whole block checkpointed" else Block
        self.blocks = nn.ModuleList(block(width, dropout, checkpointed) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)
        self.position = nn.Parameter(torch.linspace(-1, 1, width))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.both = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        kind = self.kind
        hidden = self.embed(features) * self.both + self.position
        first = hidden
        if kind == "a later part before":
            hidden = self.norm(hidden)
        if kind == "a value is read" and hidden.max() > 100:
            hidden = hidden * 2
        extra = hidden.mean() if kind == "a second argument" else None
        blocks = list(self.blocks)
        if kind == "blocks out of order":
            blocks = [blocks[1], blocks[0], *blocks[2:]]
        if kind == "a block left out":
            del blocks[1]
        for block in blocks:
            hidden = block(hidden, extra)
            if kind == "a long skip":
                hidden = hidden + first
        if kind == "an early part after":
            hidden = self.early(hidden)
        if kind == "a part of a block":
            hidden = self.blocks[0].mlp(hidden)
        if kind == "a weight of a block":
            hidden = hidden + self.blocks[0].mlp[0].weight.sum()
        if kind == "a weight elsewhere":
            hidden = hidden + self.embed.weight.norm()
        if kind == "an intermediate result logged":
            self.log("first", first.mean())
        if kind == "an intermediate result in the loss":
            hidden = hidden + first
        return self.head(self.norm(hidden) * self.both) / self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.kind == "the model not called":
            return self.temperature * 2
        logits = self(batch[0])
        if self.kind == "a second call":
            logits = logits + self(batch[0] * 2)
        loss = F.cross_entropy(logits, batch[1])
        if self.kind != "an intermediate result in the loss":
            self.log("train_loss", loss, sync_dist=True)
        return {"no loss": loss} if self.kind == "no loss" else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_chain(layout: str | None, settings: dict[str, Any], *args: Any, **options: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    settings = dict(settings)
    global_batch = settings.pop("global_batch", 8)
    recorder, module = Recorder(), Chain(*args, **options)
    trainer = trainer_for(layout, **{"max_epochs": 1, "precision": "64-true", "callbacks": [recorder], **settings})
    trainer.fit(module, ordered(Points(29), replicas=replicas(layout), global_batch=global_batch))
    return {"losses": recorder.losses, "norms": recorder.norms, "weights": whole_weights(module)}


def fit_kind(layout: str | None, kind: str, blocks: int, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    return fit_chain(layout, settings, kind, blocks=blocks, **options)


REFUSED = {
    "a second argument": "argument 1 of blocks.2 was computed by a part of the model that another pipeline rank has",
    "a second call": "embed is called a second time in one step",
    "blocks out of order": "blocks.1 is called before blocks.0",
    "a block left out": "blocks.2 is called before blocks.1",
    "an early part after": "early is registered before the blocks, .* but the step uses it after them",
    "a later part before": "norm is registered after the blocks, .* but the step uses it before them",
    "a weight elsewhere": "embed.weight is read where another pipeline rank has embed",
    "a weight of a block": "blocks.0.mlp.0.weight is read where another pipeline rank has blocks.0.mlp.0",
    "a part of a block": "blocks.0.mlp, a part of a block, is called by itself",
    "a value is read": "reads the value of a tensor",
    "a long skip": "blocks.3 is given a value that is known on another pipeline rank only",
    "an intermediate result in the loss": "training_step returned what was computed from an intermediate result",
    "an intermediate result logged": r"self.log\('first', ...\) is given what was computed from an intermediate",
    "the model not called": "the step returned before blocks.[02] was called",
    "no loss": "training_step must return a scalar loss",
    "manual optimization": "Chain sets automatic_optimization=False, but a pipeline runs the backward itself",
}


@pytest.mark.distributed
@pytest.mark.parametrize("kind", REFUSED)
def test_step_that_a_pipeline_cannot_run_is_refused_by_name_within_seconds(kind: str) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match=f"(?s)(ModelError|ConfigError): .*{REFUSED[kind]}"):
        run("pp2", fit_kind, kind, 4, {}, timeout_seconds=50)
    assert time.monotonic() - began < 30


@pytest.mark.distributed
def test_reentrant_checkpoint_of_a_block_is_refused() -> None:
    with pytest.raises(LaunchError, match="(?s)ModelError: .*use_reentrant=False"):
        run("pp2", fit_recomputed, "whole block checkpointed", True, timeout_seconds=50)


def fit_recomputed(layout: str, kind: str, checkpointed: bool | None) -> dict[str, Any]:
    return fit_chain(layout, {}, kind, dropout=0.5, checkpointed=checkpointed)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["pp2", "pp2@interleaved1f1b"])
def test_recomputation_has_the_gradients_of_the_first_run_with_dropout(layout: str) -> None:
    expected = run(layout, fit_recomputed, "", None)
    for kind, reentrant in (("", False), ("", True), ("whole block checkpointed", False)):
        ranks = run(layout, fit_recomputed, kind, reentrant)
        assert ranks[0]["losses"] == expected[0]["losses"]
        assert largest_difference(united(ranks), united(expected)) == 0


_BY_ONE: dict[Any, dict[str, Any]] = {}


def by_one(blocks: int, settings: dict[str, Any]) -> dict[str, Any]:
    key = blocks, str(settings)
    if key not in _BY_ONE:
        _BY_ONE[key] = run(None, fit_kind, "", blocks, settings)[0]
    return _BY_ONE[key]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "blocks", "batch", "microbatches"),
    [
        ("pp4", 7, 8, None),
        ("pp2", 4, 8, 16),
        ("pp2", 4, 16, 3),  # batches of 16 and 13
        ("pp2@gpipe", 4, 16, 3),
        ("pp2", 4, 8, 1),
        ("single", 4, 16, 3),
        ("pp2", 4, 28, None),  # a last batch of one sample
        ("pp4", 4, 28, None),
        ("pp2@interleaved1f1b", 5, 28, None),
        ("pp2@interleaved1f1b", 4, 7, 3),
    ],
)
def test_uneven_blocks_and_micro_batches_train_as_in_one_process(
    layout: str, blocks: int, batch: int, microbatches: int | None
) -> None:
    settings = {"global_batch": batch, "gradient_clip_val": 0.3}
    expected = by_one(blocks, settings)
    ranks = run(layout, fit_kind, "", blocks, {**settings, "num_microbatches": microbatches})
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        # What belongs to no stage is on all, and equal.
        assert {"position", "temperature", "both", "idle"} <= got["weights"].keys()
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["zero3x2-pp2", "dp2-pp2"])
def test_parameters_of_the_module_itself_train_under_zero_too(layout: str) -> None:
    settings = {"global_batch": 8, "max_steps": 3, "gradient_clip_val": 0.3}
    expected, ranks = by_one(4, settings), run(layout, fit_kind, "", 4, settings)
    for got in ranks:
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9
    moved = [expected["weights"][name] for name in ("position", "both", "temperature")]
    start = [Chain().double().state_dict()[name] for name in ("position", "both", "temperature")]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(moved, start, strict=True))


class Sharing(Chain):
    """Blocks that share a weight."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.blocks[second].mlp[0].weight = self.blocks[first].mlp[0].weight


def fit_sharing(layout: str | None, first: int, second: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), Sharing(first, second)
    trainer = trainer_for(layout, max_steps=3, precision="64-true", callbacks=[recorder])
    trainer.fit(module, ordered(Points(24), replicas=1))
    return {"losses": recorder.losses, "norms": recorder.norms, "weights": whole_weights(module)}


@pytest.mark.distributed
def test_blocks_may_share_a_weight_on_one_stage_alone() -> None:
    expected, ranks = run(None, fit_sharing, 0, 1)[0], run("pp2", fit_sharing, 0, 1)
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9
    with pytest.raises(
        LaunchError, match="(?s)ModelError: blocks.0.mlp.0.weight is shared between blocks.0 and blocks.3"
    ):
        run("pp2", fit_sharing, 0, 3, timeout_seconds=50)


@pytest.mark.distributed
def test_too_few_blocks_are_refused_with_what_would_do() -> None:
    with pytest.raises(LaunchError, match="(?s)ModelError: 3 blocks cannot make 4 pipeline stages. Use at most 3"):
        run("pp4", fit_kind, "", 3, {}, timeout_seconds=50)
    with pytest.raises(LaunchError, match="(?s)ModelError: 3 blocks cannot make 4 pipeline stages"):
        run("pp2@interleaved1f1b", fit_kind, "", 3, {}, timeout_seconds=50)


def fit_gan(layout: str) -> None:
    trainer_for(layout, max_steps=1).fit(GAN(), ordered(Points(16), replicas=1))


@pytest.mark.distributed
def test_two_optimizers_under_a_pipeline_are_refused_before_a_step() -> None:
    with pytest.raises(LaunchError, match="(?s)ConfigError: GAN sets automatic_optimization=False.*"):
        run("pp2", fit_gan, timeout_seconds=50)
