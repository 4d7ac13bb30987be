"""Where a rank is in the user's step: which stage it serves, for which micro-batch, and which block comes next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_3d.checkpoint.random_state import seed_number
from lightning_3d.errors import ModelError
from lightning_3d.parallel.placeholder import is_placeholder

_MARK = "_lightning_3d_mark"


class StageDone(BaseException):
    """Ends the user's step on a stage that is not the last; carries what the next stage starts from.

    It is no Exception, so that a step's own `except Exception` lets it pass.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class Stage:
    """One part of the pipeline: consecutive blocks, with what comes before the first and after the last."""

    index: int
    blocks: range
    first: bool
    last: bool


@dataclass
class Cursor:
    """The state that the hooks of blocks and stand-ins share.

    Args:
        names: of all blocks, in order, for messages.
        stream: tells this rank from others where their random numbers must differ at this moment.
        reseeded: called when the generators were seeded anew there.
    """

    names: list[str]
    stage: Stage | None = None
    seed: str = ""
    next: int = 0
    wire: torch.Tensor | None = None
    probing: bool = False
    shapes: dict[int, torch.Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    stream: Callable[[], str] = field(default=lambda: "")
    reseeded: Callable[[], None] = field(default=lambda: None)

    @contextmanager
    def serving(self, stage: Stage, *, wire: torch.Tensor | None, seed: str, probing: bool = False) -> Iterator[None]:
        """One run of the user's step for one stage and one micro-batch.

        Args:
            wire: what the stage before has sent, flat; None on the first stage.
            seed: of this micro-batch, equal on all ranks of the pipeline.
        """
        self.stage, self.wire, self.seed, self.next, self.probing = stage, wire, seed, 0, probing
        self.used.clear()
        self.reseed("step")
        seed_other_generators(self._seed_at("step"))
        try:
            yield
        finally:
            self.stage, self.wire = None, None

    def reseed(self, place: object) -> None:
        """Random numbers from here on depend on the micro-batch and the place alone, not on where the cuts are."""
        seed_generators(self._seed_at(place))
        self.reseeded()

    def _seed_at(self, place: object) -> str:
        return f"{self.seed}/{place}{self.stream()}"

    # ------------------------------------------------------------------ hooks

    def enter(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block that this rank has is about to run: its arguments, with what was received in the first's place."""
        hidden = _hidden(args, kwargs)
        stage = self.stage
        if stage is None:
            return self._enter_again(hidden, args, kwargs)
        self._in_order(index)
        received = None
        if index == stage.blocks.start and not stage.first:
            received = self._receive(index, hidden)
        elif is_placeholder(hidden):
            raise ModelError(f"{self.names[index]} is given a value that is known on another pipeline rank only.")
        # Kept on the tensor itself, so that a recomputation in the backward finds its own micro-batch's.
        setattr(hidden, _MARK, (received, self._seed_at(index)))
        if received is not None:
            args, kwargs = _with_hidden(args, kwargs, received)
        self._check_others(index, args, kwargs)
        self.reseed(index)
        return args, kwargs

    def leave(self, index: int) -> None:
        """A block that this rank has is done."""
        if self.stage is not None and index == len(self.names) - 1:
            self.reseed("after")

    def skip(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block that another rank has, or another stage of this one, would run now."""
        stage = self.stage
        if stage is None:
            raise ModelError(f"{self.names[index]} is called outside of a step, but another pipeline rank has it.")
        self._in_order(index)
        hidden = _hidden(args, kwargs)
        if self.probing:
            self.shapes[index] = hidden
        if index >= stage.blocks.stop:
            raise StageDone(hidden)

    def edge(self, name: str, *, before: bool) -> None:
        """A part around the trunk that another rank has would run now.

        Raises:
            ModelError: it runs on the other side of the trunk than the order of registration told.
        """
        if before and self.next == 0:
            self.used.add(name)
            return
        if name in self.used:
            raise ModelError(
                f"{name} is called a second time in one step, after the blocks. Under a pipeline a step may call the "
                "model once; its parameters may be reused by tying them."
            )
        place, use = ("before", "after") if before else ("after", "before")
        raise ModelError(
            f"{name} is registered {place} the blocks, so {'the first' if before else 'the last'} pipeline stage has "
            f"it, but the step uses it {use} them. Register it in the order of use, or reuse a parameter by tying it."
        )

    def check_finished(self) -> None:
        """The user's step has returned.

        Raises:
            ModelError: it has not called all blocks.
        """
        if self.next < len(self.names):
            raise ModelError(
                f"the step returned before {self.names[self.next]} was called: under a pipeline each step calls the "
                "model once."
            )

    # ------------------------------------------------------------------ parts

    def _in_order(self, index: int) -> None:
        if index < self.next:
            raise ModelError(
                f"{self.names[index]} is called a second time in one step. Under a pipeline a step may call the "
                "model once."
            )
        if index > self.next:
            raise ModelError(
                f"{self.names[index]} is called before {self.names[self.next]}: a pipeline needs blocks that are "
                "called in order, all of them."
            )
        self.next = index + 1

    def _receive(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        assert self.wire is not None
        if hidden.dtype != self.wire.dtype or hidden.numel() > self.wire.numel():
            raise ModelError(
                f"{self.names[index]} expects {hidden.dtype} of shape {tuple(hidden.shape)}, but the stage before sent "
                f"{self.wire.numel()} numbers of {self.wire.dtype}."
            )
        return self.wire[: hidden.numel()].view(hidden.shape)

    def _check_others(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in [*enumerate(args), *kwargs.items()]:
            if is_placeholder(value):
                raise ModelError(
                    f"argument {name!r} of {self.names[index]} was computed by a part of the model that another "
                    "pipeline rank has. Only the first argument of a block travels between stages: compute the others "
                    "from the batch, or inside the block."
                )

    def _enter_again(self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Recomputation of a checkpointed block in the backward."""
        mark = getattr(hidden, _MARK, None)
        if mark is None:
            if torch._C._current_graph_task_id() != -1:
                raise ModelError("under a pipeline, use torch.utils.checkpoint.checkpoint(..., use_reentrant=False).")
            return None
        received, seed = mark
        seed_generators(seed)
        return _with_hidden(args, kwargs, received) if received is not None else None


def seed_other_generators(seed: str) -> None:
    """Seed Python's and NumPy's generators of this process from a text."""
    random.seed(seed_number(seed))
    np.random.seed(seed_number(seed) % 2**32)


def seed_generators(seed: str) -> None:
    """Seed torch's generators of this process from a text."""
    number = seed_number(seed)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    first = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(first, torch.Tensor):
        raise ModelError(
            f"the first argument of a pipelined block must be a tensor, the output of the block before; it is a "
            f"{type(first).__name__}."
        )
    return first


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): hidden}
