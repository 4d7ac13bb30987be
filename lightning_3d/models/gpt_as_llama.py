"""The reference GPT in the terms of transformers' Llama, which computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.models.gpt import GPTConfig

# Of a part of transformers' name, the GPT's own.
_PARTS = {
    "embed_tokens": "embed",
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "lm_head": "head",
}


def llama_config(config: GPTConfig) -> Any:
    """Transformers' config. Its dropout is that of attention alone: what is trained further there drops less."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.feed_forward_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_sequence_length,
        rope_parameters={"rope_type": "default", "rope_theta": float(config.rope_theta)},
        rms_norm_eps=config.norm_eps,
        attention_dropout=config.dropout,
        tie_word_embeddings=config.tie_embeddings,
        # The data's own tokenizer has other numbers than Llama's.
        bos_token_id=None,
        eos_token_id=None,
    )


def gpt_config_of(hyper_parameters: Mapping[str, Any]) -> GPTConfig | None:
    """The GPT's config in the hyper-parameters that `LanguageModel` saves, or None."""
    config = hyper_parameters.get("config")
    if not isinstance(config, Mapping) or config.keys() != GPTConfig.__dataclass_fields__.keys():
        return None
    return GPTConfig(**config)


def gpt_name(name: str) -> str:
    """The GPT's own name for a weight of transformers' model.

    >>> gpt_name("model.layers.3.self_attn.q_proj.weight")
    'layers.3.attention.wq.weight'
    """
    return ".".join(_PARTS.get(part, part) for part in name.removeprefix("model.").split("."))
