"""The states of all random generators of one rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's generators, with those of this process's CUDA device: tensors and plain values."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        # An array would need NumPy's classes to be read back.
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Continue where `random_state` was taken."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_number(text: str) -> int:
    """A seed, from a text that names what is drawn."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All generators of the CPU start from `seed` inside, and go on afterwards as if nothing had been drawn."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
