"""Of all that ranks report, the cause is told, in its own words."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import _TunerExitException

from lightning_3d.errors import CheckpointError
from lightning_3d.strategies.processes import failures, supervise
from lightning_3d.strategies.processes.board import MACHINE, Board, Post
from lightning_3d.strategies.processes.script_launcher import ScriptLauncher
from lightning_3d.whereabouts import HERE


def failed(rank: int, failure: str, *, at: float) -> Post:
    now = time.time()
    return Post(rank=rank, pid=os.getpid(), time=now, failure=failure, failed_in="x", failed_at=at, host=MACHINE)


def told(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What this rank's supervisor reads of an error."""
    monkeypatch.setattr(HERE, "failure", "")
    with pytest.raises(type(error)), supervise.report_errors(folder / "rank-0.error"):
        raise error
    return str(json.loads((folder / "rank-0.error").read_text())["error"])


def test_the_error_is_told_and_not_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("the cause")
    error.add_note("a hint")
    assert told(error, tmp_path, monkeypatch) == "ValueError: the cause"


def test_errors_of_ours_are_told_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ", ".join(f"layer{number}.weight" for number in range(200))
    error = CheckpointError(f"these are missing: {names}.\nDo this:\n    strict_loading = False")
    assert told(error, tmp_path, monkeypatch).endswith(str(error))
    assert len(told(ValueError(names), tmp_path, monkeypatch)) < 1100


def test_the_first_of_two_errors_is_the_cause() -> None:
    posts = {1: failed(1, "DistBackendError: broken", at=9.0), 3: failed(3, "ValueError: the cause", at=1.0)}
    cause = failures.first_cause(posts, world_size=4, machine=MACHINE, known_since=0.0, now=time.time())
    assert cause is not None and cause.text.startswith("rank 3 of 4 raised ValueError: the cause")


def test_a_hang_that_another_machine_has_judged_comes_before_what_it_breaks(tmp_path: Path) -> None:
    run = tmp_path / "run-0000"
    run.mkdir()
    Board(run).claim("verdict", "rank 3 is silent")
    reports = [tmp_path / f"rank-{rank}.error" for rank in range(2)]
    for path, error, at in zip(
        reports, ("RuntimeError: closed", "HangError: rank 3 is silent"), (1.0, 2.0), strict=True
    ):
        path.write_text(json.dumps({"error": error, "traceback": "", "time": at}))
    failure = supervise.first_failure([1, None], report_paths=reports, alive_at=[0.0, 0.0])
    assert failure is not None and failure.sentence(2) == "rank 1 of 2 reports HangError: rank 3 is silent"


def test_the_end_of_lightnings_tuner_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "failure", "")
    monkeypatch.setenv(supervise.REPORT_VARIABLE, str(tmp_path / "rank-0.error"))
    launcher = ScriptLauncher(LightningEnvironment(), 1)
    ended: list[str] = []
    launcher.on_failure, launcher.on_success = lambda error: ended.append("badly"), lambda: ended.append("well")

    def tune() -> Any:
        raise _TunerExitException

    with pytest.raises(_TunerExitException):
        launcher.launch(tune)
    assert ended == ["well"] and not launcher.failed
    assert HERE.failure == "" and not (tmp_path / "rank-0.error").exists()
