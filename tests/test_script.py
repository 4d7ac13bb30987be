"""One script that knows nothing of us gives the same numbers under "auto" and "3d", on 1, 2 and 4 processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parent / "data" / "script.py"


def result_of(command: list[str], folder: Path) -> dict[str, Any]:
    """What rank 0 printed; the script runs elsewhere, so that only the installed package can serve it."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "PYTHONPATH", "PL_GLOBAL_SEED")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0].removeprefix("RESULT "))


def python(folder: Path, strategy: str, devices: int) -> dict[str, Any]:
    return result_of([sys.executable, str(SCRIPT), strategy, str(devices)], folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return python(tmp_path_factory.mktemp("auto"), "auto", 1)


def assert_equal(got: dict[str, Any], expected: dict[str, Any], world_size: int) -> None:
    assert got["world_size"] == world_size
    assert len(got["losses"]) == 18 and len(got["predictions"]) == 21
    assert got["losses"][-1] < got["losses"][0]
    for name in ("losses", "epoch_loss", "validation", "test"):
        assert got[name] == pytest.approx(expected[name], rel=1e-9), name
    for row, expected_row in zip(got["predictions"], expected["predictions"], strict=True):
        assert row == pytest.approx(expected_row, rel=1e-9)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_script_gives_the_numbers_of_auto(tmp_path: Path, devices: int, expected: dict[str, Any]) -> None:
    assert_equal(python(tmp_path, "3d", devices), expected, devices)


def test_the_script_under_torchrun_gives_the_numbers_of_auto(tmp_path: Path, expected: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert_equal(result_of([*command, str(SCRIPT), "3d", "2"], tmp_path), expected, 2)
