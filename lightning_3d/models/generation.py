"""Text from a causal language model, one whole forward for each new token: works on a model in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_3d.errors import ConfigError


def generate_tokens(
    logits: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    count: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    longest: int | None = None,
    agree: Callable[[Tensor], Tensor] = lambda chosen: chosen,
) -> Tensor:
    """Append `count` tokens to each row.

    All forwards have one shape (rows are filled up on the right, where a causal model does not look), so that a
    pipeline learns its shapes once.

    Args:
        logits: of tokens (rows, sequence), (rows, sequence, vocab).
        tokens: prompts of one length, (rows, length) int64.
        temperature: 0 takes the likeliest token each time.
        top_k: choose among so many of the likeliest.
        longest: tokens that the model takes; of a longer text it sees the end.
        agree: makes all ranks' choice one, where several run this together.

    Returns:
        (rows, length + count).

    Raises:
        ConfigError: a value that cannot work.
    """
    check_sampling(count=count, temperature=temperature, top_k=top_k)
    if not tokens.shape[1]:
        raise ConfigError("the prompt has no token. Give at least one character.")
    generator = torch.Generator().manual_seed(seed)
    total = tokens.shape[1] + count
    width = min(total, longest or total)
    for length in range(tokens.shape[1], total):
        seen = tokens[:, -width:]
        padded = torch.nn.functional.pad(seen, (0, width - seen.shape[1]))
        scores = logits(padded)[:, seen.shape[1] - 1].detach().float().cpu()
        chosen = agree(_choose(scores, temperature=temperature, top_k=top_k, generator=generator))
        tokens = torch.cat([tokens, chosen.to(tokens.device)], dim=1)
        assert tokens.shape[1] == length + 1
    return tokens


def check_sampling(*, count: int, temperature: float, top_k: int | None) -> None:
    """
    Raises:
        ConfigError: a value that cannot work.
    """
    if count < 1:
        raise ConfigError(f"max_new_tokens={count} is less than one. Set max_new_tokens=64, say.")
    if not 0 <= temperature < math.inf:
        raise ConfigError(
            f"temperature={temperature} is not a number from 0 on. Set 0 for the likeliest token, 0.8 for some variety."
        )
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k} is less than one. Set top_k=50, or null for all tokens.")


def longest_input(module: torch.nn.Module) -> int | None:
    """Tokens that a language model of ours takes at once, or None where it does not say."""
    for config, field in (("config", "max_sequence_length"), ("model_config", "max_position_embeddings")):
        value = getattr(getattr(module, config, None), field, None)
        if isinstance(value, int):
            return value
    return None


def _choose(scores: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return scores.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    return torch.multinomial(torch.softmax(scores / temperature, dim=-1), 1, generator=generator)
