"""``lightning-3d train``: one config from a recipe and overrides, a run folder for it, and ranks that run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lightning_3d.cli import run_folder
from lightning_3d.cli.check import check_layout, check_parts
from lightning_3d.cli.config import DEFAULT_RECIPE, compose_recipe, groups, key_of, recipes, split_recipe, value_at
from lightning_3d.cli.job import announce, plan, prepare, start
from lightning_3d.cli.starts import refuse_tasks_of_slurm, started_as_rank
from lightning_3d.errors import ConfigError, DataError, LayoutError, Lightning3DError

_SWEEP_OPTIONS = ("-m", "--multirun")


def main(argv: Sequence[str]) -> int:
    """The exit code is that of the first rank that failed; mistakes in the call are raised as errors of ours."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(help_text())
        return 0
    printing, sweeping = "--print-config" in argv, any(argument in _SWEEP_OPTIONS for argument in argv)
    arguments = [argument for argument in argv if argument not in ("--print-config", *_SWEEP_OPTIONS)]
    options = [argument for argument in arguments if argument.startswith("-")]
    external = started_as_rank()
    try:
        if options:
            raise ConfigError(f"there is no option {options[0]}. Settings are written key=value; see --help.")
        if sweeping:
            _check_sweep(external, printing=printing)
        if external is not None:
            _check_sizes(arguments, external)
    except ConfigError:
        # Every rank meets the same mistake: rank 0 tells it.
        if external is not None and external["rank"]:
            return 2
        raise
    if sweeping:
        from lightning_3d.cli import sweep

        return sweep.run(arguments)
    try:
        if external is not None:
            return _run_as_rank(arguments, external, printing=printing)
        return _train(arguments, printing=printing)
    except (ConfigError, LayoutError, DataError) as error:
        raise type(error)(f"{error}{_values_of_recipe(str(error), arguments)}") from error


def _train(arguments: Sequence[str], *, printing: bool) -> int:
    if not printing:
        refuse_tasks_of_slurm()
    job = plan(arguments)
    if printing:
        print(yaml.safe_dump(job.config, sort_keys=False), end="")
        return 0
    return start(job).exit_code


def _check_sweep(external: Mapping[str, int] | None, *, printing: bool) -> None:
    if printing:
        raise ConfigError("--print-config shows one run, and -m asks for several. Leave out one of them.")
    if external is not None:
        raise ConfigError(
            "-m starts runs one after the other, each with ranks of its own, but this process was started as one rank "
            "of several (torchrun). Start `lightning-3d train -m ...` once, without torchrun, or leave out -m."
        )
    refuse_tasks_of_slurm()


def _check_sizes(arguments: Sequence[str], external: Mapping[str, int]) -> None:
    for argument in arguments:
        if argument.split("=")[0] in ("trainer.devices", "trainer.num_nodes") and argument not in _sizes(external):
            devices, nodes = _sizes(external)
            raise ConfigError(f"{argument}, but this job was started with {devices} and {nodes}. Leave it out.")


def _sizes(external: Mapping[str, int]) -> tuple[str, str]:
    local = external["local_world_size"]
    return f"trainer.devices={local}", f"trainer.num_nodes={external['world_size'] // local}"


def _values_of_recipe(message: str, arguments: Sequence[str]) -> str:
    """Of the given settings that an error speaks of, the values in the recipe: those work."""
    recipe, overrides = split_recipe(arguments)
    try:
        own = compose_recipe(recipe or DEFAULT_RECIPE)
        keys = [key_of(override) for override in overrides]
    except Lightning3DError:
        return ""
    found = {key: value_at(own, key) for key in keys if key.rpartition(".")[2] in message}
    known = [f"{key}={value}" for key, value in found.items() if value is not None and not isinstance(value, dict)]
    return f" The recipe has {', '.join(known)}." if known else ""


def _run_as_rank(arguments: Sequence[str], external: Mapping[str, int], *, printing: bool) -> int:
    """Under torchrun: rank 0 makes the run folder and tells the others, then every rank runs."""
    from lightning_3d.cli import rendezvous, worker

    rank, sizes = external["rank"], _sizes(external)
    if printing:
        return 0 if rank else _train([*arguments, *sizes], printing=True)
    message: dict[str, Any] = {}
    if rank == 0:
        rendezvous.check()
        try:
            recipe, overrides, config, folder = prepare([*arguments, *sizes])
            layout = check_layout(config, world_size=external["world_size"])
            check_parts(config, layout)
            kept = [override for override in overrides if override not in sizes]
            run_folder.write_config(folder, config, recipe=recipe, overrides=kept)
            announce(config, folder, layout=layout, world_size=external["world_size"])
            message = {"config": config}
        except Exception:
            rendezvous.tell({"config": None})
            raise
        rendezvous.tell(message)
    else:
        message = rendezvous.hear()
        if message["config"] is None:
            return 2
    worker.run(message["config"])
    return 0


def help_text() -> str:
    """Usage, recipes, groups with their options, and examples."""
    lines = [
        "usage: lightning-3d train [recipe=NAME] [key=value ...] [--print-config]",
        "       lightning-3d train -m [recipe=NAME] [key=value,value ...]",
        "",
        "Trains a recipe's model on its data in several processes on this machine.",
        "",
        "recipes (recipe=NAME, or the path of a YAML file like them):",
        *(f"  {name:<17} {text}" for name, text in recipes().items()),
        "",
        "run:",
        "  name, seed, output_dir, run_dir",
        "  layout=NAME       all sizes at once: dp2, zero3x2, hsdp2x2 (replicas x shards), tp2, pp2@interleaved1f1b,",
        "                    zero3x2-tp2-pp2, ...; sets the processes too",
        "  resume=auto       go on with the newest checkpoint of the run folder; resume=PATH (or a URL) with that one",
        "",
        "sweep (-m, --multirun): a run for each combination of values, one after the other",
        "  key=a,b           values; also range() and glob(), and interval() with hydra/sweeper=optuna",
        "  metric=val_loss   what jobs are compared by;  hydra.sweep.dir=FOLDER  where their folders are",
        "",
        "groups (group=option; then group.key=value):",
    ]
    for group, options in groups().items():
        for option, text in options.items():
            lines.append(f"  {group + '=' + option:<17} {text}")
    lines += [
        "",
        "--print-config prints all settings and starts nothing.",
        "",
        "examples:",
        "  lightning-3d train                                # stdlib_gpt: tp2-pp2 on 4 processes",
        "  lightning-3d train layout=zero3x2-tp2-pp2         # the same run on 8",
        "  lightning-3d train recipe=digits_mlp layout=zero1x2 trainer.max_steps=100",
        "  lightning-3d train model.config.num_layers=6 data.sequence_length=256 trainer.precision=bf16-mixed",
        "  lightning-3d train 'data.files=[texts/*.txt]' logger=csv",
        "  lightning-3d train resume=auto trainer.max_steps=600",
        "  lightning-3d train -m recipe=digits_mlp model.learning_rate=1e-2,1e-3 seed=1,2",
        "  torchrun --nproc-per-node 4 -m lightning_3d train layout=zero2x2-pp2",
    ]
    return "\n".join(lines)
