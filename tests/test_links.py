"""save_last="link": the link points to a whole checkpoint at any time, however that was saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from held_saves import Held, saver, small_fit, trainer_with
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Small
from torch.utils.data import DataLoader
from training import run

from lightning_3d import Layout
from lightning_3d.checkpoint import store, writing
from lightning_3d.checkpoint.places import delete
from lightning_3d.errors import CheckpointError

pytestmark = pytest.mark.distributed


class Watch(L.Callback):
    """Where the link points at the end of each step; that it is whole, whenever it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at = folder, dict[int, str]()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        # What rank 0 does, the others see after the barrier that follows.
        trainer.strategy.barrier()
        self.at[trainer.global_step] = pointed_at(self.folder)
        trainer.strategy.barrier()


def pointed_at(folder: Path) -> str:
    link = folder / "last.ckpt"
    if not link.is_symlink():
        assert not link.exists()
        return ""
    assert store.is_committed(link), os.readlink(link)
    return os.readlink(link)


def moves_with_commits(layout: str, folder: Path) -> Any:
    held, watch = Held(), Watch(folder)
    held.release.set()
    first = saver(folder, 2, top_k=1, save_last="link")

    class Hold(L.Callback):
        """The second save is held until it has been looked at twice."""

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                strategy: Any = trainer.strategy
                strategy._settle(strategy._background.wait)
                held.release.clear()
                held.writing.clear()

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                held.release.set()

    trainer = trainer_with(layout, Hold(), watch, first, steps=6)
    small_fit(trainer)
    ends = [(pointed_at(folder), sorted(path.name for path in folder.iterdir()))]
    again = trainer_with(layout, saver(folder, 2, top_k=1, save_last="link"), steps=8)
    again.fit(Small(), DataLoader(torch.randn(64, 4), batch_size=4), ckpt_path="last")
    ends.append((pointed_at(folder), sorted(path.name for path in folder.iterdir())))
    return watch.at, ends


@pytest.mark.parametrize("layout", ["single", "zero3x2"])
def test_in_the_background_the_link_moves_once_the_save_is_committed(tmp_path: Path, layout: str) -> None:
    for at, ends in run(layout, moves_with_commits, tmp_path):
        assert at[2] in ("", "step=2.ckpt")
        # The checkpoint of step 4 was under way, and the former was kept for the link.
        assert at[4] == "step=2.ckpt", at
        assert ends[0] == ("step=6.ckpt", ["last.ckpt", "step=6.ckpt"])
        # What a run went on from is never removed by Lightning.
        assert ends[1][0] == "step=8.ckpt" and "step=8.ckpt" in ends[1][1]


def stays_where_a_save_fails(layout: str, folder: Path, in_background: bool) -> Any:
    callback = saver(folder, 2, top_k=1, save_last="link")
    real, calls = writing.rank_file, []

    def rank_file(rank: int) -> str:
        calls.append(rank)
        if len(calls) == 2 and rank == Layout.parse(layout).world_size - 1:
            raise OSError(28, "No space left on device")
        return real(rank)

    writing.rank_file = rank_file
    trainer = trainer_with(layout, callback, steps=50, async_checkpoint=in_background)
    with pytest.raises(CheckpointError, match="No space left"):
        small_fit(trainer, samples=400)
    # The next link's.
    target = callback._last_checkpoint_saved
    return pointed_at(folder), Path(callback.last_model_path).name, Path(target).name


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("layout", ["single", "zero3x2"])
def test_a_save_that_fails_leaves_the_link_where_it_was(tmp_path: Path, layout: str, in_background: bool) -> None:
    for got in run(layout, stays_where_a_save_fails, tmp_path, in_background):
        assert got == ("step=2.ckpt", "last.ckpt", "step=2.ckpt")


def removes_the_former(layout: str, folder: Path, in_background: bool) -> Any:
    real, seen = store.remove, list[tuple[str, str]]()

    def remove(path: Any) -> None:
        seen.append((path.name, pointed_at(folder)))
        real(path)

    store.remove = remove  # type: ignore[assignment]
    callback = saver(folder, 1, top_k=1, save_last="link")
    small_fit(trainer_with(layout, callback, steps=3, async_checkpoint=in_background))
    return seen, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("layout", ["single", "zero3x2"])
def test_the_former_is_removed_when_the_link_points_to_the_new(
    tmp_path: Path, layout: str, in_background: bool
) -> None:
    seen, end = run(layout, removes_the_former, tmp_path, in_background)[0]
    assert seen == [("step=1.ckpt", "step=2.ckpt"), ("step=2.ckpt", "step=3.ckpt")]
    assert end == ["last.ckpt", "step=3.ckpt"]


def cannot_be_linked(layout: str, folder: Path) -> Any:
    real, calls = store.link, []

    def link(path: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(1, "Operation not permitted")
        real(path, target)

    store.link = link
    ends = []

    class Look(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            ends.append((pointed_at(folder), sorted(path.name for path in folder.glob("step*"))))

    callback = saver(folder, 1, top_k=1, save_last="link")
    trainer = trainer_with(layout, callback, steps=3, async_checkpoint=False)
    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    small_fit(trainer)
    return ends


def test_a_link_that_cannot_be_moved_keeps_what_it_points_to(tmp_path: Path) -> None:
    (ends,) = run("single", cannot_be_linked, tmp_path)
    assert ends[1] == ("step=1.ckpt", ["step=1.ckpt", "step=2.ckpt"])
    assert ends[2] == ("step=3.ckpt", ["step=3.ckpt"])


class Validated(Small):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)


def waits_for_a_window(layout: str, folder: Path, in_background: bool) -> Any:
    watch = Watch(folder)
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, monitor="val_loss", save_last="link")
    trainer = trainer_with(layout, watch, callback, steps=4, async_checkpoint=in_background)
    trainer.accumulate_grad_batches, looks = 4, []

    class Look(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.strategy.barrier()
            looks.append((trainer.strategy._windows.waiting, pointed_at(folder)))  # type: ignore[attr-defined]
            trainer.strategy.barrier()

    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    trainer.val_check_interval = 3
    data = torch.randn(64, 4)
    trainer.fit(Validated(), DataLoader(data, batch_size=4), DataLoader(data[:8], batch_size=4))
    return looks, pointed_at(folder)


@pytest.mark.parametrize("in_background", [False, True])
def test_inside_a_window_the_link_waits_for_its_end(tmp_path: Path, in_background: bool) -> None:
    for looks, end in run("zero1x2", waits_for_a_window, tmp_path, in_background):
        assert any(waiting for waiting, _ in looks), looks
        assert end.startswith("step=")


def test_a_link_takes_the_place_of_whatever_has_its_name(tmp_path: Path) -> None:
    summary = {"global_step": 1}
    for name in ("a.ckpt", "b.ckpt", "last.ckpt"):
        store.save(tmp_path / name, {"x": torch.ones(1)}, extra={}, rank_state={}, summary=summary)
    link = tmp_path / "last.ckpt"
    store.link(link, tmp_path / "a.ckpt")
    assert pointed_at(tmp_path) == "a.ckpt"
    delete(tmp_path / "a.ckpt")
    store.link(link, tmp_path / "b.ckpt")
    assert pointed_at(tmp_path) == "b.ckpt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.ckpt", "last.ckpt"]
    # A kill before the swap, or after it.
    os.symlink("a.ckpt", tmp_path / ".last.ckpt.removed")
    assert store.set_aside_leftovers(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.ckpt", "last.ckpt"]
