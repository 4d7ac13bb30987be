"""A run that stops anywhere goes on with the samples that it has not seen, in any number of ranks, and counts right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Numbers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from training import run, trainer_for

from lightning_3d import Layout
from lightning_3d.strategies.batches.global_batches import Progress
from lightning_3d.strategies.batches.sampling import shard_dataloader


class Pairs:
    """A batch sampler of unlike sizes, which a run may not cut in another way."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.count).tolist()
        at = 0
        while at < self.count:
            size = 1 + order[at] % 3
            yield order[at : at + size]
            at += size

    def __len__(self) -> int:
        # As many as it gives with the seed that the tests set.
        torch.manual_seed(3)
        return sum(1 for _ in self)


def sharded(loader: DataLoader, ranks: int, done: int = 0) -> list[Any]:
    progress = Progress(done, done)
    return [
        shard_dataloader(loader, num_replicas=ranks, rank=rank, seed=3, progress=lambda: progress)
        for rank in range(ranks)
    ]


def steps(loaders: list[Any], count: int | None = None) -> list[list[int]]:
    per_rank = [[list(map(int, batch)) for batch in loader] for loader in loaders]
    assert len({len(batches) for batches in per_rank}) == 1
    return [[i for batch in step for i in batch] for step in zip(*per_rank, strict=True)][:count]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("old", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_no_sample_is_lost_or_repeated_when_an_epoch_goes_on_over_other_ranks(
    old: int, new: int, drop_last: bool
) -> None:
    for count in (24, 37, 41):
        for old_size, new_size in ((3, 3), (2, 5), (4, 1)):
            first = DataLoader(Numbers(count), batch_size=old_size, shuffle=True, drop_last=drop_last)
            second = DataLoader(Numbers(count), batch_size=new_size, shuffle=True, drop_last=drop_last)
            whole = steps(sharded(first, old))
            for stop in {1, 2, len(whole) - 1}:
                stopped = sharded(first, old, done=stop)
                before = steps(stopped, stop)
                state = stopped[0].state_dict()
                resumed = sharded(second, new)
                batches = {loader.load_state_dict(state) for loader in resumed}
                after = steps(resumed)
                seen = flat(before) + flat(after)
                left = count - len(flat(before))
                assert flat(before) == flat(whole)[: len(flat(before))]
                if drop_last:
                    assert len(set(seen)) == len(seen)
                    assert len(flat(after)) == left - left % (new_size * new)
                elif left >= new:
                    assert sorted(seen) == list(range(count))
                if (old, old_size) == (new, new_size):
                    assert before + after == whole and batches == {stop}
                # Lightning counts from there, and ends the epoch with the last of them.
                assert batches == {len(resumed[0]) - len(after)}


def test_batches_of_a_sampler_of_the_user_s_stay_as_they_are_except_for_one_that_was_begun() -> None:
    loader = DataLoader(Numbers(40), batch_sampler=Pairs(40))  # type: ignore[arg-type]
    whole = steps(sharded(loader, 1))
    before = steps(sharded(loader, 2), 3)
    assert flat(before) == flat(whole)[: len(flat(before))]
    stopped = sharded(loader, 2, done=3)
    list(stopped[0])
    resumed = sharded(loader, 3)
    for each in resumed:
        each.load_state_dict(stopped[0].state_dict())
    assert sorted(flat(before) + flat(steps(resumed))) == list(range(40))


def test_an_order_that_is_not_the_saved_one_s_is_warned_of() -> None:
    stopped = sharded(DataLoader(Numbers(40), batch_size=4, shuffle=True), 1, done=3)
    list(stopped[0])
    state = stopped[0].state_dict()
    with pytest.warns(UserWarning, match="another order than the run had.*after 12 samples"):
        sharded(DataLoader(Numbers(41), batch_size=4, shuffle=True), 1)[0].load_state_dict(state)


def test_a_few_samples_that_new_ranks_cannot_share_are_told() -> None:
    stopped = sharded(DataLoader(Numbers(10), batch_size=2), 2, done=2)
    list(stopped[0])
    resumed = sharded(DataLoader(Numbers(10), batch_size=2), 4)
    with pytest.warns(UserWarning, match="2 samples are left of the epoch.*4 data-parallel ranks"):
        assert [loader.load_state_dict(stopped[0].state_dict()) for loader in resumed] == [1] * 4
    assert steps(resumed) == []


# ------------------------------------------------------------------ inside the Trainer


class Seen(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch_idx, batch.tolist()))
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(L.Callback):
    """A checkpoint after the batches of these numbers, counted over the epochs."""

    def __init__(self, folder: Path, batches: tuple[int, ...]) -> None:
        self.folder, self.batches, self.count = folder, batches, 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.count += 1
        if self.count in self.batches:
            trainer.save_checkpoint(self.folder / f"{self.count}.ckpt")


class OwnPart(IterableDataset):
    """Takes its rank's part itself."""

    def __iter__(self) -> Iterator[int]:
        yield from range(int(os.environ["RANK"]), 40, int(os.environ["WORLD_SIZE"]))


class Rising(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(40)


def loader_for(kind: str, batch_size: int) -> Any:
    if kind == "stream":
        return DataLoader(Rising(), batch_size=batch_size)
    if "stateful" in kind:
        from torchdata.stateful_dataloader import StatefulDataLoader

        if "own" in kind:
            return StatefulDataLoader(OwnPart(), batch_size=batch_size, num_workers=int("workers" in kind))
        return StatefulDataLoader(Numbers(40), batch_size=batch_size, shuffle=True, num_workers=1)
    workers = (
        {"num_workers": 2, "persistent_workers": kind == "persistent"} if kind in ("workers", "persistent") else {}
    )
    generator = torch.Generator().manual_seed(8) if kind == "own generator" else None
    if kind == "own sampler":
        return DataLoader(Numbers(40), batch_sampler=BatchSampler(RandomSampler(Numbers(40)), batch_size, False))
    return DataLoader(Numbers(40), batch_size=batch_size, shuffle=True, generator=generator, **workers)  # type: ignore[arg-type]


def fit(
    layout: str,
    kind: str,
    folder: Path,
    saves: tuple[int, ...],
    ckpt_path: Path | None,
    global_batch: int,
    settings: Any,
) -> Any:
    L.seed_everything(7, verbose=False)
    module = Seen()
    trainer = trainer_for(layout, callbacks=[SaveAt(folder, saves)], **{"max_epochs": 3, **settings})
    loader = loader_for(kind, global_batch // Layout.parse(layout).data)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module.seen, trainer.global_step


def whole_steps(ranks: list[Any]) -> list[tuple[int, int, list[int]]]:
    """Epoch, number and samples of each step of all ranks."""
    found = []
    for step in zip(*(seen for seen, _ in ranks), strict=True):
        assert len({(epoch, index) for epoch, index, _ in step}) == 1
        found.append((*step[0][:2], sorted(i for _, _, batch in step for i in batch)))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["plain", "persistent", "own generator", "stream", "stateful", "stateful own part"])
def test_samples_and_batch_numbers_after_a_stop_are_those_of_an_undisturbed_run(tmp_path: Path, kind: str) -> None:
    if "stateful" in kind:
        pytest.importorskip("torchdata")
    # Five batches an epoch: inside the first, at its end, at the start of the second.
    saves = (2, 5, 6)
    own: dict[str, Any] = {"use_distributed_sampler": "own part" not in kind}
    for settings in (own, {**own, "max_steps": 15}):
        expected = whole_steps(run("dp2", fit, kind, tmp_path, saves, None, 8, settings))
        assert len(expected) == 15
        for epoch in range(3):
            assert sorted(i for e, _, batch in expected if e == epoch for i in batch) == list(range(40))
        for save in saves:
            got = whole_steps(run("dp2", fit, kind, tmp_path / "more", (), tmp_path / f"{save}.ckpt", 8, settings))
            assert got == expected[save:]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "batch"),
    [("plain", 8), ("plain", 12), ("stream", 8), ("stream", 12),
     *(pytest.param(kind, 12, marks=pytest.mark.slow) for kind in ("persistent", "own generator", "stateful"))],
)  # fmt: skip
def test_no_sample_is_lost_or_repeated_over_another_number_of_ranks(tmp_path: Path, kind: str, batch: int) -> None:
    before = whole_steps(run("dp2", fit, kind, tmp_path, (3,), None, 8, {"max_epochs": 1}))[:3]
    for other in ("single", "dp3"):
        if batch % Layout.parse(other).data:
            continue
        ranks = run(other, fit, kind, tmp_path, (), tmp_path / "3.ckpt", batch, {"max_epochs": 2})
        after = whole_steps(ranks)
        first = [step for step in after if step[0] == 0]
        assert sorted(i for _, _, samples in before + first for i in samples) == list(range(40))
        assert sorted(i for epoch, _, samples in after if epoch == 1 for i in samples) == list(range(40))
        assert [index for epoch, index, _ in after if epoch == 1] == list(range(-(-40 // batch)))
        # Batches are numbered so that the epoch ends with the last one's number.
        assert [index for _, index, _ in first] == list(range(24 // batch, 24 // batch + len(first)))


def test_a_stop_inside_an_accumulation_window_can_go_back_to_its_start() -> None:
    """Samples whose gradients were not yet applied have had no effect."""
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    whole = steps(sharded(loader, 2))
    progress = Progress(batches=3, window=2)
    stopped = shard_dataloader(loader, num_replicas=2, rank=0, seed=3, progress=lambda: progress)
    list(stopped)  # type: ignore[call-overload]
    for at, first in (("done", 3), ("window", 2)):
        resumed = sharded(loader, 2)
        assert [each.load_state_dict(stopped.state_dict(), at=at) for each in resumed] == [first] * 2  # type: ignore[attr-defined]
        assert steps(resumed) == whole[first:]


@pytest.mark.distributed
@pytest.mark.parametrize("other", ["dp2", "single"])
def test_no_window_is_cut_by_a_stop_inside_it(tmp_path: Path, other: str) -> None:
    settings = {"accumulate_grad_batches": 2, "max_epochs": 2}
    ranks = run("dp2", fit, "plain", tmp_path, (3,), None, 8, settings)
    expected, count = whole_steps(ranks), ranks[0][1]
    ranks = run(other, fit, "plain", tmp_path, (), tmp_path / "3.ckpt", 8, settings)
    got = whole_steps(ranks)
    # From the window's start, or from its end if the checkpoint waited for it.
    assert got in (expected[2:], expected[4:]) and ranks[0][1] == count


@pytest.mark.distributed
def test_the_first_epoch_after_a_resume_at_an_epoch_s_end_has_its_own_order_with_workers(tmp_path: Path) -> None:
    def fit_epochs(layout: str, folder: Path, ckpt_path: Path | None) -> Any:
        L.seed_everything(7, verbose=False)
        module = Seen()
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = trainer_for(layout, callbacks=[saver], enable_checkpointing=True, max_epochs=3)
        trainer.fit(module, loader_for("workers", 4), ckpt_path=ckpt_path)
        return module.seen

    expected = run("dp2", fit_epochs, tmp_path, None)
    got = run("dp2", fit_epochs, tmp_path / "more", tmp_path / "epoch=1.ckpt")
    for rank in range(2):
        assert got[rank] == [step for step in expected[rank] if step[0] == 2]
    assert {tuple(step[2]) for step in got[0]} != {tuple(step[2]) for step in expected[0] if step[0] == 0}
