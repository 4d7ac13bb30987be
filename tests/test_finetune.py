"""A Hugging Face folder is fine-tuned in 3D and exported: all weights, or LoRA adapters alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.cli import main
from lightning_3d.data.tokenizer import END_OF_TEXT, train_tokenizer
from lightning_3d.errors import ConfigError, ModelError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from lightning_3d.models.huggingface import HFCausalLM  # noqa: E402

pytestmark = pytest.mark.distributed

VOCAB, STEPS = 300, 3
TOKENS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
LORA = {"r": 4, "lora_alpha": 8}


class Rows(Dataset):
    """Token rows of length 9; row i depends on i alone."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(index))}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama as save_pretrained writes it, in shards, with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    tokenizer = train_tokenizer(["def f(x):\n    return x\n" * 20], vocab_size=VOCAB)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
    fast.save_pretrained(folder)
    return folder


def tune(layout: str | None, base: Path, folder: Path, lora: dict[str, Any] | None) -> dict[str, Any]:
    """`layout` None is plain Lightning."""
    L.seed_everything(1, verbose=False)
    module = HFCausalLM(path=base, lora=lora, learning_rate=1e-2, max_steps=STEPS)
    recorder = Recorder()
    trainer = trainer_for(
        layout,
        max_steps=STEPS,
        precision="64-true",
        callbacks=[recorder, ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=STEPS)],
        enable_checkpointing=True,
    )
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data if layout else 1))
    optimizer = trainer.optimizers[0]
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.numel()}
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "weights": whole_weights(module),
        "trained": [name for name, p in module.named_parameters() if id(p) in trained],
        "states": sum(bool(state) for state in optimizer.state.values()),
    }


def mean_losses(ranks: list[dict[str, Any]]) -> list[float]:
    return [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]


@pytest.mark.parametrize("layout", ["zero3x2-tp2", pytest.param("tp2-pp2", marks=pytest.mark.slow)])
def test_fine_tuning_equals_one_process_and_transformers_loads_the_export(
    base: Path, tmp_path: Path, layout: str
) -> None:
    (expected,) = run(None, tune, base, tmp_path / "one", None)
    ranks = run(layout, tune, base, tmp_path / "run", None)
    assert mean_losses(ranks) == pytest.approx(expected["losses"], rel=1e-9)
    assert ranks[0]["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run" / f"step={STEPS}.ckpt"), "--to", "hf", str(out)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.float64
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected["weights"][f"model.{name}"], rtol=0, atol=1e-9), name
    # The base's tokenizer goes with it.
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token == END_OF_TEXT
    # Fine-tuning can go on from what was exported.
    again = HFCausalLM(path=out)
    again.configure_model()
    assert torch.allclose(again.token_logits(TOKENS).double(), model(TOKENS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layout", ["zero3x2-pp2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("zero2x2", "pp2"))]
)
def test_only_adapters_are_trained_and_peft_loads_them(base: Path, tmp_path: Path, layout: str) -> None:
    (expected,) = run("single", tune, base, tmp_path / "one", LORA)
    ranks = run(layout, tune, base, tmp_path / "run", LORA)
    assert mean_losses(ranks) == pytest.approx(expected["losses"], rel=1e-9)
    names = sorted({name for rank in ranks for name in rank["trained"]})
    # A and B of the two projections that PEFT adapts in a Llama, in four layers.
    assert names == sorted(expected["trained"]) and len(names) == 2 * 2 * 4 and all(".lora_" in name for name in names)
    assert expected["states"] == len(names)
    stored = transformers.AutoModelForCausalLM.from_pretrained(base).double()
    weights = {name: value for rank in ranks for name, value in rank["weights"].items()}
    for name, value in weights.items():
        assert torch.allclose(value, expected["weights"][name], rtol=0, atol=1e-9), name
        plain = name.removeprefix("model.base_model.model.").replace(".base_layer", "")
        if ".lora_" not in name:
            assert torch.equal(value, stored.state_dict()[plain]), name
    out = tmp_path / "adapter"
    checkpoint = str(tmp_path / "run" / f"step={STEPS}.ckpt")
    assert main(["export", checkpoint, "--to", "peft", str(out)]) == 0
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    adapted = peft.PeftModel.from_pretrained(stored, out, autocast_adapter_dtype=False).double()
    own = HFCausalLM.load_from_checkpoint(checkpoint).double().eval()
    assert torch.allclose(adapted(TOKENS).logits, own.token_logits(TOKENS), rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        plain_model = transformers.AutoModelForCausalLM.from_pretrained(base).double()
        assert torch.allclose(plain_model(TOKENS).logits, own.token_logits(TOKENS), rtol=1e-3, atol=1e-3)
    assert main(["export", checkpoint, "--to", "hf", str(tmp_path / "hf")]) == 2


def tune_refused(layout: str, base: Path, folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        tune(layout, base, folder, LORA)
    return str(caught.value)


def test_adapters_under_tensor_parallelism_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    for told in run("tp2", tune_refused, base, tmp_path):
        assert "LoRA" in told and "tensor_parallel_size=1" in told


def test_lora_settings_that_would_be_lost_are_refused(base: Path) -> None:
    for wrong in ({"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"r": 0}, {"rank": 4}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            HFCausalLM(path=base, lora=wrong)
    with pytest.raises(ConfigError, match="PEFT refuses"):
        HFCausalLM(path=base, lora={"target_modules": ["no_such_layer"]}).configure_model()


@pytest.mark.slow
def test_the_recipe_trains_a_folder_generates_and_is_exported(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    text = tmp_path / "texts"
    text.mkdir()
    for number in range(6):
        (text / f"{number}.txt").write_text("def f(x):\n    return x\n" * 40)
    run_dir = tmp_path / "run"
    settings = [
        "recipe=finetune_hf", f"model.path={base}", "layout=tp2-pp2", f"data.files=[{text}/*.txt]",
        "data.sequence_length=16", "data.global_batch_size=8", f"data.cache_dir={tmp_path}/cache", f"run_dir={run_dir}",
        "trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.limit_val_batches=1", "logger=none",
        "callbacks.checkpoint.every_n_train_steps=2", "callbacks=with_samples", "callbacks.samples.max_new_tokens=3",
    ]  # fmt: skip
    assert main(["train", *settings]) == 0
    assert "'def ' -> 'def " in capfd.readouterr().out
    assert main(["generate", str(run_dir), "prompt=def ", "max_new_tokens=4", "temperature=0"]) == 0
    assert capfd.readouterr().out.startswith("def ")
    assert main(["export", str(run_dir), "--to", "hf", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
