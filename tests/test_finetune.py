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
from lightning_3d.cli.fit import check_model
from lightning_3d.data.tokenizer import END_OF_TEXT, train_tokenizer
from lightning_3d.errors import ConfigError, Lightning3DError, ModelError
from lightning_3d.parallel import adapters, tensor
from lightning_3d.parallel.tensor import Region
from lightning_3d.parallel.tensor_plan import resolve_plan
from lightning_3d.strategies.guards.whole_gradients import WholeGradients

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from lightning_3d.models.huggingface import HFCausalLM  # noqa: E402

pytestmark = pytest.mark.distributed

VOCAB, STEPS = 300, 3
MAX_NORM = 0.05
TOKENS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
# PEFT's own choice of layers, and all that a block of a Llama has: with split outputs, and with split inputs.
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}
SPLIT_OUTPUTS, SPLIT_INPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
LORA_EVERYWHERE = {**LORA, "target_modules": [*SPLIT_OUTPUTS, *SPLIT_INPUTS]}


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


def tune(
    layout: str | None, base: Path, folder: Path, lora: dict[str, Any] | None, strategy: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`layout` None is plain Lightning."""
    return fit(layout, HFCausalLM(path=base, lora=lora, learning_rate=1e-2, max_steps=STEPS), folder, strategy or {})


def fit(
    layout: str | None,
    module: HFCausalLM,
    folder: Path,
    strategy: dict[str, Any],
    *callbacks: L.Callback,
    resumed_from: Path | None = None,
) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder = Recorder()
    trainer = trainer_for(
        layout,
        **strategy,
        max_steps=STEPS,
        precision="64-true",
        gradient_clip_val=MAX_NORM,
        callbacks=[
            recorder,
            ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
            *callbacks,
        ],
        enable_checkpointing=True,
    )
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data if layout else 1), ckpt_path=resumed_from)
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


def assert_equal(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert mean_losses(ranks) == pytest.approx(expected["losses"], rel=1e-9)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        for name, value in rank["weights"].items():
            assert torch.allclose(value, expected["weights"][name], rtol=0, atol=1e-9), name


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        ("zero3x2-pp2", LORA),
        ("tp2", LORA_EVERYWHERE),
        ("tp2-pp2", LORA_EVERYWHERE),
        *(pytest.param(layout, LORA, marks=pytest.mark.slow) for layout in ("zero2x2", "pp2")),
        pytest.param("zero3x2-tp2", LORA_EVERYWHERE, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value.get('target_modules', 'qv'))}-targets",
)
def test_only_adapters_are_trained_and_peft_loads_them(
    base: Path, tmp_path: Path, layout: str, lora: dict[str, Any]
) -> None:
    (expected,) = run("single", tune, base, tmp_path / "one", lora)
    ranks = run(layout, tune, base, tmp_path / "run", lora)
    assert_equal(ranks, expected)
    assert min(expected["norms"]) > MAX_NORM
    names = sorted({name for rank in ranks for name in rank["trained"]})
    # A and B of each projection in four layers; PEFT itself adapts two in a Llama.
    assert names == sorted(expected["trained"]) and all(".lora_" in name for name in names)
    assert len(names) == expected["states"] == 2 * len(lora.get("target_modules", ("q_proj", "v_proj"))) * 4
    stored = transformers.AutoModelForCausalLM.from_pretrained(base).double()
    for name, value in {name: value for rank in ranks for name, value in rank["weights"].items()}.items():
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


# ---------------------------------------------------------------------- adapters under tensor parallelism


def llama(**config: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
    return transformers.LlamaConfig(**{**sizes, **config})


KINDS: dict[str, tuple[str, Any, list[str], dict[str, Any]]] = {
    "fewer key heads than ranks": ("tp4", llama(num_key_value_heads=2), [*SPLIT_OUTPUTS, *SPLIT_INPUTS], {}),
    "parts of the sequence": (
        "tp2", llama(num_key_value_heads=2), [*SPLIT_OUTPUTS, *SPLIT_INPUTS], {"sequence_parallel": True},
    ),
    "tied output layer": ("tp2", llama(tie_word_embeddings=True), ["q_proj", "lm_head"], {}),
    "split logits": ("tp2", llama(), ["q_proj", "lm_head"], {"loss_parallel": True}),
    "packed query, key and value": (
        "tp2",
        transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        ),
        ["c_attn", "c_fc", "c_proj"],
        {},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_each_kind_of_split_layer_train_as_in_one_process(tmp_path: Path, kind: str) -> None:
    layout, config, targets, strategy = KINDS[kind]
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    lora = {**LORA, "target_modules": targets}
    (expected,) = run("single", tune, tmp_path / "base", tmp_path / "one", lora)
    assert_equal(run(layout, tune, tmp_path / "base", tmp_path / "run", lora, strategy), expected)


def lose_gradients_of_whole_adapters() -> None:
    """Those of A that stays whole remain each rank's part of the sum."""
    tensor.apply_replicate = lambda *_: None


def add_gradients_twice() -> None:
    """What a layer and its adapters read is copied into the split region at B again."""
    adapters._Inside.copy_in = Region.copy_in  # type: ignore[method-assign]


def tune_with_fault(layout: str, fault: Any, base: Path, folder: Path) -> dict[str, Any]:
    fault()
    # A run would end where the copies of an adapter drift apart.
    WholeGradients.before_update = lambda *_: None  # type: ignore[method-assign]
    return tune(layout, base, folder, LORA_EVERYWHERE)


@pytest.mark.parametrize(
    "fault", [lose_gradients_of_whole_adapters, pytest.param(add_gradients_twice, marks=pytest.mark.slow)]
)
def test_gradients_that_are_not_summed_once_are_seen(base: Path, tmp_path: Path, fault: Any) -> None:
    (expected,) = run("single", tune, base, tmp_path / "one", LORA_EVERYWHERE)
    for got in run("tp2", tune_with_fault, fault, base, tmp_path / "run"):
        # B starts at zero, so that at first A has no gradient.
        assert got["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-9)
        assert got["norms"][1] != pytest.approx(expected["norms"][1], rel=1e-6)


class Dropped(L.Callback):
    """What the dropout of each adapter sets to zero, by the layer's name."""

    def __init__(self) -> None:
        self.masks: dict[str, list[torch.Tensor]] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for name, part in module.named_modules():
            if name.endswith(".lora_dropout.default"):
                masks = self.masks.setdefault(name.split(".")[-3], [])
                part.register_forward_hook(lambda _, args, output, masks=masks: masks.append(output == 0))


class Recomputed(HFCausalLM):
    def configure_model(self) -> None:
        super().configure_model()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[union-attr,operator]


def tune_with_dropout(
    layout: str, base: Path, folder: Path, strategy: dict[str, Any], kind: type[HFCausalLM] = HFCausalLM
) -> dict[str, Any]:
    dropped = Dropped()
    module = kind(path=base, lora={**LORA_EVERYWHERE, "lora_dropout": 0.5}, learning_rate=1e-2, max_steps=STEPS)
    return {**fit(layout, module, folder, strategy, dropped), "masks": dropped.masks, "state": torch.get_rng_state()}


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropout_before_an_adapter_is_equal_on_ranks_where_its_input_is(
    base: Path, tmp_path: Path, sequence_parallel: bool
) -> None:
    first, second = run("tp2", tune_with_dropout, base, tmp_path, {"sequence_parallel": sequence_parallel})
    assert first["losses"] == second["losses"] and torch.equal(first["state"], second["state"])
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), name
    for name in (*SPLIT_OUTPUTS, *SPLIT_INPUTS):
        masks = list(zip(first["masks"][name], second["masks"][name], strict=True))
        assert len(masks) == STEPS * 4
        assert all(torch.equal(a, b) is (name in SPLIT_OUTPUTS) for a, b in masks), name
        assert 0.4 < float(torch.stack([a.double().mean() for a, _ in masks]).mean()) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_recomputation_draws_the_same_dropout_before_adapters(base: Path, tmp_path: Path, layout: str) -> None:
    expected = run(layout, tune_with_dropout, base, tmp_path / "kept", {})
    for got, wanted in zip(
        run(layout, tune_with_dropout, base, tmp_path / "again", {}, Recomputed), expected, strict=True
    ):
        assert len(got["masks"]["down_proj"]) == 2 * len(wanted["masks"]["down_proj"])
        assert_equal([got], wanted)


def resume(layout: str, base: Path, checkpoint: Path) -> dict[str, Any]:
    module = HFCausalLM(path=base, lora=LORA_EVERYWHERE, learning_rate=1e-2, max_steps=STEPS)
    return fit(layout, module, checkpoint.parent / "resumed", {}, resumed_from=checkpoint)


@pytest.mark.parametrize(
    ("before", "after"), [("tp2", "single"), pytest.param("single", "tp4", marks=pytest.mark.slow)]
)
def test_adapters_are_resumed_in_another_layout(base: Path, tmp_path: Path, before: str, after: str) -> None:
    expected = run(before, tune, base, tmp_path, LORA_EVERYWHERE)[0]
    resumed = run(after, resume, base, tmp_path / "step=1.ckpt")
    assert len(resumed[0]["losses"]) == STEPS - 1
    assert_equal(resumed, {**expected, "losses": expected["losses"][1:], "norms": expected["norms"][1:]})


@pytest.mark.parametrize(
    ("targets", "layout", "told"),
    [
        (["embed_tokens"], "tp2", "embed_tokens has LoRA adapters of an embedding.* lora.target_modules"),
        (["q_proj"], "tp3", r"does not divide the 4 heads of the model's .*q_proj\. .* one of 1, 2, 4"),
    ],
    ids=["embedding", "heads"],
)
def test_adapters_that_cannot_be_split_are_refused_before_the_start(
    base: Path, targets: list[str], layout: str, told: str
) -> None:
    module = HFCausalLM(path=base, lora={**LORA, "target_modules": targets})
    with pytest.raises(Lightning3DError, match=told):
        check_model(module, Layout.parse(layout))


def test_variants_of_lora_are_refused_by_name() -> None:
    config = peft.LoraConfig(use_dora=True, target_modules=["q_proj"])
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(llama()), config)
    with pytest.raises(ModelError, match="q_proj has adapters of a variant of LoRA .DoraLinearVariant."):
        resolve_plan(model)


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
