"""Byte-level BPE, trained on the run's own training text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from lightning_3d.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# The 256 bytes and the end-of-text token: with fewer, some text could not be written.
SMALLEST_VOCABULARY = 257


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens (fewer where the text has fewer pairs to merge).

    Raises:
        DataError: a vocabulary that cannot hold every byte.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"vocab_size={vocab_size} cannot hold the 256 bytes and {END_OF_TEXT}. "
            f"Set vocab_size={SMALLEST_VOCABULARY} or more; 2048 would do."
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    with _without_threads():
        tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each document, uint32."""
    with _without_threads():
        return [np.asarray(tokenizer.encode(text).ids, dtype=np.uint32) for text in texts]


def find_tokenizer(path: str | Path) -> tuple[Path, str]:
    """The tokenizer.json at a path, or in the Hugging Face folder there, and its token for the end of a text.

    Raises:
        DataError: there is none, or it names no such token.
    """
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(
            f"tokenizer={str(path)!r}: there is no {file}. Give a tokenizer.json or a Hugging Face folder with one "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) writes it)."
        )
    described = file.parent / "tokenizer_config.json"
    token = json.loads(described.read_text()).get("eos_token") if described.is_file() else END_OF_TEXT
    token = token["content"] if isinstance(token, dict) else token
    if token is None or load_tokenizer(file).token_to_id(token) is None:
        raise DataError(
            f"{file} has no token for the end of a text ({token!r}), which separates documents. Name one of its tokens "
            "as eos_token in tokenizer_config.json beside it."
        )
    return file, token


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json."""
    return Tokenizer.from_file(str(path))


@contextmanager
def _without_threads() -> Iterator[None]:
    # Its thread pool does not survive a fork: with tokenizers before 0.23, data loader workers and ranks forked later
    # warn and may hang. A user who sets the variable has decided otherwise.
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
