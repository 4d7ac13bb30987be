"""Data, tensor and pipeline parallelism with ZeRO for ordinary LightningModules: ``Trainer(strategy="3d")``."""

from typing import TYPE_CHECKING, Any

from lightning_3d.errors import Lightning3DError
from lightning_3d.layout import Layout
from lightning_3d.strategies.register import register

if TYPE_CHECKING:
    from lightning_3d.strategies.three_d import ThreeDStrategy

__version__ = "0.1.0"
__all__ = ["Layout", "Lightning3DError", "ThreeDStrategy", "__version__"]

register()


def __getattr__(name: str) -> Any:
    # torch and Lightning take seconds to import: a layout, a help text or a check of a config need neither.
    if name == "ThreeDStrategy":
        from lightning_3d.strategies.three_d import ThreeDStrategy

        return ThreeDStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
