"""The decoder equals the formulas it is made of, and refuses sizes that cannot work."""

import math

import pytest
import torch

from lightning_3d.errors import ConfigError, ModelError
from lightning_3d.models.gpt import GPT, GPTConfig
from lightning_3d.parallel.init import Recording, materialize_, meta_tensors, record_initialization

TINY = {"vocab_size": 17, "hidden_size": 12, "num_layers": 2, "num_heads": 3, "max_sequence_length": 10}


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(**changes):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**TINY, **changes}))
    with torch.no_grad():  # norms start at one and projections small: make every parameter matter
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def formula(model, tokens):
    """The model again, one position and one head at a time, with rotations as complex factors."""
    config, weights = model.config, dict(model.named_parameters())
    weights["head.weight"] = model.head.weight
    size, group = config.head_size, config.num_heads // config.kv_heads

    def norm(x, name):
        return x / (x.pow(2).mean() + config.norm_eps).sqrt() * weights[name]

    def turn(x, position):
        pairs = torch.complex(x[: size // 2], x[size // 2 :])
        angles = torch.tensor([position / config.rope_theta ** (2 * i / size) for i in range(size // 2)])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag])

    stream = [weights["embed.weight"][token] for token in tokens]
    for layer in range(config.num_layers):
        w = {name.removeprefix(f"layers.{layer}."): p for name, p in weights.items()}
        normed = [norm(x, f"layers.{layer}.attention_norm.weight") for x in stream]
        queries = [(w["attention.wq.weight"] @ x).split(size) for x in normed]
        keys = [(w["attention.wk.weight"] @ x).split(size) for x in normed]
        values = [(w["attention.wv.weight"] @ x).split(size) for x in normed]
        for t in range(len(stream)):
            heads = []
            for head in range(config.num_heads):
                query = turn(queries[t][head], t)
                scores = torch.stack([query @ turn(keys[s][head // group], s) for s in range(t + 1)]) / math.sqrt(size)
                shares = scores.exp() / scores.exp().sum()
                heads.append(sum(share * values[s][head // group] for s, share in enumerate(shares)))
            stream[t] = stream[t] + w["attention.wo.weight"] @ torch.cat(heads)
        for t, x in enumerate(stream):
            normed_x = norm(x, f"layers.{layer}.feed_forward_norm.weight")
            gate, up = w["feed_forward.w1.weight"] @ normed_x, w["feed_forward.w3.weight"] @ normed_x
            stream[t] = x + w["feed_forward.w2.weight"] @ (gate / (1 + (-gate).exp()) * up)
    return torch.stack([weights["head.weight"] @ norm(x, "norm.weight") for x in stream])


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1}, {"tie_embeddings": True}, {"ffn_size": 5}])
def test_logits_equal_the_formula(float64, changes):
    model = build(**changes)
    tokens = torch.randint(17, (1, 7))
    assert model(tokens).dtype == torch.float64
    torch.testing.assert_close(model(tokens)[0], formula(model, tokens[0].tolist()), rtol=1e-11, atol=1e-12)


def test_a_later_token_does_not_change_earlier_logits():
    model = build()
    tokens = torch.randint(17, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 17
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(dim=-1).any()


def test_tied_embeddings_share_storage_and_are_one_parameter():
    tied, untied = build(tie_embeddings=True), build()
    assert tied.head.weight is tied.embed.weight
    assert len(list(tied.parameters())) == len(list(untied.parameters())) - 1
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


def test_grouped_heads_shrink_keys_and_values_only():
    shapes = {name: tuple(p.shape) for name, p in build(num_heads=6, num_kv_heads=2).named_parameters()}
    assert shapes["layers.0.attention.wq.weight"] == (12, 12)
    assert shapes["layers.0.attention.wk.weight"] == shapes["layers.0.attention.wv.weight"] == (4, 12)


def test_residual_projections_start_smaller_by_the_depth():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, hidden_size=128, num_layers=8, num_heads=4))
    block = model.layers[3]
    assert block.attention.wq.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.wo.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.feed_forward.w2.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_dropout_changes_training_and_not_evaluation():
    model = build(dropout=0.5)
    tokens = torch.randint(17, (2, 8))
    assert not torch.allclose(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_model_recorded_on_meta_gets_values_and_right_rotary_tables():
    recording = Recording(seed=5)
    with record_initialization(recording):
        model = GPT(GPTConfig(**TINY))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    sources = meta_tensors(model)
    materialize_(model, sources=sources, recording=recording, device=torch.device("cpu"))
    assert torch.equal(model.rotary_sin, build().rotary_sin)
    assert model.layers[0].attention.wq.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert not torch.equal(model.layers[0].attention.wq.weight, model.layers[1].attention.wq.weight)


def test_a_sequence_too_long_is_refused_with_the_limit():
    with pytest.raises(ModelError, match="11 tokens, but max_sequence_length=10"):
        build()(torch.zeros(1, 11, dtype=torch.int64))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("vocab_size", 0, "vocab_size=0"),
        ("hidden_size", "big", "hidden_size='big'"),
        ("hidden_size", 13, "hidden_size=15|hidden_size=18"),
        ("hidden_size", 9, "hidden_size=18"),
        ("num_layers", True, "num_layers=True"),
        ("num_heads", 5, r"num_heads=5 does not divide hidden_size=12. Set num_heads to one of \[1, 2, 3, 6\]"),
        ("num_kv_heads", 2, r"num_kv_heads to one of \[1, 3\]"),
        ("ffn_size", 0, "ffn_size=0"),
        ("max_sequence_length", -1, "max_sequence_length=-1"),
        ("rope_theta", 0.5, "rope_theta=0.5"),
        ("norm_eps", 0.0, "norm_eps=0.0"),
        ("norm_eps", float("nan"), "norm_eps=nan"),
        ("dropout", 1.0, "dropout=1.0"),
        ("tie_embeddings", "yes", "tie_embeddings='yes'"),
    ],
)
def test_bad_sizes_are_refused_by_the_field_s_name(field, value, says):
    with pytest.raises(ConfigError, match=says):
        GPTConfig(**{**TINY, field: value})
