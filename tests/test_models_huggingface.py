"""Hugging Face models train by our loss or their own, from a config or from a folder's weights."""

import json

import pytest
import torch

from lightning_3d.errors import ConfigError, ModelError
from lightning_3d.models.gpt import GPT, GPTConfig
from lightning_3d.parallel.init import Recording, materialize_, meta_tensors, record_initialization

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from lightning_3d.models.hf_folder import counterpart_of  # noqa: E402
from lightning_3d.models.huggingface import HFCausalLM, load_safetensors_  # noqa: E402

LLAMA = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
CONFIGS = {"llama": LLAMA, "llama-tied": {**LLAMA, "tie_word_embeddings": True}, "gpt2-tied": GPT2}
TOKENS = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=list(CONFIGS))
def config(request):
    return CONFIGS[request.param]


def built(*args, seed=0, **kwargs):
    module = HFCausalLM(*args, **kwargs)
    torch.manual_seed(seed)
    module.configure_model()
    return module


def recorded(*args, seed=0, **kwargs):
    module, recording = HFCausalLM(*args, **kwargs), Recording(seed=seed)
    with record_initialization(recording):
        module.configure_model()
    assert all(parameter.is_meta for parameter in module.parameters())
    sources = meta_tensors(module)
    materialize_(module, sources=sources, recording=recording, device=torch.device("cpu"))
    return module


def test_own_loss_equals_the_model_s(config):
    own, labels = built(config), built(config, loss="labels")
    assert own.batch_loss(TOKENS).item() == pytest.approx(labels.batch_loss(TOKENS).item(), rel=1e-6)
    torch.testing.assert_close(own.predict_step({"tokens": TOKENS}, 0).mean(), own.batch_loss(TOKENS))


def test_a_float64_model_has_a_float64_loss(config):
    torch.set_default_dtype(torch.float64)
    try:
        module = built(config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}
    loss = module.batch_loss(TOKENS)
    loss.backward()
    assert loss.dtype == torch.float64


def test_our_gpt_equals_llama_with_the_same_weights():
    llama = built({**LLAMA, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    ours = GPT(
        GPTConfig(
            vocab_size=50,
            hidden_size=24,
            ffn_size=40,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            max_sequence_length=32,
            rope_theta=500.0,
        )
    )
    names = {
        "model.embed_tokens": "embed",
        "model.layers": "layers",
        "model.norm": "norm",
        "lm_head": "head",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
    }
    weights = {}
    for name, value in llama.model.state_dict().items():
        for theirs, our_name in names.items():
            name = name.replace(theirs, our_name)
        weights[name] = value
    ours.load_state_dict(weights)
    torch.testing.assert_close(ours(TOKENS), llama.token_logits(TOKENS), rtol=1e-4, atol=1e-6)


def test_fresh_weights_recorded_on_meta_follow_the_model_s_own_initialisation(config):
    plain, replayed = built(config), recorded(config)
    for (name, expected), actual in zip(plain.named_parameters(), replayed.parameters(), strict=True):
        if expected.std() == 0:  # norms and biases
            assert torch.equal(actual, expected), name
        else:
            assert actual.std().item() == pytest.approx(expected.std().item(), rel=0.25), name
    for (name, expected), actual in zip(plain.named_buffers(), replayed.buffers(), strict=True):
        assert torch.equal(actual, expected), name
    assert len({id(p) for p in replayed.parameters()}) == len({id(p) for p in plain.parameters()})


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("build", [built, recorded])
def test_a_saved_folder_gives_equal_logits(tmp_path, config, shards, build):
    original = built(config)
    original.model.save_pretrained(tmp_path, max_shard_size="8KB" if shards > 1 else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)
    loaded = build(path=tmp_path, seed=9)
    assert loaded.vocab_size == 50
    assert torch.equal(loaded.token_logits(TOKENS), original.token_logits(TOKENS))


def test_a_folder_saved_without_its_head_s_prefix_loads(tmp_path):
    original = built(GPT2)
    original.model.transformer.save_pretrained(tmp_path)
    loaded = built(GPT2, seed=9)
    load_safetensors_(loaded.model, folder=tmp_path)
    assert torch.equal(loaded.token_logits(TOKENS), original.token_logits(TOKENS))


def test_weights_in_half_precision_load_in_the_default_dtype(tmp_path):
    built(LLAMA).model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    module = built(path=tmp_path)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_weights_that_do_not_fit_are_listed_in_one_error(tmp_path):
    built(LLAMA).model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(1)
    weights["model.norm.weight"] = torch.zeros(25)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as raised:
        built(path=tmp_path)
    message = str(raised.value)
    assert "missing: model.layers.1.mlp.up_proj.weight." in message
    assert "unexpected: model.layers.7.mlp.up_proj.weight." in message
    assert "of another shape: model.norm.weight is (25,) for (24,)." in message


@pytest.mark.parametrize("build", [built, recorded])
def test_two_values_for_one_tied_weight_are_refused(tmp_path, build):
    built({**LLAMA, "tie_word_embeddings": True}).model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    assert build(path=tmp_path).model.lm_head.weight.count_nonzero()
    weights["lm_head.weight"][3, 3] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"two that differ, but tied here: .*lm_head.weight"):
        build(path=tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    built(LLAMA).model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        built(path=tmp_path)


def test_a_folder_is_remembered_whatever_folder_a_checkpoint_is_used_in(tmp_path, monkeypatch):
    built(LLAMA).model.config.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    kept = dict(HFCausalLM(path="model").hparams)
    assert kept["path"] == str(tmp_path / "model")
    monkeypatch.chdir("/")
    assert counterpart_of(kept).folder == tmp_path / "model"
    with pytest.raises(ConfigError, match=r"path='model', .*no config.json.*--config-from"):
        counterpart_of({"path": "model"})


def test_shards_that_are_not_there_are_named(tmp_path):
    built(LLAMA).model.save_pretrained(tmp_path, max_shard_size="8KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(ModelError, match=lost.name):
        built(path=tmp_path)


def test_more_tokens_than_positions_are_refused():
    module = built({**LLAMA, "max_position_embeddings": 8}, loss="labels")
    with pytest.raises(ModelError, match="max_position_embeddings=8. Set it to 9"):
        module.batch_loss(TOKENS)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "exactly one"),
        ({"config": LLAMA, "path": "."}, "exactly one"),
        ({"config": LLAMA, "loss": "theirs"}, "loss='theirs' must be 'own' or 'labels'"),
        ({"config": {"hidden_size": 8}}, "model_type=None"),
        ({"config": {**LLAMA, "model_type": "lama"}}, "model_type='lama'.*llama"),
        ({"config": {**LLAMA, "hiden_size": 8}}, "'hiden_size'. Did you mean hidden_size"),
        ({"config": {**LLAMA, "hidden_size": "big"}}, "hidden_size"),
        ({"config": {**LLAMA, "num_key_value_heads": 3}}, r"num_key_value_heads to one of \[1, 2, 4\]"),
        ({"path": "/nowhere"}, "no config.json"),
        ({"config": LLAMA, "learning_rate": -1}, "learning_rate=-1"),
    ],
)
def test_bad_settings_are_refused_by_the_field_s_name(settings, says):
    with pytest.raises(ConfigError, match=says):
        HFCausalLM(**settings)


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install lightning-3d\[hf\]"):
        HFCausalLM(config=LLAMA)
