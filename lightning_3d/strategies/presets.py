"""The names that `Trainer(strategy=...)` knows, each `ThreeDStrategy` with some settings fixed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_3d.strategies.three_d import ThreeDStrategy

three_d: Callable[..., ThreeDStrategy] = ThreeDStrategy
zero1: Callable[..., ThreeDStrategy] = partial(ThreeDStrategy, zero_stage=1)
zero2: Callable[..., ThreeDStrategy] = partial(ThreeDStrategy, zero_stage=2)
zero3: Callable[..., ThreeDStrategy] = partial(ThreeDStrategy, zero_stage=3)
tensor_parallel: Callable[..., ThreeDStrategy] = partial(
    ThreeDStrategy, data_parallel_size=1, tensor_parallel_size="auto"
)
pipeline_parallel: Callable[..., ThreeDStrategy] = partial(
    ThreeDStrategy, data_parallel_size=1, pipeline_parallel_size="auto"
)

PRESETS: dict[str, Callable[..., ThreeDStrategy]] = {
    "3d": three_d,
    "tp": tensor_parallel,
    "pp": pipeline_parallel,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
}
