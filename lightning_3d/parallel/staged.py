"""A module dealt out over a pipeline, as the share that a strategy works with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.parallel.local import local_tensor
from lightning_3d.parallel.mesh import data_parallel_group, new_group
from lightning_3d.parallel.pipeline import Pipeline
from lightning_3d.parallel.share import Share
from lightning_3d.parallel.stages import SharedParameter


class StagedModule(Share):
    """This rank's stages of a module, with the parameters that several stages have.

    Args:
        module: already split.
        shares: for each local stage.
        mesh: all axes.
    """

    def __init__(self, module: nn.Module, *, pipeline: Pipeline, shares: list[Share], mesh: DeviceMesh) -> None:
        super().__init__(module)
        self.pipeline = pipeline
        self._shares = shares
        self._group = mesh["pp"].get_group()
        self._data_group = data_parallel_group(mesh)
        split = pipeline.split
        self._everywhere = split.everywhere
        self._tied = _tied(split.shared, mesh, module, split.aliases)
        rank = mesh.get_local_rank("pp")
        # Of a parameter that several ranks have, one's gradient counts in the norm.
        self._copies = {id(p) for p, ranks, _ in self._tied if rank != min(ranks)}
        if rank > 0:
            self._copies.update(id(p) for p in self._everywhere)

    @property
    def roots(self) -> list[nn.Module]:
        return [root for share in self._shares for root in share.roots]

    @property
    def norm_group(self) -> ProcessGroup | None:
        return self._group if self._group.size() > 1 else None

    @property
    def aliases(self) -> dict[str, str]:
        return self.pipeline.split.aliases

    @property
    def elsewhere(self) -> frozenset[str]:
        return self.pipeline.split.state_names - self.module.state_dict().keys()

    @property
    def parameter_names(self) -> list[str]:
        return self.pipeline.split.parameter_names

    def counts(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._copies

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for share in self._shares:
                stack.enter_context(share.no_sync())
            yield

    def reshard(self) -> None:
        for share in self._shares:
            share.reshard()

    @torch.no_grad()
    def combine_gradients(self) -> None:
        """Sum the gradients of parameters that several stages have, at the end of a window; collective."""
        for parameter in self._everywhere:
            _sum_(parameter, [self._group, self._data_group])
            if parameter.grad is not None:
                parameter.grad.div_(self._data_group.size())
        for parameter, _, group in self._tied:
            _sum_(parameter, [group])


def _sum_(parameter: nn.Parameter, groups: list[ProcessGroup]) -> None:
    """Sum a gradient over copies, group by group; it stays None where no copy has one."""
    has_one = parameter.grad is not None
    used = torch.full((), float(has_one), device=parameter.device)
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for group in (group for group in groups if group.size() > 1):
        dist.all_reduce(used, group=group)
        dist.all_reduce(local_tensor(gradient), group=group)
    # Read where it tells something alone: reading waits for the device.
    if not has_one and used:
        parameter.grad = gradient


def _tied(
    shared: list[SharedParameter], mesh: DeviceMesh, module: nn.Module, aliases: dict[str, str]
) -> list[tuple[nn.Parameter, tuple[int, ...], ProcessGroup]]:
    """This rank's copies, the pipeline ranks that have one, and their group; all ranks of the job must call this."""
    mine = {aliases.get(name, name): p for name, p in module.named_parameters(remove_duplicate=False)}
    size = mesh["pp"].size()
    # One row per pipeline: the ranks that differ in nothing but the stage.
    pipelines = mesh.mesh.flatten(1).T.tolist()
    found = []
    groups: dict[tuple[int, ...], ProcessGroup] = {}
    for parameter in shared:
        holders = tuple(sorted({stage % size for stage in parameter.stages}))
        for pipeline in pipelines:
            ranks = tuple(pipeline[holder] for holder in holders)
            if ranks not in groups:
                groups[ranks] = new_group(ranks)
            group = groups[ranks]
            if dist.get_rank() in ranks:
                found.append((mine[parameter.name], holders, group))
    return found
