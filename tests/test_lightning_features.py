"""What Lightning's users rely on, in each layout as in one process under strategy="auto"."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from features import gradients, module_shapes, saved, schedules, trainer_settings  # noqa: F401 (they register their cases)
from features.case import ALIKE, CASES
from training import run

pytestmark = pytest.mark.distributed

LAYOUTS = ["dp2", pytest.param("zero1x2", marks=pytest.mark.slow), "zero3x2"]


def run_cases(layout: str | None, folder: Path, cases: list[str]) -> dict[str, Any]:
    """Each case's result, or the error it raised; one Trainer after the other in one process."""
    results: dict[str, Any] = {}
    for name in cases:
        L.seed_everything(1, verbose=False)
        own = folder / f"{layout}-{name}"
        own.mkdir(exist_ok=True)
        try:
            results[name] = {**CASES, **ALIKE}[name](layout, own)
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(None, run_cases, tmp_path_factory.mktemp("auto"), list(CASES))[0]


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(request.param, run_cases, tmp_path_factory.mktemp("ranks"), [*CASES, *ALIKE], timeout_seconds=250)


def assert_close(got: Any, expected: Any, where: str) -> None:
    """Numbers within 1e-9, the rest equal, through any nest; None stands for what a rank does not have."""
    if got is None and where != "rank 0":
        return
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key in expected:
            assert_close(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_close(one, other, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.shape == expected.shape, where
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9), where
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-8, abs=1e-10), where
    else:
        assert got == expected, where


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert not isinstance(expected[name], str), expected[name]
    for rank, results in enumerate(ranks):
        assert not isinstance(results[name], str), f"rank {rank}: {results[name]}"
        assert_close(results[name], expected[name], f"rank {rank}")


@pytest.mark.parametrize("name", ALIKE)
def test_alike_on_all_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        assert not isinstance(results[name], str), f"rank {rank}: {results[name]}"
        assert_close(results[name], ranks[0][name], f"rank {rank}")
