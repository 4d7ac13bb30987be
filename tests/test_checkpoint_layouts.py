"""A checkpoint of any layout is, in any other, the same weights and the same optimizer: equal to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import VOCAB, Rows, TinyGPT
from training import ordered, run, trainer_for, whole

from lightning_3d import Layout
from lightning_3d.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.distributed

LAYOUTS = ["single", "dp2", "zero3x4", "tp2", "tp4", "pp2", "pp2@interleaved1f1b", "tp2-pp2", "hsdp2x2", "zero1x2-pp2"]
SOME = [
    ("single", "tp2-pp2"),
    ("tp2-pp2", "single"),
    ("tp2-pp2", "zero3x4"),
    ("zero3x4", "pp2@interleaved1f1b"),
    ("pp2", "hsdp2x2"),
    ("zero1x2-pp2", "tp4"),
]
STEPS = 3


class FourBlocks(TinyGPT):
    """Tied, with a frozen parameter, groups with options of their own and an optimizer that keeps two moments."""

    def _build(self) -> None:
        super()._build()
        self.model = GPT(
            GPTConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_layers=4,
                num_heads=4,
                num_kv_heads=4,
                max_sequence_length=16,
                tie_embeddings=True,
            )
        )
        self.model.layers[1].attention_norm.weight.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        moving = [p for p in self.parameters() if p.requires_grad]
        decay = [p for p in moving if p.dim() > 1]
        rest = [p for p in moving if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2)


def fit(layout: str, folder: Path, ckpt_path: Path | None, steps: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = FourBlocks(lazy=True)
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    trainer = trainer_for(
        layout, max_steps=steps, max_epochs=9, precision="64-true", callbacks=[saver], enable_checkpointing=True
    )
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data), ckpt_path=ckpt_path)
    optimizer, strategy = trainer.optimizers[0], trainer.strategy
    names = {p: strategy.share.aliases.get(name, name) for name, p in module.named_parameters()}  # type: ignore[attr-defined]
    state = {
        f"{names[p]}.{key}": whole(value) if isinstance(value, torch.Tensor) else value
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    options = {
        names[p]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    weights = {name: whole(value) for name, value in module.state_dict().items()}
    return {"weights": weights, "state": state, "options": options, "step": trainer.global_step}


def united(ranks: list[dict[str, Any]], part: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank in ranks:
        for name, value in rank[part].items():
            same = found.setdefault(name, value)
            assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value, name
    return found


def check(tmp_path: Path, saved: str, loaded: str) -> None:
    before = run(saved, fit, tmp_path / "saved", None, STEPS)
    after = run(loaded, fit, tmp_path / "loaded", tmp_path / "saved" / f"step={STEPS}.ckpt", STEPS)
    assert all(rank["step"] == STEPS for rank in after)
    for part in ("weights", "state", "options"):
        old, new = united(before, part), united(after, part)
        assert old.keys() == new.keys()
        for name in old:
            same = torch.equal(old[name], new[name]) if isinstance(old[name], torch.Tensor) else old[name] == new[name]
            assert same, f"{part} {name}"
    onward = run(loaded, fit, tmp_path / "onward", tmp_path / "saved" / f"step={STEPS}.ckpt", STEPS + 2)
    undisturbed = run(saved, fit, tmp_path / "undisturbed", None, STEPS + 2)
    old, new = united(undisturbed, "weights"), united(onward, "weights")
    assert max(float((old[name] - new[name]).abs().max()) for name in old) < 1e-9


@pytest.mark.parametrize(("saved", "loaded"), SOME)
def test_checkpoint_of_one_layout_goes_on_in_another(tmp_path: Path, saved: str, loaded: str) -> None:
    check(tmp_path, saved, loaded)


@pytest.mark.slow
@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_checkpoint_of_every_layout_goes_on_in_every_other(tmp_path: Path, saved: str, loaded: str) -> None:
    check(tmp_path, saved, loaded)
