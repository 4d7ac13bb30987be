"""What Lightning's users rely on, in each layout as in one process under strategy="auto"."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from modules import Points
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Recorder, ordered, run, trainer_for, whole, whole_weights

from lightning_3d import Layout
from lightning_3d.checkpoint import store
from lightning_3d.errors import ModelError

pytestmark = pytest.mark.distributed

LAYOUTS = ["dp2", pytest.param("zero1x2", marks=pytest.mark.slow), "zero3x2"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + torch.tanh(self.linear(features))


class Net(L.LightningModule):
    """Blocks, a head and a raw parameter; two parameter groups."""

    def __init__(self, width: int = 6, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.full((3,), scale))

    def output(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = block(features)
        return self.head(features) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.output(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.cross_entropy(self.output(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.output(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.output(batch[0])

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.blocks.parameters()}, {"params": [*self.head.parameters(), self.scale], "lr": 3e-2}]
        return torch.optim.AdamW(groups, lr=1e-2)


Case = Callable[[str | None, Path], Any]
CASES: dict[str, Case] = {}
# Not compared with one process: what the ranks say must only be equal, or is checked by the case itself.
ALIKE: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def alike(function: Case) -> Case:
    ALIKE[function.__name__] = function
    return function


def fresh(kind: Callable[..., Any], **settings: Any) -> Any:
    """In float64 from the start: stock Lightning loads a checkpoint into float32 weights before it converts them."""
    L.seed_everything(1, verbose=False)
    return kind(**settings).double()


def loader(layout: str | None, count: int = 24, **kwargs: Any) -> Any:
    return ordered(Points(count), replicas=Layout.parse(layout).data if layout else 1, **kwargs)


def fit(layout: str | None, module: L.LightningModule, *callbacks: L.Callback, val: int = 16, **kwargs: Any) -> Any:
    recorder = Recorder()
    settings = {"max_epochs": 3, "precision": "64-true", **kwargs}
    trainer = trainer_for(layout, callbacks=[recorder, *callbacks], **settings)
    trainer.fit(module, loader(layout), loader(layout, val), ckpt_path=None)
    return trainer, {"losses": recorder.losses, "norms": recorder.norms, "weights": whole_weights(module)}


# ------------------------------------------------------------------ trainer settings


@case
def settings_that_shorten_a_run(layout: str | None, folder: Path) -> Any:
    found = {}
    for name, kwargs in {
        "fast_dev_run": {"fast_dev_run": True},
        "overfit": {"overfit_batches": 2},
        "limits": {"limit_train_batches": 2, "limit_val_batches": 1},
        "fractions": {"limit_train_batches": 0.67, "val_check_interval": 0.5, "max_steps": 5},
        "inside a window": {"val_check_interval": 1, "accumulate_grad_batches": 2},
    }.items():
        module = fresh(Net)
        trainer, got = fit(layout, module, **kwargs)
        found[name] = got, trainer.global_step, float(trainer.callback_metrics["val_loss"])
    return found


@case
def several_validation_loaders(layout: str | None, folder: Path) -> Any:
    trainer = trainer_for(layout, max_epochs=1, precision="64-true")
    trainer.fit(fresh(Net), loader(layout), [loader(layout, 16), loader(layout, 8), loader(layout, 13)])
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@case
def fit_then_test_then_predict(layout: str | None, folder: Path) -> Any:
    module = fresh(Net)
    trainer, got = fit(layout, module)
    tested = trainer.test(module, loader(layout, 16), verbose=False)
    predicted = trainer.predict(module, loader(layout, 13))
    rows = torch.cat(predicted)
    # Rank 0 has all of them, the others their own.
    return got, tested, rows if trainer.is_global_zero else None


# ------------------------------------------------------------------ schedules and stopping


class Scheduled(Net):
    kind = "onecycle"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("rates", []).append([group["lr"] for group in self.optimizers().param_groups])  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.kind == "onecycle":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=[0.1, 0.2], total_steps=int(self.trainer.estimated_stepping_batches)
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@case
def schedules_per_step_and_per_epoch(layout: str | None, folder: Path) -> Any:
    found = {}
    for kind in ("onecycle", "plateau"):
        module = fresh(Scheduled)
        module.kind = kind
        _, got = fit(layout, module, max_epochs=5)
        assert module.rates[0] != module.rates[-1]
        found[kind] = got, module.rates
    return found


class Judged(Scheduled):
    """Validation metrics that are chosen by the test, not synchronised."""

    kind = "plateau"
    of_rank: Callable[[int, int], float] = staticmethod(lambda rank, epoch: 1.0 + epoch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.of_rank(self.global_rank, self.current_epoch))


@case
def early_stopping(layout: str | None, folder: Path) -> Any:
    stopper = EarlyStopping("val_loss", patience=2)
    trainer, got = fit(layout, fresh(Judged), stopper, max_epochs=9)
    assert trainer.current_epoch == 3
    return got, stopper.stopped_epoch, trainer.global_step


@alike
def metrics_that_differ_by_rank_lead_to_one_decision(layout: str | None, folder: Path) -> Any:
    stopper = EarlyStopping("val_loss", patience=3)
    saver = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}-{val_loss:.1f}", save_top_k=2)
    module = fresh(Judged)
    # Rank 0 improves for ever; rank 1 is best at epoch 1 and then gets worse.
    module.of_rank = lambda rank, epoch: 9.0 - epoch if rank == 0 else 5.0 + abs(epoch - 1) * 2
    trainer, _ = fit(layout, module, stopper, saver, max_epochs=9, enable_checkpointing=True)
    assert trainer.current_epoch < 9
    assert store.is_committed(Path(saver.best_model_path))
    assert all(store.is_committed(Path(path)) for path in saver.best_k_models) and len(saver.best_k_models) == 2
    assert sorted(folder.iterdir()) == sorted(map(Path, saver.best_k_models))
    return (
        trainer.current_epoch, trainer.global_step, saver.best_model_path, saver.kth_best_model_path,
        float(saver.best_model_score), sorted(saver.best_k_models), module.rates,
    )  # fmt: skip


# ------------------------------------------------------------------ gradients


class Clipped(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@case
def gradient_clipping_of_one_s_own(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(Clipped))[1]


class Watched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[dict[str, float]] = []
        self.gradients: list[list[torch.Tensor]] = []

    def on_after_backward(self) -> None:
        self.gradients.append([whole(p.grad) for p in self.parameters() if p.grad is not None])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for kind in (1, 2, "inf"):
            self.norms.append({name: float(value) for name, value in grad_norm(self, kind).items()})
        self.log_dict(grad_norm(self, 2))


@case
def hooks_see_the_gradients_of_the_whole_batch(layout: str | None, folder: Path) -> Any:
    module = fresh(Watched)
    trainer, got = fit(layout, module, accumulate_grad_batches=1)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "norm" in name}
    assert len(logged) == 8 and module.gradients
    return got, module.norms, module.gradients, logged


class Skipping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@alike
def a_step_that_returns_none_is_refused_by_lightning_on_all_ranks(layout: str | None, folder: Path) -> Any:
    with pytest.raises(RuntimeError, match="returning None in distributed training is not supported"):
        fit(layout, fresh(Skipping))


class Toggled(Net):
    def on_train_epoch_start(self) -> None:
        self.blocks[0].requires_grad_(self.current_epoch != 1)
        self.scale.requires_grad_(self.current_epoch == 2)


class ToggledInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def output(self, features: torch.Tensor) -> torch.Tensor:
        return super().output(features) / self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scale.requires_grad_(batch_idx != self.current_epoch)
        self.head.requires_grad_(batch_idx != 2)
        self.temperature.requires_grad_(batch_idx != 0)
        return super().training_step(batch, batch_idx)


@case
def parameters_frozen_for_an_epoch(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(Toggled))[1]


@case
def parameters_frozen_for_a_step(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(ToggledInside))[1]


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[1], optimizer, lr=1e-2)


class HeadOnly(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@case
def finetuning(layout: str | None, folder: Path) -> Any:
    module = fresh(HeadOnly)
    before = whole_weights(module)
    got = fit(layout, module, Thaw())[1]
    assert torch.equal(got["weights"]["blocks.0.linear.weight"], before["blocks.0.linear.weight"])
    assert not torch.equal(got["weights"]["blocks.1.linear.weight"], before["blocks.1.linear.weight"])
    return got


# ------------------------------------------------------------------ shapes of modules


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.shift = nn.Parameter(torch.zeros(6))

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = torch.tanh(layer(features))
        return features + self.shift


class ByMethod(Net):
    """Calls a method of a child, and uses parameters as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.mixer = nn.Parameter(torch.eye(6))

    def output(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder.encode(features) @ self.mixer
        return F.linear(hidden, self.head.weight, self.head.bias) * self.scale


class Plain(Net):
    """No repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block()])
        self.blocks[2].linear.weight = self.blocks[0].linear.weight  # type: ignore[union-attr]


class Recomputed(Net):
    def output(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = checkpoint(block, features, use_reentrant=False)  # type: ignore[assignment]
        return self.head(features) * self.scale


@case
def a_child_s_method_and_a_raw_parameter(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(ByMethod))[1]


class Reaching(Net):
    """Reaches into a block for a weight of it."""

    def output(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(features @ self.blocks[0].linear.weight) * self.scale  # type: ignore[operator, union-attr]


@alike
def a_weight_taken_out_of_a_block_is_refused_where_it_is_sharded(layout: str | None, folder: Path) -> Any:
    if layout == "dp2":
        return fit(layout, fresh(Reaching))[1]
    with pytest.raises(ModelError, match="used outside of that block's forward.*zero_stage=0"):
        fit(layout, fresh(Reaching))
    return None


@case
def no_repeated_blocks(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(Plain), gradient_clip_val=0.1)[1]


@case
def a_weight_shared_by_two_blocks(layout: str | None, folder: Path) -> Any:
    module = fresh(Shared)
    got = fit(layout, module, gradient_clip_val=0.1)[1]
    assert torch.equal(got["weights"]["blocks.0.linear.weight"], got["weights"]["blocks.2.linear.weight"])
    return got


@case
def recomputed_activations(layout: str | None, folder: Path) -> Any:
    return fit(layout, fresh(Recomputed))[1]


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def output(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(super().output(features))


@alike
def batch_norm(layout: str | None, folder: Path) -> Any:
    module = fresh(Normed)
    trainer, got = fit(layout, module)
    assert got["losses"][-1] < got["losses"][0] and int(module.norm.num_batches_tracked) == trainer.global_step
    return got["losses"], {name: value for name, value in got["weights"].items() if "running" not in name}


# ------------------------------------------------------------------ checkpoints


@case
def best_last_and_a_link(layout: str | None, folder: Path) -> Any:
    def trainer(epochs: int) -> tuple[L.Trainer, ModelCheckpoint]:
        saver = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last="link")
        settings: dict[str, Any] = {"precision": "64-true", "enable_checkpointing": True, "callbacks": [saver]}
        return trainer_for(layout, max_epochs=epochs, **settings), saver

    first, saver = trainer(2)
    first.fit(fresh(Net), loader(layout), loader(layout, 16))
    assert (folder / "last.ckpt").is_symlink() and len(list(folder.iterdir())) == 3
    module = fresh(Net, scale=9.0)
    second, saver = trainer(4)
    second.fit(module, loader(layout), loader(layout, 16), ckpt_path="last")
    weights = whole_weights(module)
    best = second.test(module, loader(layout, 16), ckpt_path="best", verbose=False)
    return second.global_step, Path(saver.best_model_path).name, float(saver.best_model_score), weights, best  # type: ignore[arg-type]


@case
def checkpoints_by_hand(layout: str | None, folder: Path) -> Any:
    module = fresh(Net, scale=2.0)
    trainer, _ = fit(layout, module)
    trainer.save_checkpoint(folder / "all.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    if layout is not None:
        extra = store.load_extra(folder / "all.ckpt")
        assert extra["hyper_parameters"] == {"width": 6, "scale": 2.0}
        names = set(store.saved_tensors(folder / "weights.ckpt"))
        assert names == {f"model.{name}" for name in module.state_dict()}
    expected = trainer.validate(module, loader(layout, 16), verbose=False)
    for name in ("all.ckpt", "weights.ckpt"):
        other = trainer_for(layout, precision="64-true")
        assert other.validate(fresh(Net), loader(layout, 16), ckpt_path=folder / name, verbose=False) == expected
    return expected


class Renamed(Net):
    """Its head had another name when the checkpoint was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = self.head
        del self.head

    def output(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = block(features)
        return self.classifier(features) * self.scale

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of_the_user"] = {"seen": 5}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in ("weight", "bias"):
            state[f"classifier.{name}"] = state.pop(f"head.{name}")


@case
def entries_that_are_renamed_while_loading(layout: str | None, folder: Path) -> Any:
    trainer, _ = fit(layout, fresh(Net))
    trainer.save_checkpoint(folder / "old.ckpt")
    module = fresh(Renamed)
    other = trainer_for(layout, precision="64-true")
    return other.validate(module, loader(layout, 16), ckpt_path=folder / "old.ckpt", verbose=False), whole_weights(
        module
    )


# ------------------------------------------------------------------ running and comparing


def run_cases(layout: str | None, folder: Path, cases: list[str]) -> dict[str, Any]:
    """Each case's result, or the error it raised; one Trainer after the other in one process."""
    results: dict[str, Any] = {}
    for name in cases:
        L.seed_everything(1, verbose=False)
        own = folder / f"{layout}-{name}"
        own.mkdir(exist_ok=True)
        try:
            results[name] = {**CASES, **ALIKE}[name](layout, own)
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(None, run_cases, tmp_path_factory.mktemp("auto"), list(CASES))[0]


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(request.param, run_cases, tmp_path_factory.mktemp("ranks"), [*CASES, *ALIKE], timeout_seconds=250)


def assert_close(got: Any, expected: Any, where: str) -> None:
    """Numbers within 1e-9, the rest equal, through any nest; None stands for what a rank does not have."""
    if got is None and where != "rank 0":
        return
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key in expected:
            assert_close(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_close(one, other, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.shape == expected.shape, where
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9), where
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-8, abs=1e-10), where
    else:
        assert got == expected, where


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert not isinstance(expected[name], str), expected[name]
    for rank, results in enumerate(ranks):
        assert not isinstance(results[name], str), f"rank {rank}: {results[name]}"
        assert_close(results[name], expected[name], f"rank {rank}")


@pytest.mark.parametrize("name", ALIKE)
def test_alike_on_all_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        assert not isinstance(results[name], str), f"rank {rank}: {results[name]}"
        assert_close(results[name], ranks[0][name], f"rank {rank}")
