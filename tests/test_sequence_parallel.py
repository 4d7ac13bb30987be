"""Sequence parallelism changes what a rank holds between split layers, and nothing that is computed."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows, TinyGPT
from pipelined_modules import HuggingFace
from test_pipeline_parity import united
from test_zero_parity import largest_difference, replicas
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.errors import LaunchError

pytestmark = pytest.mark.distributed


def fit(layout: str | None, kind: str, length: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    torch.set_default_dtype(torch.float64)
    recorder = Recorder()
    module = TinyGPT() if kind == "gpt" else HuggingFace(kind, labels=False)
    widths: list[int] = []
    trainer = trainer_for(
        layout,
        sequence_parallel=True,
        max_steps=4,
        precision="64-true",
        gradient_clip_val=0.3,
        callbacks=[recorder],
    )
    for name, part in module.named_modules():
        if name.endswith(("feed_forward_norm", "post_attention_layernorm", "ln_2")):
            part.register_forward_hook(lambda _, __, output: widths.append(output.shape[1]))
    rows = [Rows()[index][: length + 1] for index in range(40)]
    trainer.fit(module, ordered(rows, replicas=replicas(layout)))  # type: ignore[arg-type]
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "weights": whole_weights(module),
        "widths": set(widths),
    }


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("gpt", "tp2"), ("gpt", "tp4"), ("gpt", "tp2-pp2"), ("gpt", "zero3x2-tp2"), ("llama", "tp2"), ("gpt2", "tp2")],
)
def test_parts_of_the_sequence_train_as_the_whole(kind: str, layout: str) -> None:
    expected, ranks = run(None, fit, kind, 16)[0], run(layout, fit, kind, 16)
    # transformers computes norms and rotary tables in float32.
    tolerance = 1e-9 if kind == "gpt" else 1e-6
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert got["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        assert got["widths"] == {16 // Layout.parse(layout).tensor}
    if kind == "gpt":
        assert largest_difference(united(ranks), expected["weights"]) < 1e-9


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LaunchError, match="multiple of 2, or set sequence_parallel=False"):
        run("tp2", fit, "gpt", 15)
