"""Every ZeRO stage trains as one process does, in float64, in Lightning's own loop."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from modules import Classifier, Points
from parity import (
    GPT_CASES,
    fit_gan,
    fit_gpt,
    largest_difference,
    replicas,
)
from training import Recorder, ordered, run, trainer_for, whole_weights

pytestmark = pytest.mark.distributed

LAYOUTS = ["single", "dp2", "zero1x2", "zero2x2", "zero3x2", "hsdp2x2"]
# Replicas of shards.
MORE = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("dp2-zero1x2", "dp2-zero2x2")]
SOME = ["dp2", "zero1x2", "zero3x2"]


@pytest.fixture(scope="module", params=GPT_CASES)
def gpt_case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    case = GPT_CASES[request.param]
    return case, run(None, fit_gpt, *case)[0]


@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE])
def test_gpt_trains_as_in_one_process(layout: str, gpt_case: Any) -> None:
    case, expected = gpt_case
    for got in run(layout, fit_gpt, *case):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert got["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-9)
        assert largest_difference(got["weights"], expected["weights"]) < 1e-9


def fit_classifier(layout: str | None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), Classifier()
    before = whole_weights(module)
    trainer = trainer_for(layout, max_epochs=2, precision="64-true", callbacks=[recorder])
    count = replicas(layout)
    trainer.fit(module, ordered(Points(48), replicas=count), ordered(Points(21), replicas=count))
    results = trainer.test(module, ordered(Points(21), replicas=count), verbose=False)
    predictions = trainer.predict(module, ordered(Points(21), replicas=count))
    assert predictions is not None
    return {
        "losses": recorder.losses,
        "test": results[0],
        "weights": whole_weights(module),
        "before": before,
        "classes": torch.cat([batch["class"] for batch in predictions]),  # type: ignore[index, call-overload]
        "labels": torch.cat([batch["label"] for batch in predictions]),  # type: ignore[index, call-overload]
    }


@pytest.fixture(scope="module")
def classifier() -> dict[str, Any]:
    return run(None, fit_classifier)[0]


@pytest.mark.parametrize("layout", [*LAYOUTS, "zero3x4", *MORE])
def test_metrics_predictions_frozen_and_unused_parameters_are_those_of_one_process(
    layout: str, classifier: dict[str, Any]
) -> None:
    ranks = run(layout, fit_classifier)
    for got in ranks:
        assert got["losses"] == pytest.approx(classifier["losses"], rel=1e-9)
        assert got["test"] == pytest.approx(classifier["test"], rel=1e-9)
        assert got["test"]["count"] == 21
        assert largest_difference(got["weights"], classifier["weights"]) < 1e-9
        for still in ("net.2.weight", "unused.weight", "unused.bias"):
            assert torch.equal(got["weights"][still], classifier["before"][still].double())
    assert torch.equal(ranks[0]["classes"], classifier["classes"])
    assert ranks[0]["labels"].tolist() == [index % 3 for index in range(21)]


@pytest.mark.parametrize("toggle", [True, False])
@pytest.mark.parametrize("layout", [*SOME, pytest.param("zero2x2", marks=pytest.mark.slow), MORE[0]])
def test_manual_optimization_of_two_optimizers_is_that_of_one_process(layout: str, toggle: bool) -> None:
    expected = run(None, fit_gan, toggle)[0]
    for got in run(layout, fit_gan, toggle):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert largest_difference(got["weights"], expected["weights"]) < 1e-9
