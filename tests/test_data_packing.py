"""Packing loses no token and repeats none but at the end."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_3d.data.packing import PackedRows, join_documents, unigram_loss
from lightning_3d.errors import DataError


def test_documents_are_joined_by_end_of_text():
    stream = join_documents([np.array([5, 6]), np.array([], dtype=int), np.array([7])], end_of_text=0, vocab_size=300)
    assert stream.tolist() == [5, 6, 0, 0, 7, 0]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_the_largest_token_survives_the_narrow_dtype(vocab_size, dtype):
    stream = join_documents([np.array([vocab_size - 1])], end_of_text=0, vocab_size=vocab_size)
    assert stream.dtype == dtype
    assert stream.tolist() == [vocab_size - 1, 0]


@pytest.mark.parametrize("length", range(5, 18))
def test_every_token_but_the_first_is_a_target(length):
    rows = PackedRows(np.arange(length, dtype=np.uint16), sequence_length=4)
    got = [row["tokens"] for row in rows]
    assert len(got) == len(rows) == math.ceil((length - 1) / 4)
    assert all(row.dtype == torch.int64 and row.shape == (5,) for row in got)
    assert all(torch.equal(row, row[0] + torch.arange(5)) for row in got)
    targets = [int(token) for row in got for token in row[1:]]
    assert set(targets) == set(range(1, length))
    # Each row goes on where the one before it ended, but for the last.
    assert all(int(a[-1]) == int(b[0]) for a, b in pairwise(got[:-1]))


def test_a_stream_shorter_than_one_row_is_refused_with_a_length_that_works():
    with pytest.raises(DataError, match="sequence_length=3 or less"):
        PackedRows(np.arange(4), sequence_length=4)
    assert len(PackedRows(np.arange(4), sequence_length=3)) == 1


@pytest.mark.parametrize("length", [5, 9, 10, 12])
def test_target_counts_equal_counting_the_rows(length):
    stream = np.random.default_rng(0).integers(0, 6, size=length).astype(np.uint16)
    rows = PackedRows(stream, sequence_length=4)
    targets = torch.cat([row["tokens"][1:] for row in rows])
    assert rows.target_counts(8).tolist() == torch.bincount(targets, minlength=8).tolist()


def test_unigram_loss_equals_a_sum_by_hand():
    train, held_out = [0, 0, 0, 1, 2], [0, 1, 1, 3]
    probability = {token: (train.count(token) + 1) / (len(train) + 4) for token in range(4)}
    by_hand = -sum(math.log(probability[token]) for token in held_out) / len(held_out)
    counts = (np.bincount(train, minlength=4), np.bincount(held_out, minlength=4))
    assert unigram_loss(*counts) == pytest.approx(by_hand, rel=1e-12)
