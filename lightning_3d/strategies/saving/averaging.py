"""Lightning's WeightAveraging (EMAWeightAveraging, say) on a sharded model: each rank averages its own part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.local import local_tensor
from lightning_3d.parallel.share import Share
from lightning_3d.strategies.saving.weights import placed


def refuse_whole_averages(trainer: L.Trainer) -> None:
    """
    Raises:
        ConfigError: StochasticWeightAveraging, which averages whole weights and swaps schedulers before they are
            restored.
    """
    if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigError(
            "StochasticWeightAveraging needs whole weights on every rank. Use lightning.pytorch.callbacks."
            "WeightAveraging (equal weights, the SWA average) or EMAWeightAveraging, which work in every layout."
        )


def leave_averages_to_strategy(trainer: L.Trainer) -> None:
    """Before the callbacks' `setup`, which would copy the whole model on every rank."""
    for callback in _averaging(trainer):
        if type(callback).setup is WeightAveraging.setup:
            callback.setup = MethodType(_no_copy, callback)  # type: ignore[method-assign]


def average_shards(trainer: L.Trainer, share: Share) -> None:
    """Give the callbacks an average of this rank's part, once the model is laid out."""
    for callback in _averaging(trainer):
        device = callback._device
        here = next(share.module.parameters(), torch.zeros(0)).device
        if device is not None and not _is_at(here, torch.device(device)):
            raise ConfigError(
                f"{type(callback).__name__}(device={device!r}) is not where the weights are ({here}). Leave it out: "
                "the average is sharded as the weights are."
            )
        callback._average_model = ShardedAverage(share, use_buffers=callback._use_buffers, **callback._kwargs)  # type: ignore[assignment]


class ShardedAverage:
    """What WeightAveraging uses of torch's AveragedModel, over one rank's part of a module.

    Args:
        share: of the module.
        settings: for AveragedModel; functions see parts of tensors.
    """

    def __init__(self, share: Share, **settings: Any) -> None:
        self._share = share
        share.reshard()
        parts: Any = AveragedModel(_Parts(share.module), **settings)
        self._average = parts
        self._module = _Averaged(share.module, [*parts.module.parameters(), *parts.module.buffers()])

    @property
    def module(self) -> _Averaged:
        """The average, placed as the module is. What follows in the callback looks at the module's own parts."""
        self._share.reshard()
        return self._module

    def update_parameters(self, module: nn.Module) -> None:
        self._share.reshard()
        self._average.update_parameters(_Parts(module))

    def state_dict(self) -> dict[str, Any]:
        averages = {f"module.{name}": value for name, value in self._module.state_dict().items()}
        return {"n_averaged": self._average.n_averaged.clone(), **averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._average.n_averaged.copy_(state["n_averaged"])
        prefix = "module."
        self._module.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})


class _Parts(nn.Module):
    """The local parts of a module's parameters and buffers, in their order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            nn.Parameter(local_tensor(p.detach()), requires_grad=False) for p in module.parameters()
        )
        for index, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer_{index}", local_tensor(buffer.detach()))


class _Averaged:
    """Averages with the names, order and placements of a module's parameters and buffers."""

    def __init__(self, module: nn.Module, parts: list[torch.Tensor]) -> None:
        originals = [*module.parameters(), *module.buffers()]
        averages = [_placed_as(original, part) for original, part in zip(originals, parts, strict=True)]
        count = len(list(module.parameters()))
        self._parameters, self._buffers = averages[:count], averages[count:]
        by_id = {id(original): average for original, average in zip(originals, averages, strict=True)}
        named = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self._by_name = {name: by_id[id(named[name])] for name in module.state_dict() if name in named}

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters)

    def buffers(self) -> Iterator[torch.Tensor]:
        return iter(self._buffers)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._by_name)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        for name, average in self._by_name.items():
            if strict or name in state:
                average.copy_(placed(state[name], average))


def _is_at(here: torch.device, wanted: torch.device) -> bool:
    """Without a number, any device of the kind."""
    return here.type == wanted.type and wanted.index in (None, here.index)


def _placed_as(original: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    part = part.detach()
    if not isinstance(original, DTensor):
        return part
    return DTensor.from_local(
        part,
        original.device_mesh,
        original.placements,
        run_check=False,
        shape=original.shape,
        stride=original.stride(),
    )


def _averaging(trainer: L.Trainer) -> list[WeightAveraging]:
    return [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]  # type: ignore[attr-defined]


def _no_copy(callback: WeightAveraging, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
    """Stands for WeightAveraging.setup."""
