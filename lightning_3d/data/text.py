"""Text files as rows of tokens: a tokenizer trained on them, packed rows, whole files held out for validation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tokenizers import Tokenizer

from lightning_3d.data.batch import check_count
from lightning_3d.data.global_batch import GlobalBatchDataModule
from lightning_3d.data.packing import PackedRows, unigram_loss
from lightning_3d.data.text_cache import TokenCache, default_cache_folder, ensure_entry, entry_folder, open_entry
from lightning_3d.data.text_files import TextFile, choose_up_to, find_text_files, split_held_out
from lightning_3d.data.tokenizer import END_OF_TEXT, SMALLEST_VOCABULARY, find_tokenizer, load_tokenizer
from lightning_3d.errors import DataError


class TextDataModule(GlobalBatchDataModule):
    """Packed rows {"tokens": (sequence_length + 1,) int64} of text files; test and predict read the held-out rows too.

    `prepare_data` trains the tokenizer and encodes the files, once for all ranks and runs; `setup` maps the tokens.

    Args:
        files: paths and globs; None means the Python standard library's own sources.
        max_bytes: take a sample of whole files up to this size; None means all.
        vocab_size: the most tokens that a trained tokenizer may have; the property `vocab_size` tells how many it has.
        tokenizer: a tokenizer.json, or a Hugging Face folder with one, to use instead of training one.
        global_batch_size: rows of one batch over all data-parallel ranks.
        validation_fraction: the share of files held out, at least one.
        seed: of the choice of files and, where the strategy does not shuffle itself, of the order of rows.
        cache_dir: where the tokens are kept; None means the user's cache folder.

    Raises:
        DataError: a value that cannot work, files that are missing, empty or too short (see `text_files`, `packing`),
            or a global batch that does not divide by the data-parallel size.
    """

    def __init__(
        self,
        files: Sequence[str | Path] | None = None,
        max_bytes: int | None = 4_000_000,
        vocab_size: int = 2048,
        sequence_length: int = 256,
        global_batch_size: int = 32,
        validation_fraction: float = 0.05,
        num_workers: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        cache_dir: str | Path | None = None,
        tokenizer: str | Path | None = None,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size,
            validation_fraction=validation_fraction,
            num_workers=num_workers,
            shuffle=shuffle,
            seed=seed,
        )
        if max_bytes is not None:
            check_count("max_bytes", max_bytes)
        check_count("vocab_size", vocab_size, least=SMALLEST_VOCABULARY)
        check_count("sequence_length", sequence_length)
        self.files = files
        self.max_bytes = max_bytes
        self.requested_vocab_size = vocab_size
        self._given = None if tokenizer is None else find_tokenizer(tokenizer)
        self.sequence_length = sequence_length
        self.cache_folder = default_cache_folder() if cache_dir is None else Path(cache_dir).expanduser()
        self._split: tuple[list[TextFile], list[TextFile]] | None = None
        self._cache: TokenCache | None = None

    def prepare_data(self) -> None:
        train, validation = self.split_files()
        ensure_entry(
            self._entry_folder(),
            train=train,
            validation=validation,
            vocab_size=self.requested_vocab_size,
            tokenizer=self._given,
        )

    def setup(self, stage: str | None = None) -> None:
        self._rows("train")
        self._rows("validation")

    def split_files(self) -> tuple[list[TextFile], list[TextFile]]:
        """Training files and held-out files, by name."""
        if self._split is None:
            files = find_text_files(self.files)
            chosen = files if self.max_bytes is None else choose_up_to(files, max_bytes=self.max_bytes, seed=self.seed)
            if len(chosen) < len(files) and self.files is not None:
                rank_zero_info(
                    f"max_bytes={self.max_bytes}: {len(chosen)} of {len(files)} files are read. "
                    "Set max_bytes=null to read all."
                )
            self._split = split_held_out(chosen, validation_fraction=self.validation_fraction, seed=self.seed)
        return self._split

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer has, once `prepare_data` has run."""
        return self._tokens().vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, once `prepare_data` has run."""
        return load_tokenizer(self._tokens().folder / "tokenizer.json")

    @property
    def end_of_text(self) -> str:
        """The token between two documents."""
        return self._given[1] if self._given else END_OF_TEXT

    def unigram_loss(self) -> float:
        """Nats per held-out target of a model that knows only how often each token occurs in the training text."""
        train_counts = np.bincount(self._tokens().train, minlength=self.vocab_size)
        return unigram_loss(train_counts, self._rows("validation").target_counts(self.vocab_size))

    def train_samples(self) -> PackedRows:
        rows = self._rows("train")
        if len(rows) < self.global_batch_size:
            raise DataError(
                f"The training text makes {len(rows)} rows of {self.sequence_length} tokens, fewer than "
                f"global_batch_size={self.global_batch_size}. Set global_batch_size={len(rows)} or less, a smaller "
                "sequence_length, or give more text."
            )
        return rows

    def held_out_samples(self) -> PackedRows:
        return self._rows("validation")

    def _rows(self, part: str) -> PackedRows:
        cache = self._tokens()
        try:
            return PackedRows(
                cache.train if part == "train" else cache.validation, sequence_length=self.sequence_length
            )
        except DataError as error:
            raise DataError(f"{part} files: {error}") from error

    def _tokens(self) -> TokenCache:
        if self._cache is None:
            self._cache = open_entry(self._entry_folder())
        return self._cache

    def _entry_folder(self) -> Path:
        train, validation = self.split_files()
        return entry_folder(
            self.cache_folder,
            train=train,
            validation=validation,
            vocab_size=self.requested_vocab_size,
            tokenizer=self._given[0] if self._given else None,
        )
