"""Data, tensor and pipeline parallelism with ZeRO sharding for ordinary LightningModules: ``Trainer(strategy="3d")``."""

from lightning_3d.errors import Lightning3DError
from lightning_3d.layout import Layout
from lightning_3d.strategies.register import register
from lightning_3d.strategies.three_d import ThreeDStrategy

__version__ = "0.1.0"
__all__ = ["Layout", "Lightning3DError", "ThreeDStrategy", "__version__"]

register()
