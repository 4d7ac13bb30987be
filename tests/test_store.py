"""A checkpoint folder is whole or not there, whatever fails, and any number of ranks loads any other's."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faulty_disk import FaultyDisk
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.places import Folder
from lightning_3d.errors import CheckpointError, LaunchError
from lightning_3d.strategies.processes.launch import fork_ranks

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


# ------------------------------------------------------------------ saving over what is there


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


# ------------------------------------------------------------------ a failure


@pytest.mark.parametrize(("name", "can_swap"), [("step=2", True), ("last.ckpt", True), ("last.ckpt", False)])
def test_a_save_that_fails_leaves_nothing_of_what_it_wrote(tmp_path: Path, name: str, can_swap: bool) -> None:
    save(tmp_path / "last.ckpt", 1.0)
    with FaultyDisk(can_swap=can_swap).in_use() as disk:
        save(tmp_path / name, 2.0)
    store.remove(tmp_path / name)
    save(tmp_path / "last.ckpt", 1.0)
    for number, operation in enumerate(disk.operations):
        with FaultyDisk(fail_at=number, can_swap=can_swap).in_use(), pytest.raises(CheckpointError, match="No space"):
            save(tmp_path / name, 2.0)
        assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"], (number, operation)
    assert_holds(tmp_path / "last.ckpt", 1.0)


def test_a_draft_that_cannot_be_deleted_is_told_as_the_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "unlink", failing)
    with FaultyDisk(fail_at=9).in_use(), pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path / "step=1", 1.0)
    monkeypatch.undo()
    assert store.set_aside_leftovers(tmp_path) == [tmp_path / ".step=1.unfinished"]


# ------------------------------------------------------------------ a kill


def killed_at(number: int | None, path: Path, *, can_swap: bool) -> list[str]:
    """Save in a fork that is killed instead of operation `number`; the operations, where it is None."""
    disk = FaultyDisk(fail_at=number, fault=lambda: os.kill(os.getpid(), signal.SIGKILL), can_swap=can_swap)
    if number is None:
        with disk.in_use():
            save(path, 2.0, 2)
        return disk.operations
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with disk.in_use():
            save(path, 2.0, 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    return []


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_under_the_name(tmp_path: Path, can_swap: bool) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1.0)
    operations = killed_at(None, path, can_swap=can_swap)
    ends = [index for index, operation in enumerate(operations) if operation in ("swap", "rename")]
    aside = 0
    writes = [number for number, operation in enumerate(operations) if operation == "write"]
    # Some of them, and all of the last file's, which is the summary.
    tried = {n for n in range(len(operations)) if operations[n] != "write" or n % 5 == 0} | set(writes[-3:])
    for number in sorted(tried):
        save(path, 1.0)
        killed_at(number, path, can_swap=can_swap)
        # Swapping leaves no moment without a checkpoint of that name; renaming twice does.
        assert path.exists() or not can_swap
        assert store.committed(tmp_path) == [Folder(path)]
        assert_holds(path, 2.0 if number > ends[-1] else 1.0)
        found = store.set_aside_leftovers(tmp_path)
        assert all(left == tmp_path / ".last.ckpt.unfinished" for left in found)
        aside += len(found)
        assert store.committed(tmp_path) == [Folder(path)] and store.set_aside_leftovers(tmp_path) == []
    assert aside >= len([n for n in ends if operations[n] != "rename"]) and aside > 5
    save(path, 3.0)
    assert_holds(path, 3.0)
    assert [found.name for found in tmp_path.iterdir()] in (
        ["last.ckpt"],
        [".last.ckpt.unfinished", "last.ckpt"],
        ["last.ckpt", ".last.ckpt.unfinished"],
    )


@pytest.mark.parametrize("content", [b"", b'{"global_st', b"\0" * 40, b"\xff\xfe"])
def test_a_half_written_summary_makes_nothing_whole_and_stops_no_start(tmp_path: Path, content: bytes) -> None:
    save(tmp_path / "step=1", 1.0)
    for name in (".step=1.0123abcd.saving", "step=2"):
        shutil.copytree(tmp_path / "step=1", tmp_path / name)
        (tmp_path / name / store.SUMMARY).write_bytes(content)
    assert store.set_aside_leftovers(tmp_path) == [tmp_path / ".step=1.unfinished"]
    assert store.committed(tmp_path) == [Folder(tmp_path / "step=1")]
    with pytest.raises(CheckpointError, match="step=2 is a folder but holds no whole checkpoint"):
        store.require_committed(tmp_path / "step=2")


def test_a_draft_belongs_to_the_name_that_it_was_for(tmp_path: Path) -> None:
    for name in ("a", "a.b", "a.b.c", "a.saving", "step=1 [x]*"):
        killed_at(9, tmp_path / name, can_swap=True)
        assert [found.name for found in store.set_aside_leftovers(tmp_path)] == [f".{name}.unfinished"]
    # A save removes what is left of former ones under its own name, and of no other.
    killed_at(9, tmp_path / "a", can_swap=True)
    killed_at(9, tmp_path / "a.b", can_swap=True)
    save(tmp_path / "a", 1.0)
    (left,) = tmp_path.glob(".*.saving")
    assert left.name.startswith(".a.b.")


def test_leftovers_are_reported_once_and_do_not_pile_up(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "whole", float(step), step)
        killed_at(9, tmp_path / f"step={step}", can_swap=True)
        (tmp_path / f".gone={step}.removed").mkdir()
        assert store.set_aside_leftovers(tmp_path) == [tmp_path / f".step={step}.unfinished"]
        assert store.set_aside_leftovers(tmp_path) == []
        assert sorted(path.name for path in tmp_path.iterdir()) == [f".step={step}.unfinished", "whole"]
        assert store.committed(tmp_path) == [Folder(tmp_path / "whole")]


def test_several_ranks_repair_at_once(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1.0)
    for _ in range(5):
        path.rename(tmp_path / ".last.ckpt.replaced")
        for found in together(2, store.newest, tmp_path):
            assert found == Folder(path)


def test_what_a_kill_between_two_renames_left_is_there_when_it_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path / "last.ckpt", 1.0)
    (tmp_path / "last.ckpt").rename(tmp_path / ".last.ckpt.replaced")
    store.require_committed(tmp_path / "last.ckpt")
    assert_holds(tmp_path / "last.ckpt", 1.0)


# ------------------------------------------------------------------ ranks that do not share a folder


def save_elsewhere(folder: Path, path: str) -> str:
    own = folder / f"machine-{rank()}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    try:
        save(Path(path), 1.0)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_ranks_that_do_not_see_one_folder_are_told_and_commit_nothing(tmp_path: Path) -> None:
    # Rank 1 finds a draft of that name, and one of an earlier save, where it looks.
    for name in (".step=1.saving", ".step=1.0123abcd.saving"):
        (tmp_path / "machine-1" / name).mkdir(parents=True)
        (tmp_path / "machine-1" / name / store.EXTRA).write_bytes(b"")
    for message in together(2, save_elsewhere, tmp_path, "step=1"):
        assert "saving checkpoint step=1 failed on rank 1" in message and "absolute path" in message, message
        assert "machine-1" in message
    assert [store.committed(tmp_path / f"machine-{number}") for number in range(2)] == [[], []]
    assert together(2, save_elsewhere, tmp_path, str(tmp_path / "step=1")) == ["no error"] * 2
    assert_holds(tmp_path / "step=1", 1.0)


# ------------------------------------------------------------------ what is there


@pytest.mark.parametrize("missing", [store.METADATA, store.SUMMARY])
def test_leftovers_are_not_picked(tmp_path: Path, missing: str) -> None:
    save(tmp_path / "step=1", 1.0)
    save(tmp_path / "step=9", 9.0, 9)
    for name in (".step=9.saving", ".step=9.removed"):
        shutil.copytree(tmp_path / "step=9", tmp_path / name)
    (tmp_path / "step=9" / missing).unlink()
    assert store.committed(tmp_path) == [Folder(tmp_path / "step=1")]
    with pytest.raises(CheckpointError, match="step=9 is a folder but holds no whole checkpoint"):
        store.require_committed(tmp_path / "step=9")
    assert store.committed(tmp_path / "nowhere") == []


def test_a_hidden_name_is_a_name_but_that_of_a_save_under_way_is_not(tmp_path: Path) -> None:
    save(tmp_path / ".hidden.ckpt", 1.0)
    save(tmp_path / ".hidden.ckpt", 2.0)
    assert_holds(tmp_path / ".hidden.ckpt", 2.0)
    assert store.committed(tmp_path) == [Folder(tmp_path / ".hidden.ckpt")]
    for kind in ("saving", "unfinished", "removed", "replaced"):
        with pytest.raises(CheckpointError, match=f"hidden.ckpt.{kind} .*Give another name"):
            save(tmp_path / f".hidden.ckpt.{kind}", 3.0)
    store.remove(tmp_path / ".hidden.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder_of_ours_and_is_told_where_it_serves(tmp_path: Path) -> None:
    (tmp_path / "plain.ckpt").touch()
    with pytest.raises(CheckpointError, match=r"plain.ckpt is one file, no folder .* ckpt_path=.*initial_weights="):
        store.require_committed(tmp_path / "plain.ckpt")


@pytest.mark.parametrize("found", [2, "next"])
def test_a_later_format_is_refused_and_none_is_the_first(tmp_path: Path, found: Any) -> None:
    save(tmp_path / "step=1", 1.0)
    store.require_committed(tmp_path / "step=1")
    summary = {**store.summary(tmp_path / "step=1"), "format": found}
    (tmp_path / "step=1" / store.SUMMARY).write_text(json.dumps(summary))
    with pytest.raises(CheckpointError, match=rf"has format {found!r}, and this version .* up to 1\. Load it with"):
        store.require_committed(tmp_path / "step=1")


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


# ------------------------------------------------------------------ unpickling


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("where", ["extra.pt", "rank_00000.pt", "entry", ".metadata"])
def test_a_checkpoint_cannot_run_code_unless_it_is_trusted(tmp_path: Path, where: str) -> None:
    trap, sprung = Trap(tmp_path / "sprung"), tmp_path / "sprung"
    path = tmp_path / "step=1"
    store.save(
        path,
        {"weight": weight(1.0), "name": trap if where == "entry" else "plain"},
        extra={"note": trap if where == "extra.pt" else None},
        rank_state={"value": trap if where == "rank_00000.pt" else 1.0},
        summary={"global_step": 1},
    )
    if where == ".metadata":
        (path / ".metadata").write_bytes(pickle.dumps(trap))

    def read(weights_only: bool) -> None:
        store.load_tensors(path, {"name": None}, weights_only=weights_only)
        store.load_extra(path, weights_only=weights_only)
        store.load_rank_state(path, rank=0, weights_only=weights_only)

    with pytest.raises(CheckpointError, match="names .*touch" if where == ".metadata" else "weights_only=False"):
        read(True)
    assert not sprung.exists()
    if where != ".metadata":
        read(False)
        assert sprung.exists()
