"""Modules that are split over tensor-parallel ranks train as in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from modules import VOCAB, Points, Rows
from pipelined_modules import HuggingFace
from test_pipeline_parity import united
from test_zero_parity import fit_gpt, largest_difference, replicas
from torch import nn
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d.models.gpt import GPT, GPTConfig

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

_BY_ONE: dict[tuple[str, str], dict[str, Any]] = {}


def language(settings: dict[str, Any], module: dict[str, Any]) -> Any:
    return settings, lambda: Language(**module)


def fit_case(layout: str | None, case: str) -> dict[str, Any]:
    settings, options = CASES[case]
    return train(layout, lambda: Language(**options), settings)


def by_one(case: str) -> dict[str, Any]:
    if ("case", case) not in _BY_ONE:
        _BY_ONE["case", case] = run(None, fit_case, case)[0]
    return _BY_ONE["case", case]


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
    assert_equal(run(layout, fit_case, case), by_one(case))


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
    [*(("tp2", loss) for loss in LOSSES), ("tp4", "ignored targets"), ("tp2-pp2", "ignored targets"),
     ("zero3x2-tp2", "used in other ways too")],
)  # fmt: skip
def test_loss_on_split_logits_is_that_of_one_process(layout: str, loss: str) -> None:
    if "ignored" in loss and "pp" in layout:
        # A mean over counted targets is weighted otherwise where micro-batches count differently many.
        loss = "of each token"
    expected = run(None, fit_loss, loss, {})[0]
    assert_equal(run(layout, fit_loss, loss, {"loss_parallel": True}), expected)
