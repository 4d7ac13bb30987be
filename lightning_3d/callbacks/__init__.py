"""What a run tells of itself besides its loss."""

from lightning_3d.callbacks.gradient_norm import GradientNorm
from lightning_3d.callbacks.throughput import Throughput

__all__ = ["GradientNorm", "Throughput"]
