"""Digits are split the same way every time, and divided among data-parallel ranks."""

import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_3d.data.digits import DigitsDataModule
from lightning_3d.errors import DataError

pytest.importorskip("sklearn")


def images(dataset):
    return {bytes(pixels.numpy().tobytes()) for pixels, _ in dataset}


def test_the_held_out_images_are_the_same_each_time_and_no_training_images():
    first, second, other = DigitsDataModule(), DigitsDataModule(), DigitsDataModule(seed=1)
    for data in (first, second, other):
        torch.manual_seed(hash(data) % 1000)  # the split must not follow the global generator
        data.setup()
    assert len(first.train_set) + len(first.validation_set) == 1797
    assert images(first.validation_set) == images(second.validation_set) != images(other.validation_set)
    assert not images(first.train_set) & images(first.validation_set)


def test_pixels_are_between_zero_and_one_in_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        data = DigitsDataModule()
        data.setup()
    finally:
        torch.set_default_dtype(torch.float32)
    pixels, labels = next(iter(data.train_dataloader()))
    assert (pixels.shape, pixels.dtype, labels.dtype) == ((64, 64), torch.float64, torch.int64)
    assert (pixels.min(), pixels.max()) == (0, 1)


def test_each_rank_loads_its_share_of_the_global_batch():
    data = DigitsDataModule(global_batch_size=60)
    data.setup()
    data.trainer = SimpleNamespace(strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 4, "rank": 1}))
    assert data.train_dataloader().batch_size == data.val_dataloader().batch_size == 15


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install lightning-3d\[examples\]"):
        DigitsDataModule().setup()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"global_batch_size": 5000}, "global_batch_size=1438 or less"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"seed": "x"}, "seed='x'"),
    ],
)
def test_bad_settings_are_refused_by_the_field_s_name(settings, says):
    with pytest.raises(DataError, match=says):
        DigitsDataModule(**settings).setup()
