"""`lightning-3d verify` passes where layouts train as one process does, says where they do not, and refuses early."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_3d.cli import main, verify
from lightning_3d.cli.comparison import RunRecord, Tolerance, compare
from lightning_3d.cli.config import recipes
from lightning_3d.errors import LaunchError
from lightning_3d.layout import Layout
from lightning_3d.parallel import tensor
from lightning_3d.parallel.staged import StagedModule
from lightning_3d.strategies import feeding
from lightning_3d.strategies.guards.whole_gradients import WholeGradients
from lightning_3d.strategies.three_d import ThreeDStrategy

LAYOUTS = ["dp2", "zero1x2", "zero2x2", "zero3x2"]
# What else in `make test`; tests/test_verify_layouts.py has all.
MORE = {"digits_mlp": "hsdp2x2", "stdlib_gpt": "tp2-pp2", "stdlib_llama_hf": "tp2-pp2"}
TEXT = ["data.vocab_size=300", "data.sequence_length=16", "data.global_batch_size=8", "data.cache_dir=cache"]
SMALL = {
    "digits_mlp": ["model.hidden_size=8", "data.global_batch_size=16"],
    "stdlib_gpt": [*TEXT, "model.config.hidden_size=32", "model.config.num_layers=2"],
    "stdlib_llama_hf": [
        *TEXT,
        "model.config.hidden_size=32",
        "model.config.intermediate_size=64",
        "model.config.num_hidden_layers=2",
    ],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = "".join(f"def double_{i}(x):\n    return {i} * x + {i * i % 7}\n" for i in range(400))
    for number in range(4):
        (tmp_path / f"text{number}.txt").write_text(text[number:])
    return tmp_path


def small(recipe: str) -> list[str]:
    if recipe == "stdlib_llama_hf":
        pytest.importorskip("transformers")
    files = [] if recipe == "digits_mlp" else ["data.files=[text0.txt,text1.txt,text2.txt,text3.txt]"]
    return ["verify", f"recipe={recipe}", *SMALL[recipe], *files]


def rows(output: str) -> dict[str, list[str]]:
    """The table's rows: layout, loss, gradient norm, weights, validation, moved, three counts of bytes, verdict."""
    found = [line.split() for line in output.splitlines()]
    return {cells[0]: cells[1:] for cells in found if len(cells) == 10 and cells[-1] in ("pass", "FAIL")}


# ---------------------------------------------------------------------- passing


@pytest.mark.distributed
# The fine-tuning recipe needs a folder: tests/test_finetune.py has one.
@pytest.mark.parametrize("recipe", [name for name in recipes() if name != "finetune_hf"])
def test_every_layout_of_a_recipe_trains_as_one_process_in_float64(
    recipe: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = [*LAYOUTS, MORE[recipe]]
    assert main([*small(recipe), f"layouts=[{','.join(layouts)}]"]) == 0
    table = rows(capsys.readouterr().out)
    assert list(table) == ["single", *layouts]
    for loss, norm, weights, validation, moved, *_, verdict in table.values():
        assert max(map(float, (loss, norm, weights, validation))) <= 1e-9 <= 1e-4 <= float(moved)
        assert verdict == "pass"
    # Differing sums of the same numbers: all zeros would mean that the layouts did not run.
    assert float(table["dp2"][2]) > 0
    whole, sharded = ([int(count.replace(",", "")) for count in table[name][5:8]] for name in ("dp2", "zero3x2"))
    assert whole == [2 * count for count in sharded]
    assert {path.name for path in folder.iterdir()} <= {"cache", *(f"text{number}.txt" for number in range(4))}


@pytest.mark.distributed
def test_the_models_own_loss_in_float32_is_held_to_a_millionth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*small("stdlib_llama_hf"), "layouts=[zero2x2]", "model.loss=labels"]) == 0
    assert "loss 1e-06" in capsys.readouterr().out


@pytest.mark.distributed
def test_accumulation_clipping_and_float32_are_taken_from_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=0.1", "dtype=float32", "steps=2"]
    assert main([*small("digits_mlp"), "layouts=[zero3x2]", *settings]) == 0
    output = capsys.readouterr().out
    assert "2 steps in float32" in output and "Allowed: loss 1e-04; weights must" in output


# ---------------------------------------------------------------------- failing


@pytest.mark.distributed
def test_a_fault_on_each_axis_fails_the_layouts_that_have_it_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = feeding.shard_dataloader

    def same_rows(loader: Any, **kwargs: Any) -> Any:
        return real(loader, **{**kwargs, "rank": 0})

    def own_part(ctx: Any, partial: torch.Tensor, group: Any) -> torch.Tensor:
        return partial.clone()

    monkeypatch.setattr(feeding, "shard_dataloader", same_rows)
    monkeypatch.setattr(tensor._ReduceOut, "forward", staticmethod(own_part))
    monkeypatch.setattr(StagedModule, "norm_group", property(lambda self: None))
    # A run would end where the copies of a parameter drift apart.
    monkeypatch.setattr(WholeGradients, "before_update", lambda *_: None)
    assert main([*small("digits_mlp"), "layouts=[dp2,tp2,pp2]"]) == 1
    output = capsys.readouterr().out
    assert {name: cells[-1] for name, cells in rows(output).items()} == {
        "single": "pass",
        "dp2": "FAIL",
        "tp2": "FAIL",
        "pp2": "FAIL",
    }
    assert "dp2: loss differs by" in output and "dp2: weights differs by" in output
    assert "tp2: loss differs by" in output and "pp2: gradient norm differs by" in output


@pytest.mark.distributed
def test_a_layout_whose_rank_raises_fails_and_the_others_are_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = ThreeDStrategy.setup

    def setup(self: ThreeDStrategy, trainer: Any) -> None:
        if self.layout.name == "zero2x2":
            raise RuntimeError("no room")
        real(self, trainer)

    monkeypatch.setattr(ThreeDStrategy, "setup", setup)
    assert main([*small("digits_mlp"), "layouts=[zero2x2,dp2]"]) == 1
    output = capsys.readouterr().out
    assert {name: cells[-1] for name, cells in rows(output).items()} == {
        "single": "pass",
        "zero2x2": "FAIL",
        "dp2": "pass",
    }
    assert "zero2x2: rank" in output and "no room" in output


@pytest.mark.distributed
def test_weights_that_do_not_move_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*small("digits_mlp"), "layouts=[dp2]", "model.learning_rate=1e-12"]) == 1
    assert "the weights moved by" in capsys.readouterr().out


def test_an_epoch_without_enough_steps_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "fork_ranks", lambda *_, **__: [RunRecord(gradient_norms=[1.0])])
    with pytest.raises(LaunchError, match="1 optimizer steps of steps=5"):
        verify.run({"strategy": {}, "trainer": {}}, [Layout.parse("single")], tolerance=Tolerance(1e-9), steps=5)


# ---------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layouts=[dp2,zero9x2]"], "'zero9x2' is no axis"),
        (["layouts=[]"], "names none"),
        (["layouts=[dp3]"], "layout dp3: data: global_batch_size=64 does not divide by the data-parallel size 3"),
        (["layouts=[dp2-dp2]"], "twice"),
        (["layouts=[tp0]"], "tensor_parallel_size=0"),
        (["dtype=float16"], "dtype='float16' cannot be compared in. Did you mean float"),
        (["steps=0"], "steps=0 is not a whole number from 1 on. Set steps=5"),
        (["steps=many"], "steps=many"),
        (["layout=dp2"], "layout is set by layouts=[...]"),
        (["trainer.max_steps=3"], "trainer.max_steps is set by steps=..."),
        (["trainer.precision=bf16-true"], "trainer.precision is set by dtype=..."),
        (["strategy.zero_stage=1"], "strategy.zero_stage is set by layouts=[...]"),
        (["strategy=zero1"], "strategy is set by layouts=[...]"),
        (["callbacks.progress.refresh_rate=1"], "runs without callbacks"),
        (["data.shuffle=true"], "data.shuffle is set by the comparison"),
        (["model.hiden_size=8"], "there is no setting model.hiden_size. Did you mean model.hidden_size?"),
        (["model.hidden_size=0"], "hidden_size=0"),
        (["--fast"], "there is no option --fast"),
        (["recipe=digits"], "Did you mean digits_mlp?"),
        (["steps=3", "steps=9"], "'steps=3' and 'steps=9' set steps twice"),
        (["dtype=float32", "dtype=float64"], "set dtype twice"),
        (["data.global_batch_size=8", "data.global_batch_size=16"], "set data.global_batch_size twice"),
        (["recipe=stdlib_gpt", "recipe=digits_mlp"], "set recipe twice"),
    ],
)
def test_mistake_is_told_in_one_line_before_any_process_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(verify, "fork_ranks", never)
    start = time.monotonic()
    recipe = [] if arguments[0].startswith("recipe=") else ["recipe=digits_mlp"]
    assert main(["verify", *recipe, *arguments]) == 2
    assert time.monotonic() - start < 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and message in captured.err


def test_help_tells_of_every_setting_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ["layouts", "dtype", "steps", "float32", "zeroSxN", *recipes()]:
        assert name in text


# ---------------------------------------------------------------------- the comparison


def record(**changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "losses": [2.0, 1.0],
        "gradient_norms": [3.0],
        "metrics": {"val_loss": 1.0},
        "initial": {"w": torch.tensor([1.0, 4.0])},
        "final": {"w": torch.tensor([1.5, 4.0])},
        "parameters": frozenset({"w"}),
    }
    return RunRecord(**{**values, **changes})


def test_equal_runs_do_not_differ() -> None:
    comparison = compare(record(), [record(), record()])
    assert (comparison.loss, comparison.gradient_norm, comparison.weights, comparison.metrics) == (0, 0, 0, 0)
    assert comparison.moved == 0.125
    assert comparison.excesses(Tolerance.exact(0.0)) == []


def test_losses_of_ranks_are_averaged_and_other_figures_must_hold_on_each() -> None:
    comparison = compare(record(), [record(losses=[3.0, 1.0]), record(losses=[1.0, 1.0])])
    assert comparison.loss == 0
    comparison = compare(record(), [record(), record(gradient_norms=[6.0], metrics={"val_loss": 1.5})])
    assert (comparison.gradient_norm, comparison.metrics) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("changes", "figure"),
    [
        ({"losses": [2.0]}, "loss"),
        ({"losses": [2.0, float("nan")]}, "loss"),
        ({"gradient_norms": []}, "gradient norm"),
        ({"gradient_norms": [float("nan")]}, "gradient norm"),
        ({"metrics": {}}, "metrics"),
        ({"final": {"w": torch.tensor([1.5, float("nan")])}}, "weights"),
        ({"final": {"w": torch.tensor([1.5])}}, "weights"),
        ({"final": {}}, "weights"),
        ({"initial": {"w": torch.tensor([1.0, 4.1])}}, "weights"),
        ({"final": {"w": torch.tensor([1.0, 4.0])}}, "the weights moved"),
    ],
)
def test_what_is_missing_or_no_number_never_passes(changes: dict[str, Any], figure: str) -> None:
    excesses = compare(record(), [record(**changes)]).excesses(Tolerance.exact(1e-3))
    assert any(excess.startswith(figure) for excess in excesses)
