"""A compact modern decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention, optional weight tying.

Everything is initialised by ordinary tensor operations in the constructors, without reading a value back, so that the
model can be built on the meta device and the same operations replayed later, shard by shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import ConfigError, ModelError

_INIT_STD = 0.02
_FEED_FORWARD_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT, checked when they are set.

    Attributes:
        num_kv_heads: heads of keys and values; None means as many as queries have.
        ffn_size: inner width of SwiGLU; None means 8/3 of `hidden_size`, rounded up to a multiple of 64.

    Raises:
        ConfigError: a size that cannot work; the message names the field and a value that would.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    ffn_size: int | None = None
    max_sequence_length: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_sequence_length")
        optional_sizes = ("num_kv_heads", "ffn_size")
        for name in (*sizes, *optional_sizes):
            value = getattr(self, name)
            if value is None and name in optional_sizes:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} is not a whole number of at least 1; {name}=4 would do.")
        for name in ("rope_theta", "norm_eps", "dropout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"{name}={value!r} is not a finite number; leave it out to get the default.")
        if not isinstance(self.tie_embeddings, bool):
            raise ConfigError(f"tie_embeddings={self.tie_embeddings!r} must be true or false.")
        if self.hidden_size % self.num_heads:
            fits = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % (2 * n) == 0]
            raise ConfigError(
                f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}. "
                f"Set num_heads to one of {fits} or hidden_size={_round_up(self.hidden_size, 2 * self.num_heads)}."
            )
        if self.head_size % 2:
            raise ConfigError(
                f"hidden_size={self.hidden_size} over num_heads={self.num_heads} makes heads {self.head_size} wide, "
                f"but rotary positions turn pairs. Set hidden_size={2 * self.hidden_size}, or another even multiple of "
                "num_heads."
            )
        if self.num_heads % self.kv_heads:
            fits = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}. "
                f"Set num_kv_heads to one of {fits}."
            )
        if self.rope_theta <= 1:
            raise ConfigError(f"rope_theta={self.rope_theta} must be above 1; 10000 is usual.")
        if self.norm_eps <= 0:
            raise ConfigError(f"norm_eps={self.norm_eps} must be above 0; 1e-5 is usual.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} must be at least 0 and below 1; 0.1 would do.")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, the default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def feed_forward_size(self) -> int:
        """Inner width of SwiGLU, the default resolved."""
        return _round_up(8 * self.hidden_size // 3, _FEED_FORWARD_MULTIPLE) if self.ffn_size is None else self.ffn_size


class GPT(nn.Module):
    """Decoder-only transformer.

    Shapes:
        tokens: (batch, sequence) int64 -> logits: (batch, sequence, vocab)

    Raises:
        ModelError: a sequence longer than `max_sequence_length`.
    """

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        else:
            nn.init.normal_(self.head.weight, std=_INIT_STD)
        nn.init.normal_(self.embed.weight, std=_INIT_STD)
        cos, sin = rotary_tables(
            head_size=config.head_size, max_sequence_length=config.max_sequence_length, theta=config.rope_theta
        )
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """How tensor parallelism splits each module, by name."""
        outputs = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
        return {
            "embed": "vocabulary",
            **{f"layers.*.{name}": "colwise" for name in outputs},
            "layers.*.attention.wo": "rowwise",
            "layers.*.feed_forward.w2": "rowwise",
            "head": "colwise_gather_output",
        }

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.max_sequence_length:
            raise ModelError(
                f"The sequence has {length} tokens, but max_sequence_length={self.config.max_sequence_length}. "
                f"Set max_sequence_length={length} or feed shorter sequences."
            )
        hidden = self.embed(tokens)
        cos = self.rotary_cos[:length].to(hidden.dtype)
        sin = self.rotary_sin[:length].to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """One transformer layer: attention and feed-forward, each normalised first and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout > 0 else nn.Identity()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), cos, sin))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class Attention(nn.Module):
    """Causal attention with rotary positions; head counts are read from the projections' outputs.

    A tensor-parallel rank that holds a share of each projection's rows therefore runs the same code.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.grouped = config.kv_heads != config.num_heads
        self.dropout = config.dropout
        kv_size = config.kv_heads * config.head_size
        self.wq = _linear(config.hidden_size, config.hidden_size, std=_INIT_STD)
        self.wk = _linear(config.hidden_size, kv_size, std=_INIT_STD)
        self.wv = _linear(config.hidden_size, kv_size, std=_INIT_STD)
        self.wo = _linear(config.hidden_size, config.hidden_size, std=_residual_std(config))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            projection(hidden).view(batch, length, -1, self.head_size).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.grouped,
        )
        output: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = _linear(config.hidden_size, config.feed_forward_size, std=_INIT_STD)
        self.w3 = _linear(config.hidden_size, config.feed_forward_size, std=_INIT_STD)
        self.w2 = _linear(config.feed_forward_size, config.hidden_size, std=_residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))
        return output


def rotary_tables(*, head_size: int, max_sequence_length: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each (max_sequence_length, head_size / 2), in the default dtype."""
    # Angles grow with the position, so float32 would lose a digit for every tenfold length: compute them in float64.
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles = torch.arange(max_sequence_length, dtype=torch.float64)[:, None] * theta**-exponents
    return angles.cos().to(torch.get_default_dtype()), angles.sin().to(torch.get_default_dtype())


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (batch, heads, sequence, head_size) by its positions; first and second half are the pairs, as in Llama."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _linear(in_features: int, out_features: int, *, std: float) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(linear.weight, std=std)
    return linear


def _residual_std(config: GPTConfig) -> float:
    # Each layer adds twice to the stream: the sum's variance then does not grow with depth (GPT-2).
    return _INIT_STD / math.sqrt(2 * config.num_layers)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
