"""`lightning-3d verify` in float64, all kinds of layouts on all kinds of models; `make verify-all` shows the tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cli_verify import rows

from lightning_3d.cli import main

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(3600)]

LAYOUTS = [
    "pp2", "pp2@gpipe", "pp2@interleaved1f1b", "pp4", "tp2", "tp4", "tp2-pp2", "dp2-tp2-pp2", "zero1x2-tp2-pp2",
    "zero2x2-pp2", "zero3x2-tp2-pp2", "hsdp2x2-tp2",
]  # fmt: skip

TEXT = [
    "data.max_bytes=60000",
    "data.vocab_size=300",
    "data.sequence_length=16",
    "data.global_batch_size=8",
    "model.warmup_steps=0",
]
GPT = ["recipe=stdlib_gpt", *TEXT, "model.config.hidden_size=32"]
HUGGING_FACE = ["recipe=stdlib_llama_hf", *TEXT]
MODELS = {
    "gpt": GPT,
    "gpt, tied": [*GPT, "model.config.tie_embeddings=true"],
    "llama, tied, two heads of keys": [
        *HUGGING_FACE,
        "model.config.hidden_size=32",
        "model.config.intermediate_size=64",
        "model.config.tie_word_embeddings=true",
    ],
    "gpt2": [*HUGGING_FACE, "model=gpt2_hf", "model.config.n_embd=32"],
    "mlp": ["recipe=digits_mlp", "model.hidden_size=16", "model.num_hidden_layers=4", "data.global_batch_size=16"],
}


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_layout_trains_as_one_process_in_float64(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["verify", *MODELS[model], f"layouts=[{','.join(LAYOUTS)}]", "steps=4"])
    output = capsys.readouterr().out
    print(f"{model}\n{output}")
    assert code == 0
    assert list(rows(output)) == ["single", *LAYOUTS]
