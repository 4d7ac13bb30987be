"""Steps whose loss or gradients are not finite: an error that says where it began, or a step that no rank takes.

The gradients are looked at once per optimizer step, and all ranks learn of any rank's. On the CPU, and where steps are
skipped, at once; on a GPU that would make it wait for its host, so an error is told one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import ConfigError, NumbersError
from lightning_3d.parallel.gradients import largest_part
from lightning_3d.parallel.local import local_tensor
from lightning_3d.parallel.placeholder import Absent, is_placeholder

# How early in a step it is, and what to say of it.
Finding = tuple[int, str]

_GRADIENT = 4

ACTIONS = ("error", "skip", "ignore")


class FiniteSteps:
    """Watches the steps of one module.

    Args:
        module: laid out.
        action: "error", "skip" or "ignore".
        device: of this rank.
        rerun: runs the user's step once more on a batch, without gradients; collective.
    """

    def __init__(
        self, module: L.LightningModule, *, action: str, device: torch.device, rerun: Callable[[tuple[Any, ...]], Any]
    ) -> None:
        self._module = module
        self._action = action
        self._device = device
        self._rerun = rerun
        self._loss = torch.zeros((), dtype=torch.bool, device=device)
        self._args: tuple[Any, ...] = ()
        self._pending: tuple[torch.Tensor, Any, int] | None = None

    def began(self, args: tuple[Any, ...]) -> None:
        """The arguments of a `training_step`; local."""
        # Of an accumulation window, the batch that began it.
        if self._device.type != "cpu" or not self._loss:
            self._args = args

    def saw(self, output: Any) -> None:
        """What `training_step` returned; local."""
        if self._action == "ignore":
            return
        loss = output.get("loss") if isinstance(output, dict) else output
        bad = ~torch.isfinite(loss.detach()).all() if isinstance(loss, torch.Tensor) else torch.tensor(False)
        self._loss = self._loss | bad.to(self._device)

    def before_update(self, optimizer: Any) -> None:
        """To be called with the gradients of a whole window, before they are clipped; collective.

        Raises:
            NumbersError: on all ranks, where one of them has a loss or gradient that is not finite.
        """
        if self._action == "ignore":
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        bad = (self._loss | ~torch.isfinite(largest_part(parameters)).to(self._device)).float()
        if dist.get_world_size() > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        step = self._module.trainer.global_step
        if self._device.type == "cpu" or self._action == "skip":
            if bad:
                self._act(parameters, step)
        else:
            self.settle()
            copy = torch.empty_like(bad, device="cpu", pin_memory=True).copy_(bad, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = copy, event, step
        self._loss = torch.zeros_like(self._loss)

    def settle(self) -> None:
        """Look at what was put off; before a checkpoint would keep it."""
        if self._pending is None:
            return
        copy, event, step = self._pending
        self._pending = None
        event.synchronize()
        if copy:
            raise NumbersError(
                f"step {step}: {self._told(self._in_weights())}. It was seen one step late, for a GPU does not wait. "
                f"{_ADVICE}"
            )

    def _act(self, parameters: list[nn.Parameter], step: int) -> None:
        if self._action == "skip":
            told = self._told(self._in_gradients())
            for parameter in parameters:
                parameter.grad = None
            rank_zero_warn(f"step {step} is skipped on all ranks: {told}.")
            return
        # All ranks, for the layers of one may need the others. Not a step that steps its optimizers itself.
        outputs = self._in_outputs() if self._module.automatic_optimization else None
        where = self._in_batch() or self._in_weights() or outputs or self._in_gradients()
        raise NumbersError(f"step {step}: {self._told(where)}. {_ADVICE}")

    def _told(self, where: Finding | None) -> str:
        """What the ranks have found, in one sentence; collective."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, where and (not self._loss, *where))
        told = [(rank, each) for rank, each in enumerate(found) if each is not None]
        if not told:
            return "a loss or gradient was not finite"
        # A loss that is not finite is the cause of gradients that are not, on other ranks too. A forward comes to the
        # first stage of a pipeline first, a backward to the last.
        worst = min(told, key=lambda entry: (*entry[1][:2], -entry[0] if entry[1][1] == _GRADIENT else entry[0]))[1]
        ranks = [str(rank) for rank, each in enumerate(found) if each == worst]
        return f"the {'gradient' if worst[0] else 'loss'} is not finite on rank {', '.join(ranks)}: {worst[2]}"

    # ------------------------------------------------------------------ where it began, on this rank

    def _in_batch(self) -> Finding | None:
        for leaf in tree_leaves(self._args[:1]):
            if isinstance(leaf, torch.Tensor) and not _finite(leaf):
                return 0, "the batch itself has values that are not finite"
        return None

    def _in_weights(self) -> Finding | None:
        name = next((name for name, p in self._module.named_parameters() if not _finite(p)), None)
        return None if name is None else (1, f"the weight {name} already was not finite")

    def _in_outputs(self) -> Finding | None:
        found: list[Finding] = []

        def look(name: str, module: nn.Module, output: Any) -> None:
            if not found and any(not _finite(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)):
                found.append((2, f"the output of {name} ({_kind(module)}) is the first in the forward"))

        with _hooked(self._module, look), without_logs(self._module), torch.no_grad():
            self._rerun(self._args)
        if not found and self._loss:
            found.append((3, "the outputs of all modules are finite, so it is what the step makes of them"))
        return found[0] if found else None

    def _in_gradients(self) -> Finding | None:
        """The last module with such a gradient: the backward reached it first."""
        names = [name for name, p in self._module.named_parameters() if p.grad is not None and not _finite(p.grad)]
        return (_GRADIENT, f"the gradient of {names[-1]} is the first in the backward") if names else None


_ADVICE = (
    "Lower the learning rate or clip gradients, look at the batch, or set ThreeDStrategy(nonfinite='skip') to leave "
    "such steps out."
)


def check_action(value: object) -> str:
    """
    Raises:
        ConfigError: another value than those of `ACTIONS`.
    """
    if value not in ACTIONS:
        raise ConfigError(f"nonfinite={value!r} is unknown. Set 'error', 'skip' or 'ignore'.")
    return str(value)


def _kind(module: nn.Module) -> str:
    """The user's class, which FSDP2 has changed."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _finite(tensor: torch.Tensor) -> bool:
    if is_placeholder(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(local_tensor(tensor.detach())).all())


@contextmanager
def _hooked(module: nn.Module, look: Callable[[str, nn.Module, Any], None]) -> Iterator[None]:
    hooks = [
        part.register_forward_hook(lambda part, _, output, name=name: look(name, part, output))
        for name, part in module.named_modules()
        if name and not isinstance(part, Absent)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_logs(module: L.LightningModule) -> Iterator[None]:
    """What a step logs inside is dropped."""
    module.__dict__["log"] = lambda *_, **__: None
    try:
        yield
    finally:
        module.__dict__.pop("log", None)
