"""A checkpoint folder is whole or not there, whatever fails, and any number of ranks loads any other's."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_3d.checkpoint import store
from lightning_3d.errors import CheckpointError, LaunchError
from lightning_3d.strategies.launch import fork_ranks

pytestmark = pytest.mark.distributed


def together(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` in forked ranks that have met; one rank alone has no process group."""

    def work() -> Any:
        if ranks > 1:
            dist.init_process_group("gloo")
        result = function(*args)
        if ranks > 1:
            # A rank that leaves early takes the others' connections with it.
            dist.barrier()
        return result

    return fork_ranks(work, world_size=ranks, timeout_seconds=60)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def weight(value: float) -> torch.Tensor:
    # Seven rows do not divide by any number of ranks.
    return torch.arange(21.0).reshape(7, 3) + value


def sharded(tensor: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized():
        return tensor
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(path: Path, value: float, step: int = 1) -> None:
    state = {"weight": sharded(weight(value)), "scale": torch.tensor(value), "lr": value, "name": f"at {value}"}
    store.save(
        path,
        state,
        extra={"loops": [value], "note": None},
        rank_state={"rank": rank(), "value": value},
        summary={"global_step": step, "layout": "test"},
    )


def load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"weight": sharded(torch.zeros(7, 3)), "scale": torch.zeros(()), "lr": None, "name": None}
    store.load_tensors(path, state)
    return {
        **state,
        "weight": whole(state["weight"]),
        "extra": store.load_extra(path),
        "own": store.load_rank_state(path, rank=rank()),
    }


def assert_holds(path: Path, value: float) -> None:
    """Read in this process, without any group."""
    got = load(path)
    assert torch.equal(got["weight"], weight(value)) and float(got["scale"]) == value
    assert (got["lr"], got["name"]) == (value, f"at {value}")
    assert got["extra"] == {"loops": [value], "note": None}


def test_any_number_of_ranks_loads_any_other_s(tmp_path: Path) -> None:
    sizes = (1, 2, 4)
    for size in sizes:
        together(size, save, tmp_path / f"by{size}", float(size), size)
    assert [path.name for path in store.committed(tmp_path)] == ["by1", "by2", "by4"]
    for size in sizes:
        for got_by_rank in together(size, lambda: [(by, rank(), load(tmp_path / f"by{by}")) for by in sizes]):
            for by, own_rank, got in got_by_rank:
                assert torch.equal(got["weight"], weight(by)) and float(got["scale"]) == by and got["lr"] == by
                assert got["extra"]["loops"] == [by]
                assert got["own"] == ({"rank": own_rank, "value": float(by)} if own_rank < by else None)
    saved = store.saved_tensors(tmp_path / "by4")
    assert saved["weight"].size == torch.Size([7, 3]) and saved["weight"].properties.dtype == torch.float32


# ------------------------------------------------------------------ a writer that fails


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def on_rename_to(suffix: str, action: Callable[[], Any]) -> None:
    """Do this instead of the first rename to a name with that ending: the former checkpoint moves aside first."""
    real, calls = os.rename, []

    def rename(source: Any, target: Any) -> None:
        if not calls and str(target).endswith(suffix):
            calls.append(target)
            action()
        else:
            real(source, target)

    os.rename = rename  # type: ignore[assignment]


def break_writing(where: str) -> None:
    """On this rank, from now on."""
    if where == "tensors":
        FileSystemWriter.write_data = full_disk  # type: ignore[method-assign]
    elif where == "metadata":
        FileSystemWriter.finish = full_disk  # type: ignore[method-assign]
    elif where == "rest":
        store._write = full_disk
    elif where == "folder":
        Path.mkdir = full_disk  # type: ignore[method-assign]
    else:
        on_rename_to(where, full_disk)


def save_with_a_failure(path: Path, broken_rank: int, where: str) -> tuple[str, float]:
    if rank() == broken_rank:
        break_writing(where)
    begin = time.monotonic()
    try:
        save(path, 2.0, 2)
    except CheckpointError as error:
        return str(error), time.monotonic() - begin
    return "no error", 0.0


CASES = [
    *((1, 0, where) for where in ("folder", "tensors", "metadata", "rest", ".replaced", "/last.ckpt")),
    *((2, 0, where) for where in ("folder", "tensors", "metadata", "rest", ".replaced", "/last.ckpt")),
    *((2, 1, where) for where in ("tensors", "rest")),
]


@pytest.mark.parametrize(("ranks", "broken_rank", "where"), CASES)
def test_a_failing_writer_is_told_on_all_ranks_and_the_checkpoints_before_stay(
    tmp_path: Path, ranks: int, broken_rank: int, where: str
) -> None:
    together(ranks, save, tmp_path / "last.ckpt", 1.0)
    for message, seconds in together(ranks, save_with_a_failure, tmp_path / "last.ckpt", broken_rank, where):
        assert "No space left on device" in message and f"rank {broken_rank}" in message and "last.ckpt" in message
        assert seconds < 10
    assert store.newest(tmp_path) == tmp_path / "last.ckpt"
    assert store.committed(tmp_path) == [tmp_path / "last.ckpt"]
    assert_holds(tmp_path / "last.ckpt", 1.0)
    # What was left does not get in the way of the next save.
    together(ranks, save, tmp_path / "last.ckpt", 3.0)
    assert_holds(tmp_path / "last.ckpt", 3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_new_name_that_fails_leaves_the_former_checkpoint_the_newest(tmp_path: Path) -> None:
    save(tmp_path / "step=1", 1.0)
    for message, _ in together(2, save_with_a_failure, tmp_path / "step=2", 1, "tensors"):
        assert "No space left" in message
    assert store.newest(tmp_path) == tmp_path / "step=1"
    with pytest.raises(CheckpointError, match="step=2 does not exist. Whole checkpoints beside it: .*step=1"):
        store.require_committed(tmp_path / "step=2")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_replaces_what_has_its_name(tmp_path: Path, ranks: int) -> None:
    link = tmp_path / "last.ckpt"
    together(ranks, save, tmp_path / "step=1", 1.0)
    link.symlink_to(tmp_path / "step=1", target_is_directory=True)
    together(ranks, save, link, 2.0)
    assert not link.is_symlink()
    assert_holds(link, 2.0)
    assert_holds(tmp_path / "step=1", 1.0)
    (tmp_path / "file.ckpt").write_text("a checkpoint of another program")
    (tmp_path / "dangling.ckpt").symlink_to(tmp_path / "nowhere")
    for name in ("file.ckpt", "dangling.ckpt"):
        save(tmp_path / name, 3.0)
        assert_holds(tmp_path / name, 3.0)


# ------------------------------------------------------------------ a kill


def save_until_rename(path: Path, suffix: str) -> None:
    on_rename_to(suffix, lambda: os.kill(os.getpid(), signal.SIGKILL))
    save(path, 2.0, 2)


@pytest.mark.parametrize("suffix", [".replaced", "/last.ckpt"])
def test_a_kill_at_either_rename_leaves_the_former_checkpoint(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1.0)
    with pytest.raises(LaunchError, match="SIGKILL"):
        together(1, save_until_rename, path, suffix)
    assert path.exists() == (suffix == ".replaced")
    assert (tmp_path / ".last.ckpt.saving").is_dir()
    assert store.committed(tmp_path) == [path]
    assert_holds(path, 1.0)
    save(path, 3.0)
    assert_holds(path, 3.0)
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]


def test_several_ranks_repair_at_once(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1.0)
    for _ in range(5):
        path.rename(tmp_path / ".last.ckpt.replaced")
        for found in together(2, store.newest, tmp_path):
            assert found == path


@pytest.mark.parametrize("missing", [store.METADATA, store.SUMMARY])
def test_leftovers_are_not_picked(tmp_path: Path, missing: str) -> None:
    save(tmp_path / "step=1", 1.0)
    save(tmp_path / "step=9", 9.0, 9)
    for name in (".step=9.saving", ".step=9.removed"):
        shutil.copytree(tmp_path / "step=9", tmp_path / name)
    (tmp_path / "step=9" / missing).unlink()
    assert store.committed(tmp_path) == [tmp_path / "step=1"]
    with pytest.raises(CheckpointError, match="step=9 is a folder but holds no whole checkpoint"):
        store.require_committed(tmp_path / "step=9")
    assert store.committed(tmp_path / "nowhere") == []


def test_the_newest_has_the_highest_step_then_the_latest_time(tmp_path: Path) -> None:
    for name, step in (("b", 10), ("c", 9), ("a", 10)):
        save(tmp_path / name, 1.0, step)
    assert [path.name for path in store.committed(tmp_path)] == ["c", "b", "a"]


# ------------------------------------------------------------------ removal and damage


def remove_and_die(path: Path) -> None:
    shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    store.remove(path)


def test_a_removal_that_is_killed_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    save(tmp_path / "step=1", 1.0)
    with pytest.raises(LaunchError, match="SIGKILL"):
        together(1, remove_and_die, tmp_path / "step=1")
    assert store.committed(tmp_path) == []
    save(tmp_path / "step=1", 1.0)
    store.remove(tmp_path / "step=1")
    assert list(tmp_path.iterdir()) == []
    store.remove(tmp_path / "step=1")


def test_removing_a_link_keeps_what_it_points_to(tmp_path: Path) -> None:
    save(tmp_path / "step=1", 1.0)
    (tmp_path / "last").symlink_to("step=1", target_is_directory=True)
    store.remove(tmp_path / "last")
    assert not (tmp_path / "last").is_symlink()
    assert_holds(tmp_path / "step=1", 1.0)


def load_damaged(path: Path) -> str:
    try:
        load(path)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_damaged_file_is_told_on_all_ranks(tmp_path: Path) -> None:
    together(2, save, tmp_path / "step=1", 1.0)
    (tmp_path / "step=1" / "__1_0.distcp").write_bytes(b"")
    for message in together(2, load_damaged, tmp_path / "step=1"):
        assert "loading checkpoint" in message and "step=1" in message
