"""Each setting that cannot work is refused when it is given, before any process, by name and with one that works."""

from __future__ import annotations

import inspect
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.strategies.presets import PRESETS

SECONDS = 2.0

# Field, a bad value, and what the message must offer instead.
BAD: list[tuple[str, Any, str]] = [
    ("data_parallel_size", 0, "data_parallel_size=1"),
    ("data_parallel_size", "all", "'auto'"),
    ("data_parallel_size", 2.0, "data_parallel_size=1"),
    ("data_parallel_replicas", 0, "data_parallel_replicas=1"),
    ("data_parallel_replicas", "auto", "data_parallel_replicas=1"),
    ("tensor_parallel_size", -1, "tensor_parallel_size=1"),
    ("pipeline_parallel_size", 1.5, "pipeline_parallel_size=1"),
    ("zero_stage", 4, "0, 1, 2, 3"),
    ("zero_stage", "3", "0, 1, 2, 3"),
    ("schedule", "zigzag", "gpipe, 1f1b, interleaved1f1b"),
    ("num_microbatches", 0, "num_microbatches=1"),
    ("num_microbatches", "auto", "num_microbatches=1"),
    ("process_group_backend", "mpi", "'gloo' or 'nccl'"),
    ("process_group_backend", 1, "None"),
    ("loss_parallel", "yes", "True or False"),
    ("sequence_parallel", 1, "True or False"),
    ("async_checkpoint", "yes", "True or False"),
    ("storage_options", "key", "storage_options=None"),
    ("initial_weights", "no/such/folder", "hf download"),
    ("initial_weights", 3, "initial_weights=None"),
    ("nonfinite", "stop", "'error', 'skip' or 'ignore'"),
    ("nonfinite", None, "'error', 'skip' or 'ignore'"),
    ("replay_every_n_steps", -1, "Set 0 for never, or 1000"),
    ("replay_every_n_steps", 2.0, "Set 0 for never, or 1000"),
    ("replay_every_n_steps", True, "Set 0 for never, or 1000"),
    ("timeout_seconds", 0, "1800"),
    ("timeout_seconds", "1800", "1800"),
    ("timeout_seconds", True, "1800"),
    ("timeout_seconds", float("nan"), "1800"),
    ("timeout_seconds", float("inf"), "1800"),
    ("timeout_seconds", 1e30, "1800"),
]

# Settings that are good each, but not with one another or with the processes of the Trainer.
TOGETHER: list[tuple[dict[str, Any], int, str]] = [
    ({"data_parallel_size": 3}, 2, "data_parallel_size=2"),
    ({"data_parallel_size": 1}, 2, "data_parallel_size=2 or 'auto'"),
    ({"data_parallel_size": 4, "data_parallel_replicas": 3}, 4, "data_parallel_replicas to one of 1, 2, 4"),
    ({"data_parallel_replicas": 3}, 4, "data_parallel_replicas to one of 1, 2, 4"),
    ({"data_parallel_size": 4, "data_parallel_replicas": 2, "zero_stage": 0}, 4, "data_parallel_replicas=1"),
    ({"data_parallel_size": "auto", "tensor_parallel_size": "auto"}, 4, "data_parallel_size=1"),
]


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


def message_of(build: Callable[[], Any], error: Any) -> str:
    begin = time.process_time()
    with pytest.raises(error) as caught:
        build()
    assert time.process_time() - begin < SECONDS
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def trainer(strategy: Any, devices: int) -> L.Trainer:
    return L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False)


def test_every_field_of_layout_and_strategy_has_a_bad_value_here() -> None:
    fields = set(inspect.signature(ThreeDStrategy).parameters)
    assert fields >= set(inspect.signature(Layout).parameters)
    assert {field for field, *_ in BAD} == fields


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("field", "value", "works"), BAD)
def test_a_bad_value_is_refused_by_the_strategy(field: str, value: Any, works: str) -> None:
    error = LayoutError if field in inspect.signature(Layout).parameters else ConfigError
    message = message_of(lambda: ThreeDStrategy(**{field: value}), error)
    assert f"{field}={value!r}" in message and works in message


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("settings", "devices", "works"), TOGETHER)
def test_sizes_that_do_not_fit_are_refused_when_the_trainer_is_built(
    settings: dict[str, Any], devices: int, works: str
) -> None:
    message = message_of(lambda: trainer(ThreeDStrategy(**settings), devices), LayoutError)
    assert works in message


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_passes_its_settings_on_and_refuses_what_is_fixed_or_unknown(name: str) -> None:
    with pytest.raises((LayoutError, ConfigError), match="timeout_seconds=-1|is not available yet"):
        PRESETS[name](timeout_seconds=-1)
    with pytest.raises(TypeError, match="zero"):
        PRESETS[name](zero=3)
