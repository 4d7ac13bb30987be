"""`Layout` is validated without torch, and each refusal names the field, the value and one that works."""

from __future__ import annotations

import ast
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import lightning_3d.layout
from lightning_3d import Layout
from lightning_3d.errors import LayoutError

DATA_AXES = [
    "", "dp2", "dp3", "zero0x2", "zero1x2", "zero2x4", "zero3x2", "zero3x6", "hsdp2x2", "hsdp3x2", "dp2-zero1x2",
    "dp2-zero2x3",
]  # fmt: skip
TENSOR_AXES = ["", "tp2", "tp8"]
PIPELINE_AXES = ["", "pp2", "pp4@gpipe", "pp2@interleaved1f1b"]


def size_of(name: str) -> int:
    """The product of the numbers of all axes, read independently of `parse`."""
    size = 1
    for axis in name.split("-"):
        bare = re.sub(r"@\w+$", "", re.sub(r"^zero\dx", "zero", axis))
        for number in re.findall(r"\d+", bare):
            size *= int(number)
    return size


NAMES = ["-".join(filter(None, axes)) for axes in product(DATA_AXES, TENSOR_AXES, PIPELINE_AXES)]


@pytest.mark.parametrize("name", [name or "single" for name in NAMES])
def test_a_parsed_name_is_the_layout_s_own_name(name: str) -> None:
    layout = Layout.parse(name)
    assert layout.world_size == size_of(name)
    assert layout.data == layout.replicas * layout.data_parallel_shards
    assert layout.name == name.replace("zero0x", "dp")
    # Names leave out what has no effect, so a second round trip is exact.
    assert Layout.parse(layout.name).name == layout.name
    assert layout.resolve(layout.world_size) == layout


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(data_parallel_size=1), "single"),
        (Layout(data_parallel_size=4, zero_stage=0), "dp4"),
        (Layout(data_parallel_size=4, zero_stage=0, data_parallel_replicas=4), "dp4"),
        (Layout(data_parallel_size=4, zero_stage=2), "zero2x4"),
        (Layout(data_parallel_size=4, data_parallel_replicas=2), "hsdp2x2"),
        (Layout(data_parallel_size=4, data_parallel_replicas=2, zero_stage=1), "dp2-zero1x2"),
        (Layout(data_parallel_size=2, data_parallel_replicas=2), "dp2"),
        (Layout(2, 1, 3, 4, schedule="gpipe"), "zero3x2-tp3-pp4@gpipe"),
    ],
)
def test_names(layout: Layout, name: str) -> None:
    assert layout.name == name
    same = Layout.parse(name)
    assert (same.data, same.tensor, same.pipeline) == (layout.data, layout.tensor, layout.pipeline)
    assert (same.replicas, same.data_parallel_shards) == (layout.replicas, layout.data_parallel_shards)


@pytest.mark.parametrize(
    "name",
    [
        "", "dp", "dp0", "dp-2", "dp2-dp2", "zero4x2", "zero3", "zero3x", "zero3x0", "tp2-tp2", "hsdp2", "hsdp2x0",
        "hsdp2x2-dp2", "dp2-hsdp2x2", "zero3x2-hsdp2x2", "hsdp2x2-zero1x2",
        "tp2@gpipe", "dp2@gpipe", "pp2@zigzag", "pp2@", "2",
        "single-dp2",
        "dp2 ", "DP2", "dp2--tp2", "dp2-zero0x2",
    ],
)  # fmt: skip
def test_a_name_outside_the_grammar_is_refused(name: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(name)
    assert re.search("Write |[Ss]et ", str(caught.value))


@pytest.mark.parametrize(
    ("settings", "world_size", "field", "size"),
    [
        ({}, 6, "data", 6),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 12, "data", 2),
        ({"data_parallel_size": 2, "tensor_parallel_size": "auto"}, 8, "tensor", 4),
        ({"data_parallel_size": 2, "pipeline_parallel_size": "auto"}, 6, "pipeline", 3),
        ({"data_parallel_replicas": 2}, 6, "data_parallel_shards", 3),
        ({"zero_stage": 0}, 4, "replicas", 4),
    ],
)
def test_auto_takes_the_processes_that_are_left(settings: Any, world_size: int, field: str, size: int) -> None:
    layout = Layout(**settings)
    with pytest.raises(LayoutError, match="resolve"):
        _ = layout.world_size
    resolved = layout.resolve(world_size)
    assert resolved.world_size == world_size and getattr(resolved, field) == size


# A refusal, and a setting out of its own advice that must then be accepted.
BAD: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    *(
        ({field: value}, field, {field: 1})
        for field in ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_replicas")
        for value in (0, -1, 1.5, 2.0, "2", "all", None, True, [2])
    ),
    ({"data_parallel_replicas": "auto"}, "data_parallel_replicas", {"data_parallel_replicas": 1}),
    *(
        ({"num_microbatches": value}, "num_microbatches", {"num_microbatches": 1})
        for value in (0, -4, 1.5, "auto", False)
    ),
    *(({"zero_stage": value}, "zero_stage", {"zero_stage": 3}) for value in (4, -1, "3", 1.0, None, True, "auto")),
    *(({"schedule": value}, "schedule", {"schedule": "1f1b"}) for value in ("1F1B", "", None, 1, [])),
    (
        {"tensor_parallel_size": "auto"},
        "data_parallel_size and tensor_parallel_size",
        {"tensor_parallel_size": "auto", "data_parallel_size": 1},
    ),
    (
        {"data_parallel_size": 4, "data_parallel_replicas": 3},
        "data_parallel_replicas=3.*data_parallel_size=4.*1, 2, 4",
        {"data_parallel_size": 4, "data_parallel_replicas": 2},
    ),
    (
        {"data_parallel_size": 4, "data_parallel_replicas": 2, "zero_stage": 0},
        "data_parallel_replicas=2.*data_parallel_size=4.*data_parallel_replicas=1",
        {"data_parallel_size": 4, "data_parallel_replicas": 1, "zero_stage": 0},
    ),
]


@pytest.mark.parametrize(("settings", "named", "works"), BAD, ids=[str(settings) for settings, *_ in BAD])
def test_a_bad_value_is_refused_by_name_with_one_that_works(settings: Any, named: str, works: Any) -> None:
    with pytest.raises(LayoutError, match=named) as caught:
        Layout(**settings)
    message = str(caught.value)
    assert all(repr(value) in message for value in settings.values() if value != 0 or len(settings) == 1)
    assert "Set " in message or "set " in message
    changed = [field for field in works if works[field] != settings.get(field)]
    assert all(field in message and str(works[field]) in message for field in changed)
    Layout(**works)


@pytest.mark.parametrize(
    ("settings", "world_size", "says", "works"),
    [
        ({"data_parallel_size": 3, "tensor_parallel_size": 2}, 8, "data 3 x tensor 2 x pipeline 1 = 6", 4),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 3}, 4, "data 2 x tensor 1 x pipeline 3 = 6", None),
        ({"tensor_parallel_size": 3}, 4, "tensor 3 x pipeline 1 = 3.*multiple of 3.*1, 2, 4", None),
        ({"tensor_parallel_size": 8}, 4, "tensor 8 x pipeline 1 = 8.*multiple of 8", None),
        ({"data_parallel_replicas": 3}, 4, "data_parallel_replicas=3.*data_parallel_size=4.*1, 2, 4", None),
        ({}, 0, "world_size=0", None),
        ({}, 2.0, "world_size=2.0", None),
    ],
)
def test_sizes_that_do_not_multiply_to_the_processes_are_refused(
    settings: Any, world_size: Any, says: str, works: int | None
) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        Layout(**settings).resolve(world_size)
    if works is not None:
        assert f"data_parallel_size={works}" in str(caught.value)
        assert Layout(**{**settings, "data_parallel_size": works}).resolve(world_size).world_size == world_size


def test_the_module_imports_only_the_standard_library_and_our_errors() -> None:
    tree = ast.parse(Path(lightning_3d.layout.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - {"lightning_3d.errors"} <= sys.stdlib_module_names
    assert "lightning_3d.errors" in imported
