"""Every so many steps a step is computed twice, and what differs by a bit is told: hardware that computes wrong.

Both runs have the same batch, weights and random numbers. The losses of a rank and its own gradients, before they are
combined with those of other data-parallel ranks, are compared, so that the rank is known that computes wrong; the ranks
of one tensor- or pipeline-parallel group hand each other numbers, so all of them may be named. Code of the user's that
runs in the step runs twice; logs, buffers, torchmetrics and random numbers are as after one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_3d.checkpoint.random_state import random_state, set_random_state
from lightning_3d.errors import ConfigError, NumbersError
from lightning_3d.parallel.local import local_tensor
from lightning_3d.parallel.share import Share
from lightning_3d.parallel.zero import fsdp_parameters


class Replay:
    """Compares one step with another run of it.

    Args:
        module: laid out.
        share: this rank's of it.
    """

    def __init__(self, module: L.LightningModule, share: Share) -> None:
        self._module = module
        self._share = share

    def compare(self, step: Callable[[], Any], again: Callable[[], Any]) -> Any:
        """`step()`, whose gradients stay, after `again()` was found to give the same; collective.

        Args:
            step: forward and backward; its result is returned, the loss or None.
            again: the same without logs or counters.

        Raises:
            NumbersError: on all ranks, with the rank and the first parameter that differ.
        """
        random, state = random_state(), _state(self._module)
        with self._gradients() as first:
            loss = step()
        after = random_state(), _state(self._module)
        kept = [(p, p.grad) for p in self._module.parameters()]
        first |= _bits({name: p.grad for name, p in self._module.named_parameters()}, "combined")
        for parameter, _ in kept:
            parameter.grad = None
        set_random_state(random)
        _restore(self._module, state)
        with self._gradients() as second:
            other = again()
        second |= _bits({name: p.grad for name, p in self._module.named_parameters()}, "combined")
        for parameter, gradient in kept:
            parameter.grad = gradient
        set_random_state(after[0])
        _restore(self._module, after[1])
        self._tell({**_bits({"": loss}, "loss"), **first}, {**_bits({"": other}, "loss"), **second})
        return loss

    @contextmanager
    def _gradients(self) -> Iterator[dict[str, list[int]]]:
        """Bits of the gradients that the backward makes on this rank, before any rank's are combined."""
        found: dict[str, list[int]] = {}
        watched = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        names = {id(p): name for name, p in watched.items()}
        for root in self._share.roots:
            for record in fsdp_parameters(root):
                # What the backward sees; it is there once the step has run.
                if id(record.sharded_param) in names and hasattr(record, "_unsharded_param"):
                    watched[names[id(record.sharded_param)]] = record._unsharded_param

        def note(name: str, gradient: torch.Tensor) -> None:
            found.setdefault(f"own {name}", []).append(_checksum(gradient))

        hooks = [
            p.register_hook(lambda gradient, name=name: note(name, gradient))
            for name, p in watched.items()
            if p.requires_grad
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def _tell(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
        different = [name for name in {**first, **second} if first.get(name) != second.get(name)]
        own = [name for name in different if not name.startswith("combined")]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, next(iter([*own, *different]), None))
        if not any(found):
            return
        # What was combined differs on ranks that have computed right.
        ranks = [rank for rank, name in enumerate(found) if name and not name.startswith("combined")]
        ranks = ranks or [rank for rank, name in enumerate(found) if name]
        places: dict[str, list[str]] = {}
        for rank in ranks:
            kind, _, name = str(found[rank]).partition(" ")
            places.setdefault("its loss" if kind == "loss" else f"the gradient of {name}", []).append(str(rank))
        where = "; ".join(f"on rank {', '.join(ranks)} {what}" for what, ranks in places.items())
        raise NumbersError(
            f"step {self._module.trainer.global_step} gave other numbers when it was computed again: {where} is the "
            "first that differs by a bit. The step draws or counts what a second run does not repeat, or uses kernels "
            "that are not deterministic (set torch.use_deterministic_algorithms(True)), or the hardware of that rank, "
            "or of one of these, computes wrong: replace it."
        )


def check_replay(value: object) -> int:
    """
    Raises:
        ConfigError: no whole number of steps.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"replay_every_n_steps={value!r} is no number of steps. Set 0 for never, or 1000, say.")
    return value


def refuse_windows(*, accumulate_grad_batches: int, automatic_optimization: bool = True) -> None:
    """
    Raises:
        ConfigError: accumulation, whose earlier batches a second run would need, or manual optimization.
    """
    if accumulate_grad_batches > 1 or not automatic_optimization:
        raise ConfigError(
            "replay_every_n_steps computes a whole step twice, which needs automatic optimization and one batch to a "
            f"step, but accumulate_grad_batches={accumulate_grad_batches} and automatic_optimization="
            f"{automatic_optimization}. Set replay_every_n_steps=0 here."
        )


def _bits(tensors: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {f"{kind} {name}": _checksum(value) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bits, each with a weight of its place; equal for equal bits."""
    flat = local_tensor(tensor.detach()).contiguous().flatten()
    words = flat.view(_WORDS[flat.element_size()]).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=words.device) * 2654435761 + 1
    return int((words * places).sum())


def _state(module: nn.Module) -> dict[str, Any]:
    """What a step may change besides gradients."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    names = ("_update_count", "_computed", "_forward_cache")
    return {
        "buffers": [buffer.clone() for buffer in module.buffers()],
        "metrics": [
            {name: deepcopy(vars(metric)[name]) for name in (*metric._defaults, *names) if name in vars(metric)}
            for metric in metrics
        ],
    }


@torch.no_grad()
def _restore(module: nn.Module, state: Mapping[str, Any]) -> None:
    for buffer, saved in zip(module.buffers(), state["buffers"], strict=True):
        buffer.copy_(saved)
    for metric, saved in zip((m for m in module.modules() if isinstance(m, Metric)), state["metrics"], strict=True):
        vars(metric).update(deepcopy(saved))
