"""One order of FSDP2's collectives in a backward, on all ranks, whatever each rank's loss has reached.

FSDP2 gathers and reduces a unit where the loss has reached it, and of its parameters those that have a gradient. Ranks
whose batches use different parameters would then reduce one parameter onto another, or wait for each other for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import ModelError
from lightning_3d.parallel.local import to_device

_UNLIKE_BLOCKS = (
    "the data-parallel ranks called different repeated blocks, or in another order, but under ZeRO all ranks gather a "
    "block where one calls it. Call the same blocks on every rank (a layer that is dropped at random must be dropped "
    "on all; heads of which a batch uses one belong in attributes, not in a ModuleList), or set zero_stage=0."
)
# What a digest of calls fits into, with its negative.
_LARGE = 2**61 - 1


class UnitOrder:
    """Makes each backward gather and reduce what the forward has called, in the reverse of its order.

    Autograd goes through nodes in the reverse of the order in which they were made. So when a backward comes to a unit,
    those that were called after it and have not been reached will not be: they take their turn now, with zeros. After
    the last unit ranks tell each other which parameters had a gradient: one that nobody used keeps `grad` None.

    Args:
        root: FSDP2's root, whose own parameters come last.
        group: all data-parallel ranks.
    """

    def __init__(self, root: nn.Module, *, group: dist.ProcessGroup) -> None:
        self._group = group
        self._states: list[Any] = [m._get_fsdp_state() for m in root.modules() if isinstance(m, FSDPModule)]
        self._units = [unit for state in self._states for unit in param_groups(state)]
        self._number = {unit: number for number, unit in enumerate(self._units)}
        self._parameters = [parameter for unit in self._units for parameter in unit.fsdp_params]
        self._root_units = param_groups(self._states[0])
        self._original: dict[tuple[str, Any], Callable[..., Any]] = {}
        # What a run has called, each with whether its inputs' gradient tells when it is done.
        self._calls: list[tuple[Any, bool]] = []
        self._last: list[tuple[Any, bool]] = []
        self._inputs_tell = False
        # What the backward has before it.
        self._events: deque[tuple[str, Any]] = deque()
        self._expected: set[Any] = set()
        self._begun = self._finished = False
        # Whether a backward ends a window, and the parameters that no backward of it has used on this rank.
        self._ends_window = True
        self._unused: dict[int, Any] = {}
        self._gathered = 0
        # What was told last, which is what is told next but for rare steps.
        self._told: tuple[list[int], torch.Tensor] | None = None
        self._watch()

    def begin_run(self) -> None:
        """A forward begins that a backward may follow."""
        self._calls, self._last = [], []
        self._events.clear()
        self._begun = False

    @contextmanager
    def inside_window(self) -> Iterator[None]:
        """Backwards inside do not end an accumulation window."""
        self._ends_window = False
        try:
            yield
        finally:
            self._ends_window = True

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Around a backward: its end completes the reduction, whatever the loss has reached."""
        self._begun = self._finished = False
        try:
            yield
            if not self._finished:
                self._complete(self._states[0])
        except BaseException:
            self._reset()
            raise

    # ------------------------------------------------------------------ what FSDP2 calls

    def _watch(self) -> None:
        for state in self._states:
            self._replace(state, "_root_post_backward_final_callback", self._complete)
        for unit in self._units:
            self._replace(unit, "pre_forward", self._pre_forward)
            self._replace(unit, "post_forward", self._post_forward)
            self._replace(unit, "pre_backward", self._pre_backward)
            self._replace(unit, "post_backward", self._post_backward)

    def _replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        self._original[name, owner] = getattr(owner, name)
        setattr(owner, name, partial(ours, owner))

    def _pre_forward(self, unit: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if not _in_backward() and not unit.is_unsharded:
            self._gathered = (self._gathered * 1_000_003 + self._number[unit] + 1) % _LARGE
        result = self._original["pre_forward", unit](module, args, kwargs)
        # It gives back what it got, but where it has put a node before tensors that require a gradient.
        self._inputs_tell = result[0] is not args or result[1] is not kwargs
        return result

    def _post_forward(self, unit: Any, module: Any, inputs: Any, output: Any) -> Any:
        inputs_tell = self._inputs_tell
        result = self._original["post_forward", unit](module, inputs, output)
        if unit not in self._root_units and not _in_backward() and torch.is_grad_enabled() and _requires_grad(result):
            self._calls.append((unit, inputs_tell))
        return result

    def _pre_backward(self, unit: Any, *args: Any) -> None:
        if unit._training_state.name != "PRE_BACKWARD":
            self._advance("pre", unit)
        self._original["pre_backward", unit](*args)

    def _post_backward(self, unit: Any, *_: Any) -> None:
        self._advance("post", unit)
        self._reduce(unit)

    def _complete(self, state: Any) -> None:
        """The backward's end: what it has not reached, then what FSDP2 leaves for its end, the root above all."""
        if not self._begun:
            self._begin()
        while self._events:
            self._take_turn(*self._events.popleft())
        self._original["_root_post_backward_final_callback", state]()
        self._begun, self._finished = False, True
        if self._ends_window:
            self._agree()

    # ------------------------------------------------------------------ parts

    def _begin(self) -> None:
        # Another backward of what has been called, unless more has been.
        self._last, self._calls = self._calls or self._last, []
        self._expected = {unit for unit, _ in self._last}
        self._events = deque()
        for unit, inputs_tell in reversed(self._last):
            self._events.append(("pre", unit))
            if inputs_tell:
                self._events.append(("post", unit))
        self._begun = True

    def _advance(self, kind: str, unit: Any) -> None:
        if not self._begun:
            self._begin()
        if (kind, unit) in self._events:
            while (event := self._events.popleft()) != (kind, unit):
                self._take_turn(*event)

    def _take_turn(self, kind: str, unit: Any) -> None:
        if kind == "post":
            self._reduce(unit)
        elif unit._training_state.name != "PRE_BACKWARD":
            self._original["pre_backward", unit](True)

    def _reduce(self, unit: Any) -> None:
        if unit.reduce_grads:
            parameters = [p for p in unit.fsdp_params if hasattr(p, "_unsharded_param")]
            used = [p for p in parameters if _has_gradient(p)]
            if used or unit in self._expected or unit in self._root_units:
                for parameter in used:
                    self._unused.pop(id(parameter), None)
                for parameter in parameters:
                    if not _has_gradient(parameter) and parameter._unsharded_param.requires_grad:
                        if parameter.sharded_param.grad is None:
                            self._unused[id(parameter)] = parameter
                        parameter._unsharded_param.grad = torch.zeros_like(parameter._unsharded_param)
        self._original["post_backward", unit]()

    @torch.no_grad()
    def _agree(self) -> None:
        """Parameters that no rank has used in the window get no gradient; collective."""
        if not self._parameters:
            return
        mine = [int(id(parameter) not in self._unused) for parameter in self._parameters]
        mine += [self._gathered, -self._gathered]
        if self._told is None or self._told[0] != mine:
            self._told = mine, to_device(mine, self._parameters[0].sharded_param.device)
        largest = self._told[1].clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        self._gathered = 0
        equal = largest[-2] == -largest[-1]
        if equal.is_cuda:
            # Told by the device itself: to read it here would be to wait for the whole backward.
            torch._assert_async(equal, _UNLIKE_BLOCKS)
        elif not equal:
            raise ModelError(_UNLIKE_BLOCKS)
        if self._unused:
            for parameter, used in zip(self._parameters, largest.tolist(), strict=False):
                if not used:
                    parameter.sharded_param.grad = None
        self._unused = {}

    def _reset(self) -> None:
        """After a backward that raised: FSDP2 would take the next for a part of it."""
        self._begun = False
        self._events.clear()
        for state in self._states:
            state._state_ctx.post_backward_final_callback_queued = False
        for holder in (*self._states, *self._units):
            holder._training_state = type(holder._training_state).IDLE
        for parameter in self._parameters:
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def param_groups(state: Any) -> list[Any]:
    """FSDP2's groups of the parameters that travel together, of one module."""
    # torch 2.11 and older: one group a module.
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _requires_grad(output: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output))


def _has_gradient(parameter: Any) -> bool:
    return parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None
