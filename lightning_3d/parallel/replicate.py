"""ZeRO stage 0: every rank holds the whole model, gradients are averaged while the backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from lightning_3d.errors import ModelError
from lightning_3d.parallel.local import local_tensor, to_device
from lightning_3d.parallel.share import Share

# A bucket is large enough to use a link well and small enough to be sent while the backward goes on (DDP's default).
BUCKET_BYTES = 25 * 2**20


@dataclass
class _Bucket:
    """Parameters whose gradients travel together."""

    parameters: list[nn.Parameter]
    waiting: set[int] = field(default_factory=set)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None


class ReplicatedModule(Share):
    """A module that every rank of `group` holds whole, with equal weights."""

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup) -> None:
        super().__init__(module)
        self._averager = GradientAverager(list(module.parameters()), group=group)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._averager.follow_frozen()
        result = function(*args, **kwargs)
        self._averager.follow_unfrozen()
        return result

    def no_sync(self) -> AbstractContextManager[None]:
        return self._averager.paused()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        self._averager.follow_unfrozen()
        with self._averager.backward_pass():
            yield


class GradientAverager:
    """Averages gradients over `group`, bucket by bucket, as the backward produces them.

    Each bucket carries one number per parameter that tells how many ranks had a gradient: a parameter that no rank
    used keeps `grad` None (an optimizer then leaves it alone, as in one process), one that some ranks used is averaged
    with zeros for the others. Averaging an averaged gradient changes nothing, so several backwards may precede a step.

    Args:
        parameters: whole on every rank, in the same order.
        group: the data-parallel ranks.
        at_end: send nothing while the backward goes on.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        at_end: bool = False,
    ) -> None:
        self._parameters = parameters
        self._at_end = at_end
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._hooks: dict[int, Any] = {}
        self._next = 0
        # Whether a backward has begun to send, and whether the one that `backward_pass` is around has ended.
        self._reducing = self._finished = False
        self._enabled, self._inside_pass = True, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients only accumulate on this rank inside."""
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Around a backward: its end averages all gradients, also where the loss has reached no parameter; collective.

        What hooks send before is only ahead of that.
        """
        self._forget()
        self._inside_pass = True
        try:
            yield
        finally:
            self._inside_pass = False
        if self._enabled and not self._finished:
            self._begin()
            self._finish()

    def follow_frozen(self) -> None:
        """To be called before each forward: parameters may have been frozen or unfrozen since the last."""
        self._forget()
        self._average([p for p in self._parameters if p.requires_grad])

    def follow_unfrozen(self) -> None:
        """To be called before each backward: the step may have unfrozen parameters, or frozen some that it had used."""
        self._average([p for p in self._parameters if p.requires_grad or id(p) in self._bucket_of])

    def _average(self, parameters: list[nn.Parameter]) -> None:
        wanted = {id(p): p for p in parameters}
        if wanted.keys() == self._bucket_of.keys():
            return
        for key in self._hooks.keys() - wanted.keys():
            self._hooks.pop(key).remove()
        for key in wanted.keys() - self._hooks.keys():
            self._hooks[key] = wanted[key].register_post_accumulate_grad_hook(self._on_gradient)
        # Gradients come in the reverse of the forward's order, which is about the order of registration.
        self._buckets = list(_pack(parameters[::-1], self._bucket_bytes))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._enabled or (self._at_end and self._inside_pass):
            return
        if not self._reducing:
            self._begin()
            Variable._execution_engine.queue_callback(self._finish)
        bucket = self._bucket_of[id(parameter)]
        if bucket.work is not None:
            raise ModelError(
                "a parameter received a gradient twice in one backward, after the first was already sent. "
                "Reentrant checkpointing does that: use torch.utils.checkpoint(..., use_reentrant=False)."
            )
        bucket.waiting.discard(id(parameter))
        # All ranks must send in the same order, so a full bucket waits for those before it.
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._send(self._buckets[self._next])
            self._next += 1

    def _begin(self) -> None:
        self._reducing, self._next = True, 0
        for bucket in self._buckets:
            bucket.waiting = {id(p) for p in bucket.parameters}

    def _forget(self) -> None:
        """A backward that raised has left what it sent."""
        self._reducing = self._finished = False
        for bucket in self._buckets:
            bucket.work = bucket.flat = None

    def _send(self, bucket: _Bucket) -> None:
        # Tensor-parallel parameters are replicated part by part.
        held = [local_tensor(p) for p in bucket.parameters]
        used = _flags([p.grad is not None for p in bucket.parameters], like=held[0])
        parts = [
            torch.zeros_like(mine).flatten() if p.grad is None else local_tensor(p.grad).flatten()
            for p, mine in zip(bucket.parameters, held, strict=True)
        ]
        flat = torch.cat([*parts, used])
        flat[: -len(used)].div_(self._group.size())
        bucket.flat = flat
        bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)

    def _finish(self) -> None:
        """What the backward left: buckets with unused parameters, then all results back into `grad`."""
        self._reducing, self._finished = False, True
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        for bucket in self._buckets:
            assert bucket.work is not None and bucket.flat is not None
            bucket.work.wait()
            sizes = [local_tensor(p).numel() for p in bucket.parameters]
            *averages, used = bucket.flat.split([*sizes, len(sizes)])
            # Read only where it tells something: what this rank has used is used, and reading waits for the device.
            unused_here = any(p.grad is None for p in bucket.parameters)
            counts = used.tolist() if unused_here else [1.0] * len(sizes)
            for parameter, average, count in zip(bucket.parameters, averages, counts, strict=True):
                if count == 0:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                mine = local_tensor(parameter.grad)
                mine.copy_(average.view_as(mine))
            bucket.work = bucket.flat = None


def _flags(values: list[bool], *, like: torch.Tensor) -> torch.Tensor:
    """As numbers; where all are equal, as nearly always, nothing is copied to the device."""
    if len(set(values)) == 1:
        return like.new_full((len(values),), float(values[0]))
    return to_device(values, like.device, like.dtype)


def _pack(parameters: list[nn.Parameter], bucket_bytes: int) -> Iterator[_Bucket]:
    pending: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    size: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        pending.setdefault(key, []).append(parameter)
        size[key] = size.get(key, 0) + parameter.numel() * parameter.element_size()
        if size[key] >= bucket_bytes:
            yield _Bucket(pending.pop(key))
            size[key] = 0
    for rest in pending.values():
        yield _Bucket(rest)
