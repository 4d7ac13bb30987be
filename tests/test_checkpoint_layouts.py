"""A checkpoint of any layout is, in any other, the same weights and the same optimizer: equal to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from modules import VOCAB, Rows, TinyGPT
from training import ordered, run, trainer_for, whole

from lightning_3d import Layout
from lightning_3d.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.distributed

LAYOUTS = [
    "single", "dp2", "zero3x4", "tp2", "tp4", "pp2", "pp4@interleaved1f1b", "tp2-pp2", "zero3x2-tp2-pp2", "hsdp2x2",
    "dp2-tp2-pp2", "zero1x2-pp2",
]  # fmt: skip
SOME = [
    ("single", "tp2-pp2", "adamw"),
    ("tp2-pp2", "single", "sgd"),
    ("tp2-pp2", "zero3x4", "foreach"),
    ("zero3x4", "pp2@interleaved1f1b", "adamw"),
    ("pp2", "hsdp2x2", "fused"),
    ("zero1x2-pp2", "tp4", "momentum"),
]
# At most one block on each of the stages of pp4@interleaved1f1b.
BLOCKS = 8
STEPS, ON = 3, 2


class Blocks(TinyGPT):
    """Tied, with a frozen parameter and groups with options of their own.

    Args:
        optimizer: adamw, foreach, fused, sgd (which keeps no state) or momentum.
    """

    def __init__(self, optimizer: str) -> None:
        self.optimizer_name = optimizer
        super().__init__(lazy=True)

    def _build(self) -> None:
        super()._build()
        self.model = GPT(
            GPTConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_layers=BLOCKS,
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
        groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
        if self.optimizer_name in ("sgd", "momentum"):
            return torch.optim.SGD(groups, lr=1e-2, momentum=0.9 * (self.optimizer_name == "momentum"))
        speed = {} if self.optimizer_name == "adamw" else {self.optimizer_name: True}
        return torch.optim.AdamW(groups, lr=1e-2, **speed)


class Loaded(L.Callback):
    """All of weights and optimizer before the first step."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.state = gathered(trainer, module)


def gathered(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    optimizer, strategy = trainer.optimizers[0], trainer.strategy
    strategy.share.reshard()  # type: ignore[attr-defined]
    names = {p: strategy.share.aliases.get(name, name) for name, p in module.named_parameters()}  # type: ignore[attr-defined]
    state = {
        f"{names[p]}.{key}": whole(value) if isinstance(value, torch.Tensor) else value
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    options = {
        names[p]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for p in group["params"]
        if p in names
    }
    weights = {name: whole(value) for name, value in module.state_dict().items()}
    return {"weights": weights, "state": state, "options": options, "step": trainer.global_step}


def fit(layout: str, optimizer: str, folder: Path | None, ckpt_path: Path | None, steps: int) -> Any:
    """What was there before the first step, after the one that was saved, and at the end."""
    L.seed_everything(1, verbose=False)
    module, loaded, saved = Blocks(optimizer), Loaded(), dict[str, Any]()
    callbacks: list[L.Callback] = [loaded]
    if folder is not None:

        class Save(L.Callback):
            def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
                if trainer.global_step == STEPS:
                    saved.update(gathered(trainer, module))
                    trainer.save_checkpoint(folder / "saved.ckpt")

        callbacks.append(Save())
    micro = 4 if "pp4" in layout else None
    trainer = trainer_for(
        layout, max_steps=steps, max_epochs=9, precision="64-true", callbacks=callbacks, num_microbatches=micro
    )
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data), ckpt_path=ckpt_path)
    return {"loaded": loaded.state, "saved": saved, "end": gathered(trainer, module)}


def united(ranks: list[dict[str, Any]], moment: str, part: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank in ranks:
        for name, value in rank[moment][part].items():
            same = found.setdefault(name, value)
            assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value, name
    return found


_RUNS: dict[tuple[str, str], tuple[Any, Path]] = {}


def saved_by(layout: str, optimizer: str, factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An undisturbed run and its checkpoint, made once."""
    key = layout, optimizer
    if key not in _RUNS:
        folder = factory.mktemp("saved")
        _RUNS[key] = run(layout, fit, optimizer, folder, None, STEPS + ON), folder / "saved.ckpt"
    return _RUNS[key]


def check(factory: pytest.TempPathFactory, saved: str, loaded: str, optimizer: str) -> None:
    before, path = saved_by(saved, optimizer, factory)
    after = run(loaded, fit, optimizer, None, path, STEPS + ON)
    assert all(rank["loaded"]["step"] == STEPS for rank in after)
    for part in ("weights", "state", "options"):
        old, new = united(before, "saved", part), united(after, "loaded", part)
        assert old.keys() == new.keys(), part
        assert bool(old) == (part != "state" or optimizer != "sgd")
        for name in old:
            same = torch.equal(old[name], new[name]) if isinstance(old[name], torch.Tensor) else old[name] == new[name]
            assert same, f"{part} {name}"
    old, new = united(before, "end", "weights"), united(after, "end", "weights")
    assert old.keys() == new.keys()
    assert max(float((old[name] - new[name]).abs().max()) for name in old) < 1e-9
    assert any(not torch.equal(old[name], value) for name, value in united(before, "saved", "weights").items())


@pytest.mark.parametrize(("saved", "loaded", "optimizer"), SOME)
def test_checkpoint_of_one_layout_goes_on_in_another(
    tmp_path_factory: pytest.TempPathFactory, saved: str, loaded: str, optimizer: str
) -> None:
    check(tmp_path_factory, saved, loaded, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_checkpoint_of_every_layout_goes_on_in_every_other(
    tmp_path_factory: pytest.TempPathFactory, saved: str, loaded: str
) -> None:
    check(tmp_path_factory, saved, loaded, "adamw")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "foreach", "fused", "sgd", "momentum"])
@pytest.mark.parametrize(("saved", "loaded"), [("zero3x2-tp2-pp2", "hsdp2x2"), ("zero3x4", "tp2-pp2"), ("tp4", "dp2")])
def test_every_optimizer_goes_on(
    tmp_path_factory: pytest.TempPathFactory, saved: str, loaded: str, optimizer: str
) -> None:
    check(tmp_path_factory, saved, loaded, optimizer)


class Numbered(Blocks):
    """Block i holds the number i, and so do its moments."""

    def _build(self) -> None:
        super()._build()
        assert self.model is not None
        for index, block in enumerate(self.model.layers):
            for parameter in block.parameters():
                torch.nn.init.constant_(parameter, float(index))


def numbers(layout: str, folder: Path, ckpt_path: Path | None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module, loaded = Numbered("adamw"), Loaded()
    micro = 4 if "pp4" in layout else None
    trainer = trainer_for(layout, max_steps=1 if ckpt_path is None else 2, callbacks=[loaded], num_microbatches=micro)
    if ckpt_path is None:

        class Number(L.Callback):
            def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
                for name, parameter in module.named_parameters():
                    index = float(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else -1.0
                    for tensor in (parameter.data, *trainer.optimizers[0].state.get(parameter, {}).values()):
                        if tensor.dim():
                            tensor.fill_(index)

        trainer.callbacks.insert(0, Number())  # type: ignore[attr-defined]
    trainer.fit(module, ordered(Rows(8), replicas=1), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint(folder / "saved.ckpt")
    return {"loaded": loaded.state}


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp4@interleaved1f1b", marks=pytest.mark.slow)])
def test_block_keeps_its_number_whatever_stage_holds_it(tmp_path: Path, layout: str) -> None:
    run("single", numbers, tmp_path, None)
    ranks = run(layout, numbers, tmp_path, tmp_path / "saved.ckpt")
    weights, state = united(ranks, "loaded", "weights"), united(ranks, "loaded", "state")
    seen = set()
    for name, value in [*weights.items(), *state.items()]:
        if ".layers." in name and value.dim():
            index = int(name.split(".layers.")[1].split(".")[0])
            assert bool((value == index).all()), name
            seen.add(index)
    assert seen == set(range(BLOCKS))
