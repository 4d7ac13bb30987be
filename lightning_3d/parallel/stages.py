"""Dealing a model's blocks out to the stages of a pipeline, in place: what a rank does not keep has no weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lightning_3d.errors import ModelError
from lightning_3d.parallel.cursor import Cursor, Stage
from lightning_3d.parallel.placeholder import Absent, Shadow
from lightning_3d.parallel.trunk import Trunk, cost, cut, find_trunk


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages have, each its copy.

    Args:
        name: its first name in the whole model.
        stages: that have it.
    """

    name: str
    stages: tuple[int, ...]


class SplitModule:
    """A module of which this rank has the blocks of some stages; changed in place, names unchanged.

    Args:
        module: whole.
        num_stages: of the pipeline.
        local: indices of this rank's stages.
        device: of the activations.

    Raises:
        ModelError: no trunk, too few blocks, or a parameter shared between blocks of different stages.
    """

    def __init__(self, module: nn.Module, *, num_stages: int, local: list[int], device: torch.device) -> None:
        self.module = module
        self.trunk = find_trunk(module)
        container = module.get_submodule(self.trunk.container)
        self._container = container
        blocks = [container.get_submodule(name) for name in self.trunk.blocks]
        prefix = f"{self.trunk.container}." if self.trunk.container else ""
        self.cursor = Cursor([prefix + name for name in self.trunk.blocks])
        ranges = cut(
            [cost(block) for block in blocks],
            parts=num_stages,
            first=sum(cost(module.get_submodule(name)) for name in self.trunk.before),
            last=sum(cost(module.get_submodule(name)) for name in self.trunk.after),
        )
        self.all_stages = [Stage(i, r, first=i == 0, last=i == num_stages - 1) for i, r in enumerate(ranges)]
        self.stages = [self.all_stages[index] for index in local]
        self.shared = _shared(module, self.trunk, self.all_stages)
        self.aliases = _aliases(module)
        self.state_names = frozenset(module.state_dict())
        self.parameter_names = [name for name, _ in module.named_parameters()]
        self.everywhere = [module.get_parameter(name) for name in self.trunk.everywhere]
        self._skips = [self._stand_in_block(i, block, device) for i, block in enumerate(blocks)]
        self._edges = self._stand_in_edges(device)
        self._settle()
        # What other ranks have must not live on here.
        mine = {index for stage in self.stages for index in stage.blocks}
        self._blocks: dict[int, nn.Module] = {index: blocks[index] for index in mine}

    @property
    def stage_of_blocks(self) -> dict[str, int]:
        """The stage of each block, by its full name."""
        return {self.cursor.names[index]: stage.index for stage in self.all_stages for index in stage.blocks}

    def pieces(self, stage: Stage) -> nn.ModuleList:
        """The submodules with parameters that belong to a local stage, blocks last."""
        edges = (self.trunk.before if stage.first else ()) + (self.trunk.after if stage.last else ())
        return nn.ModuleList([*map(self.module.get_submodule, edges), *self.blocks(stage)])

    def blocks(self, stage: Stage) -> list[nn.Module]:
        return [self._blocks[index] for index in stage.blocks]

    def watch(self) -> None:
        """Hook the blocks that this rank has; after everything else that hooks them, so that this comes first."""
        for stage in self.stages:
            for index in stage.blocks:
                block = self._blocks[index]
                block.register_forward_pre_hook(
                    lambda _, args, kwargs, index=index: self.cursor.enter(index, args, kwargs),
                    prepend=True,
                    with_kwargs=True,
                )
                block.register_forward_hook(lambda *_, index=index: self.cursor.leave(index))

    @contextmanager
    def serving(self, stage: Stage) -> Iterator[None]:
        """Only this stage's parts are in the module."""
        if len(self.stages) == 1:
            yield
            return
        home = dict(self._container._modules)
        others = (() if stage.first else self.trunk.before) + (() if stage.last else self.trunk.after)
        edges = {name: self.module.get_submodule(name) for name in others}
        for name in edges:
            self._replace(name, self._edges[name])
        for other in self.stages:
            if other is not stage:
                for index in other.blocks:
                    self._container._modules[self.trunk.blocks[index]] = self._skips[index]
        try:
            yield
        finally:
            self._container._modules.update(home)
            for name, part in edges.items():
                self._replace(name, part)

    @contextmanager
    def probing(self) -> Iterator[Stage]:
        """Nothing of the trunk and before it is real: a run costs nothing and tells the shapes at all cuts."""
        container = dict(self._container._modules)
        edges = {name: self.module.get_submodule(name) for name in self.trunk.before}
        for index, name in enumerate(self.trunk.blocks):
            self._container._modules[name] = self._skips[index]
        for name in edges:
            self._replace(name, self._edges[name])
        cut_off = self.all_stages[-1].blocks.start
        try:
            yield Stage(-1, range(cut_off, cut_off), first=True, last=False)
        finally:
            self._container._modules.update(container)
            for name, part in edges.items():
                self._replace(name, part)

    def _stand_in_block(self, index: int, block: nn.Module, device: torch.device) -> Absent:
        shadow = Shadow(block, device=device)
        return Absent(
            shadow,
            name=self.cursor.names[index],
            on_call=lambda _, args, kwargs: self.cursor.skip(index, args, kwargs),
            on_part=_refuse_part,
        )

    def _stand_in_edges(self, device: torch.device) -> dict[str, Absent]:
        sides = [(name, True) for name in self.trunk.before] + [(name, False) for name in self.trunk.after]
        return {
            name: Absent(
                Shadow(self.module.get_submodule(name), device=device),
                name=name,
                on_call=partial(self._edge_called, before),
            )
            for name, before in sides
        }

    def _edge_called(self, before: bool, name: str, *_: object) -> None:
        self.cursor.edge(name, before=before)

    def _settle(self) -> None:
        """Put stand-ins wherever this rank has nothing."""
        mine = {index for stage in self.stages for index in stage.blocks}
        for index, name in enumerate(self.trunk.blocks):
            if index not in mine:
                self._container._modules[name] = self._skips[index]
        if not any(stage.first for stage in self.stages):
            for name in self.trunk.before:
                self._replace(name, self._edges[name])
        if not any(stage.last for stage in self.stages):
            for name in self.trunk.after:
                self._replace(name, self._edges[name])

    def _replace(self, name: str, part: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        self.module.get_submodule(parent)._modules[child] = part


def _refuse_part(name: str, *_: object) -> None:
    raise ModelError(
        f"{name}, a part of a block, is called by itself, but another pipeline rank has that block. Call blocks as a "
        "whole and in order, or set pipeline_parallel_size=1."
    )


def _stage_of(trunk: Trunk, stages: list[Stage]) -> dict[str, int]:
    """The stage of each part, by name."""
    prefix = f"{trunk.container}." if trunk.container else ""
    found = {prefix + trunk.blocks[index]: stage.index for stage in stages for index in stage.blocks}
    found.update(dict.fromkeys(trunk.before, 0))
    found.update(dict.fromkeys(trunk.after, len(stages) - 1))
    return found


def _shared(module: nn.Module, trunk: Trunk, stages: list[Stage]) -> list[SharedParameter]:
    """Parameters with names on more than one stage; those around the trunk are shared by all and not listed."""
    holders: dict[int, tuple[str, set[int]]] = {}
    places = _stage_of(trunk, stages)
    blocks = {trunk.container + "." + name if trunk.container else name for name in trunk.blocks}
    parts_of: dict[int, set[str]] = {}
    for part, stage in places.items():
        for name, parameter in module.get_submodule(part).named_parameters(prefix=part, remove_duplicate=False):
            holders.setdefault(id(parameter), (name, set()))[1].add(stage)
            parts_of.setdefault(id(parameter), set()).add(part)
    shared = []
    for key, (name, found) in holders.items():
        if len(found) > 1:
            if parts_of[key] & blocks:
                raise ModelError(
                    f"{name} is shared between {' and '.join(sorted(parts_of[key]))}, which belong to different "
                    "pipeline stages. Only parts before and after the blocks may share a parameter."
                )
            shared.append(SharedParameter(name, tuple(sorted(found))))
    return sorted(shared, key=lambda parameter: parameter.name)


def _aliases(module: nn.Module) -> dict[str, str]:
    """The first name of every parameter that has several, by its other names."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found
