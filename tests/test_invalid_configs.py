"""Hundreds of configurations that cannot work are refused by name before anything starts; hundreds that can are not."""

from __future__ import annotations

import copy
import functools
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import invalid_configs
import lightning as L
import pytest
import setting_values
import torch.distributed as dist
import valid_configs
from invalid_configs import Case

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import store
from lightning_3d.cli import check, config, job, main, run_folder, train
from lightning_3d.cli.config import compose_recipe
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.strategies.processes.launch import Outcome

SEED = 20
INVALID, VALID = 520, 200
# All of them take two minutes: `make test` takes some of each rule.
EVERY = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The jobs that were about to start; what would start a process or a process group fails the test."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process or a process group was started")

    for owner, name in ((os, "fork"), (os, "posix_spawn"), (subprocess, "Popen"), (dist, "init_process_group")):
        monkeypatch.setattr(owner, name, refuse)
    # Tests that run beside others come from `python -c`, which no Trainer could run again.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    jobs: list[Any] = []
    monkeypatch.setattr(train, "start", lambda job: jobs.append(job) or Outcome(0))
    # Hydra's part is most of the time, and the recipes without changes are composed in every case.
    compose = functools.cache(lambda file, overrides: COMPOSE(file, list(overrides)))
    monkeypatch.setattr(config, "_compose", lambda file, overrides: copy.deepcopy(compose(file, tuple(overrides))))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    checkpoint = tmp_path / "old" / "checkpoints" / "step.ckpt"
    checkpoint.mkdir(parents=True)
    for name in (store.METADATA, store.SUMMARY):
        (checkpoint / name).write_text('{"global_step": 1}')
    (tmp_path / "old" / "config.yaml").write_text("{}")
    (tmp_path / "old" / "overrides.yaml").write_text("recipe: digits_mlp\noverrides: []\n")
    return jobs


COMPOSE = config._compose


def outcome(case: Case, jobs: list[Any], capsys: pytest.CaptureFixture[str]) -> str | None:
    """The error of a case in one line, or None where it is accepted."""
    jobs.clear()
    if case.arguments:
        code = main(["train", *case.arguments])
        told = capsys.readouterr()
        if code == 0 and jobs:
            return None
        assert (code, told.out, jobs) == (2, "", []), f"{case.name}: exit code {code}, {told}"
        assert told.err.startswith("error: ") and told.err.count("\n") == 1, f"{case.name}: {told.err}"
        return told.err
    try:
        strategy = ThreeDStrategy(**case.settings)
        L.Trainer(accelerator="cpu", devices=case.devices, strategy=strategy, logger=False, enable_checkpointing=False)
    except (ConfigError, LayoutError, TypeError) as error:
        return str(error)
    return None


def slips(cases: list[Case], jobs: list[Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Cases that were accepted, or refused without a word of what is wrong."""
    found = []
    before = sorted(Path().rglob("*"))
    for case in cases:
        message = outcome(case, jobs, capsys)
        if message is None:
            found.append(f"ACCEPTED {case.name}")
        elif missing := [word for word in case.told if word not in message]:
            found.append(f"UNTOLD {missing} {case.name}: {message.strip()}")
    assert sorted(Path().rglob("*")) == before
    return found


def test_every_setting_of_every_recipe_is_in_the_table() -> None:
    for recipe in setting_values.RECIPES:
        assert leaves(compose_recipe(recipe)) == set(setting_values.fields_of(recipe)), recipe


def leaves(node: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in node.items():
        if key != "_target_":
            found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", setting_values.RECIPES)
def test_every_bad_value_of_every_setting_is_refused_by_name(
    recipe: str, nothing_starts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fields = setting_values.fields_of(recipe)
    cases = [invalid_configs.bad(recipe, key, value) for key, values in fields.items() for value in values.bad]
    assert len(cases) > 500 and not (found := slips(cases, nothing_starts, capsys)), "\n".join(found)


def test_generator_makes_as_many_different_cases_of_every_rule_and_the_same_ones_again() -> None:
    cases = invalid_configs.invalid(SEED, INVALID)
    assert len({case.name for case in cases}) == INVALID >= 500
    assert min(Counter(case.rule for case in cases).values()) >= 2
    names = [case.name for case in cases]
    assert names == [case.name for case in invalid_configs.invalid(SEED, INVALID)]
    assert names != [case.name for case in invalid_configs.invalid(SEED + 1, INVALID)]


@EVERY
def test_five_hundred_invalid_configurations_are_refused_by_name_before_anything_starts(
    every: int, nothing_starts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = slips(invalid_configs.invalid(SEED, INVALID)[::every], nothing_starts, capsys)
    assert not found, "\n".join(found)


@EVERY
def test_two_hundred_valid_configurations_are_accepted(
    every: int, nothing_starts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = valid_configs.valid(SEED, VALID)
    assert len(cases) == VALID
    cases = cases[::every]
    refused = [f"{case.name}: {told}" for case in cases if (told := outcome(case, nothing_starts, capsys))]
    assert not refused, "\n".join(refused)


def test_case_that_works_or_that_is_refused_for_another_reason_is_told(
    nothing_starts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        Case("works", ("recipe=digits_mlp", "seed=1"), told=("seed",)),
        Case("works in code", settings={"zero_stage": 1}, devices=2, told=("zero_stage",)),
        Case("another reason", ("recipe=digits_mlp", "seed=-1"), told=("trainer.max_steps",)),
    ]
    found = slips(cases, nothing_starts, capsys)
    assert [line.split(":")[0] for line in found] == [
        "ACCEPTED works",
        "ACCEPTED works in code",
        "UNTOLD ['trainer.max_steps'] another reason",
    ]


@pytest.mark.parametrize(
    ("owner", "name", "fault", "rule"),
    [
        (check, "_RANGES", {}, "bad_value"),
        (check, "check_batch", lambda *_: None, "batch_that_does_not_divide"),
        (check, "check_model", lambda *_: None, "fewer_blocks_than_stages"),
        (check, "check_lengths", lambda *_: None, "sequence_longer_than_positions"),
        (run_folder, "check_writable", lambda *_: None, "file_in_the_way"),
        (job, "check_once", lambda *_: None, "setting_given_twice"),
        (config, "closest", lambda *_: "", "misspelt_setting"),
    ],
)
def test_check_that_is_left_out_is_noticed(
    owner: Any, name: str, fault: Any, rule: str, nothing_starts: list[Any], capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(owner, name, fault)
    rng = random.Random(SEED)
    cases = [invalid_configs.RULES[rule](rng) for _ in range(40 if rule == "bad_value" else 4)]
    assert slips(cases, nothing_starts, capsys)
