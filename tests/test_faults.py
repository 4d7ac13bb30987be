"""Whichever rank fails, in whichever phase: the job ends soon with an error and its cause, and nothing is left."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from faulty_jobs import KINDS, PHASES, WORLD_SIZE, Ended, Fault, Job, train

pytestmark = pytest.mark.distributed

LAYOUT = "zero1x2-pp2"


def run(fault: Fault, folder: Path, *, how: str = "script") -> Ended:
    body = partial(train, fault, folder, layout=LAYOUT, timeout_seconds=60)
    return Job(body, how=how, folder=folder).wait()


def assert_ended_with_cause(ended: Ended, fault: Fault) -> None:
    assert ended.code != 0
    assert ended.seconds < 30
    assert ended.alive == []
    rank = f"rank {fault.rank} of {WORLD_SIZE}"
    what = "was killed" if fault.kind == "SIGKILL" else "raised ValueError: the cause"
    if fault.phase == "save" and fault.kind == "exception":
        # All ranks learn of it, and any of them may be the first to end.
        assert f"failed on rank {fault.rank}: ValueError: the cause" in ended.errors
        return
    assert ended.errors.count(f"{rank} {what}") == 1, ended.errors
    told = next(line for line in ended.errors.splitlines() if f"{rank} {what}" in line)
    # Ranks are laid out as stage, data.
    assert f"(stage {fault.rank // 2}, data {fault.rank % 2})" in told, told


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("how", ["script", "ranks"])
def test_any_fault_ends_the_job(how: str, rank: int, phase: str, kind: str, tmp_path: Path) -> None:
    fault = Fault(phase, rank, kind)
    assert_ended_with_cause(run(fault, tmp_path, how=how), fault)
