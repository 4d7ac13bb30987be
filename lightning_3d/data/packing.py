"""Documents joined into one stream of tokens, and the stream cut into rows for next-token prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_3d.errors import DataError


def join_documents(documents: Sequence[np.ndarray], *, end_of_text: int, vocab_size: int) -> np.ndarray:
    """One stream of tokens, each document followed by `end_of_text`, in the smallest of uint16 and uint32 that fits."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    stream = np.empty(sum(len(document) + 1 for document in documents), dtype=dtype)
    start = 0
    for document in documents:
        end = start + len(document)
        stream[start:end] = document
        stream[end] = end_of_text
        start = end + 1
    return stream


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows {"tokens": (sequence_length + 1,) int64} of a stream, read from it when asked for.

    Each row begins with the token that the row before it ends with, so that every token but the first is a target. The
    last row ends with the stream: where the stream does not divide, it takes its start back into the row before it.

    Raises:
        DataError: a stream shorter than one row.
    """

    def __init__(self, stream: np.ndarray, *, sequence_length: int) -> None:
        if len(stream) < sequence_length + 1:
            raise DataError(
                f"The text has {len(stream)} tokens, fewer than the sequence_length={sequence_length} + 1 of one row. "
                f"Give more text, or set sequence_length={max(1, len(stream) - 1)} or less."
            )
        self.stream = stream
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return -(-(len(self.stream) - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = self.start(index)
        row = self.stream[start : start + self.sequence_length + 1]
        return {"tokens": torch.from_numpy(row.astype(np.int64))}

    def start(self, index: int) -> int:
        """Where a row begins in the stream."""
        return min(index * self.sequence_length, len(self.stream) - 1 - self.sequence_length)

    def target_counts(self, vocab_size: int) -> np.ndarray:
        """How often each token is a target over all rows, (vocab_size,) int64."""
        counts = np.bincount(self.stream[1:], minlength=vocab_size)
        if len(self) > 1:
            # The last row may repeat targets of the row before it.
            repeated = self.stream[self.start(len(self) - 1) + 1 : self.start(len(self) - 2) + self.sequence_length + 1]
            counts += np.bincount(repeated, minlength=vocab_size)
        return counts


def unigram_loss(train_counts: np.ndarray, target_counts: np.ndarray) -> float:
    """Mean nats per target of a model that knows only how often each token occurs, add-one smoothed.

    Shapes:
        train_counts, target_counts: (vocab,) whole numbers.

    >>> round(unigram_loss(np.array([3, 1]), np.array([1, 1])), 4)  # probabilities 4/6 and 2/6
    0.752
    """
    smoothed = train_counts.astype(np.float64) + 1
    return float(-(target_counts * np.log(smoothed / smoothed.sum())).sum() / target_counts.sum())
