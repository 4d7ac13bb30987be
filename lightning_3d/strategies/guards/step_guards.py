"""What a user's step may not do without notice where the module's other parts are on other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_3d.errors import ModelError
from lightning_3d.parallel.placeholder import Absent


class PartialModules:
    """Modules of which this rank has a part: a sum over all their parameters would be a sum over some.

    Args:
        module: dealt out over a pipeline.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = {
            name: part
            for name, part in module.named_modules()
            if any(isinstance(inner, Absent) for inner in part.modules()) and not isinstance(part, Absent)
        }

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Asking for more than the first parameter (which tells a device or dtype) raises a ModelError inside."""
        for name, part in self._modules.items():
            part.__dict__["named_parameters"] = _one_only(name, part)
        try:
            yield
        finally:
            for part in self._modules.values():
                del part.__dict__["named_parameters"]


def _one_only(name: str, part: nn.Module) -> Any:
    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        found = type(part).named_parameters(part, *args, **kwargs)
        if kwargs.get("recurse") is False:
            yield from found
            return
        yield next(found)
        raise ModelError(
            f"the step goes through all parameters of {name or type(part).__name__}, but each pipeline rank has a part "
            "of them. Use the optimizer's weight_decay for a penalty on weights, or set pipeline_parallel_size=1."
        )

    return named_parameters


class SharedBuffers:
    """Buffers that every stage has: what a step makes of them after the model's call, only the last stage knows.

    Args:
        module: dealt out over a pipeline.
        own: the parts that one stage alone has.
    """

    def __init__(self, module: nn.Module, *, own: list[nn.Module]) -> None:
        private = {id(buffer) for part in own for buffer in part.buffers()}
        self._owners = [
            (part, key, f"{name}.{key}" if name else key)
            for name, part in module.named_modules()
            for key, buffer in part.named_buffers(recurse=False)
            if id(buffer) not in private
        ]
        # The tensors themselves: the address of one that was replaced may be another's by now.
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}
        self.changed()

    def changed(self) -> dict[str, torch.Tensor]:
        """Those that were written to, or replaced, since the last call."""
        found = {}
        for part, key, name in self._owners:
            buffer = part._buffers[key]
            if buffer is None:
                continue
            known = self._seen.get(name)
            if known is None or known[0] is not buffer or known[1] != buffer._version:
                found[name] = buffer
            self._seen[name] = buffer, buffer._version
        return found

    @torch.no_grad()
    def update(self, values: dict[str, torch.Tensor]) -> None:
        """Take over the last stage's."""
        for part, key, name in self._owners:
            if name in values:
                part._buffers[key] = values[name].to(values[name].device, copy=True)
        self.changed()
