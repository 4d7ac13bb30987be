"""What a step computes of numbers that the host knows copies nothing to the device, which would be waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import run

from lightning_3d import Layout
from lightning_3d.parallel import mesh as meshes
from lightning_3d.parallel.microbatch import weighted_mean
from lightning_3d.parallel.replicate import _flags
from lightning_3d.strategies.logs import Entry

# Takes the place of a GPU: nothing on it can be read.
DEVICE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Keeps the operations that take a tensor from the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = {leaf.device.type for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        if "cpu" in devices and DEVICE.type in made:
            self.found.append(str(function))
        return result


def test_a_copy_is_told() -> None:
    with Copies() as copies:
        torch.tensor([1.0]).to(DEVICE)
        torch.tensor([1.0], device=DEVICE)
    assert len(copies.found) >= 1


def test_numbers_of_the_host_are_not_copied() -> None:
    values = [torch.zeros((), device=DEVICE) for _ in range(3)]
    with Copies() as copies:
        assert weighted_mean(values, [3, 3, 2]).device == DEVICE
        entry = Entry("loss", values=[values[0], 0.5, torch.tensor(2.0), 3], sizes=[2, 2, 2, 1])
        assert entry.merged(DEVICE).device == DEVICE
        assert _flags([True] * 4, like=values[0]).shape == _flags([False] * 4, like=values[0]).shape == (4,)
    assert copies.found == []


def test_flags_are_their_values() -> None:
    like = torch.zeros(2, dtype=torch.float64)
    for values in ([True, True], [False, False], [True, False]):
        flags = _flags(values, like=like)
        assert flags.tolist() == [float(value) for value in values] and flags.dtype == like.dtype


def members(layout: str) -> tuple[list[int], list[int]]:
    dist.init_process_group("gloo")
    mesh = meshes.build_mesh(Layout.parse(layout), device=torch.device("cpu"))
    data = meshes.data_parallel_group(mesh)
    meshes.dist.get_backend = lambda group: "nccl"
    group = meshes.host_data_parallel_group(mesh)
    # The first rank has the store that the others meet by.
    dist.barrier()
    return dist.get_process_group_ranks(data), dist.get_process_group_ranks(group)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["dp2-pp2", "zero3x2-tp2", "hsdp2x2"])
def test_the_group_on_the_host_has_the_data_parallel_ranks(layout: str) -> None:
    for data, host in run(layout, members):
        assert host == data
