"""Checkpoints below URLs that fsspec knows, and under odd names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from local_shelf import LocalShelf, register
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for, whole_weights

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.places import Folder, place
from lightning_3d.checkpoint.shelf import Shelf
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.strategies.processes.launch import fork_ranks
from lightning_3d.strategies.saving.selection import _last

pytestmark = pytest.mark.distributed
register()


def save(path: Any, value: float, step: int = 1) -> None:
    state = {"weight": torch.full((3,), value), "lr": value}
    store.save(path, state, extra={"note": value}, rank_state={"own": value}, summary={"global_step": step})


def value_at(path: Any) -> float:
    state: dict[str, Any] = {"weight": torch.zeros(3), "lr": None}
    store.load_tensors(path, state)
    value = float(state["lr"])
    assert torch.equal(state["weight"], torch.full((3,), value)) and store.load_extra(path) == {"note": value}
    assert store.load_rank_state(path, rank=0) == {"own": value} and store.load_rank_state(path, rank=1) is None
    return value


def parts(folder: Path) -> int:
    return sum(path.is_dir() for path in folder.iterdir())


@pytest.fixture(params=["memory", "shelf", "file", "plain"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    base = f"{tmp_path}/runs of mine/a + b"
    return {"plain": base, "memory": f"memory:/{base}"}.get(request.param, f"{request.param}://{base}")


def test_checkpoint_is_saved_replaced_listed_and_removed(url: str) -> None:
    assert not store.is_committed(f"{url}/step=1.ckpt")
    save(f"{url}/step=1.ckpt", 1.0)
    save(f"{url}/step=2.ckpt", 2.0, 2)
    for value in (3.0, 4.0, 5.0):
        save(f"{url}/step=1.ckpt", value)
        assert value_at(f"{url}/step=1.ckpt") == value
    assert value_at(f"{url}/step=2.ckpt") == 2.0
    names = [found.name for found in place(url).whole()]
    assert names == ["step=1.ckpt", "step=2.ckpt"]
    with pytest.raises(CheckpointError, match=r"step=3.ckpt does not exist. Whole .*step=1.ckpt, .*step=2.ckpt"):
        store.require_committed(f"{url}/step=3.ckpt")
    store.remove(f"{url}/step=1.ckpt")
    assert not store.is_committed(f"{url}/step=1.ckpt") and store.is_committed(f"{url}/step=2.ckpt")
    store.remove(f"{url}/step=1.ckpt")


def test_a_save_that_fails_below_a_url_keeps_the_former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"shelf://{tmp_path}/last.ckpt"
    save(url, 1.0)
    real, calls, broken = LocalShelf._open, [], [0]

    def failing(self: Any, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "r" not in mode:
            calls.append(path)
            if len(calls) == broken[0]:
                raise OSError(28, "No space left on device")
        return real(self, path, mode, **kwargs)

    monkeypatch.setattr(LocalShelf, "_open", failing)
    save(url, 1.0)
    count = len(calls)
    assert count >= 5 and calls[-1].endswith("checkpoint.json")
    for number in range(1, count + 1):
        calls.clear()
        broken[0] = number
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(url, 2.0)
        assert value_at(url) == 1.0
        # Where the last write was refused, nobody knows whether it came to count.
        assert number == count or parts(tmp_path / "last.ckpt") == 1
    broken[0] = 0
    save(url, 3.0)
    assert value_at(url) == 3.0
    assert parts(tmp_path / "last.ckpt") == 1


class ClientError(Exception):
    """As clients of stores raise them: of no class that all have in common."""


def unavailable(*_: Any, **__: Any) -> None:
    raise ClientError("503, try again")


def test_what_a_client_cannot_delete_stops_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"shelf://{tmp_path}/last.ckpt"
    save(url, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(LocalShelf, "rm", unavailable)
        for value in (2.0, 3.0):
            save(url, value)
            assert value_at(url) == value
    save(url, 4.0)
    assert value_at(url) == 4.0
    assert parts(tmp_path / "last.ckpt") == 1


def save_in_own_memory() -> str:
    dist.init_process_group("gloo")
    try:
        save("memory://runs/step=1", 1.0)
        return "no error"
    except CheckpointError as error:
        return f"{error} {store.is_committed('memory://runs/step=1')}"
    finally:
        # A rank that leaves early takes the others' connections with it.
        dist.barrier()


def test_ranks_that_do_not_see_one_store_are_told_and_commit_nothing() -> None:
    for message in fork_ranks(save_in_own_memory, world_size=2, timeout_seconds=60):
        assert "saving checkpoint memory://runs/step=1 failed on rank 1" in message and message.endswith("False")


def test_kinds_of_places_and_wrong_ones(tmp_path: Path) -> None:
    assert isinstance(place(tmp_path), Folder) and isinstance(place(f"file://{tmp_path}/a b"), Folder)
    assert isinstance(place("memory://x"), Shelf) and str(place("memory://x/y/")) == "memory://x/y"
    with pytest.raises(CheckpointError, match="nowhere://x: .*Give a local path"):
        place("nowhere://x")
    with pytest.raises(CheckpointError, match="for patterns of several names"):
        place("memory://x/step=[1]")
    for local in (tmp_path, f"file://{tmp_path}", f"local://{tmp_path}"):
        with pytest.raises(ConfigError, match="storage_options=.* are for URLs of other .*, but .* is a local path"):
            place(local, storage_options={"token": 1})


def test_the_last_checkpoint_is_found_with_the_options_of_its_store(tmp_path: Path) -> None:
    url = f"shelf://{tmp_path}/runs"
    save(place(f"{url}/on_exception.ckpt", storage_options={"token": "secret"}), 1.0)
    LocalShelf.clear_instance_cache()
    LocalShelf.tokens.clear()
    here: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = trainer_for("single", callbacks=[OnExceptionCheckpoint(url)], **here)
    assert _last(trainer, {"token": "secret"}) == f"{url}/on_exception.ckpt"
    assert set(LocalShelf.tokens) == {"secret"}
    # Options of a store are none of a local folder's.
    save(f"file://{tmp_path}/on_exception.ckpt", 1.0)
    trainer = trainer_for("single", callbacks=[OnExceptionCheckpoint(f"file://{tmp_path}")], **here)
    assert _last(trainer, {"token": "secret"}) == f"file://{tmp_path}/on_exception.ckpt"


def test_a_file_url_that_lightning_takes_for_a_name_is_refused(tmp_path: Path) -> None:
    saver = ModelCheckpoint(f"file://{tmp_path}/a b")
    trainer = trainer_for("single", callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(ConfigError, match=f"Set dirpath='{tmp_path}/a b'"):
        trainer.fit(TinyGPT(lazy=True), ordered(Rows(), replicas=1))


def fit(layout: str, folder: str, ckpt_path: str | None, steps: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = TinyGPT(lazy=True)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1, save_last=True)
    strategy = ThreeDStrategy(
        **Layout.parse(layout).as_dict(),
        timeout_seconds=60,
        storage_options={"token": "secret"} if folder.startswith("shelf") else None,
    )
    trainer = trainer_for(
        layout, max_steps=steps, max_epochs=9, callbacks=[saver], enable_checkpointing=True, strategy=strategy
    )
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data), ckpt_path=ckpt_path)
    there = [found.name for found in place(folder).whole()]
    return {"weights": whole_weights(module), "there": there, "tokens": LocalShelf.tokens[:]}


def twice(layout: str, folder: str) -> Any:
    fit(layout, folder, None, 4)
    return fit(layout, folder, "last", 6)


def fit_without_deleting(layout: str, folder: str) -> Any:
    LocalShelf.rm = unavailable  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        there = fit(layout, folder, None, 4)["there"]
    return there, [str(warning.message) for warning in told if "could not be removed" in str(warning.message)]


def test_training_goes_on_where_a_client_cannot_delete_a_former_checkpoint(tmp_path: Path) -> None:
    ranks = run("zero3x2", fit_without_deleting, f"shelf://{tmp_path}")
    for there, _ in ranks:
        assert there == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    (told,) = ranks[0][1]
    assert "step=2.ckpt could not be removed and stays: ClientError: 503, try again." in told


@pytest.mark.parametrize(("layout", "protocol"), [("single", "memory:/"), ("zero3x2", "shelf://"), ("tp2-pp2", "")])
def test_training_saves_and_resumes_below_a_url(tmp_path: Path, layout: str, protocol: str) -> None:
    whole = run(layout, fit, str(tmp_path / "whole"), None, 6)
    # One process, since what is in memory ends with it; a second Trainer otherwise too.
    got = run(layout, twice, f"{protocol}{tmp_path}/with a space")
    for rank, expected in zip(got, whole, strict=True):
        assert rank["there"] == ["last.ckpt", "step=6.ckpt"]
        assert all(torch.equal(value, expected["weights"][name]) for name, value in rank["weights"].items())
    if protocol == "shelf://":
        assert "secret" in got[0]["tokens"]
