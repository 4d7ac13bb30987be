"""scikit-learn's 1797 images of handwritten digits, 8 x 8 pixels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_3d.data.global_batch import GlobalBatchDataModule
from lightning_3d.errors import DataError

_BRIGHTEST = 16


class DigitsDataModule(GlobalBatchDataModule):
    """Pairs (pixels (64,) in [0, 1], torch's default dtype; label, int64); a fixed share is held out by `seed`.

    Test and predict read the held-out images too.

    Args:
        global_batch_size: images of one batch over all data-parallel ranks.
        validation_fraction: the share of images held out.
        seed: of the split and, where the strategy does not shuffle itself, of the order of images.

    Raises:
        DataError: a value that cannot work, scikit-learn is not installed, or a global batch that does not divide by
            the data-parallel size.
    """

    def __init__(
        self,
        global_batch_size: int = 64,
        validation_fraction: float = 0.2,
        num_workers: int = 0,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size,
            validation_fraction=validation_fraction,
            num_workers=num_workers,
            shuffle=shuffle,
            seed=seed,
        )
        self.train_set: Dataset[tuple[Tensor, ...]] | None = None
        self.validation_set: Dataset[tuple[Tensor, ...]] | None = None

    def setup(self, stage: str | None = None) -> None:
        pixels, labels = _load_digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        held_out_count = min(max(1, round(self.validation_fraction * len(labels))), len(labels) - 1)
        held_out, kept = order[:held_out_count], order[held_out_count:]
        if len(kept) < self.global_batch_size:
            raise DataError(
                f"There are {len(kept)} training images, fewer than global_batch_size={self.global_batch_size}. "
                f"Set global_batch_size={len(kept)} or less, or a smaller validation_fraction."
            )
        self.train_set = TensorDataset(pixels[kept], labels[kept])
        self.validation_set = TensorDataset(pixels[held_out], labels[held_out])

    def train_samples(self) -> Dataset[tuple[Tensor, ...]]:
        return _loaded(self.train_set)

    def held_out_samples(self) -> Dataset[tuple[Tensor, ...]]:
        return _loaded(self.validation_set)


def _loaded(images: Dataset[tuple[Tensor, ...]] | None) -> Dataset[tuple[Tensor, ...]]:
    if images is None:
        raise DataError("The digits are not loaded yet: call setup(), or let the Trainer do it.")
    return images


def _load_digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("DigitsDataModule needs scikit-learn: pip install lightning-3d[examples]") from error
    pixels, labels = load_digits(return_X_y=True)
    return (
        torch.as_tensor(pixels, dtype=torch.get_default_dtype()) / _BRIGHTEST,
        torch.as_tensor(labels, dtype=torch.int64),
    )
