"""A checkpoint of any layout opens in one process without a launcher: a module from it, or a stock Trainer's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.plain import read_plain
from lightning_3d.errors import CheckpointError

pytestmark = pytest.mark.distributed

ROWS = torch.stack([Rows()[index] for index in range(4)])
LAYOUTS = ["tp2-pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3x2", "zero1x2-pp2"))]


class Remembered(TinyGPT):
    """With hyper-parameters."""

    def __init__(self, *, lazy: bool = False, learning_rate: float = 1e-2, note: str = "") -> None:
        super().__init__(lazy=lazy, learning_rate=learning_rate)
        self.save_hyperparameters()

    def predict_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(rows[:, :-1])  # type: ignore[misc]


def train(layout: str | None, folder: Path, ckpt_path: Path | None, steps: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = Remembered(lazy=True, learning_rate=5e-3, note="kept")
    # At the end of an epoch of 5 steps, so that a stock Trainer goes on with the next one.
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = trainer_for(
        layout, max_steps=steps, max_epochs=9, precision="64-true", callbacks=[saver], enable_checkpointing=True
    )
    count = Layout.parse(layout).data if layout else 1
    trainer.fit(module, ordered(Rows(), replicas=count), ckpt_path=ckpt_path)
    weights = whole_weights(module)
    logits = trainer.predict(module, ordered(Rows(4), replicas=count, global_batch=4))
    return {"weights": weights, "logits": logits}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_from_checkpoint_gives_the_training_model_s_logits(tmp_path: Path, layout: str) -> None:
    trained = run(layout, train, tmp_path, None, 5)[0]
    module = Remembered.load_from_checkpoint(tmp_path / "step=5.ckpt")
    assert module.hparams == {"lazy": True, "learning_rate": 5e-3, "note": "kept"}
    assert module.learning_rate == 5e-3
    assert all(torch.equal(module.state_dict()[name], value.float()) for name, value in trained["weights"].items())
    logits = module.double().eval().predict_step(ROWS, 0)
    torch.testing.assert_close(logits, torch.cat(trained["logits"]), rtol=1e-5, atol=1e-6)
    assert module.model is not None and module.model.head.weight is module.model.embed.weight


def test_arguments_and_device_are_lightning_s_own(tmp_path: Path) -> None:
    run("zero3x2", train, tmp_path, None, 5)
    path = str(tmp_path / "step=5.ckpt")
    assert Remembered.load_from_checkpoint(path, note="new").hparams["note"] == "new"
    for location in ("meta", {"cpu": "meta"}, torch.device("meta")):
        state = read_plain(path, optimizer=False, map_location=location)["state_dict"]
        assert all(value.is_meta for value in state.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stock_trainer_goes_on_with_a_folder(tmp_path: Path, layout: str) -> None:
    expected = run(layout, train, tmp_path / "whole", None, 7)
    (got,) = run(None, train, tmp_path / "stock", tmp_path / "whole" / "step=5.ckpt", 7)
    seen = set()
    for rank in expected:
        for name, value in rank["weights"].items():
            seen.add(name)
            assert torch.allclose(got["weights"][name], value, rtol=0, atol=1e-9), name
    assert seen == got["weights"].keys()


def load_on_one_rank(layout: str, folder: Path) -> list[float]:
    train(layout, folder, None, 5)
    found = []
    if dist.get_rank() == 1:
        module = Remembered.load_from_checkpoint(folder / "step=5.ckpt")
        found = [float(module.temperature.detach()), float(module.learning_rate)]
        with pytest.raises(CheckpointError, match="loading checkpoint .*gone.* failed on rank 1"):
            store.read_tensors(folder / "gone", {"x": torch.zeros(1)})
    dist.barrier()
    return found


def test_one_rank_of_a_job_loads_by_itself(tmp_path: Path) -> None:
    first, second = run("dp2", load_on_one_rank, tmp_path)
    assert first == [] and len(second) == 2 and second[1] == 5e-3


def test_a_folder_that_is_not_whole_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.ckpt").mkdir()
    (tmp_path / "broken.ckpt" / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        Remembered.load_from_checkpoint(tmp_path / "broken.ckpt")


def load_from_urls(layout: str | None, folder: Path) -> list[str]:
    """A folder in a store's memory and one of this machine, and a plain file in memory."""
    urls = ["memory://loaded/step=5.ckpt", f"file://{folder}/step=5.ckpt", "memory://loaded/plain.ckpt"]
    train(layout, folder, None, 5)
    module = Remembered(note="kept")
    trainer = trainer_for(layout, max_steps=1)
    trainer.fit(module, ordered(Rows(), replicas=1))
    trainer.save_checkpoint(urls[0])
    stock = trainer_for(None, max_steps=1)
    stock.fit(Remembered(note="kept"), ordered(Rows(), replicas=1))
    stock.save_checkpoint(urls[2])
    stock.validate(Remembered(), ordered(Rows(), replicas=1), ckpt_path=urls[0], verbose=False)
    return [Remembered.load_from_checkpoint(url).hparams["note"] for url in urls]


def test_load_from_checkpoint_takes_the_url_of_a_folder(tmp_path: Path) -> None:
    assert run("single", load_from_urls, tmp_path) == [["kept"] * 3]
    for url in (f"{tmp_path}", f"file://{tmp_path}"):
        with pytest.raises(CheckpointError, match="is a folder but holds no whole checkpoint"):
            Remembered.load_from_checkpoint(url)
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match=r"runs is a folder .* beside it: .*step=5.ckpt"):
        Remembered.load_from_checkpoint(tmp_path / "runs")
