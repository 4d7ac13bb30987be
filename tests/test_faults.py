"""Whichever rank fails, in whichever phase: the job ends soon with an error and its cause, and nothing is left."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from faulty_jobs import KINDS, LOADING, PHASES, WORLD_SIZE, Ended, Fault, Job, save_one, train

from lightning_3d import Layout
from lightning_3d.checkpoint import store

pytestmark = pytest.mark.distributed

LAYOUT = "zero1x2-pp2"


# What a rank that raises is told to have been doing; one that is killed was seen there, or a moment before.
PLACES = {
    "setup": "setup",
    **dict.fromkeys(LOADING, "loading a checkpoint"),
    "forward": "training, batch",
    "schedule": "training, batch",
    "validation": "validation",
    "teardown": "teardown",
}


TELLING = re.compile(rf"^rank \d+ .*of {WORLD_SIZE} .*(?:raised|was killed|ended with) .*$", re.MULTILINE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for jobs that fail while they load it."""
    return save_one(tmp_path_factory.mktemp("saved"), layout=LAYOUT)


def run(fault: Fault, folder: Path, saved: Path, *, how: str = "script") -> Ended:
    path = saved if fault.phase in LOADING else None
    body = partial(train, fault, folder, layout=LAYOUT, timeout_seconds=60, ckpt_path=path)
    return Job(body, how=how, folder=folder).wait()


def assert_ended_with_cause(ended: Ended, fault: Fault) -> None:
    assert ended.code != 0
    assert ended.seconds < 30
    assert ended.alive == []
    rank = f"rank {fault.rank} of {WORLD_SIZE}"
    what = "was killed" if fault.kind == "SIGKILL" else "raised ValueError: the cause"
    # One cause, and no rank's complaint about its peer's end; after all tracebacks but the one that belongs to it.
    (told,) = TELLING.findall(ended.errors)
    told, _, rest = ended.errors[ended.errors.index(told) :].partition("\n")
    assert not rest.strip() or rest.startswith(f"the end of what rank {told.split()[1]} printed"), rest
    # What several ranks do together.
    if fault.phase in ("save", "extra", "load", "optimizer") and fault.kind == "exception":
        # All ranks learn of it, and any of them may be the first to end.
        assert f"failed on rank {fault.rank}: ValueError: the cause; it was in" in told, told
        return
    assert told.startswith(f"{rank} {what}"), told
    # Ranks are laid out as stage, data.
    assert f"(stage {fault.rank // 2}, data {fault.rank % 2})" in told, told
    if fault.kind == "exception":
        assert f"it was in {PLACES[fault.phase]}" in told, told
        # Its traceback.
        assert 'raise ValueError("the cause")' in ended.errors


# Each rank, phase and kind at least once.
COVERING = [
    ("script", Fault("setup", 0, "SIGKILL")),
    ("script", Fault("load", 3, "exception")),
    ("ranks", Fault("load", 1, "SIGKILL")),
    ("script", Fault("random state", 2, "SIGKILL")),
    ("ranks", Fault("hook", 0, "exception")),
    ("script", Fault("forward", 1, "exception")),
    ("ranks", Fault("schedule", 3, "exception")),
    ("ranks", Fault("save", 2, "SIGKILL")),
    ("script", Fault("validation", 0, "exception")),
    ("ranks", Fault("teardown", 1, "exception")),
]


@pytest.mark.parametrize(("how", "fault"), COVERING, ids=lambda value: getattr(value, "phase", value))
def test_fault_ends_the_job(how: str, fault: Fault, tmp_path: Path, saved: Path) -> None:
    assert_ended_with_cause(run(fault, tmp_path, saved, how=how), fault)
    if fault.phase in LOADING:
        assert store.is_committed(saved)


@pytest.mark.parametrize(("layout", "rank"), [("dp2", 1), ("zero1x2-pp2", 3)])
def test_step_without_a_loss_on_one_rank_is_an_error_that_ends_all(tmp_path: Path, layout: str, rank: int) -> None:
    size = Layout.parse(layout).world_size
    body = partial(train, Fault("loss", rank, "none"), tmp_path, layout=layout, timeout_seconds=60)
    ended = Job(body, how="script", folder=tmp_path, world_size=size).wait()
    assert ended.code != 0 and ended.alive == [] and ended.seconds < 30
    what = "RuntimeError: Skipping the `training_step` by returning None"
    if size == 4:
        what = "lightning_3d.errors.ModelError: under a pipeline training_step must return a scalar loss"
    assert ended.errors.count(f"rank {rank} of {size} raised {what}") == ended.errors.count(f" of {size} raised ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("how", ["script", "ranks"])
def test_any_fault_ends_the_job(how: str, rank: int, phase: str, kind: str, tmp_path: Path, saved: Path) -> None:
    fault = Fault(phase, rank, kind)
    assert_ended_with_cause(run(fault, tmp_path, saved, how=how), fault)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(len(LOADING)))
def test_a_fault_in_any_part_of_a_load_ends_the_job(number: int, kind: str, tmp_path: Path, saved: Path) -> None:
    fault = Fault(LOADING[number], number % WORLD_SIZE, kind)
    assert_ended_with_cause(run(fault, tmp_path, saved), fault)
