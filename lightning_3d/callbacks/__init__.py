"""What a run tells of itself besides its loss."""

from lightning_3d.callbacks.gradient_norm import GradientNorm
from lightning_3d.callbacks.sample_text import SampleText
from lightning_3d.callbacks.stragglers import Stragglers
from lightning_3d.callbacks.throughput import Throughput

__all__ = ["GradientNorm", "SampleText", "Stragglers", "Throughput"]
