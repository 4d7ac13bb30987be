"""A rank that stops or goes astray is named, with who waits for it, and the job ends."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from faulty_jobs import LOADING, Fault, Job, save_one, train

from lightning_3d.strategies.processes import hang_report
from lightning_3d.strategies.processes.board import Post

TIMEOUT = 10.0


def job(fault: Fault, folder: Path, *, how: str, layout: str = "zero1x2-pp2", ckpt_path: Path | None = None) -> Job:
    body = partial(train, fault, folder, layout=layout, timeout_seconds=TIMEOUT, ckpt_path=ckpt_path)
    return Job(body, how=how, folder=folder)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("rank", "phase", "how"),
    [
        (0, "forward", "script"),
        (2, "load", "ranks"),
        pytest.param(3, "schedule", "ranks", marks=pytest.mark.slow),
        pytest.param(1, "contents", "script", marks=pytest.mark.slow),
        pytest.param(2, "setup", "script", marks=pytest.mark.slow),
        pytest.param(0, "save", "ranks", marks=pytest.mark.slow),
        pytest.param(3, "save", "script", marks=pytest.mark.slow),
        pytest.param(1, "validation", "script", marks=pytest.mark.slow),
    ],
)
def test_stopped_rank_is_named_within_the_timeout(rank: int, phase: str, how: str, tmp_path: Path) -> None:
    ckpt_path = None
    if phase in LOADING:
        (tmp_path / "before").mkdir()
        ckpt_path = save_one(tmp_path / "before", layout="zero1x2-pp2")
    ended = job(Fault(phase, rank, "SIGSTOP"), tmp_path, how=how, ckpt_path=ckpt_path).wait()
    assert ended.code != 0 and ended.alive == []
    name = f"rank {rank} (stage {rank // 2}, data {rank % 2})"
    told = ended.errors.splitlines() + [
        line for path in tmp_path.glob("logs/*") for line in path.read_text().splitlines()
    ]
    assert any(line.startswith(f"no progress for 10 s: {name} has not been heard of for") for line in told), (
        ended.errors
    )
    assert any(f"waits for rank {rank}" in line for line in told)
    # The other ranks' stacks, and who waits for whom.
    reports = list(tmp_path.glob("hang_reports/*/*"))
    others = [f"rank_{other:05d}.txt" for other in range(4) if other != rank]
    assert sorted(path.name for path in reports) == [*others, "summary.txt"]
    stopped_at = (tmp_path / "happened").stat().st_mtime
    assert all(TIMEOUT / 2 < path.stat().st_mtime - stopped_at < TIMEOUT for path in reports)


@pytest.mark.slow
@pytest.mark.distributed
def test_rank_that_never_returns_from_its_code_is_named_with_the_line(tmp_path: Path) -> None:
    ended = job(Fault("forward", 1, "endless"), tmp_path, how="script").wait()
    assert ended.code != 0 and ended.alive == []
    assert "no progress for 10 s: rank 1 (stage 0, data 1) is in training, batch 2" in ended.errors
    assert "faulty_jobs.py" in ended.errors and "in endless" in ended.errors
    assert "rank 0 (stage 0, data 0): waits for rank 1" in ended.errors
    (stack,) = tmp_path.glob("hang_reports/*/rank_00001.txt")
    assert "in endless" in stack.read_text()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("phase", ["save", "load"])
def test_long_saves_and_loads_and_many_steps_are_no_hang(phase: str, tmp_path: Path) -> None:
    # All ranks are longer in the save than the timeout, and together longer in validation.
    fault = Fault(phase, -1, "slow", seconds=5.0)
    (tmp_path / "before").mkdir()
    ckpt_path = save_one(tmp_path / "before", layout="dp2") if phase == "load" else None
    body = partial(train, fault, tmp_path, layout="dp2", timeout_seconds=4.0, limit_val_batches=4, ckpt_path=ckpt_path)
    ended = Job(body, how="script", folder=tmp_path, world_size=2).wait()
    assert ended.code == 0, ended.errors
    assert list(tmp_path.glob("hang_reports/*")) == []


def post(rank: int, *, waiting: bool = True, seconds_ago: float = 0.2, **kwargs: object) -> Post:
    defaults = {"where": "training, batch 3", "coordinates": {"stage": rank}, "still_seconds": 10.0}
    return Post(rank=rank, pid=1, time=NOW - seconds_ago, waiting=waiting, **{**defaults, **kwargs})  # type: ignore[arg-type]


NOW = time.time()


def summary(*posts: Post, world_size: int = 4) -> str:
    known = {post.rank: post for post in posts}
    return hang_report.summarise(known, world_size=world_size, timeout_seconds=10, now=NOW)


def test_chain_of_waiting_ranks_leads_to_the_one_that_does_not_wait() -> None:
    text = summary(
        post(0, awaits=(1,)),
        post(1, awaits=(2,)),
        post(2, waiting=False, place="mine.py:7 in step"),
        post(3, awaits=(2,)),
    )
    first, *lines = text.splitlines()
    assert first == "no progress for 10 s: rank 2 (stage 2) is in training, batch 3, at mine.py:7 in step."
    assert lines[0].startswith("  rank 0 (stage 0): waits for rank 1;")
    assert lines[1].startswith("  rank 1 (stage 1): waits for rank 2;")
    assert lines[2].startswith("  rank 2 (stage 2): does not wait for others")


def test_rank_behind_in_a_group_is_the_awaited_one() -> None:
    posts = [post(rank, sequence={"world": 8, "pair": 3}) for rank in range(3)]
    text = summary(*posts, post(3, waiting=False, sequence={"world": 7}))
    assert text.startswith("no progress for 10 s: rank 3 (stage 3) is in")
    assert text.count("waits for rank 3;") == 3


def test_ranks_in_collectives_of_different_groups_are_told_to_have_taken_different_ways() -> None:
    text = summary(post(0, sequence={"a": 2, "b": 1}), post(1, sequence={"a": 1, "b": 2}), world_size=2)
    assert text.startswith("all ranks wait for each other for 10 s: they have taken different ways.")
    assert "rank 0 (stage 0): waits for rank 1" in text and "rank 1 (stage 1): waits for rank 0" in text


def test_silent_rank_is_the_cause_whatever_it_said_last() -> None:
    text = summary(post(0, awaits=(1,)), post(1, seconds_ago=12.0), world_size=3)
    assert text.startswith(
        "no progress for 10 s: rank 1 (stage 1) has not been heard of for 12 s, since training, batch 3"
    )
    assert "rank 2 has said nothing here" in text


def test_rank_that_never_came_is_named() -> None:
    posts = [post(rank, where="setup") for rank in (0, 1, 3)]
    assert summary(*posts).startswith("no progress for 10 s: rank 2 has not come.")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", ["script", "ranks"])
def test_rank_that_stops_before_it_comes_is_named(how: str, tmp_path: Path) -> None:
    ended = job(Fault("start", 1, "SIGSTOP"), tmp_path, how=how).wait()
    assert ended.code != 0 and ended.alive == [] and ended.seconds < 30 + TIMEOUT
    assert "no progress for 10 s: rank 1 has not come" in ended.errors


def across(rank: int, **kwargs: object) -> Post:
    machine = "ab"[rank // 2]
    return post(rank, host=machine, hostname=f"host{machine.upper()}", **kwargs)


def test_cut_network_is_told_where_ranks_wait_for_other_machines_only() -> None:
    text = summary(across(0, awaits=(2,)), across(1, awaits=(3,)), across(2, awaits=(0,)), across(3, awaits=(1,)))
    first, *lines = text.splitlines()
    cut = "what hostA and hostB send each other does not arrive: is the network between them cut?"
    assert first == f"no progress for 10 s: {cut}"
    assert lines[0].startswith("  rank 0 (stage 0) on hostA: waits for rank 2;")
    # Nobody is behind; or a rank waits for one of its machine, which waits for the other.
    assert cut in summary(*(across(rank, sequence={"world": 5}) for rank in range(4)))
    assert cut in summary(
        across(0, awaits=(2,)), across(1, awaits=(0,)), across(2, sequence={"a": 1}), across(3, sequence={"a": 0})
    )


@pytest.mark.parametrize(
    "last",
    [
        {"waiting": False},
        {"awaits": (0,), "seconds_ago": 12.0},
        {"awaits": (2,)},
        {"sequence": {"a": 1, "b": 2}},
        {"done": True},
    ],
    ids=["computes", "is silent", "and its neighbour wait for each other", "went another way", "has ended"],
)
def test_network_is_not_blamed_where_a_rank(last: dict[str, object]) -> None:
    others = [across(rank, awaits=(3,), sequence={"a": 2, "b": 1} if "sequence" in last else {}) for rank in range(3)]
    assert "network" not in summary(*others, across(3, **last))
