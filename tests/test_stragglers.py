"""A slow rank is named within ten steps, and nobody in a thousand clean ones."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for

from lightning_3d import Layout
from lightning_3d.callbacks.stragglers import SlowRanks, Stragglers
from lightning_3d.errors import ConfigError

WINDOW, TOLD_EVERY = 8, 3
DATA = Path(__file__).parent / "data"
STAGES = {"dp2": [0, 0], "dp4": [0] * 4, "dp2-pp2": [0, 0, 1, 1], "pp4": [0, 1, 2, 3], "dp8": [0] * 8}


def timings(stages: list[int], *, steps: int, noise: float, seed: int, spikes: float = 0.01) -> torch.Tensor:
    """(steps, ranks): stages of unlike cost, log-normal noise, one step in a hundred five times as long, drifts."""
    draw = torch.Generator().manual_seed(seed)
    cost = 0.02 * (1 + torch.tensor(stages, dtype=torch.float64) / 2)
    jitter = torch.randn(steps, len(stages), generator=draw, dtype=torch.float64).mul(noise).exp()
    longer = 1 + 4 * (torch.rand(steps, len(stages), generator=draw) < spikes)
    drift = 1 + 0.5 * torch.sin(torch.arange(steps) / 100)[:, None]
    return cost * jitter * longer * drift


def recorded(layout: str) -> tuple[list[int], torch.Tensor]:
    """Stages, and (steps, ranks) of milliseconds: a tiny GPT's steps while tests ran on the same two cores."""
    with (DATA / f"step_times_{layout}.csv").open() as file:
        rows = list(csv.reader(file))
    milliseconds = torch.tensor([[float(value) for value in row] for row in rows[1:]])
    return [int(name.removeprefix("stage ")) for name in rows[0]], milliseconds


def named(stages: list[int], seconds: torch.Tensor, *, window: int = WINDOW) -> list[tuple[int, int]]:
    """(step, rank) of each verdict."""
    judge = SlowRanks(stages, factor=1.5, window=window)
    found = []
    for end in range(TOLD_EVERY, len(seconds) + 1, TOLD_EVERY):
        found += [(end, rank) for rank in judge.judge(seconds[end - TOLD_EVERY : end].tolist())]
    return found


@pytest.mark.parametrize("layout", STAGES)
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_nobody_is_named_in_a_thousand_clean_steps(layout: str, noise: float) -> None:
    for seed in range(10):
        assert named(STAGES[layout], timings(STAGES[layout], steps=1000, noise=noise, seed=seed)) == []


@pytest.mark.parametrize("layout", ["dp2", "dp2-pp2"])
def test_nobody_is_named_in_a_thousand_steps_of_ranks_that_share_two_busy_cores(layout: str) -> None:
    stages, milliseconds = recorded(layout)
    assert len(milliseconds) > 990
    assert named(stages, milliseconds) == []
    # Ranks were slow for a few steps by chance: half the window names some.
    assert named(stages, milliseconds, window=4) != []


@pytest.mark.parametrize("layout", ["dp2", "dp2-pp2"])
def test_slow_rank_is_named_within_ten_steps_on_two_busy_cores(layout: str) -> None:
    stages, milliseconds = recorded(layout)
    for slow in range(len(stages)):
        for begin in range(100, 960, 40):
            seconds = milliseconds.clone()
            seconds[begin:, slow] *= 6
            step, rank = named(stages, seconds)[0]
            assert rank == slow and begin < step <= begin + 10


@pytest.mark.parametrize("layout", STAGES)
@pytest.mark.parametrize("begin", range(100, 103))
def test_slow_rank_alone_is_named_within_ten_steps_whenever_it_begins(layout: str, begin: int) -> None:
    stages = STAGES[layout]
    for slow in range(len(stages)):
        seconds = timings(stages, steps=200, noise=0.1, seed=begin, spikes=0)
        seconds[begin:, slow] *= 3
        seconds[begin + 4, slow] /= 3  # an exception
        step, rank = named(stages, seconds)[0]
        assert rank == slow and begin < step <= begin + 10
        assert {rank for _, rank in named(stages, seconds)} == {slow}


def test_rank_is_named_anew_only_after_it_has_recovered() -> None:
    seconds = timings(STAGES["dp4"], steps=200, noise=0.02, seed=0)
    seconds[50:100, 1] *= 3
    seconds[150:, 1] *= 3
    seconds[60:100:4, 1] /= 3
    verdicts = [step for step, _ in named(STAGES["dp4"], seconds)]
    assert verdicts == [*range(57, 105, 3), *range(159, 201, 3)]


def test_rank_that_is_slow_from_the_start_is_named_if_it_has_a_peer() -> None:
    seconds = timings(STAGES["dp2-pp2"], steps=50, noise=0.1, seed=0)
    seconds[:, 2] *= 3
    assert named(STAGES["dp2-pp2"], seconds)[0] == (9, 2)


@pytest.mark.parametrize(("settings", "match"), [({"factor": 1.0}, "factor=1.0"), ({"window": 0}, "window=0")])
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Stragglers(**settings)


class SleepsIn(L.Callback):
    """One rank's step takes longer by a sleep, from a batch on."""

    def __init__(self, *, rank: int, begin: int) -> None:
        self.rank, self.begin = rank, begin

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step >= self.begin:
            time.sleep(1.0)


def train(layout: str, slow: int) -> list[tuple[int, int, float]]:
    L.seed_everything(0, verbose=False)
    # A step of some 20 ms: what else the machine does may slow a rank down for real, but not so much.
    stragglers = Stragglers(factor=5.0)
    trainer = trainer_for(layout, max_steps=22, callbacks=[SleepsIn(rank=slow, begin=12), stragglers])
    trainer.fit(TinyGPT(), ordered(Rows(400), replicas=Layout.parse(layout).data))
    return stragglers.named


@pytest.mark.distributed
def test_planted_sleep_is_named_on_all_ranks_though_all_take_the_same_time(tmp_path: Path) -> None:
    for found in run("zero3x2", train, 1):
        assert [rank for _, rank, _ in found] == [1]
        assert 12 < found[0][0] <= 22
