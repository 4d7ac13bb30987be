"""LoRA adapters (PEFT's layers) on layers that tensor parallelism splits.

An adapted layer computes W x + s B A x, with W frozen. Where W's outputs are split, B's are split alike and A stays
whole: each rank has a part of the gradients of A and of x, and one copy into the split region serves W and A. Where
W's inputs are split, A's are split alike; their few products are summed, and B stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lightning_3d.errors import ModelError
from lightning_3d.parallel import tensor
from lightning_3d.parallel.tensor import Region


class _Inside(Region):
    """For a layer that reads what is in the split region already, whose gradient is a part of the sum."""

    def copy_in(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def enter(self, hidden: torch.Tensor, *, training: bool) -> None:
        """The layer below the adapters has entered it."""

    def leave(self, hidden: torch.Tensor) -> None:
        """The layer below the adapters has left it, where its outputs are gathered."""


def has_adapters(module: object) -> bool:
    """Whether this is a layer of PEFT's that adds LoRA to another."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def plain_layer(module: Any) -> Any:
    """The layer that a module adapts; itself where it adapts none."""
    return module.base_layer if has_adapters(module) else module


def check_adapted(name: str, layer: nn.Module, style: str) -> None:
    """
    Raises:
        ModelError: adapters of a kind that tensor parallelism does not split.
    """
    if layer.lora_embedding_A:
        what = "LoRA adapters of an embedding"
    elif layer.lora_variant:
        what = f"adapters of a variant of LoRA ({', '.join(type(v).__name__ for v in layer.lora_variant.values())})"  # type: ignore[operator]
    elif style.startswith("replicate"):
        what = f"LoRA adapters and the style {style!r}"
    else:
        return
    raise ModelError(
        f"{name} has {what}, which tensor parallelism does not split. Take {name.rpartition('.')[2]} from "
        "lora.target_modules, or set tensor_parallel_size=1 and use ZeRO or a pipeline, e.g. layout=zero3x2-pp2."
    )


def split_parts(layer: nn.Module, style: str) -> list[nn.Module]:
    """What `apply_colwise` and `apply_rowwise` deal with; other parts are used as any whole layer outside is."""
    first, second = _of_all(layer, "lora_A"), _of_all(layer, "lora_B")
    return [plain_layer(layer), *first, *(second if style != "rowwise" else ())]


def apply_colwise(
    name: str, layer: nn.Module, region: Region, *, split: Callable[[str, nn.Module, Region], None]
) -> None:
    """Split the outputs of a layer and of its adapters.

    Args:
        split: splits a Linear's outputs, that of the layer and of each B alike.
    """
    inside = _Inside(region.mesh, loss_parallel=region.loss_parallel)
    inside.owners = region.owners
    layer.register_forward_pre_hook(lambda _, args: (region.copy_in(args[0]), *args[1:]))
    split(f"{name}.base_layer", plain_layer(layer), region)
    for first in _of_all(layer, "lora_A"):
        tensor.apply_replicate(name, first, region)
    for second in _of_all(layer, "lora_B"):
        split(f"{name}.lora_B", second, inside)
    # Drawn alike, although the layer below has entered the split region: what it falls on is whole.
    _apply_dropout(layer, region.common_stream)


def apply_rowwise(name: str, layer: nn.Module, region: Region) -> None:
    """Split the inputs of a layer and of its adapters."""
    tensor.apply_rowwise(f"{name}.base_layer", plain_layer(layer), region)
    for first in _of_all(layer, "lora_A"):
        tensor.apply_rowwise(f"{name}.lora_A", first, region)

    @contextmanager
    def own_stream(hidden: torch.Tensor) -> Iterator[None]:
        # Again, for the layer below has left the split region, and what it falls on is split.
        region.enter(hidden, training=True)
        try:
            yield
        finally:
            region.leave(hidden)

    _apply_dropout(layer, own_stream)


def _apply_dropout(layer: nn.Module, stream: Callable[[torch.Tensor], Any]) -> None:
    def forward(self: nn.Dropout, hidden: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return hidden
        with stream(hidden):
            return F.dropout(hidden, self.p)

    for dropout in _of_all(layer, "lora_dropout"):
        if isinstance(dropout, nn.Dropout):
            tensor.set_forward(dropout, forward)


def _of_all(layer: nn.Module, part: str) -> list[nn.Module]:
    """A part of each of a layer's adapters, by their names."""
    return list(getattr(layer, part).values())
