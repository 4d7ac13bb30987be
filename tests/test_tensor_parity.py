"""Modules that are split over tensor-parallel ranks train as in one process, in float64."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from modules import VOCAB, Points, Rows
from pipelined_modules import HF_CONFIGS, HuggingFace
from test_pipeline_parity import fit_mlp, united
from test_zero_parity import fit_gan, fit_gpt, largest_difference, replicas
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d.errors import ModelError
from lightning_3d.models.gpt import GPT, Block, GPTConfig
from lightning_3d.parallel.split_logits import SplitLogits

pytestmark = pytest.mark.distributed


def train(
    layout: str | None, build: Callable[..., L.LightningModule], settings: dict[str, Any], *args: Any
) -> dict[str, Any]:
    """A short run of `build(*args)` under a Trainer of these settings."""
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), build(*args)
    trainer = trainer_for(layout, **{"max_steps": 3, "precision": "64-true", "callbacks": [recorder], **settings})
    trainer.fit(module, ordered(module.data(), replicas=replicas(layout)))  # type: ignore[operator]
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": whole_weights(module),
    }


def assert_equal(ranks: list[dict[str, Any]], expected: dict[str, Any], *, tolerance: float = 1e-9) -> None:
    for got in ranks:
        assert len(got["losses"]) == len(expected["losses"]) > 0
        assert got["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert got["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        assert got["metrics"] == pytest.approx(expected["metrics"], rel=tolerance)
    assert largest_difference(united(ranks), expected["weights"]) < tolerance


_ALONE: dict[tuple[Any, ...], dict[str, Any]] = {}


def alone(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What one process gets, once."""
    key = (function.__name__, *map(str, args))
    if key not in _ALONE:
        _ALONE[key] = run(None, function, *args)[0]
    return _ALONE[key]


# ---------------------------------------------------------------------- the reference GPT


class Language(L.LightningModule):
    """The reference GPT with 4 heads, 2 of keys and values, under one of several losses."""

    def __init__(
        self, loss: str = "flat", vocab_size: int = VOCAB, tied: bool = False, dropout: float = 0.0, **optimizer: Any
    ) -> None:
        super().__init__()
        self.kind, self.optimizer = loss, optimizer
        self.widths: set[int] = set()
        self.model = GPT(
            GPTConfig(
                vocab_size=vocab_size, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, dropout=dropout,
                max_sequence_length=16, tie_embeddings=tied,
            )
        )  # fmt: skip
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def data(self) -> Rows:
        return Rows(24)

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits, targets = self.model(rows[:, :-1]), rows[:, 1:].flatten()
        self.widths.add(logits.shape[-1])
        loss = LOSSES[self.kind](logits, targets)
        if self.kind == "used in other ways too":
            self.log("accuracy", (logits.argmax(-1).flatten() == targets).double().mean(), sync_dist=True)
            loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        loss = loss * self.temperature
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, **self.optimizer)


def changed_in_place(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits[..., 5] = -3.0
    logits.mul_(0.7)
    logits += 0.1 * logits.detach().square()
    return F.cross_entropy(logits.flatten(0, 1), targets)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "flat": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets),
    "ignored targets": lambda logits, targets: F.cross_entropy(
        logits.view(-1, logits.size(-1)), targets.where(targets % 3 > 0, -7), ignore_index=-7
    ),
    "summed": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / len(targets),
    "of each token": lambda logits, targets: F.cross_entropy(
        logits.double().reshape(-1, logits.shape[-1]), target=targets, reduction="none"
    ).square().mean(),
    "sliced": lambda logits, targets: nn.CrossEntropyLoss()(
        logits[:, 1:].contiguous().flatten(0, 1), targets.view(len(logits), -1)[:, 1:].flatten()
    ),
    "smoothed": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=0.1),
    "weighted classes": lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), targets, weight=torch.linspace(0.5, 2.0, logits.shape[-1], dtype=logits.dtype)
    ),
    "classes second": lambda logits, targets: F.cross_entropy(logits.mT, targets.view(len(logits), -1)),
    "own softmax": lambda logits, targets: -logits.log_softmax(-1).flatten(0, 1).gather(1, targets[:, None]).mean(),
    "changed in place": lambda logits, targets: changed_in_place(logits, targets),
    "used in other ways too": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets),
}  # fmt: skip


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (Trainer, module)
    "tied": ({}, {"tied": True}),
    "untied": ({}, {}),
    "clipped by norm": ({"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}, {"tied": True}),
    "clipped by value": (
        {"gradient_clip_val": 1e-2, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
        {},
    ),
    "foreach": ({}, {"foreach": True}),
    "fused": ({}, {"fused": True}),
    "101 tokens": ({}, {"vocab_size": 101}),
    "101 tokens, tied": ({}, {"vocab_size": 101, "tied": True}),
}


def fit_case(layout: str | None, case: str) -> dict[str, Any]:
    settings, options = CASES[case]
    return train(layout, lambda: Language(**options), settings)


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        *(("tp2", case) for case in CASES),
        *(("tp4", case) for case in ("tied", "untied", "clipped by norm")),
        *(("tp2-pp2", case) for case in ("tied", "clipped by norm", "fused", "101 tokens, tied")),
        *(("zero3x2-tp2", case) for case in ("untied", "clipped by norm", "foreach", "fused")),
        ("dp2-tp2", "clipped by norm"),
        ("zero1x2-tp2", "clipped by norm"),
        ("hsdp2x2-tp2", "clipped by norm"),
        ("zero1x2-tp2-pp2", "clipped by norm"),
        *(
            pytest.param(layout, case, marks=pytest.mark.slow)
            for layout in ("dp2-tp2-pp2", "zero2x2-tp2-pp2", "zero3x2-tp2-pp2", "tp4-pp2", "tp2-pp2@interleaved1f1b")
            for case in ("tied", "clipped by norm")
            if "interleaved" not in layout
        ),
    ],
)
def test_gpt_trains_as_in_one_process(layout: str, case: str) -> None:
    assert_equal(run(layout, fit_case, case), alone(fit_case, case))


@pytest.mark.parametrize("layout", ["zero3x2-tp2", "zero1x2-tp2"])
@pytest.mark.parametrize("case", ["101 tokens", "101 tokens, tied"])
def test_vocabulary_that_does_not_divide_trains_as_in_one_process_under_zero(layout: str, case: str) -> None:
    assert_equal(run(layout, fit_case, case), alone(fit_case, case))


@pytest.mark.parametrize("layout", ["tp2", "tp4", "zero3x2-tp2", "tp2-pp2"])
def test_fit_with_validation_is_that_of_one_process(layout: str) -> None:
    expected = alone(fit_gpt, 1, {})
    ranks = run(layout, fit_gpt, 1, {})
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-9)
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9


@pytest.mark.parametrize("layout", ["tp2", "zero1x2-tp2"])
def test_manual_optimization_of_two_optimizers_is_that_of_one_process(layout: str) -> None:
    expected = alone(fit_gan, True)
    for got in run(layout, fit_gan, True):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert largest_difference(got["weights"], expected["weights"]) < 1e-9


def fit_frozen(layout: str | None) -> dict[str, Any]:
    def build() -> Language:
        module = Language()
        module.model.embed.requires_grad_(False)
        module.model.layers[0].requires_grad_(False)
        module.model.layers[1].attention.wo.requires_grad_(False)
        module.model.layers[2].attention.wk.requires_grad_(False)
        module.model.head.requires_grad_(False)
        return module

    return train(layout, build, {"gradient_clip_val": 0.3})


@pytest.mark.parametrize("layout", ["tp2", "tp4", "zero3x2-tp2", "tp2-pp2"])
def test_frozen_weights_stay_and_others_train_as_in_one_process(layout: str) -> None:
    assert_equal(run(layout, fit_frozen), alone(fit_frozen))


def fit_half(layout: str | None, precision: str, loss_parallel: bool) -> dict[str, Any]:
    return train(layout, Language, {"precision": precision, "loss_parallel": loss_parallel})


@pytest.mark.parametrize("loss_parallel", [False, True])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp2-pp2", marks=pytest.mark.slow)])
def test_half_precision_stays_near_one_process(layout: str, precision: str, loss_parallel: bool) -> None:
    expected = alone(fit_half, precision, False)
    for got in run(layout, fit_half, precision, loss_parallel):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-2)
        assert got["norms"] == pytest.approx(expected["norms"], rel=3e-2)


def fit_uneven_vocabulary(layout: str | None) -> dict[str, Any]:
    widths: set[int] = set()

    def build() -> Language:
        module = Language(vocab_size=101)
        module.widths = widths
        return module

    return {**train(layout, build, {}), "widths": widths}


def test_vocabulary_that_does_not_divide_keeps_its_size() -> None:
    for got in run("tp2", fit_uneven_vocabulary):
        assert got["widths"] == {101}
        assert got["weights"]["model.head.weight"].shape == (101, 32)


def fit_loss(layout: str | None, loss: str, settings: dict[str, Any]) -> dict[str, Any]:
    return train(layout, Language, settings, loss)


@pytest.mark.parametrize(
    ("layout", "loss"),
    [*(("tp2", loss) for loss in LOSSES), ("tp4", "ignored targets"), ("tp2-pp2", "of each token"),
     ("tp2-pp2", "ignored targets"), ("zero3x2-tp2", "used in other ways too")],
)  # fmt: skip
def test_loss_on_split_logits_is_that_of_one_process(layout: str, loss: str) -> None:
    settings: dict[str, Any] = {"loss_parallel": True}
    if "ignored" in loss and "pp" in layout:
        # A mean over counted targets is weighted otherwise where micro-batches count differently many.
        settings["num_microbatches"] = 1
    expected = alone(fit_loss, loss, {})
    assert_equal(run(layout, fit_loss, loss, settings), expected)


def count_gathers(layout: str, loss: str) -> int:
    gathers, real = [], SplitLogits.whole

    def whole(self: SplitLogits) -> torch.Tensor:
        gathers.append(self.shape)
        return real(self)

    SplitLogits.whole = whole  # type: ignore[method-assign]
    fit_loss(layout, loss, {"loss_parallel": True})
    return len(gathers)


@pytest.mark.parametrize("loss", ["flat", "ignored targets", "summed", "of each token", "sliced"])
def test_cross_entropy_needs_no_whole_logits(loss: str) -> None:
    assert run("tp2", count_gathers, loss) == [0, 0]


class Beyond(L.LightningModule):
    """A GPT that meets a token, or a target, that the vocabulary does not have."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.model = GPT(GPTConfig(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4))

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        tokens, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
        (tokens if self.where == "tokens" else targets)[0, 0] = VOCAB
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_beyond(layout: str, where: str) -> None:
    trainer_for(layout, max_steps=1, loss_parallel=True).fit(Beyond(where), ordered(Rows(8), replicas=1))


@pytest.mark.parametrize("where", ["tokens", "targets"])
def test_index_beyond_the_vocabulary_is_an_error_as_in_one_process(where: str) -> None:
    with pytest.raises(
        Exception, match=f"IndexError: {where} .*must be in 0 to {VOCAB - 1}, but are from .* to {VOCAB}"
    ):
        run("tp2", fit_beyond, where)


def differentiate_twice(layout: str) -> str:
    module = Beyond("tokens")
    trainer = trainer_for(layout, max_steps=1, loss_parallel=True)

    def step(rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(module.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        (gradient,) = torch.autograd.grad(loss, [module.model.norm.weight], create_graph=True)
        return loss + gradient.square().sum()

    module.training_step = step  # type: ignore[method-assign]
    try:
        trainer.fit(module, ordered(Rows(8), replicas=1))
    except ModelError as error:
        return str(error)
    return ""


def test_second_derivatives_are_refused_rather_than_wrong() -> None:
    for message in run("tp2", differentiate_twice):
        assert "second derivative is taken through a layer that is split" in message


# ---------------------------------------------------------------------- transformers, MLPs, biases


class FromTransformers(HuggingFace):
    def __init__(self, kind: str, labels: bool) -> None:
        super().__init__(kind, labels=labels)

    def data(self) -> Rows:
        return Rows(24)


QWEN3 = {**HF_CONFIGS["qwen2"], "model_type": "qwen3", "head_dim": 8}


def fit_hugging_face(layout: str | None, kind: str, labels: bool, settings: dict[str, Any]) -> dict[str, Any]:
    HF_CONFIGS["qwen3"] = QWEN3
    torch.set_default_dtype(torch.float64)
    return train(layout, FromTransformers, settings, kind, labels)


_HUGGING_FACE = [(layout, kind) for layout in ("tp2", "tp2-pp2") for kind in ("llama", "gpt2")] + [
    ("tp4", "qwen3"),
    ("tp4", "gpt2"),
    ("zero3x2-tp2", "qwen3"),
]
_MORE = [("tp2-pp2@interleaved1f1b", "llama"), ("tp4", "llama"), ("tp2", "qwen3"), ("zero3x2-tp2", "gpt2")]


@pytest.mark.parametrize(
    ("layout", "kind", "labels"),
    [
        *((layout, kind, False) for layout, kind in _HUGGING_FACE),
        *((layout, kind, True) for layout, kind in _HUGGING_FACE[:4]),
        *(pytest.param(layout, kind, True, marks=pytest.mark.slow) for layout, kind in _MORE),
    ],
)
def test_hugging_face_models_train_as_in_one_process(layout: str, kind: str, labels: bool) -> None:
    expected = alone(fit_hugging_face, kind, labels, {})
    # Their norms, rotary tables and own loss are computed in float32.
    assert_equal(run(layout, fit_hugging_face, kind, labels, {}), expected, tolerance=1e-5)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_losses_run_on_split_logits(kind: str, labels: bool) -> None:
    expected = alone(fit_hugging_face, kind, labels, {})
    assert_equal(run("tp2", fit_hugging_face, kind, labels, {"loss_parallel": True}), expected, tolerance=1e-5)


@pytest.mark.parametrize("layout", ["tp2", "tp4", "zero3x2-tp2", "tp2-pp2", "tp2-pp3"])
def test_sequential_with_biases_trains_as_in_one_process(layout: str) -> None:
    # Three samples are left for the last batch, or four where it must make equal halves.
    samples = 44 if "zero" in layout else 43
    expected, ranks = alone(fit_mlp, samples), run(layout, fit_mlp, samples)
    for got in ranks:
        assert len(got["losses"]) == 6
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9


# ---------------------------------------------------------------------- whole parameters in split regions


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


class Scaled(L.LightningModule):
    """An MLP with a parameter between its split layers, and one of the same kind outside."""

    def __init__(self, planned: bool, from_zero: bool = False) -> None:
        super().__init__()
        self.planned = planned
        self.fc1, self.inside, self.fc2, self.outside = nn.Linear(6, 64), Scale(), nn.Linear(64, 3), Scale()
        if from_zero:
            nn.init.zeros_(self.fc2.weight)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"fc1": "colwise", "fc2": "rowwise", **({"inside": "replicate"} if self.planned else {})}

    def data(self) -> Points:
        return Points(48)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.outside(self.fc2(torch.tanh(self.inside(self.fc1(batch[0]))))), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def fit_scaled(layout: str | None, planned: bool, from_zero: bool = False) -> Any:
    try:
        return train(layout, Scaled, {"max_steps": 5}, planned, from_zero)
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("layout", ["tp2", "zero3x2-tp2"])
def test_whole_parameter_in_a_split_region_is_summed_where_the_plan_says_so(layout: str) -> None:
    assert_equal(run(layout, fit_scaled, True), alone(fit_scaled, True))


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize("layout", ["tp2", "zero3x2-tp2"])
def test_whole_parameter_in_a_split_region_is_refused_by_name_where_it_does_not(layout: str, from_zero: bool) -> None:
    for told in run(layout, fit_scaled, False, from_zero):
        assert told.startswith("the gradient of inside.scale differs between tensor-parallel ranks")
        assert "'replicate' in tensor_parallel_plan()" in told


# ---------------------------------------------------------------------- random streams and memory


class Dropping(L.LightningModule):
    """A split MLP with dropout inside and outside of the split region."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 96)
        )
        self.dropped: dict[str, list[torch.Tensor]] = {"1": [], "3": []}
        for name, dropped in self.dropped.items():
            self.net.get_submodule(name).register_forward_hook(
                lambda _, args, output, dropped=dropped: dropped.append((output == 0).detach().clone())
            )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_dropping(layout: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), Dropping()
    trainer_for(layout, max_steps=4, callbacks=[recorder]).fit(module, ordered(Points(32), replicas=1))
    return {"dropped": module.dropped, "losses": recorder.losses, "state": torch.get_rng_state()}


@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_dropout_differs_between_ranks_inside_a_split_region_and_is_equal_outside(layout: str) -> None:
    first, second = run(layout, fit_dropping)[:2]
    assert first["losses"] == second["losses"]
    assert torch.equal(first["state"], second["state"])
    assert first["dropped"]["1"][0].shape[-1] == 32
    assert len(first["dropped"]["3"]) >= 4
    for name, equal in (("1", False), ("3", True)):
        masks = list(zip(first["dropped"][name], second["dropped"][name], strict=True))
        assert all(torch.equal(a, b) is equal for a, b in masks)
        share = torch.stack([a.double().mean() for a, _ in masks]).mean()
        assert 0.4 < float(share) < 0.6


class Drawing(Language):
    """Notes what it draws from each generator, in each kind of step."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[str, list[tuple[float, ...]]] = {}

    def draw(self, step: str, rows: torch.Tensor) -> torch.Tensor:
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        self.drawn.setdefault(step, []).append(drawn)
        return self.model(rows[:, :-1]).mean()

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.draw("train", rows)

    def validation_step(self, rows: torch.Tensor, batch_idx: int) -> None:
        self.draw("validate", rows)

    def test_step(self, rows: torch.Tensor, batch_idx: int) -> None:
        self.draw("test", rows)

    def predict_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.draw("predict", rows)


def draw_in_steps(layout: str) -> dict[str, list[tuple[float, ...]]]:
    L.seed_everything(1, verbose=False)
    module, options = Drawing(), {"replicas": replicas(layout)}
    trainer = trainer_for(layout, max_epochs=2, num_microbatches=1 if "pp" in layout else None)
    # What ranks do between steps must not reach into them.
    random.seed(os.getpid())
    trainer.fit(module, ordered(Rows(24), **options), ordered(Rows(16), **options))
    trainer.test(module, ordered(Rows(24), **options), verbose=False)
    trainer.predict(module, ordered(Rows(24), **options), return_predictions=False)
    return module.drawn


@pytest.mark.parametrize("layout", ["tp2", "dp2-tp2", "tp2-pp2"])
def test_each_step_draws_other_numbers_and_those_of_its_data_parallel_rank(layout: str) -> None:
    ranks = run(layout, draw_in_steps)
    axes = replicas(layout)
    for step, count in (("train", 6), ("validate", 4), ("test", 3), ("predict", 3)):
        # Under a pipeline the first are those of a probe.
        distinct = {tuple(got[step][-count:]) for got in ranks}
        assert len(distinct) == axes, step
        for kind in range(3):
            assert len({numbers[kind] for mine in distinct for numbers in mine}) == count * axes, step


class CheckpointedBlock(Block):
    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, *args, use_reentrant=False)


def fit_checkpointed(layout: str, checkpointed: bool) -> dict[str, Any]:
    def build() -> Language:
        module = Language(dropout=0.3)
        for layer in module.model.layers if checkpointed else ():
            layer.__class__ = CheckpointedBlock
        return module

    return train(layout, build, {})


class HalfCheckpointedMLP(nn.Module):
    """Its recomputation ends where activations are split."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.fc1, self.drop, self.fc2 = nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32)

    def inside(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drop(F.gelu(self.fc1(hidden)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return hidden + self.fc2(self.inside(hidden))
        return hidden + self.fc2(checkpoint(self.inside, hidden, use_reentrant=False))


class HalfCheckpointed(L.LightningModule):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(HalfCheckpointedMLP(checkpointed) for _ in range(4))
        self.head = nn.Linear(32, VOCAB)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}

    def data(self) -> Rows:
        return Rows(40)

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.embed(rows[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), rows[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_half_checkpointed(layout: str, checkpointed: bool) -> dict[str, Any]:
    return train(layout, HalfCheckpointed, {"max_steps": 4}, checkpointed)


@pytest.mark.parametrize("fit", [fit_checkpointed, fit_half_checkpointed])
@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_recomputation_draws_the_same_dropout(layout: str, fit: Callable[..., dict[str, Any]]) -> None:
    ranks, expected = (run(layout, fit, checkpointed) for checkpointed in (True, False))
    for got, wanted in zip(ranks, expected, strict=True):
        assert got["losses"] == wanted["losses"]
        assert largest_difference(got["weights"], wanted["weights"]) < 1e-12


class Activations(L.Callback):
    """Counts activations that outlive their step."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        for part in module.modules():
            if isinstance(part, nn.RMSNorm):
                part.register_forward_hook(lambda _, args, output: self.seen.append(weakref.ref(output)))

    def on_train_batch_end(self, *_: Any) -> None:
        gc.collect()
        self.alive.append(sum(activation() is not None for activation in self.seen))


def count_activations(layout: str) -> tuple[int, list[int]]:
    activations = Activations()
    train(layout, Language, {"callbacks": [Recorder(), activations]})
    return len(activations.seen), activations.alive


@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_no_activation_outlives_its_step(layout: str) -> None:
    for seen, alive in run(layout, count_activations):
        assert seen > 0
        assert alive == [0, 0, 0]
