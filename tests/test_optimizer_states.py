"""What is loaded into an optimizer is what torch itself would load, and only into the optimizer that saved it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training import run, trainer_for, whole, whole_weights

from lightning_3d import Layout
from lightning_3d.checkpoint.export import export_ckpt
from lightning_3d.checkpoint.optimizer_state import flatten, restore_
from lightning_3d.errors import CheckpointError

pytestmark = pytest.mark.distributed


class Noting(torch.optim.SGD):
    """Keeps the last two gradients and how many there were."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                notes = self.state[p].setdefault("notes", {"last": [], "count": 0})
                p.data.sub_(1e-3 * sum(notes["last"], torch.zeros_like(p)))
                notes["last"] = [*notes["last"], p.grad.detach().clone()][-2:]
                notes["count"] += 1
        return loss


class Keyed(torch.optim.SGD):
    """Counts its steps in all places that an optimizer has, and has moments under keys of odd kinds."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        own = self.state["of all"]  # type: ignore[index]
        own["steps"] = own.get("steps", 0) + 1
        self.steps += 1
        for group in self.param_groups:
            group["steps.of.group"] = group.get("steps.of.group", 0) + 1
            for p in group["params"]:
                for key in ("a.b", "#c", 0, (1, "d.e")):
                    moment = self.state[p].setdefault(key, torch.zeros_like(p))
                    moment.mul_(0.9).add_(p.grad, alpha=1 / (own["steps"] + self.steps + group["steps.of.group"]))
                    p.data.sub_(moment, alpha=0.1)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict(state_dict)


class Net(L.LightningModule):
    """Two Linears and a learned number.

    Args:
        groups: how parameters are grouped: kind (matrices with weight decay, the rest without), layer, or one.
        optimizer: adamw, adafactor, lbfgs, noting (SGD with a nest of values for each parameter), keyed (SGD with
            state of its own kinds), rate (AdamW whose learning rate is a tensor), or two (one for each Linear).
    """

    def __init__(self, groups: str = "kind", optimizer: str = "adamw") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.groups, self.optimizer_name = groups, optimizer
        self.automatic_optimization = optimizer != "two"

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.second(self.first(batch).relu()) * self.scale - 1).square().mean()
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups: Any = [{"params": [*matrices, *rest], "weight_decay": 0.3}]
        if self.groups == "kind":
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if self.groups == "layer":
            groups = [
                {"params": [*self.first.parameters(), self.scale], "weight_decay": 0.2},
                {"params": self.second.parameters(), "weight_decay": 0.0},
            ]
        if self.optimizer_name == "adafactor":
            return torch.optim.Adafactor(groups, lr=1e-2)
        if self.optimizer_name == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        if self.optimizer_name == "noting":
            return Noting(groups, lr=1e-2)
        if self.optimizer_name == "keyed":
            return Keyed(groups, lr=1e-2)
        if self.optimizer_name == "rate":
            return torch.optim.AdamW(groups, lr=torch.tensor(1e-3))
        if self.optimizer_name == "two":
            return [torch.optim.AdamW(part.parameters()) for part in (self.first, self.second)]
        return torch.optim.AdamW(groups, lr=1e-3)


def fit(
    layout: str | None,
    path: Path | None,
    ckpt_path: Path | None,
    module: Any,
    precision: str = "64-true",
    *,
    max_steps: int | None = None,
) -> Any:
    """`layout` None is plain Lightning; module: arguments of `Net`; two steps, and two more if it goes on."""
    L.seed_everything(1, verbose=False)
    net = Net(*module)
    trainer = trainer_for(layout, max_steps=max_steps or (2 if ckpt_path is None else 4), precision=precision)
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).to(net.dtype)
    loader = DataLoader(data, batch_size=8 // (Layout.parse(layout).data if layout else 1))
    trainer.fit(net, loader, ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    names = {p: name for name, p in net.named_parameters()}
    return {
        "weights": {name: whole(p) for name, p in net.named_parameters()},
        "decay": [[group["weight_decay"] for group in one.param_groups] for one in trainer.optimizers],
        "state": {
            f"{names[p]}.{key}": value.detach().clone() if isinstance(value, torch.Tensor) else value
            for one in trainer.optimizers
            for p, entries in one.state.items()
            for key, value in entries.items()
        },
    }


def fit_epochs(layout: str | None, path: Path | None, ckpt_path: Path | None, module: Any, epochs: int) -> Any:
    """The weights after so many epochs of four steps."""
    L.seed_everything(1, verbose=False)
    net = Net(*module).double()
    trainer = trainer_for(layout, max_epochs=epochs, precision="64-true")
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).double()
    loader = DataLoader(data, batch_size=8 // (Layout.parse(layout).data if layout else 1))
    trainer.fit(net, loader, ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    return {name: whole(p) for name, p in net.named_parameters()}


class Untrained(Net):
    def configure_optimizers(self) -> None:
        return None


def save_untrained(layout: str, path: Path) -> Any:
    trainer = trainer_for(layout, max_steps=1)
    trainer.fit(Untrained(), DataLoader(torch.randn(8, 4), batch_size=8))
    trainer.save_checkpoint(path)
    return whole_weights(Untrained.load_from_checkpoint(path, weights_only=False))


def test_a_module_without_an_optimizer_is_saved(tmp_path: Path) -> None:
    (weights,) = run("single", save_untrained, tmp_path / "untrained.ckpt")
    assert weights.keys() == Net().state_dict().keys()


def refusal(layout: str, ckpt_path: Path | None, module: Any, path: Path | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        fit(layout, path, ckpt_path, module)
    return str(caught.value)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("layout", ["single", "zero3x2"])
def test_a_run_goes_on_in_another_precision_as_plain_lightning_does(
    tmp_path: Path, layout: str, precision: str
) -> None:
    run(layout, fit, tmp_path / "ours.ckpt", None, ())
    run(None, fit, tmp_path / "plain.ckpt", None, ())
    (resumed,) = run(None, fit, None, tmp_path / "plain.ckpt", (), precision)
    # Ours goes on inside the epoch that max_steps ended, plain Lightning with the next one.
    (undisturbed,) = run(None, partial(fit, max_steps=4), None, None, ())
    for path, expected in ((tmp_path / "ours.ckpt", undisturbed), (tmp_path / "plain.ckpt", resumed)):
        for rank in run(layout, fit, None, path, (), precision):
            assert rank["state"].keys() == resumed["state"].keys()
            for name, value in rank["state"].items():
                assert value.dtype == resumed["state"][name].dtype, name
            for name, value in rank["weights"].items():
                tolerance = 1e-5 if precision == "32-true" else 2e-2
                assert torch.allclose(value.double(), expected["weights"][name].double(), rtol=0, atol=tolerance), name


OTHERS = [
    ("kind", "layer", r"group 0 .*here also first\.bias, scale.*but not second\.weight"),
    ("one", "kind", r"group 0 .*but not first\.bias, scale, second\.bias"),
    ("kind", "one", r"group 0 .*here also first\.bias, scale, second\.bias"),
]


@pytest.mark.parametrize("layout", ["single", "zero3x2"])
@pytest.mark.parametrize(("saved", "here", "told"), OTHERS)
def test_groups_other_than_the_saved_ones_are_refused(
    tmp_path: Path, layout: str, saved: str, here: str, told: str
) -> None:
    run("single", fit, tmp_path / "saved.ckpt", None, (saved,))
    for error in run(layout, refusal, tmp_path / "saved.ckpt", (here,)):
        assert re.search(told, error.replace("\n", " ")), error
    # The same groups go on, with their own options.
    for rank in run(layout, fit, None, tmp_path / "saved.ckpt", (saved,)):
        assert rank["decay"] == ([[0.1, 0.0]] if saved == "kind" else [[0.3]])


@pytest.mark.parametrize(("saved", "here"), [(("one", "two"), ("one",)), (("one",), ("one", "two"))])
def test_other_numbers_of_optimizers_are_refused(tmp_path: Path, saved: Any, here: Any) -> None:
    run("single", fit, tmp_path / "saved.ckpt", None, saved)
    (error,) = run("single", refusal, tmp_path / "saved.ckpt", here)
    assert re.search(r"has [12] optimizers, configure_optimizers\(\) gave [12]", error), error


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_states_that_are_not_shaped_as_their_parameters_go_on_where_those_are_whole(tmp_path: Path, kind: str) -> None:
    layout, path = "single" if kind == "ours" else None, tmp_path / "saved.ckpt"
    run(layout, fit, path, None, ("kind", "adafactor"))
    (expected,) = run(layout, fit, None, path, ("kind", "adafactor"))
    assert expected["state"]["first.weight.row_var"].shape == (8, 1)
    # Plain Lightning loads weights before it makes them float64.
    tolerance = 1e-9 if kind == "ours" else 1e-7
    ranks = [rank for layout in ("single", "dp2") for rank in run(layout, fit, None, path, ("kind", "adafactor"))]
    for rank in ranks:
        for part in ("state", "weights"):
            assert rank[part].keys() == expected[part].keys()
            for name, value in rank[part].items():
                assert torch.allclose(value, expected[part][name], rtol=0, atol=tolerance), name
    for error in run("zero3x2", refusal, path, ("kind", "adafactor")):
        assert "cannot be sharded" in error and "first.weight" in error, error


@pytest.mark.parametrize("optimizer", ["lbfgs", "noting", "rate"])
@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_states_that_are_nests_and_options_that_are_tensors_come_back(
    tmp_path: Path, layout: str, optimizer: str
) -> None:
    path = tmp_path / "saved.ckpt"
    run(layout, fit_epochs, path, None, ("kind", optimizer), 1)
    resumed = run(layout, fit_epochs, None, path, ("kind", optimizer), 2)
    undisturbed = run(layout, fit_epochs, None, None, ("kind", optimizer), 2)
    for got, expected in zip(resumed, undisturbed, strict=True):
        for name, weight in expected.items():
            assert torch.equal(got[name], weight), name


def test_a_nest_with_parts_of_sharded_tensors_is_refused(tmp_path: Path) -> None:
    for error in run("zero3x2", refusal, None, ("kind", "noting"), tmp_path / "saved.ckpt"):
        assert re.search("state.*notes.*part of a sharded tensor.*state.parameter..NAME. = ", error), error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", ["single", "zero3x2"])
def test_states_of_no_parameter_entries_of_the_optimizer_and_odd_keys_come_back(tmp_path: Path, layout: str) -> None:
    keyed = ("kind", "keyed")
    (expected,) = run(None, fit_epochs, None, None, keyed, 2)
    run(layout, fit_epochs, tmp_path / "ours.ckpt", None, keyed, 1)
    run(None, fit_epochs, tmp_path / "stock.ckpt", None, keyed, 1)
    export_ckpt(tmp_path / "ours.ckpt", tmp_path / "exported.ckpt")
    for reader, name in ((layout, "ours"), (layout, "stock"), (None, "exported"), (None, "ours")):
        for rank in run(reader, fit_epochs, None, tmp_path / f"{name}.ckpt", keyed, 2):
            for key, value in rank.items():
                assert torch.allclose(value, expected[key], rtol=0, atol=1e-12), (reader, name, key)


def test_a_key_that_cannot_be_saved_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.state[weight][object] = 1
    with pytest.raises(CheckpointError, match=r"weight has an entry <class 'object'>.*Use a string"):
        flatten(optimizer, names={weight: "weight"})


@pytest.mark.parametrize("capturable", [False, True])
def test_entries_lie_where_torch_wants_them(capturable: bool) -> None:
    weight, number = (nn.Parameter(torch.zeros(shape, device="meta")) for shape in ((2, 3), ()))
    optimizer = torch.optim.AdamW([weight, number], capturable=capturable)
    names = {weight: "weight", number: "number"}
    flat = {
        f"state.{names[p]}.{entry}": torch.zeros(p.shape if entry == "exp_avg" else (), dtype=torch.float64)
        for p in names
        for entry in ("exp_avg", "step")
    }
    restore_(optimizer, flat, names=names, groups=[])
    for parameter in names:
        found = optimizer.state[parameter]
        assert found["exp_avg"].is_meta and found["exp_avg"].dtype == torch.float32
        assert found["step"].is_meta == capturable


def test_options_that_are_not_one_group_s_and_states_of_nothing_are_refused() -> None:
    one, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer, names = torch.optim.SGD([one, other], lr=1.0), {one: "one", other: "other"}
    with pytest.raises(CheckpointError, match=r"other was saved with other options .*group 0: \{'lr': 2.0\}"):
        restore_(optimizer, {"param_groups.one.lr": 1.0, "param_groups.other.lr": 2.0}, names=names, groups=[])
    with pytest.raises(CheckpointError, match="state.third.momentum_buffer was loaded, but"):
        restore_(optimizer, {"state.third.momentum_buffer": torch.zeros(2)}, names=names, groups=[])
    restore_(optimizer, {"param_groups.one.lr": 0.5, "param_groups.other.lr": 0.5}, names=names, groups=[])
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["params"] == [one, other]
    # A group that has no parameter here is known by its place.
    optimizer.add_param_group({"params": []})
    restore_(optimizer, {"param_groups.one.lr": 0.5}, names=names, groups=[{"lr": 7.0}, {"lr": 0.25}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
