"""A loss or gradient that is not finite: an error that says where it began, or a step that all ranks leave out."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from modules import Points
from torch import nn
from torch.utils.data import DataLoader
from training import trainer_for, whole, whole_weights

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.errors import NumbersError
from lightning_3d.strategies.processes.launch import fork_ranks

pytestmark = pytest.mark.distributed


class Bad(torch.autograd.Function):
    """Spoils what passes, in the forward or the backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forward: bool) -> torch.Tensor:
        ctx.forward = forward
        return value * float("nan") if forward else value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient if ctx.forward else gradient * float("inf"), None


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, size)
        self.spoil: bool | None = None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = self.linear(features)
        return features if self.spoil is None else Bad.apply(features, self.spoil)  # type: ignore[no-any-return]


class Net(L.LightningModule):
    """At the third step rank 1's second layer spoils the forward, or the backward."""

    def __init__(self, kind: str, rank: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(Layer(6), Layer(6), Layer(3))
        self.kind, self.rank = kind, rank
        self.finished: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features, label = batch
        now = self.global_step == 2 and self.kind != "clean" and self.global_rank >= self.rank
        for layer in self.net:
            if isinstance(layer, Layer):
                layer.spoil = None
        if now and self.kind == "batch":
            features[0, 0] = float("inf")
        elif now and self.kind != "loss" and isinstance(self.net[1], Layer):
            self.net[1].spoil = self.kind == "forward"
        loss = F.cross_entropy(self.net(features), label)
        self.log("train_loss", loss)
        return loss * float("inf") if now and self.kind == "loss" else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.finished.append(self.global_step)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0.linear": "colwise", "net.1.linear": "rowwise", "net.2.linear": "colwise_gather_output"}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


class ManualNet(Net):
    """Steps its optimizer itself."""

    def __init__(self, kind: str, rank: int = 1) -> None:
        super().__init__(kind, rank)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Trail(L.Callback):
    """Weights and moments of this rank after each step, whole."""

    def __init__(self) -> None:
        self.after: list[list[torch.Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        trainer.strategy.share.reshard()  # type: ignore[attr-defined]
        states = list(trainer.optimizers[0].state.values())
        moments = [whole(state[key]).clone() for state in states for key in ("exp_avg", "exp_avg_sq")]
        self.after.append([*(weight.clone() for weight in whole_weights(module).values()), *moments])


def fit(layout: str, kind: str, action: str, settings: dict[str, Any], make: type[Net] = Net) -> Any:
    L.seed_everything(1, verbose=False)
    parsed = Layout.parse(layout)
    if layout == "pp2":
        settings = {**settings, "num_microbatches": 2}
    trail = Trail()
    settings = {k: v for k, v in settings.items() if k != "num_microbatches"}
    trainer = trainer_for(layout, max_epochs=1, callbacks=[trail] if action == "skip" else [], **settings)
    strategy: Any = trainer.strategy
    assert isinstance(strategy, ThreeDStrategy)
    strategy._nonfinite = action
    module = make(kind, rank=0 if parsed.data == 1 else parsed.world_size - 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(Points(24), batch_size=4 // parsed.data))
            error = None
        except NumbersError as raised:
            error = str(raised)
    told = [str(entry.message) for entry in caught if "is skipped" in str(entry.message)]
    steps = [int(state["step"]) for state in trainer.optimizers[0].state.values()]
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return error, told, whole_weights(module), module.finished, steps, rate, trail.after


def ranks_of(layout: str, kind: str, action: str, make: type[Net] = Net, **settings: Any) -> list[Any]:
    world_size = Layout.parse(layout).world_size
    return fork_ranks(fit, world_size=world_size, timeout_seconds=120, args=(layout, kind, action, settings, make))


@pytest.mark.parametrize(
    ("layout", "kind", "where"),
    [
        ("zero3x2", "forward", "loss is not finite on rank 1: the output of net.1 (Layer)"),
        ("dp2", "batch", "loss is not finite on rank 1: the batch itself"),
        ("dp2", "loss", "loss is not finite on rank 1: the outputs of all modules are finite"),
        ("dp2", "backward", "gradient is not finite on rank 0, 1: the gradient of net.1.linear.bias is the first"),
        ("tp2", "forward", "the output of net.1 (Layer)"),
        ("pp2", "forward", "the output of net.1 (Layer)"),
        ("pp2", "backward", "the gradient of net.1.linear.bias is the first"),
        # On the last stage alone, of one of two pipelines: its other stage has the loss from there.
        ("pp2", "loss", "the outputs of all modules are finite"),
        ("zero1x2-pp2", "loss", "loss is not finite on rank 1, 3: the outputs of all modules are finite"),
    ],
)
def test_an_error_on_all_ranks_says_where_it_began(layout: str, kind: str, where: str) -> None:
    for error, _, weights, finished, *_ in ranks_of(layout, kind, "error"):
        assert error is not None and error.startswith("step 2: the ") and where in error
        assert "nonfinite='skip'" in error
        # The step was not taken.
        assert finished == [1, 2] and all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("batch", "on rank 1: the batch itself"),
        ("backward", "on rank 0, 1: the gradient of net.1.linear.bias is the first"),
    ],
)
def test_manual_optimization_has_the_same_error_without_a_second_step(kind: str, where: str) -> None:
    for error, _, weights, *_ in ranks_of("dp2", kind, "error", ManualNet):
        assert error is not None and error.startswith("step 2: the ") and where in error
        assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize(("layout", "settings"), [("zero3x2", {"gradient_clip_val": 0.5}), ("dp2", {}), ("pp2", {})])
def test_a_skipped_step_changes_nothing_on_any_rank(layout: str, settings: dict[str, Any]) -> None:
    ranks = ranks_of(layout, "forward", "skip", **settings)
    _, _, clean, finished, whole_steps, rate, _ = ranks_of(layout, "clean", "skip", **settings)[0]
    assert finished == [1, 2, 3, 4, 5, 6]
    for error, _, weights, steps_done, steps, own_rate, after in ranks:
        assert error is None and steps_done == finished
        same = [all(map(torch.equal, one, other)) for one, other in itertools.pairwise(after)]
        assert same == [False, True, False, False, False]
        # As fp16's: the schedule goes on, the optimizer has counted one step less.
        assert own_rate == rate and set(steps) == {5} and set(whole_steps) == {6}
        for name, weight in weights.items():
            assert torch.isfinite(weight).all()
            if name in ranks[0][2]:
                assert torch.equal(weight, ranks[0][2][name])
    assert "step 2 is skipped on all ranks: the " in ranks[0][1][0]
    assert len(ranks[0][1]) == 1 and any(not torch.equal(ranks[0][2][name], clean[name]) for name in ranks[0][2])


def test_ignored_numbers_go_their_way_and_a_scaler_s_overflows_are_left_to_it() -> None:
    error, told, weights, finished, *_ = ranks_of("dp2", "forward", "ignore")[0]
    assert error is None and not told and len(finished) == 6
    assert all(weight.isnan().all() for weight in weights.values())
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    error, told, weights, finished, *_ = ranks_of("dp2", "forward", "error", plugins=[plugin])[0]
    assert error is None and not told and len(finished) == 6
    assert all(torch.isfinite(weight).all() for weight in weights.values())
