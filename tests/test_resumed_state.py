"""Learning rates, groups, frozen layers and what modules keep go on after a resume as if the run had not stopped."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from training import run, trainer_for, whole, whole_weights

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.errors import CheckpointError

pytestmark = pytest.mark.distributed


class Net(L.LightningModule):
    """Linears, whose parameters and biases are groups of their own."""

    def __init__(self, schedule: str = "none", interval: str = "step", monitor: str = "val_loss") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)
        self.schedule, self.interval, self.monitor = schedule, interval, monitor
        self.rates: dict[int, list[float]] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        optimizer = self.trainer.optimizers[0]
        self.rates[self.trainer.global_step] = [group["lr"] for group in optimizer.param_groups]
        loss = self.head(self.body(batch)).square().mean()
        self.log("train_loss", self.course(), on_epoch=True, on_step=False)
        return loss

    def course(self) -> float:
        """A metric that reaches a new best in even epochs, and is worse than before in odd ones."""
        return float(self.current_epoch * (-1) ** (self.current_epoch % 2 == 0))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.course(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2]}]
        optimizer = torch.optim.AdamW([{**groups[0], "lr": 1e-2}, {**groups[1], "lr": 1e-3, "weight_decay": 0.3}])
        if self.schedule == "none":
            return optimizer
        if self.schedule == "multistep":
            scheduler: Any = lr_scheduler.MultiStepLR(optimizer, [2, 5, 6], 0.5)
        elif self.schedule == "onecycle":
            scheduler = lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=20)
        elif self.schedule == "plateau":
            # It halves or does not by what the metric was.
            scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0)
        else:
            warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
            cosine = lr_scheduler.CosineAnnealingLR(optimizer, 12)
            scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])
        config = {"scheduler": scheduler, "interval": self.interval, "monitor": self.monitor, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


class SaveEachStep(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch-{trainer.global_step}.ckpt")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"validation-{trainer.global_step}.ckpt")


def loader(layout: str) -> DataLoader:
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_size=8 // Layout.parse(layout).data)


def rates(
    layout: str, folder: Path, schedule: str, interval: str, every: int, monitor: str = "val_loss", **settings: Any
) -> list[str]:
    """Where the rates of a resumed run differ from those of the undisturbed one."""

    def fit(ckpt_path: Path | None) -> dict[int, list[float]]:
        L.seed_everything(1, verbose=False)
        module = Net(schedule, interval, monitor)
        callbacks = [] if ckpt_path else [SaveEachStep(folder)]
        trainer = trainer_for(layout, max_epochs=5, check_val_every_n_epoch=every, callbacks=callbacks, **settings)
        trainer.fit(module, loader(layout), loader(layout), ckpt_path=ckpt_path)
        return module.rates

    expected = fit(None)
    assert len(expected) == 15 and len({tuple(rate) for rate in expected.values()}) > 1
    wrong = []
    for path in sorted(folder.glob("*.ckpt")):
        step = int(path.stem.partition("-")[2])
        if step < 15 and (step in (2, 3, 4, 6, 11)):
            got = fit(path)
            if got != {number: rate for number, rate in expected.items() if number >= step}:
                wrong.append(f"{path.stem}: {got}")
    return wrong


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("schedule", ["multistep", "warmup_cosine", "onecycle", "plateau"])
def test_learning_rates_go_on_exactly(tmp_path: Path, schedule: str, interval: str, every: int) -> None:
    assert run("single", rates, tmp_path, schedule, interval, every) == [[]]


@pytest.mark.parametrize(
    ("layout", "interval", "settings"),
    [
        ("zero3x2", "epoch", {}),
        ("single", "epoch", {"monitor": "train_loss"}),
        ("single", "epoch", {"max_steps": 15}),
        ("single", "step", {"val_check_interval": 2}),
        ("single", "epoch", {"limit_val_batches": 0, "monitor": "train_loss"}),
    ],
)
def test_schedules_that_go_by_a_metric_go_on_exactly(
    tmp_path: Path, layout: str, interval: str, settings: dict[str, Any]
) -> None:
    for got in run(layout, partial(rates, **settings), tmp_path, "plateau", interval, 1):
        assert got == []


class Unfreeze(BaseFinetuning):
    """The body joins at epoch 1, with options of its own."""

    def freeze_before_training(self, module: L.LightningModule) -> None:
        self.freeze(module.body)

    def finetune_function(self, module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.make_trainable(module.body)
            optimizer.add_param_group({"params": list(module.body.parameters()), "lr": 5e-3, "weight_decay": 0.2})


def unfrozen(layout: str, folder: Path, ckpt_path: Path | None, epochs: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = Net()
    trainer = trainer_for(layout, max_epochs=epochs, callbacks=[Unfreeze()], precision="64-true")
    trainer.fit(module, loader(layout), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint(folder / f"after{epochs}.ckpt")
    optimizer = trainer.optimizers[0]
    names = {p: name for name, p in module.named_parameters()}
    return {
        "trained": {name: p.requires_grad for name, p in module.named_parameters()},
        "groups": [(g["lr"], g["weight_decay"], [names[p] for p in g["params"]]) for g in optimizer.param_groups],
        "moments": {f"{names[p]} {k}": whole(v) for p, e in optimizer.state.items() for k, v in e.items()},
        "weights": whole_weights(module),
    }


@pytest.mark.parametrize("layout", ["zero1x2", "zero3x2", "tp2"])
def test_layers_unfrozen_before_the_stop_stay_so(tmp_path: Path, layout: str) -> None:
    stopped = run(layout, unfrozen, tmp_path, None, 2)
    expected = run(layout, unfrozen, tmp_path, None, 4)
    resumed = run(layout, unfrozen, tmp_path, tmp_path / "after2.ckpt", 4)
    for before, got, whole_run in zip(stopped, resumed, expected, strict=True):
        assert all(got["trained"].values()) and got["trained"] == whole_run["trained"]
        assert len(got["groups"]) == 3 and got["groups"] == whole_run["groups"]
        for part in ("moments", "weights"):
            assert got[part].keys() == whole_run[part].keys()
            assert all(torch.equal(got[part][name], whole_run[part][name]) for name in got[part]), part
        assert not torch.equal(got["weights"]["body.0.weight"], before["weights"]["body.0.weight"])


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.top = self._modules.pop("head")

    def head(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.top(x)


class RenamesAsItLoads(Renamed):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in ("weight", "bias"):
            state[f"top.{name}"] = state.pop(f"head.{name}")


def renamed(layout: str, kind: type[Net], folder: Path, ckpt_path: Path | None) -> dict[str, Any] | str:
    L.seed_everything(1, verbose=False)
    module = kind()
    trainer = trainer_for(layout, max_epochs=2, callbacks=[] if ckpt_path else [SaveEachStep(folder)])
    try:
        trainer.fit(module, loader(layout), ckpt_path=ckpt_path)
    except CheckpointError as error:
        return str(error)
    return {name.replace("top.", "head."): value for name, value in whole_weights(module).items()}


@pytest.mark.parametrize("layout", ["zero3x2", "pp2"])
def test_an_optimizer_goes_on_with_parameters_that_a_hook_renames(tmp_path: Path, layout: str) -> None:
    expected = run(layout, renamed, Net, tmp_path, None)
    got = run(layout, renamed, RenamesAsItLoads, tmp_path, tmp_path / "step-4.ckpt")
    for one, other in zip(got, expected, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


def test_renamed_parameters_are_all_told_where_no_hook_renames_them(tmp_path: Path) -> None:
    run("single", renamed, Net, tmp_path, None)
    (told,) = run("single", renamed, Renamed, tmp_path, tmp_path / "step-4.ckpt")
    assert "on_load_checkpoint" in told
    assert all(name in told for name in ("head.weight", "head.bias", "top.weight", "top.bias"))


class Counting(nn.Linear):
    """Keeps something beside its parameters: a dict, a number, or a tensor once it has been called."""

    def __init__(self, kind: str) -> None:
        super().__init__(8, 8)
        self.kind, self.calls, self.got = kind, 0, list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x)

    def get_extra_state(self) -> Any:
        seen = torch.full((2,), float(self.calls))
        if self.kind == "tensor":
            return seen if self.calls else None
        return {"calls": self.calls, "seen": seen, "more": {}, 5: seen} if self.kind == "dict" else self.calls

    def set_extra_state(self, state: Any) -> None:
        self.got.append(copy.deepcopy(state))


class Counted(Net):
    def __init__(self) -> None:
        super().__init__()
        kinds = ["dict", "dict", "number", "number", "tensor", "tensor"]
        self.body = nn.Sequential(nn.Linear(4, 8), *(Counting(kind) for kind in kinds))


def counted(layout: str, path: Path, in_background: bool) -> dict[str, Any]:
    """What each part that this rank has keeps after one epoch, and what a run that goes on gives it."""

    def fit(epochs: int, callbacks: list[Any], ckpt_path: Path | None) -> dict[str, Counting]:
        module = Counted()
        strategy = ThreeDStrategy(**Layout.parse(layout).as_dict(), async_checkpoint=in_background, timeout_seconds=60)
        trainer = trainer_for(layout, max_epochs=epochs, callbacks=callbacks, strategy=strategy)
        trainer.fit(module, loader(layout), ckpt_path=ckpt_path)
        return {name: part for name, part in module.named_modules() if isinstance(part, Counting)}

    kept = {name: part.get_extra_state() for name, part in fit(1, [SaveEachStep(path.parent)], None).items()}
    got = {name: part.got for name, part in fit(2, [], path).items()}
    return {name: (kept[name], got[name]) for name in kept}


@pytest.mark.parametrize(("layout", "in_background"), [("zero3x2", False), ("pp2", False), ("zero1x2", True)])
def test_what_a_module_keeps_beside_tensors_comes_back_equal(tmp_path: Path, layout: str, in_background: bool) -> None:
    parts = [item for rank in run(layout, counted, tmp_path / "step-3.ckpt", in_background) for item in rank.items()]
    assert {name for name, _ in parts} == {f"body.{number}" for number in range(1, 7)}
    for name, (kept, got) in parts:
        # Called once a step, or once a micro-batch.
        assert int(kept["calls"] if isinstance(kept, dict) else torch.as_tensor(kept).max()) >= 3, name
        assert len(got) == 1 and equal(got[0], kept), (name, kept, got)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else type(one) is type(other) and one == other
