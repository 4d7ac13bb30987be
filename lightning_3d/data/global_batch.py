"""What data modules here share: training and held-out samples, in batches that all ranks fill together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_3d.data.batch import check_count, check_fraction, data_parallel_size, per_rank_batch_size


class GlobalBatchDataModule(L.LightningDataModule, ABC):
    """Loads `global_batch_size` samples a step over all data-parallel ranks; test and predict read what is held out.

    Args:
        global_batch_size: samples of one batch over all data-parallel ranks.
        validation_fraction: the share held out.
        seed: of the split and, where the strategy does not shuffle itself, of the order of samples.

    Raises:
        DataError: a value that cannot work; from the loaders, a global batch that does not divide by the data-parallel
            size.
    """

    def __init__(
        self, *, global_batch_size: int, validation_fraction: float, num_workers: int, shuffle: bool, seed: int
    ) -> None:
        super().__init__()
        check_count("global_batch_size", global_batch_size)
        check_fraction("validation_fraction", validation_fraction)
        check_count("num_workers", num_workers, least=0)
        check_count("seed", seed, least=0)
        self.global_batch_size = global_batch_size
        self.validation_fraction = validation_fraction
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.seed = seed

    @abstractmethod
    def train_samples(self) -> Dataset[Any]:
        """What is trained on; enough for one batch."""

    @abstractmethod
    def held_out_samples(self) -> Dataset[Any]:
        """What is not."""

    def train_dataloader(self) -> DataLoader[Any]:
        # The last samples of an epoch are left out when they do not fill a batch: every step then weighs as much.
        return self._loader(self.train_samples(), shuffle=self.shuffle, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.held_out_samples())

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def _loader(self, samples: Dataset[Any], *, shuffle: bool = False, drop_last: bool = False) -> DataLoader[Any]:
        return DataLoader(
            samples,
            batch_size=per_rank_batch_size(
                global_batch_size=self.global_batch_size, data_parallel_size=data_parallel_size(self.trainer)
            ),
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            generator=torch.Generator().manual_seed(self.seed) if shuffle else None,
        )
