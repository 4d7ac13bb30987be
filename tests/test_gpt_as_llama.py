"""The reference GPT, trained in any layout, is a Llama to transformers: the same logits, the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Rows
from training import ordered, run, trainer_for

from lightning_3d import Layout
from lightning_3d.cli import main
from lightning_3d.models.gpt import GPTConfig
from lightning_3d.models.language_model import LanguageModel

pytestmark = pytest.mark.distributed

# Nothing at its default: a field that is not carried over would change the logits.
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48,
    "max_sequence_length": 24, "rope_theta": 500.0, "norm_eps": 1e-2, "dropout": 0.1,
}  # fmt: skip


class Texts(Rows):
    def __getitem__(self, index: int) -> Any:
        return {"tokens": super().__getitem__(index)}


def train(layout: str, folder: Path, tied: bool) -> None:
    L.seed_everything(1, verbose=False)
    module = LanguageModel({**SIZES, "tie_embeddings": tied}, learning_rate=1e-1, max_steps=3)
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3)
    trainer = trainer_for(layout, max_steps=3, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, ordered(Texts(), replicas=Layout.parse(layout).data))


@pytest.mark.parametrize(("layout", "tied"), [("tp2-pp2", False), ("zero3x2", True)])
def test_transformers_computes_the_same_logits_from_the_exported_folder(
    tmp_path: Path, layout: str, tied: bool, capsys: pytest.CaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    run(layout, train, tmp_path, tied)
    source, out = tmp_path / "step=3.ckpt", tmp_path / "hf"
    assert main(["export", str(source), "--to", "hf", str(out)]) == 0
    assert "left out: optimizer states\n" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    own = LanguageModel.load_from_checkpoint(source).eval()
    tokens = torch.stack([Rows()[index][:16] for index in range(4)])
    with torch.no_grad():
        theirs, ours = model(input_ids=tokens).logits, own.token_logits(tokens)
    # transformers computes its rotary angles in float32.
    assert ours.abs().max() > 0.1
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert model.config.tie_word_embeddings is tied
    assert GPTConfig.__dataclass_fields__.keys() == {*SIZES, "tie_embeddings"}
