"""A rank that loads weights reads its share of them and no more: counted in bytes, and in pages of the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset
from training import ordered, run, trainer_for

from lightning_3d import Layout
from lightning_3d.parallel import init
from lightning_3d.parallel.held import held_bytes
from lightning_3d.parallel.local import local_tensor
from lightning_3d.strategies.saving import plain_files, weights

pytestmark = pytest.mark.distributed

BLOCKS, WIDTH = 4, 3072
# Of a block: two matrices with their biases. All cuts below divide them evenly.
BLOCK_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 4
MODEL_BYTES = BLOCKS * BLOCK_BYTES
# The kernel maps up to 2 MiB around what is touched, at both ends of a matrix's part.
AROUND = 2 * 2 * 2**20


class Points(Dataset):
    def __init__(self, width: int = WIDTH) -> None:
        self.width = width

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(self.width)


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Stack(L.LightningModule):
    """Linears, from their own initial values or, with `path`, from a file that `configure_model` copies."""

    width = WIDTH

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.path = path
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(*(block(self.width) for _ in range(BLOCKS)))
            if self.path is not None:
                self.load_state_dict(torch.load(self.path, mmap=True, map_location="cpu"))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).mean(), sync_dist=True)  # type: ignore[misc]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pages_of(path: Path) -> int:
    """Bytes of a mapped file that this process has touched."""
    found, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            mine = line.endswith(str(path))
        elif mine and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def bytes_by_calls() -> int:
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def load(layout: str, path: Path, inside: bool) -> dict[str, int]:
    """Counts of one rank. `inside`: the module's own code loads the file, else the strategy."""
    read: list[int] = []
    kept: list[Any] = []

    def counted(function: Any) -> Any:
        def part_of(whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            part = function(whole, target)
            read.append(local_tensor(part).numel() * part.element_size())
            return part

        return part_of

    def keeping(function: Any) -> Any:
        def open_and_keep(*args: Any, **kwargs: Any) -> Any:
            kept.append(function(*args, **kwargs))
            return kept[-1]

        return open_and_keep

    with pytest.MonkeyPatch.context() as patch:
        if inside:
            patch.setattr(init, "part_like", counted(init.part_like))
        else:
            patch.setattr(weights, "placed", counted(weights.placed))
        # Mappings must live until they are measured.
        patch.setattr(torch, "load", keeping(torch.load))
        patch.setattr(plain_files, "open_weights", keeping(plain_files.open_weights))
        module = Stack(path if inside else None)
        trainer = trainer_for(layout, limit_val_batches=1)
        if not inside:
            trainer.strategy._initial_weights = path  # type: ignore[attr-defined]
        before = bytes_by_calls()
        trainer.validate(module, ordered(Points(), replicas=Layout.parse(layout).data, global_batch=4), verbose=False)
        by_calls = bytes_by_calls() - before
        trainer.strategy.share.reshard()  # type: ignore[attr-defined]
        held = held_bytes(trainer.strategy.share).parameters  # type: ignore[attr-defined]
        return {"read": sum(read), "held": held, "pages": pages_of(path), "calls": by_calls}


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return {
        f"net.{i}.{j}.{name}": torch.full(shape, i + 0.5)
        for i in range(BLOCKS)
        for j in (0, 2)
        for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
    }


SHARES = {"single": 1, "zero3x4": 4, "pp2": 2, "zero3x2-pp2": 4}
STAGES = {"single": 1, "zero3x4": 1, "pp2": 2, "zero3x2-pp2": 2}
QUICK = [("zero3x4", "safetensors"), ("pp2", "ckpt"), ("zero3x2-pp2", "inside")]
ALL = [(layout, kind) for layout in SHARES for kind in ("ckpt", "safetensors", "inside")]


@pytest.mark.parametrize(
    ("layout", "kind"), [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in ALL]
)
def test_bytes_read_are_the_rank_s_share(
    tmp_path: Path, state: dict[str, torch.Tensor], layout: str, kind: str
) -> None:
    share = SHARES[layout]
    path = tmp_path / f"weights.{kind}"
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state} if kind == "ckpt" else state, path)
    for rank in run(layout, load, path, kind == "inside"):
        assert rank["read"] == rank["held"] == MODEL_BYTES // share
        assert rank["pages"] <= MODEL_BYTES // share + 2 * BLOCKS // STAGES[layout] * AROUND
        assert rank["pages"] >= 0.9 * MODEL_BYTES // share, "the measurement sees what is read"
        # And nothing is read besides the mapping.
        assert rank["calls"] < 0.1 * MODEL_BYTES // share


def test_a_split_layer_reads_its_rows_or_columns(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    # Biases of row-wise layers are whole on both ranks.
    rowwise = BLOCKS * WIDTH * 4
    for rank in run("tp2", load, path, False):
        assert rank["read"] == rank["held"] == (MODEL_BYTES - rowwise) // 2 + rowwise


class Trained(Stack):
    width = 1024

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()  # type: ignore[misc]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class CountRead(L.Callback):
    """Between the start of `fit` and the first step, in which a checkpoint is loaded."""

    begin = count = 0

    def setup(self, *_: Any, **__: Any) -> None:
        self.begin = bytes_by_calls()

    def on_train_start(self, *_: Any) -> None:
        self.count = bytes_by_calls() - self.begin


def train(layout: str, folder: Path, ckpt_path: Path | None) -> int:
    counted = CountRead()
    trainer = trainer_for(layout, max_steps=2 if ckpt_path else 1, max_epochs=9, callbacks=[counted])
    points = ordered(Points(Trained.width), replicas=Layout.parse(layout).data, global_batch=4)
    trainer.fit(Trained(), points, ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint(folder)
    return counted.count


# Of all that is saved. A saved piece of which a rank holds a part is read whole: of tp2, the columns of both ranks.
READ = {
    ("zero3x4", "zero3x4"): 1 / 4,
    ("zero3x4", "pp2"): 1 / 2,
    ("pp2", "zero3x2-pp2"): 1 / 2,
    ("tp2", "zero3x2"): 3 / 4,
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(*one, marks=[] if one == ("zero3x4", "pp2") else pytest.mark.slow) for one in READ],
)
def test_bytes_read_of_a_folder_are_the_saved_pieces_of_a_rank_s_share(tmp_path: Path, saved: str, loaded: str) -> None:
    run(saved, train, tmp_path / "step=1.ckpt", None)
    written = sum(path.stat().st_size for path in (tmp_path / "step=1.ckpt").glob("*.distcp"))
    # With AdamW's two moments.
    assert written == pytest.approx(3 * BLOCKS * 2 * Trained.width**2 * 4, rel=0.02)
    for count in run(loaded, train, tmp_path, tmp_path / "step=1.ckpt"):
        assert READ[saved, loaded] * written <= count <= READ[saved, loaded] * written + 4 * 2**20
