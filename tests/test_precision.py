"""What each precision keeps and computes in, in every layout, and that small updates add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from modules import Rows, TinyGPT
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils.data import DataLoader, TensorDataset
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.checkpoint import store
from lightning_3d.parallel.local import local_tensor

pytestmark = pytest.mark.distributed

LAYOUTS = ["single", "dp2", "zero3x2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1x2", "zero2x2"))]

# precision: (weights, gradients, moments, what a block's matrix product gives). As Lightning documents its plugins for
# one process; sharding changes none of it.
TABLE: dict[Any, tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]] = {
    "64-true": (torch.float64, torch.float64, torch.float64, torch.float64),
    "32-true": (torch.float32, torch.float32, torch.float32, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "bf16-mixed": (torch.float32, torch.float32, torch.float32, torch.bfloat16),
}
TOLERANCE = {"64-true": 1e-9, "32-true": 1e-4, "bf16-true": 3e-2, "bf16-mixed": 1e-2}


class Observed(TinyGPT):
    """Notes the dtypes of weights, gradients, moments, and of what the linear layers of blocks return."""

    def on_fit_start(self) -> None:
        self.found: dict[str, set[str]] = {name: set() for name in ("weights", "gradients", "moments", "block")}
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear) and ".layers." in name:
                layer.register_forward_hook(lambda _, __, output: self.found["block"].add(str(output.dtype)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            self.found["weights"].add(str(local_tensor(parameter).dtype))
            assert parameter.grad is not None
            self.found["gradients"].add(str(local_tensor(parameter.grad).dtype))

    def on_train_end(self) -> None:
        optimizer: Any = self.optimizers()
        for state in optimizer.state.values():
            self.found["moments"] |= {str(local_tensor(state[name]).dtype) for name in ("exp_avg", "exp_avg_sq")}


def fit(layout: str | None, precision: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), Observed()
    trainer = trainer_for(layout, max_epochs=2, precision=precision, callbacks=[recorder], gradient_clip_val=1.0)
    replicas = Layout.parse(layout).data if layout else 1
    trainer.fit(module, ordered(Rows(), replicas=replicas), ordered(Rows(16), replicas=replicas))
    return {"losses": recorder.losses, "found": module.found, "val_loss": float(trainer.callback_metrics["val_loss"])}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {precision: run(None, fit, precision)[0] for precision in TABLE}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", TABLE)
def test_dtypes_are_those_of_the_table_and_losses_those_of_auto(layout: str, precision: str, plain: Any) -> None:
    expected = plain[precision]
    table = dict(
        zip(("weights", "gradients", "moments", "block"), ({str(dtype)} for dtype in TABLE[precision]), strict=True)
    )
    assert expected["found"] == table
    for got in run(layout, fit, precision):
        assert got["found"] == table
        assert got["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE[precision])
        assert got["val_loss"] == pytest.approx(expected["val_loss"], rel=TOLERANCE[precision])
        assert got["losses"][-1] < got["losses"][0]


# By the first name until torch 2.12.
SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")


def fit_and_look(layout: str, precision: str, folder: Path) -> dict[str, set[str]]:
    """Dtypes of what ranks send each other for weights and gradients, and of what a checkpoint keeps."""
    L.seed_everything(1, verbose=False)
    sent: dict[str, set[str]] = {}

    def note(name: str) -> Any:
        send = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                # Not the votes and counts.
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 64:
                    sent.setdefault(name, set()).add(str(value.dtype))
            return send(*args, **kwargs)

        return call

    trainer = trainer_for(layout, max_steps=2, precision=precision)
    module = TinyGPT()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", *SCATTERS, "all_gather_into_tensor", "all_gather_single"):
            if hasattr(dist, name):
                patch.setattr(dist, name, note(name))
        trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data))
    trainer.save_checkpoint(folder / "end.ckpt")
    kept = store.saved_tensors(folder / "end.ckpt")
    dtypes: dict[str, set[str]] = {"weights": set(), "moments": set()}
    for name, entry in kept.items():
        if isinstance(entry, TensorStorageMetadata) and (name.startswith("model.") or ".exp_avg" in name):
            dtypes["weights" if name.startswith("model.") else "moments"].add(str(entry.properties.dtype))
    return {"sent": set().union(*sent.values()), "how": set(sent), **dtypes}


@pytest.mark.parametrize("layout", ["dp2", "zero1x2", "zero2x2", "zero3x2"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_what_is_sent_and_what_a_checkpoint_keeps_have_the_dtype_of_the_weights(
    layout: str, precision: str, tmp_path: Path
) -> None:
    dtype = str(TABLE[precision][0])
    for got in run(layout, fit_and_look, precision, tmp_path):
        assert got["sent"] == got["weights"] == got["moments"] == {dtype}
        assert got["how"] & ({"all_reduce"} if layout == "dp2" else set(SCATTERS))


class Small(L.LightningModule):
    """Moves by 1e-4 of its weight a step: less than bfloat16 can tell from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        for layer in self.layers:
            nn.init.ones_(layer.weight)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Adam's step is the learning rate, whatever the size of the gradient.
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def fit_small(layout: str, precision: str) -> float:
    module = Small()
    trainer = trainer_for(layout, max_epochs=1, precision=precision)
    rows = TensorDataset(torch.ones(200 * 2, 4))
    trainer.fit(module, DataLoader(rows, batch_size=2 // Layout.parse(layout).data))
    assert trainer.global_step == 200
    return max(float((local_tensor(p).float() - 0.98).abs().max()) for p in module.parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hundred_tiny_updates_add_up_in_mixed_precision(layout: str) -> None:
    assert max(run(layout, fit_small, "bf16-mixed")) < 1e-4


def test_tiny_updates_are_lost_where_weights_are_bfloat16() -> None:
    """What the test above would see if the weights were not kept in float32."""
    assert run("single", fit_small, "bf16-true")[0] == pytest.approx(0.02, abs=1e-2)


class Overflowing(TinyGPT):
    """The loss overflows at the third step, where a rank has the loss: under a pipeline on the last stage alone."""

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        last = self.trainer.global_rank == self.trainer.world_size - 1
        factor = 1e30 if self.global_step == 2 and last and self.training else 1.0
        return super().loss(rows) * factor * factor


def fit_scaled(layout: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    L.seed_everything(1, verbose=False)
    module, seen = Overflowing(), []

    class Scale(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(float(scaler.get_scale()))

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = trainer_for(layout, max_epochs=1, plugins=[plugin], callbacks=[Scale()], gradient_clip_val=1.0)
    trainer.fit(module, ordered(Rows(), replicas=Layout.parse(layout).data))
    return seen, float(trainer.global_step), whole_weights(module)


@pytest.mark.parametrize("layout", ["dp2", "zero3x2", "pp2"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout: str) -> None:
    ranks = run(layout, fit_scaled)
    for scales, _, weights in ranks:
        assert scales == ranks[0][0] and min(scales) == 512.0
        assert all(torch.isfinite(weight).all() for weight in weights.values())
