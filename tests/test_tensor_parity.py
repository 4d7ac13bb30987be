"""Modules that are split over tensor-parallel ranks train as in one process, in float64."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows
from parity import (
    alone,
    assert_equal,
    fit_gan,
    fit_gpt,
    fit_mlp,
    largest_difference,
    train,
    united,
)
from pipelined_modules import HF_CONFIGS, HuggingFace
from split_language import Language
from torch import nn
from training import Recorder, run

pytestmark = pytest.mark.distributed


# ---------------------------------------------------------------------- the reference GPT


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


# ---------------------------------------------------------------------- random streams and memory


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
