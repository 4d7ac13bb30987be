"""The batch of each rank follows from the global one."""

from types import SimpleNamespace

import pytest

from lightning_3d.data.batch import data_parallel_size, per_rank_batch_size
from lightning_3d.errors import DataError


def test_the_data_parallel_size_is_the_strategy_s_not_the_world_s():
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0}, world_size=8)
    assert data_parallel_size(SimpleNamespace(strategy=strategy)) == 2
    assert data_parallel_size(SimpleNamespace(strategy=SimpleNamespace())) == 1
    assert data_parallel_size(None) == 1


def test_rank_batches_add_up_to_the_global_batch():
    assert [per_rank_batch_size(global_batch_size=12, data_parallel_size=n) for n in (1, 2, 3, 12)] == [12, 6, 4, 1]


@pytest.mark.parametrize(
    ("size", "says"),
    [(5, r"to 10 or 15, or the data-parallel size to one of \[1, 2, 3, 4, 6, 12\]"), (16, "to 16, or")],
)
def test_an_uneven_global_batch_is_refused_with_sizes_that_work(size, says):
    with pytest.raises(DataError, match=says):
        per_rank_batch_size(global_batch_size=12, data_parallel_size=size)
