"""A rank's memory at its highest is what the split predicts, and building the model never needs more than its share."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from memory import in_clean_process, keep_no_freed_memory, memory_bytes
from torch.utils.data import Dataset
from training import ordered, run, trainer_for

from lightning_3d import Layout
from lightning_3d.models.gpt import GPT, GPTConfig
from lightning_3d.models.language_model import LanguageModel

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's and glibc's own counters"),
]

# 59 million parameters, the largest tensor 2% of a rank's half of a float32 copy: what a step needs for a moment (a
# weight's gradient, AdamW's denominator) and the activations of 16 tokens are small beside the states.
LARGE = GPTConfig(vocab_size=512, hidden_size=640, num_layers=12, num_heads=10, max_sequence_length=4)
SMALL = GPTConfig(vocab_size=32, hidden_size=40, num_layers=12, num_heads=10, max_sequence_length=4)


class Texts(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.arange(index, index + 5)}


class Wasteful(LanguageModel):
    """Built in the constructor, whole on every rank, and with a second copy of the gradients."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.configure_model()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.copies = [p.grad.clone() for p in self.parameters() if p.grad is not None]


class Peaks(L.Callback):
    """The process's highest memory up to the first step, and up to the end; bytes."""

    def __init__(self) -> None:
        self.setup_bytes = self.run_bytes = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.setup_bytes = memory_bytes("VmHWM")

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.run_bytes = memory_bytes("VmHWM")


def measure(layout: str, kind: type[LanguageModel]) -> tuple[int, int]:
    """A rank's highest memory while it sets up and while it trains, over what a tiny model of the same kind left."""
    keep_no_freed_memory()
    fit(layout, kind, SMALL)
    # The highest so far is now: the kernel forgets what came before.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    peaks = fit(layout, kind, LARGE)
    return peaks.setup_bytes - before, peaks.run_bytes - before


def fit(layout: str, kind: type[LanguageModel], config: GPTConfig) -> Peaks:
    L.seed_everything(1, verbose=False)
    peaks = Peaks()
    loader = ordered(Texts(), replicas=1, global_batch=4)
    trainer_for(layout, max_steps=2, callbacks=[peaks]).fit(kind(config), loader)
    return peaks


def share_bytes(layout: str) -> list[int]:
    """Bytes of each rank's parameters: stages of six blocks, the embedding with the first and the head with the last;
    under tensor parallelism half of each matrix."""
    parsed = Layout.parse(layout)
    with torch.device("meta"):
        model = GPT(LARGE)

    def bytes_of(module: torch.nn.Module) -> int:
        sizes = [p.numel() // (parsed.tensor if p.dim() > 1 else 1) for p in module.parameters()]
        return 4 * sum(sizes)

    if parsed.pipeline == 1:
        return [bytes_of(model)] * parsed.tensor
    half = bytes_of(model.layers) // 2
    ends = (bytes_of(model.embed), bytes_of(model.norm) + bytes_of(model.head))
    return [half + end for end in ends for _ in range(parsed.tensor)]


def cut_off_bytes(layout: str) -> int:
    """Bytes of the largest tensor that tensor-parallel ranks draw as a whole and do not keep."""
    with torch.device("meta"):
        largest = max(p.numel() for p in GPT(LARGE).parameters())
    return 4 * (largest - largest // Layout.parse(layout).tensor)


def highest(layout: str, kind: type[LanguageModel] = LanguageModel) -> list[tuple[float, float]]:
    """Each rank's highest memory in units of the prediction.

    In setup that is its parameters, and one tensor as a whole before it is cut; in training its parameters, their
    gradients and AdamW's two moments.
    """
    measured = in_clean_process(run, layout, measure, kind)
    shares = share_bytes(layout)
    rest = cut_off_bytes(layout)
    return [(setup / (share + rest), peak / (4 * share)) for (setup, peak), share in zip(measured, shares, strict=True)]


MORE = ["pp2@gpipe", "pp2@interleaved1f1b", "tp2-pp2"]


@pytest.mark.parametrize("layout", ["pp2", "tp2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in MORE)])
def test_peak_memory_is_the_share_that_the_split_predicts(layout: str) -> None:
    for setup, peak in highest(layout):
        assert peak == pytest.approx(1.0, abs=0.1)
        # A whole model would be twice the share, or more.
        assert setup == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_a_whole_model_and_a_second_copy_of_gradients_would_be_seen() -> None:
    for setup, peak in highest("pp2", Wasteful):
        assert setup > 1.9
        assert peak > 1.2
