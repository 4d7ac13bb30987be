"""``lightning-3d verify``: every layout beside one process, on a recipe's own model and data.

The reference is plain Lightning: ``strategy="auto"`` in one process, with torch's norm and Lightning's clipping, and no
code of ours but the recipe's model and data. What a model builds in its constructor starts there as plain Lightning
draws it. What it builds in `configure_model` starts, by design, from values that our strategy draws in an order of its
own; the reference takes those from the layout ``single`` (our strategy in one process), which is therefore always in
the table and checked like the others. So training is checked against Lightning throughout; initial weights are checked
against Lightning where it can have them too, else between the layouts.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.plugins.environments import LightningEnvironment
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_3d.cli.build import build
from lightning_3d.cli.check import check_config, check_layout, check_parts, check_top_level, number_of_processes
from lightning_3d.cli.comparison import (
    LEAST_MOVED,
    Comparison,
    Recorder,
    RunRecord,
    Tolerance,
    compare,
    fit,
    quiet_lightning,
)
from lightning_3d.cli.config import (
    DEFAULT_RECIPE,
    check_once,
    closest,
    compose_recipe,
    key_of,
    recipes,
    resolve,
    split_recipe,
)
from lightning_3d.cli.targets import accepts
from lightning_3d.errors import ConfigError, LaunchError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.strategies.processes.launch import fork_ranks

DEFAULT_LAYOUTS = "dp2,zero1x2,zero2x2,zero3x2"
DTYPES = {"float64": "64-true", "float32": "32-true"}
_OPTIONS = {"layouts": DEFAULT_LAYOUTS, "dtype": "float64", "steps": "5"}
_VALIDATION_BATCHES = 2

# Settings that the comparison fixes, by what decides them instead.
_FIXED = {
    "layout": "layouts=[...]",
    "resume": "the comparison, which starts anew",
    "run_dir": "the comparison, which writes nothing",
    "output_dir": "the comparison, which writes nothing",
    "strategy": "layouts=[...]",
    "callbacks": "the comparison, which runs without callbacks",
    "logger": "the comparison, which runs without loggers",
    "data.shuffle": "the comparison, since plain Lightning shuffles in another order",
    "trainer.precision": "dtype=...",
    "trainer.devices": "layouts=[...]",
    "trainer.num_nodes": "the comparison, which runs on one machine",
    "trainer.max_steps": "steps=...",
    "trainer.max_epochs": "steps=...",
    "trainer.max_time": "steps=...",
    "trainer.val_check_interval": "the comparison, which validates after the last step",
    "trainer.check_val_every_n_epoch": "the comparison, which validates after the last step",
    "trainer.fast_dev_run": "steps=...",
    **{f"strategy.{field}": "layouts=[...]" for field in Layout.__dataclass_fields__ if field != "num_microbatches"},
}


@dataclass(frozen=True)
class Request:
    """What a call of `verify` asks for."""

    recipe: str
    overrides: list[str]
    layouts: list[Layout]
    dtype: str
    steps: int


@dataclass(frozen=True)
class Row:
    """A layout's result: its comparison, or why there is none."""

    layout: str
    comparison: Comparison | None
    failures: list[str]


def main(argv: Sequence[str]) -> int:
    """Exit code 1 where a layout fails; mistakes in the call are raised as errors of ours."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(help_text())
        return 0
    request = parse(argv)
    with tempfile.TemporaryDirectory(prefix="lightning-3d-") as folder:
        config = prepare(request, folder=folder)
        tolerance = tolerance_of(config, dtype=request.dtype)
        reference, rows = run(config, request.layouts, tolerance=tolerance, steps=request.steps)
    _print(request, tolerance, reference, rows)
    return 1 if any(row.failures for row in rows) else 0


def parse(argv: Sequence[str]) -> Request:
    """Read the arguments; ``single`` comes first among the layouts, and none comes twice.

    Raises:
        ConfigError, LayoutError: a value that cannot work; nothing has been started yet.
    """
    options = [argument for argument in argv if argument.startswith("-")]
    if options:
        raise ConfigError(f"there is no option {options[0]}. Settings are written key=value; see --help.")
    check_once(argv)
    recipe, rest = split_recipe(argv)
    given = dict(_OPTIONS)
    overrides = []
    for argument in rest:
        key, _, value = argument.partition("=")
        if key in _OPTIONS:
            given[key] = value
        else:
            overrides.append(argument)
    for key in map(key_of, overrides):
        decider = next((_FIXED[k] for k in _FIXED if key == k or (key.startswith(f"{k}.") and k != "strategy")), None)
        if decider is not None:
            raise ConfigError(f"{key} is set by {decider}. Leave it out.")
    if given["dtype"] not in DTYPES:
        raise ConfigError(f"dtype={given['dtype']!r} cannot be compared in. {closest(given['dtype'], DTYPES)}")
    if not given["steps"].isdecimal() or int(given["steps"]) < 1:
        raise ConfigError(f"steps={given['steps']} is not a whole number from 1 on. Set steps=5, say.")
    names = [name.strip() for name in given["layouts"].strip("[]").split(",") if name.strip()]
    if not names:
        raise ConfigError(f"layouts={given['layouts']} names none. Set 'layouts=[{DEFAULT_LAYOUTS}]', say.")
    layouts = {layout.name: layout for layout in map(Layout.parse, ["single", *names])}
    return Request(recipe or DEFAULT_RECIPE, overrides, list(layouts.values()), given["dtype"], int(given["steps"]))


def prepare(request: Request, *, folder: str) -> dict[str, Any]:
    """The resolved config of the comparison, checked for every layout.

    Raises:
        Lightning3DError: a setting, or a layout, that cannot work.
    """
    config = compose_recipe(request.recipe, request.overrides)
    check_top_level(config)
    given = {key_of(override) for override in request.overrides}
    config.update(resume=None, run_dir=folder, layout=None, callbacks={}, logger={"_target_": None})
    trainer = config["trainer"]
    trainer.update(
        devices=1,
        num_nodes=1,
        precision=DTYPES[request.dtype],
        max_steps=request.steps,
        max_epochs=-1,
        # Never inside the fit: an epoch that ends early would shift it away from the last step.
        val_check_interval=10**9,
        check_val_every_n_epoch=None,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    if "trainer.limit_val_batches" not in given:
        trainer["limit_val_batches"] = _VALIDATION_BATCHES
    if accepts(config["data"]["_target_"], "shuffle"):
        config["data"]["shuffle"] = False
    config = resolve(config)
    check_config(config)
    for layout in request.layouts:
        try:
            world_size = number_of_processes({**config["trainer"], "devices": layout.world_size})
            found = check_layout(with_layout(config, layout), world_size=world_size)
        except (ConfigError, LayoutError) as error:
            raise type(error)(f"layout {layout.name}: {error}") from error
        if found is None:
            raise ConfigError(
                f"strategy._target_={config['strategy'].get('_target_')} has no layout. "
                "Write strategy: 3d in the recipe's defaults."
            )
    check_parts(config)
    return config


def with_layout(config: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The same config for another layout's sizes and number of processes."""
    sizes = {field: value for field, value in layout.as_dict().items() if field != "num_microbatches"}
    return {
        **config,
        "strategy": {**config["strategy"], **sizes},
        "trainer": {**config["trainer"], "devices": layout.world_size},
    }


def tolerance_of(config: Mapping[str, Any], *, dtype: str) -> Tolerance:
    """What must agree, and how well.

    In float32 rounding differs between layouts by more than many a mistake would, so only the loss is held.
    """
    if dtype == "float32":
        return Tolerance(loss=1e-4)
    # transformers computes its own loss in float32, whatever the model's dtype.
    in_float32 = config["model"].get("loss") == "labels" and config["model"]["_target_"].endswith("HFCausalLM")
    return Tolerance.exact(1e-6 if in_float32 else 1e-9)


def run(
    config: Mapping[str, Any], layouts: Sequence[Layout], *, tolerance: Tolerance, steps: int
) -> tuple[RunRecord, list[Row]]:
    """Run the reference and all layouts, each in forks of this process; the first layout is ``single``.

    Raises:
        LaunchError: the data could not be prepared, or one process could not train.
    """
    patience = float(config["strategy"].get("timeout_seconds", 1800))
    # Forked too: what trains a tokenizer has threads, and a process with threads is not to be forked.
    fork_ranks(_prepare_data, world_size=1, timeout_seconds=patience, args=(config,))
    started = time.monotonic()
    single, *others = layouts
    _tell(single.name)
    singles = _fork(with_layout(config, single), single, timeout_seconds=patience)
    # More ranks than cores take turns; a rank that waits for ever is to be told of in minutes.
    patience = min(patience, 120 + 20 * (time.monotonic() - started))
    _tell("strategy=auto")
    arguments = (config, None, singles[0].initial)
    (reference,) = fork_ranks(_fit, world_size=1, timeout_seconds=patience, args=arguments)
    if len(reference.gradient_norms) < steps:
        raise LaunchError(
            f"one process made {len(reference.gradient_norms)} optimizer steps of steps={steps}. "
            "Set fewer steps, or limits of the trainer that allow as many."
        )
    rows = [_row(single, singles, reference, tolerance)]
    for layout in others:
        _tell(layout.name)
        try:
            ranks = _fork(with_layout(config, layout), layout, timeout_seconds=patience * layout.world_size)
        except LaunchError as error:
            rows.append(Row(layout.name, None, [str(error)]))
        else:
            rows.append(_row(layout, ranks, reference, tolerance))
    return reference, rows


def _row(layout: Layout, ranks: Sequence[RunRecord], reference: RunRecord, tolerance: Tolerance) -> Row:
    comparison = compare(reference, ranks)
    return Row(layout.name, comparison, comparison.excesses(tolerance))


def _fork(config: Mapping[str, Any], layout: Layout, *, timeout_seconds: float) -> list[RunRecord]:
    return fork_ranks(_fit, world_size=layout.world_size, timeout_seconds=timeout_seconds, args=(config, layout, None))


def _prepare_data(config: Mapping[str, Any]) -> None:
    data: L.LightningDataModule = build(config["data"])
    data.prepare_data()


def _fit(config: Mapping[str, Any], layout: Layout | None, start_from: Mapping[str, Tensor] | None) -> RunRecord:
    """In a rank: the run of `layout`, or of plain Lightning for None."""
    quiet_lightning()
    warnings.simplefilter("ignore")
    L.seed_everything(config["seed"], workers=True, verbose=False)
    recorder = Recorder(start_from)
    trainer = build(
        {**config["trainer"], "default_root_dir": config["run_dir"]},
        strategy="auto" if layout is None else build(config["strategy"]),
        callbacks=[recorder],
        logger=False,
        # Ranks that we forked are ours also inside a cluster's job, whose variables would say otherwise.
        plugins=[LightningEnvironment()],
    )
    return fit(trainer, recorder, build(config["model"]), data=build(config["data"]))


def _tell(name: str) -> None:
    print(f"runs {name} ...", file=sys.stderr, flush=True)


def _print(request: Request, tolerance: Tolerance, reference: RunRecord, rows: Sequence[Row]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    title = f"{request.recipe}, {request.steps} steps in {request.dtype}, beside strategy=auto in one process"
    table = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    table.add_column("layout", no_wrap=True)
    for heading in ("loss", "gradient\nnorm", "weights", "validation", "moved"):
        table.add_column(heading, justify="right")
    for heading in ("bytes per rank:\nparameters", "\ngradients", "\noptimizer"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        verdict = "[red]FAIL[/red]" if row.failures else "[green]pass[/green]"
        table.add_row(row.layout, *_cells(row.comparison, reference), verdict)
    console.print(table)
    for row in rows:
        for failure in row.failures:
            console.print(f"{row.layout}: {failure}", markup=False, highlight=False)
    limits = {
        "loss": tolerance.loss,
        "gradient norm": tolerance.gradient_norm,
        "weights": tolerance.weights,
        "validation": tolerance.metrics,
    }
    told = ", ".join(f"{name} {limit:.0e}" for name, limit in limits.items() if limit is not None)
    console.print(
        f"Largest differences: relative; of weights, and how far they moved, relative to the largest weight.\n"
        f"Allowed: {told}; weights must have moved by {LEAST_MOVED:.0e}.",
        highlight=False,
    )


def _cells(comparison: Comparison | None, reference: RunRecord) -> list[str]:
    if comparison is None:
        return ["-"] * 8
    loss = f"{comparison.loss:.1e}" if reference.losses else "-"
    metrics = f"{comparison.metrics:.1e}" if reference.metrics else "-"
    figures = [f"{comparison.gradient_norm:.1e}", f"{comparison.weights:.1e}"]
    held = (comparison.held.parameters, comparison.held.gradients, comparison.held.optimizer)
    return [loss, *figures, metrics, f"{comparison.moved:.1e}", *(f"{count:,}" for count in held)]


def help_text() -> str:
    """Usage, settings and examples."""
    lines = [
        "usage: lightning-3d verify [recipe=NAME] ['layouts=[NAME,...]'] [dtype=float64] [steps=5] [key=value ...]",
        "",
        "Trains a recipe for a few steps in one process of plain Lightning (strategy=auto) and in every layout, on the",
        "same data and weights, and prints how far they are apart and how many bytes a rank holds. Exit code 1 where a",
        "layout fails.",
        "",
        "  layouts   axes joined by '-': dpN (replicas), zeroSxN (stage S over N), hsdpRxN (stage 3, R replicas of N",
        "            shards), tpN, ppN (1F1B), ppN@gpipe, ppN@interleaved1f1b.",
        f"            Default [{DEFAULT_LAYOUTS}]; 'single' (one process of ours) is always there.",
        "  dtype     float64 (default): losses, gradient norms, validation within 1e-9 relative, weights within 1e-9",
        "            of the largest weight (1e-6 for model.loss=labels, which transformers computes in float32).",
        "            float32: losses within 1e-4.",
        "  steps     optimizer steps; default 5. The weights must move by 1e-4 of the largest one.",
        "",
        "Other settings are the recipe's and those of `lightning-3d train`; the global batch is the same in all",
        "layouts, nothing is shuffled, and nothing is written but the data's cache. A model that draws random numbers",
        "while it trains (dropout) draws others on each rank, so it cannot agree: set its dropout to 0.",
        "",
        "recipes:",
        *(f"  {name:<17} {text}" for name, text in recipes().items()),
        "",
        "examples:",
        "  lightning-3d verify recipe=digits_mlp",
        "  lightning-3d verify recipe=stdlib_llama_hf 'layouts=[zero3x2,hsdp2x2]' model.loss=labels steps=3",
        "  lightning-3d verify recipe=stdlib_llama_hf model=gpt2_hf 'layouts=[tp2,pp2@gpipe,hsdp2x2-tp2]'",
        "  lightning-3d verify 'layouts=[tp2,pp2,tp2-pp2]' strategy.loss_parallel=true",
        "  lightning-3d verify dtype=float32 trainer.accumulate_grad_batches=2",
    ]
    return "\n".join(lines)
