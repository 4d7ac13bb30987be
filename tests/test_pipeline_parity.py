"""An unmodified step trains under a pipeline as in one process, in float64, for every schedule and ZeRO stage."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows
from parity import (
    GPT_CASES,
    assert_encoder_equal,
    fit_encoder,
    fit_gpt,
    fit_mlp,
    largest_difference,
    replicas,
    united,
)
from pipelined_modules import Encoder, HuggingFace, Sentences, collate
from training import Recorder, ordered, run, trainer_for, whole_weights

pytestmark = pytest.mark.distributed

LAYOUTS = ["pp2", "pp2@gpipe", "dp2-pp2", "zero1x2-pp2", "zero2x2-pp2", "zero3x2-pp2"]


@pytest.fixture(scope="module", params=["plain", "accumulated and clipped by norm"])
def gpt_case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    case = GPT_CASES[request.param]
    return case, run(None, fit_gpt, *case)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tied_gpt_trains_as_in_one_process(layout: str, gpt_case: Any) -> None:
    case, expected = gpt_case
    ranks = run(layout, fit_gpt, *case)
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert got["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-9)
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9


@pytest.fixture(scope="module")
def encoder() -> dict[str, Any]:
    return run(None, fit_encoder, 2)[0]


@pytest.mark.parametrize("layout", ["pp2", "pp4", "pp2@interleaved1f1b", "zero3x2-pp2"])
def test_encoder_that_nobody_tuned_trains_as_in_one_process(layout: str, encoder: dict[str, Any]) -> None:
    assert_encoder_equal(run(layout, fit_encoder, 2), encoder)


def test_batches_that_micro_batches_do_not_divide_train_as_in_one_process() -> None:
    # Batches of 8 and one of 5.
    assert_encoder_equal(run("pp2", fit_encoder, 2, Encoder, 29), run(None, fit_encoder, 2, Encoder, 29)[0])


@pytest.mark.parametrize("layout", ["pp2", "pp3"])
def test_sequential_of_unlike_layers_trains_with_a_short_last_batch(layout: str) -> None:
    expected, ranks = run(None, fit_mlp)[0], run(layout, fit_mlp)
    assert ranks[0]["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    assert ranks[0]["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9


def fit_hf(layout: str | None, kind: str, labels: bool) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    torch.set_default_dtype(torch.float64)
    recorder, module = Recorder(), HuggingFace(kind, labels=labels)
    trainer = trainer_for(layout, max_steps=3, precision="64-true", callbacks=[recorder])
    trainer.fit(module, ordered(Rows(24), replicas=replicas(layout)))
    return {"losses": recorder.losses, "norms": recorder.norms, "weights": whole_weights(module)}


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize(("kind", "layout"), [("llama", "pp2"), ("gpt2", "pp2"), ("qwen2", "zero3x2-pp2")])
def test_hugging_face_models_train_as_in_one_process(kind: str, layout: str, labels: bool) -> None:
    expected, ranks = run(None, fit_hf, kind, labels)[0], run(layout, fit_hf, kind, labels)
    # Their own loss, norms and rotary tables are computed in float32.
    tolerance = 1e-6
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert got["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    united(ranks)


def fit_noisy(layout: str, microbatches: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = Encoder(dropout=0.3, noise=0.3, lazy=True)
    recorder = Recorder()
    trainer = trainer_for(layout, num_microbatches=microbatches, max_steps=4, callbacks=[recorder])
    trainer.fit(module, ordered(Sentences(29), replicas=1, collate_fn=collate))
    return {"losses": recorder.losses, "weights": whole_weights(module)}


def test_random_numbers_do_not_depend_on_the_cuts() -> None:
    expected = run("single", fit_noisy, 4)[0]
    assert len(set(expected["losses"])) == 4
    for layout in ("pp2", "pp2@gpipe", "pp2@interleaved1f1b", "pp4"):
        ranks = run(layout, fit_noisy, 4)
        assert ranks[0]["losses"] == expected["losses"], layout
        got = united(ranks)
        assert all(torch.equal(got[name], expected["weights"][name]) for name in got), layout


@pytest.mark.parametrize(
    "layout", [pytest.param("zero1x2-pp2@interleaved1f1b", marks=pytest.mark.slow), "zero3x2-pp2@interleaved1f1b"]
)
def test_interleaved_stages_work_with_shards(layout: str) -> None:
    ranks = run(layout, fit_encoder, 1)
    expected = run("zero1x2-pp2", fit_encoder, 1)
    assert ranks[0]["losses"] == pytest.approx(expected[0]["losses"], rel=1e-9)
    assert largest_difference(united(ranks), united(expected)) < 1e-9


class FrozenStart(Encoder):
    """Fine-tuning: what the first stage has is frozen; a buffer counts steps after the model's call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        for part in (self.embedding, self.blocks[0], self.blocks[1]):
            part.requires_grad_(False)
        self.position.requires_grad_(False)
        self.temperature.requires_grad_(False)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        output = super().training_step(batch, batch_idx)
        self.steps += 1
        return output

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit_frozen(layout: str | None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module, recorder = FrozenStart(), Recorder()
    trainer = trainer_for(layout, max_steps=3, precision="64-true", callbacks=[recorder])
    trainer.fit(module, ordered(Sentences(24), replicas=1, collate_fn=collate))
    return {"losses": recorder.losses, "weights": whole_weights(module), "steps": int(module.steps)}


def test_a_stage_without_trained_parameters_and_a_buffer_that_the_step_changes() -> None:
    expected, ranks = run(None, fit_frozen)[0], run("pp2", fit_frozen)
    weights = {name: value for name, value in expected["weights"].items() if name != "steps"}
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        # Once for each micro-batch.
        assert got["steps"] == ranks[-1]["steps"] == 12
    assert largest_difference({name: value for name, value in united(ranks).items() if name != "steps"}, weights) < 1e-9
