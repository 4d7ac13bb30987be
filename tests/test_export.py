"""What is exported is what was trained: equal to the bit, ties and frozen weights right, in bounded memory."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import resource
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from memory import in_clean_process, keep_no_freed_memory, memory_bytes
from modules import Rows, TinyGPT
from safetensors.torch import load_file
from training import ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.export import export_ckpt, write_shards
from lightning_3d.checkpoint.names import find_prefix
from lightning_3d.cli import main
from lightning_3d.errors import CheckpointError

LAYOUTS = ["zero2x2-pp2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("zero1x2", "zero3x2", "tp2-pp2"))]


class Tied(TinyGPT):
    """A head tied to the embedding, a frozen layer and a buffer."""

    def _build(self) -> None:
        super()._build()
        assert self.model is not None
        self.model.layers[1].requires_grad_(False)
        self.register_buffer("seen", torch.full((3,), 7.0))


def train(layout: str | None, folder: Path, ckpt_path: Path | None, steps: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = Tied(lazy=True)
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = trainer_for(
        layout, max_steps=steps, max_epochs=9, precision="64-true", callbacks=[saver], enable_checkpointing=True
    )
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data if layout else 1), ckpt_path=ckpt_path)
    return whole_weights(module)


def united(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for rank in ranks for name, value in rank.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exported_ckpt_is_what_a_stock_trainer_would_have_saved(tmp_path: Path, layout: str) -> None:
    weights = united(run(layout, train, tmp_path / "run", None, 5))
    out = tmp_path / "out.ckpt"
    assert main(["export", str(tmp_path / "run" / "step=5.ckpt"), "--to", "ckpt", str(out)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.ckpt", "run"]
    state = torch.load(out, weights_only=True)["state_dict"]
    module = Tied()
    module.double().load_state_dict(state, strict=True)
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert state["model.head.weight"].data_ptr() != 0
    assert module.model is not None and module.model.head.weight is module.model.embed.weight
    assert torch.equal(Tied.load_from_checkpoint(out).seen.double(), state["seen"])  # type: ignore[arg-type]
    # And a stock Trainer goes on with it as the run itself does.
    (stock,) = run(None, train, tmp_path / "stock", out, 7)
    own = united(run(layout, train, tmp_path / "own", tmp_path / "run" / "step=5.ckpt", 7))
    assert all(torch.allclose(stock[name], own[name], rtol=0, atol=1e-9) for name in own)


def test_a_dtype_that_safetensors_lacks_is_exported_to_a_ckpt_and_else_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source, value = tmp_path / "step=1.ckpt", torch.tensor([1 + 2j, 3], dtype=torch.complex128)
    state = {"model.rotation": value, "model.weight": torch.ones(2)}
    store.save(source, state, extra={"epoch": 1}, rank_state={}, summary={"global_step": 1})
    assert main(["export", str(source), "--to", "ckpt", str(tmp_path / "out.ckpt")]) == 0
    exported = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(exported["rotation"], value) and torch.equal(exported["weight"], torch.ones(2))
    assert main(["export", str(source), "--to", "safetensors", str(tmp_path / "out.safetensors")]) == 2
    assert "rotation is of dtype torch.complex128, which safetensors does not have" in capsys.readouterr().err


def test_empty_tensors_of_several_dtypes_are_exported(tmp_path: Path) -> None:
    source = tmp_path / "step=1.ckpt"
    own = {"none": torch.empty(0), "no": torch.empty(0, dtype=torch.bool), "rows": torch.empty(0, 3)}
    own["weight"] = torch.ones(2)
    state = {f"model.{name}": value for name, value in own.items()}
    store.save(source, state, extra={"epoch": 1}, rank_state={}, summary={"global_step": 1})
    assert main(["export", str(source), "--to", "ckpt", str(tmp_path / "out.ckpt")]) == 0
    assert main(["export", str(source), "--to", "safetensors", str(tmp_path / "out.safetensors")]) == 0
    ckpt = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]
    for exported in (ckpt, load_file(tmp_path / "out.safetensors")):
        assert exported.keys() == own.keys()
        for name, value in own.items():
            assert exported[name].dtype == value.dtype and torch.equal(exported[name], value), name


@pytest.mark.distributed
def test_safetensors_hold_the_weights_by_the_module_s_names(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    weights = united(run("zero3x2", train, tmp_path / "run", None, 5))
    source, out = str(tmp_path / "run" / "step=5.ckpt"), tmp_path / "weights.safetensors"
    assert main(["export", source, "--to", "safetensors", str(out)]) == 0
    assert "left out: optimizer states" in capsys.readouterr().out
    stored = load_file(out)
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)
    half = tmp_path / "half.safetensors"
    assert main(["export", source, "--to", "safetensors", str(half), "--dtype", "bfloat16"]) == 0
    assert all(value.dtype == torch.bfloat16 for value in load_file(half).values())
    # Nothing that is there is written over, and what means nothing is not ignored.
    assert main(["export", source, "--to", "safetensors", str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["export", source, "--to", "safetensors", str(tmp_path / "x"), "--weights-only"]) == 2
    assert main(["export", source, "--to", "hf", str(tmp_path / "x")]) == 2
    assert "--config-from" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nowhere"), "--to", "hf", str(tmp_path / "x")]) == 2


def save_large(folder: Path, *, count: int, rows: int) -> Path:
    """A checkpoint of `count` tensors of `rows` MiB each."""
    state = {f"model.layer{i}": torch.full((rows, 2**18), float(i)) for i in range(count)}
    summary = {"format": 1, "global_step": 0, "epoch": 0, "layout": "single", "world_size": 1}
    store.save(folder, state, extra={}, rank_state={}, summary=summary)
    return folder


def peak_of(action: Any) -> int:
    """The most anonymous memory that this process had during an action, beyond what it had before, in bytes."""

    before, peak, done = memory_bytes("RssAnon"), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, memory_bytes("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        done.set()
        watcher.join()
    return peak - before


def export_and_measure(kind: str, folder: Path, batch: int) -> int:
    keep_no_freed_memory()
    source = save_large(folder / "large.ckpt", count=48, rows=4)
    names = {f"layer{i}": f"layer{i}" for i in range(48)}
    if kind == "ckpt":
        return peak_of(lambda: export_ckpt(source, folder / "out.ckpt", batch_bytes=batch))
    (folder / "out").mkdir()
    return peak_of(lambda: write_shards(source, folder / "out", names=names, shard_bytes=4 * batch, batch_bytes=batch))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [pytest.param("ckpt", marks=pytest.mark.slow), "hf"])
def test_an_export_holds_no_more_than_one_batch_of_tensors(tmp_path: Path, kind: str) -> None:
    model, tensor, batch = 48 * 4 * 2**20, 4 * 2**20, 16 * 2**20
    peak = in_clean_process(export_and_measure, kind, tmp_path, batch)
    # The batch, what torch reads one saved tensor from (its bytes and the tensor of them), and one for all else.
    bound = batch + 3 * tensor
    assert peak <= bound, f"{peak / 2**20:.0f} MiB"
    whole = in_clean_process(export_and_measure, kind, tmp_path / "whole", model)
    assert whole > 0.9 * model, "the measurement sees what is held"


@pytest.mark.distributed
def test_shards_are_no_larger_than_asked_for_and_the_index_names_all(tmp_path: Path) -> None:
    source = save_large(tmp_path / "large.ckpt", count=5, rows=1)
    (tmp_path / "out").mkdir()
    write_shards(source, tmp_path / "out", names={f"layer{i}": f"h.{i}" for i in range(5)}, shard_bytes=2 * 2**20)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 2**20
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], torch.full((1, 2**18), float(name[2:])))


def exported_in_little_space(folder: Path, kind: str, bytes_of_a_file: int) -> tuple[int, str]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_of_a_file, bytes_of_a_file))
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = main(["export", str(folder / "large.ckpt"), "--to", kind, str(folder / "out")])
    return code, told.getvalue()


@pytest.mark.parametrize(
    ("kind", "rows", "told"),
    [("safetensors", 2, "File too large"), ("ckpt", 2, "File too large"), ("ckpt", 1, "torch.save: ")],
)
def test_a_failed_export_says_why_and_leaves_nothing(tmp_path: Path, kind: str, rows: int, told: str) -> None:
    save_large(tmp_path / "large.ckpt", count=1, rows=rows)
    # With a row, torch's file is too large but the one beside it, of which it is made, is not.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        code, error = child.submit(exported_in_little_space, tmp_path, kind, 2**20 + 256).result()
    assert code == 2 and error.startswith(f"error: {tmp_path / 'out'} could not be written: ") and told in error
    assert [path.name for path in tmp_path.iterdir()] == ["large.ckpt"]


def test_a_prefix_is_found_and_two_are_refused() -> None:
    stored = ["embed.weight", "layers.0.weight"]
    own = [f"net.{name}" for name in stored]
    assert find_prefix(stored, [*own, "scale"]) == "net."
    assert find_prefix(stored, stored) == ""
    with pytest.raises(CheckpointError, match="several places.*ema.net.*net."):
        find_prefix(stored, [*own, *(f"ema.{name}" for name in own)])


class Opinion:
    """Nothing that torch loads unasked."""


def with_objects(_: None, path: Path) -> None:
    module, kept = Tied(), {"hyper_parameters": {"opinion": Opinion()}}
    summary = {"format": 1, "global_step": 0, "epoch": 0, "layout": "single", "world_size": 1}
    state = {f"model.{name}": value for name, value in module.state_dict().items()}
    store.save(path, state, extra=kept, rank_state={}, summary=summary)


@pytest.mark.distributed
def test_objects_are_exported_only_if_trusted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, out = tmp_path / "some.ckpt", tmp_path / "out.ckpt"
    run(None, with_objects, path)
    assert main(["export", str(path), "--to", "ckpt", str(out)]) == 2
    told = capsys.readouterr().err
    assert "Opinion" in told and "--trust" in told and "trust=true" in told and not out.exists()
    assert main(["export", str(path), "--to", "ckpt", str(out), "--trust"]) == 0
    assert isinstance(torch.load(out, weights_only=False)["hyper_parameters"]["opinion"], Opinion)
    assert main(["export", str(path), "--to", "safetensors", str(tmp_path / "x"), "--trust"]) == 2
    # What else is wrong with it is told once it is loaded.
    assert main(["export", str(path), "--to", "hf", str(tmp_path / "x")]) == 2
    assert "--trust" in capsys.readouterr().err
    assert main(["export", str(path), "--to", "hf", str(tmp_path / "x"), "--trust"]) == 2
    assert "--config-from" in capsys.readouterr().err


def test_a_place_below_a_file_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "step=1.ckpt"
    store.save(source, {"model.w": torch.ones(1)}, extra={}, rank_state={}, summary={"global_step": 1})
    (tmp_path / "file").touch()
    for out in ("file/out", "file/deep/out"):
        assert main(["export", str(source), "--to", "safetensors", str(tmp_path / out)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and f"{out} could not be written" in told, told


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "x"])
def test_sizes_of_files_that_mean_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture, size: str) -> None:
    assert main(["export", str(tmp_path), "--to", "hf", str(tmp_path / "x"), "--shard-size", size]) == 2
    assert f"'{size}' is no positive number of gigabytes" in capsys.readouterr().err
