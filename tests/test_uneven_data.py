"""Ranks with other numbers of batches stop together, and those that should see the same data do, or say so."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training import run, trainer_for

from lightning_3d.errors import ConfigError, DataError

pytestmark = pytest.mark.distributed


class Counting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
        self.trained: list[list[float]] = []
        self.validated: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features = batch[0] if isinstance(batch, list | tuple) else batch
        self.trained.append(features.flatten().tolist())
        return self.layers(features).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features = batch[0] if isinstance(batch, list | tuple) else batch
        self.validated.append(features.flatten().tolist())
        self.log("val_loss", self.layers(features).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnPart(IterableDataset):
    """Cut by its rank, into parts of unlike length."""

    def __init__(self, trainer: L.Trainer, counts: list[int], *, by_process: bool = False) -> None:
        self.trainer, self.counts, self.by_process = trainer, counts, by_process

    def __iter__(self) -> Iterator[torch.Tensor]:
        strategy: Any = self.trainer.strategy
        rank = self.trainer.global_rank if self.by_process else strategy.data_parallel_rank
        for i in range(self.counts[rank]):
            yield torch.tensor([float(100 * rank + i)])


class Fixed(OwnPart):
    def __len__(self) -> int:
        strategy: Any = self.trainer.strategy
        return self.counts[strategy.data_parallel_rank]


def fit_uneven(layout: str, kind: str) -> Any:
    trainer = trainer_for(layout, max_epochs=2, use_distributed_sampler=False)
    module = Counting()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = ([5, 7, 6, 8], [4, 2, 3, 3])
        loaders: list[Any]
        if kind == "streams":
            loaders = [DataLoader(OwnPart(trainer, count), batch_size=1) for count in counts]
        elif kind == "lengths":
            loaders = [DataLoader(Fixed(trainer, count), batch_size=1) for count in counts]
        else:
            loaders = [OwnPart(trainer, count) for count in counts]
        trainer.fit(module, *loaders)
    told = sorted(
        {str(entry.message) for entry in caught if "loader" in str(entry.message) and "rank" in str(entry.message)}
    )
    return (
        len(module.trained),
        len(module.validated),
        trainer.global_step,
        [message for message in told if "stop" in message],
    )


@pytest.mark.parametrize("kind", ["streams", "lengths", "iterables"])
def test_ranks_with_fewer_batches_stop_all_of_them_with_a_warning(kind: str) -> None:
    ranks = run("zero3x2", fit_uneven, kind)
    # Two epochs of the shorter: 5 of 5 and 7, and 2 of 4 and 2.
    assert [rank[:3] for rank in ranks] == [(10, 4, 10)] * 2
    train, val = (
        next(message for message in ranks[0][3] if f"the {name} loader" in message) for name in ("train", "val")
    )
    if kind == "lengths":
        assert "5 on rank 0, 7 on rank 1" in train and "all stop after 5" in train and "after 2" in val
    else:
        assert "of rank 0 ended after 5 batches" in train and "of rank 1 ended after 2 batches" in val


def test_ranks_of_a_pipeline_and_of_tensor_parallelism_stop_together_too() -> None:
    ranks = run("zero1x2-pp2", fit_uneven, "streams")
    assert [rank[:3] for rank in ranks] == [(ranks[0][0], ranks[0][1], 10)] * 4


class Shifting(IterableDataset):
    """Takes its rank's part itself, though the strategy will."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.trainer.global_rank, 20, self.trainer.world_size):
            yield torch.tensor([float(i)])


def fit_shifting(layout: str, kind: str) -> str:
    trainer = trainer_for(layout, max_epochs=1, use_distributed_sampler=kind == "cut twice")
    loader: Any = DataLoader(Shifting(trainer), batch_size=1)
    if kind == "by process":
        rows = torch.arange(40.0).reshape(4, 10, 1)
        loader = DataLoader(TensorDataset(rows[trainer.global_rank]), batch_size=2)
    with pytest.raises(DataError) as caught:
        trainer.fit(Counting(), loader)
    return str(caught.value)


def test_a_stream_that_cuts_itself_is_not_cut_again_in_silence() -> None:
    for message in run("dp2", fit_shifting, "cut twice"):
        assert "gives rank 1 other samples than rank 0" in message and "use_distributed_sampler=False" in message


@pytest.mark.parametrize("kind", ["stream", "by process"])
def test_peers_of_one_model_that_are_given_other_data_are_told(kind: str) -> None:
    for message in run("pp2", fit_shifting, kind):
        assert "gives rank 1 another batch than rank 0" in message and "distributed_sampler_kwargs" in message


class Augmented(Dataset):
    """Each sample is drawn, from the generators that a process has or from one that goes by the process."""

    def __init__(self, *, by_process: bool = False) -> None:
        self.by_process = by_process

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.by_process:
            return torch.rand(1, generator=torch.Generator().manual_seed(os.getpid()))
        return torch.tensor([random.random() + float(np.random.rand()) + float(torch.rand(()))])


class Apart(L.Callback):
    """Leaves processes as unseeded ones are, or those that have drawn differently."""

    def on_fit_start(self, *_: Any) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(os.getpid())


def fit_augmented(layout: str, kind: str, folder: str | None = None) -> Any:
    workers = kind == "workers"
    L.seed_everything(1, workers=workers, verbose=False)
    module, resumed = Counting(), kind == "resumed"
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = trainer_for(
        layout,
        max_epochs=2,
        enable_checkpointing=folder is not None,
        callbacks=[Apart(), *([saver] if folder else [])],
        use_distributed_sampler=kind != "not shared out",
    )
    options: dict[str, Any] = {"batch_size": 4, "num_workers": int(workers)}
    loaders = [DataLoader(Augmented(), **options) for _ in range(2)]
    trainer.fit(module, *loaders, ckpt_path=f"{folder}/step=4.ckpt" if resumed else None)
    return trainer.strategy.data_parallel_rank, module.trained, module.validated  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("tp2", "main process"), ("tp2", "workers"), ("tp2", "not shared out"), ("dp2-tp2", "main process"),
     ("zero1x2-pp2", "main process")],
)  # fmt: skip
def test_what_a_dataset_draws_is_equal_on_peers_and_new_in_each_batch(layout: str, kind: str) -> None:
    parts: dict[int, Any] = {}
    for data_rank, *seen in run(layout, fit_augmented, kind):
        # A pipeline runs the step more than once on a batch.
        numbers = [list(dict.fromkeys(number for batch in stage for number in batch)) for stage in seen]
        assert parts.setdefault(data_rank, numbers) == numbers
    for stage in (0, 1):
        drawn = [number for part in parts.values() for number in part[stage]]
        assert len(drawn) == len(set(drawn)) == 2 * 24


def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    whole, resumed = (run("tp2", fit_augmented, kind, str(tmp_path))[0][1] for kind in ("main process", "resumed"))
    assert resumed == whole[4:]


def fit_by_process(layout: str) -> str:
    with pytest.raises(DataError) as caught:
        trainer_for(layout, max_epochs=1).fit(Counting(), DataLoader(Augmented(by_process=True), batch_size=4))
    return str(caught.value)


@pytest.mark.parametrize("layout", ["tp2", "zero1x2-pp2"])
def test_a_dataset_that_goes_by_the_process_is_told_to_peers(layout: str) -> None:
    for message in run(layout, fit_by_process):
        assert re.search(r"train loader gives rank \d another batch than rank \d, .*seeded by the process", message)


class Predicting(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.predicted: list[list[float]] = []

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.predicted.append(batch[0].flatten().tolist())
        return self.layers(batch[0])


def fit_all(layout: str) -> Any:
    module = Predicting()
    trainer = trainer_for(layout, max_epochs=1)
    loaders = [
        DataLoader(TensorDataset(torch.arange(24.0)[:, None]), batch_size=4, shuffle=s) for s in (True, False, False)
    ]
    trainer.fit(module, loaders[0], loaders[1])
    trainer.predict(module, loaders[2])
    strategy: Any = trainer.strategy
    return strategy.data_parallel_rank, module.trained, module.validated, module.predicted


@pytest.mark.parametrize("layout", ["zero1x2-pp2", pytest.param("dp2-tp2-pp2", marks=pytest.mark.slow)])
def test_ranks_that_share_a_data_parallel_coordinate_see_the_same_and_all_together_everything_once(layout: str) -> None:
    ranks = run(layout, fit_all)
    for stage in (1, 2, 3):
        parts: dict[int, Any] = {}
        for rank in ranks:
            # A pipeline first tries the step on a micro-batch.
            tried, *batches = rank[stage]
            assert tried in batches and parts.setdefault(rank[0], batches) == batches
        assert len(parts) == 2
        assert sorted(number for seen in parts.values() for batch in seen for number in batch) == list(range(24))


def fit_other_limits(layout: str) -> None:
    trainer = trainer_for(layout, max_epochs=1, limit_train_batches=3 + int(os.environ["RANK"]))
    with pytest.raises(ConfigError, match="limit_train_batches: 3 on rank 0, 4 on rank 1"):
        trainer.fit(Counting(), DataLoader(TensorDataset(torch.arange(24.0)[:, None]), batch_size=2))


def test_other_limits_on_other_ranks_are_an_error_at_the_start() -> None:
    run("dp2", fit_other_limits)
