"""A job that SLURM queues again goes on from its newest whole checkpoint, whatever a kill has left beside it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.trainer.connectors import checkpoint_connector
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for

from lightning_3d import Layout
from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.places import place

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by what picks checkpoints alone."""
    monkeypatch.setattr(checkpoint_connector, "SLURMEnvironment", SimpleNamespace(detect=lambda: True))


def start(layout: str, root: Any, *, max_steps: int = 2, ckpt_path: str | None = None) -> L.Trainer:
    trainer = trainer_for(layout, default_root_dir=root, max_steps=max_steps)
    train = ordered(Rows(), replicas=Layout.parse(layout).data)
    trainer.fit(TinyGPT(lazy=True), train, ckpt_path=ckpt_path)
    return trainer


def save_for_requeue(trainer: L.Trainer) -> str:
    """As Lightning does at SLURM's signal."""
    path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
    trainer.save_checkpoint(path)
    return path.rpartition("/")[2]


def killed_in_save(layout: str, root: Any) -> list[Any]:
    first = start(layout, root, max_steps=1)
    found = [first.ckpt_path, save_for_requeue(first)]
    if first.is_global_zero:
        draft = (place(root) / "hpc_ckpt_2.ckpt").begin()
        (place(root) / "hpc_ckpt_2.ckpt").write(draft, store.EXTRA, b"")
    first.strategy.barrier()
    for ckpt_path in (None, "hpc"):
        second = start(layout, root, ckpt_path=ckpt_path)
        found += [str(second.ckpt_path).rpartition("/")[2], second.global_step]
    return [*found, save_for_requeue(second)]


@pytest.mark.parametrize(("layout", "protocol"), [("single", ""), ("zero3x2", ""), ("single", "memory:/")])
def test_a_job_killed_in_its_save_goes_on_from_the_one_before_and_saves_the_next(
    tmp_path: Path, layout: str, protocol: str
) -> None:
    for found in run(layout, killed_in_save, f"{protocol}{tmp_path}"):
        assert found == [None, "hpc_ckpt_1.ckpt", "hpc_ckpt_1.ckpt", 2, "hpc_ckpt_1.ckpt", 2, "hpc_ckpt_2.ckpt"]
    if not protocol:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]


def killed_in_first_save(layout: str, root: Path) -> tuple[Any, int, str]:
    (place(root) / "hpc_ckpt_1.ckpt").begin()
    trainer = start(layout, root)
    with pytest.raises(ValueError, match="no HPC checkpoint was found"):
        start(layout, root, ckpt_path="hpc")
    return trainer.ckpt_path, trainer.global_step, save_for_requeue(trainer)


def test_a_job_killed_in_its_first_save_starts_anew(tmp_path: Path) -> None:
    assert run("single", killed_in_first_save, tmp_path) == [(None, 2, "hpc_ckpt_1.ckpt")]


def highest(layout: str, root: Path) -> tuple[str, str]:
    first = start(layout, root / "elsewhere", max_steps=1)
    for number in (9, 10):
        first.save_checkpoint(root / f"hpc_ckpt_{number}.ckpt")
    # Neither is a checkpoint.
    (root / "hpc_ckpt_11.ckpt").mkdir()
    (root / "notes on hpc_ckpt_10 of 2024").touch()
    second = start(layout, root)
    return Path(str(second.ckpt_path)).name, save_for_requeue(second)


def test_the_highest_number_of_a_whole_checkpoint_counts(tmp_path: Path) -> None:
    assert run("single", highest, tmp_path) == [("hpc_ckpt_10.ckpt", "hpc_ckpt_11.ckpt")]


def after_plain(layout: str, root: Path) -> tuple[str, int]:
    trainer = trainer_for(None, max_steps=1, default_root_dir=root / "elsewhere")
    trainer.fit(TinyGPT(), ordered(Rows(), replicas=1))
    trainer.save_checkpoint(root / "hpc_ckpt_3.ckpt")
    trainer = start(layout, root)
    return Path(str(trainer.ckpt_path)).name, trainer.global_step


def test_a_plain_file_of_a_requeued_job_is_gone_on_from(tmp_path: Path) -> None:
    assert run("single", after_plain, tmp_path) == [("hpc_ckpt_3.ckpt", 2)]
