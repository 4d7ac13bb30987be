"""``lightning-3d train``: one config from a recipe and overrides, a run folder for it, and ranks that run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.cli import run_folder
from lightning_3d.cli.check import check_config, check_layout, check_parts, check_top_level, number_of_processes
from lightning_3d.cli.config import (
    DEFAULT_RECIPE,
    compose_recipe,
    groups,
    key_of,
    recipes,
    resolve,
    split_recipe,
    value_at,
)
from lightning_3d.errors import ConfigError, DataError, LayoutError, Lightning3DError
from lightning_3d.layout import Layout
from lightning_3d.strategies.launch import start_ranks

_LAYOUT_FIELDS = tuple(Layout.__dataclass_fields__)


def main(argv: Sequence[str]) -> int:
    """The exit code is that of the first rank that failed; mistakes in the call are raised as errors of ours."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(help_text())
        return 0
    printing = "--print-config" in argv
    arguments = [argument for argument in argv if argument != "--print-config"]
    options = [argument for argument in arguments if argument.startswith("-")]
    if options:
        raise ConfigError(f"there is no option {options[0]}. Settings are written key=value; see --help.")
    try:
        if external := _started_by_others():
            return _run_as_rank(arguments, external)
        return _train(arguments, printing=printing)
    except (ConfigError, LayoutError, DataError) as error:
        raise type(error)(f"{error}{_values_of_recipe(str(error), arguments)}") from error


def _train(arguments: Sequence[str], *, printing: bool) -> int:
    recipe, overrides, config, folder = prepare(arguments)
    world_size = number_of_processes(config["trainer"])
    if config["trainer"].get("num_nodes", 1) != 1:
        raise ConfigError(
            f"trainer.num_nodes={config['trainer']['num_nodes']} needs a launcher on every machine: start this command "
            f"with torchrun on each, or set trainer.num_nodes=1."
        )
    layout = check_layout(config, world_size=world_size)
    check_parts(config)
    if printing:
        print(yaml.safe_dump(config, sort_keys=False), end="")
        return 0
    path = run_folder.write_config(folder, config, recipe=recipe, overrides=overrides)
    _announce(config, folder, layout=layout.name if layout else f"{world_size} processes")
    command = [sys.executable, "-m", "lightning_3d.cli.worker", str(path.absolute())]
    return start_ranks(command, world_size=world_size, log_dir=folder / "logs")


def prepare(arguments: Sequence[str]) -> tuple[str, list[str], dict[str, Any], Path]:
    """Recipe, overrides, resolved and checked config, and run folder; nothing is written.

    With ``resume=auto`` the overrides of the run to go on with hold too, unless they are given anew.
    """
    named, overrides = split_recipe(arguments)
    recipe = named or DEFAULT_RECIPE
    config = compose_recipe(recipe, overrides)
    check_top_level(config)
    folder = run_folder.find_run(config)
    if folder is not None:
        old_recipe, old_overrides = run_folder.read_overrides(folder)
        if named is not None and old_recipe not in (None, named):
            raise ConfigError(
                f"{folder} is a run of recipe={old_recipe}, not {named}. Leave recipe= out to go on with it."
            )
        recipe = old_recipe or recipe
        given = {key_of(override) for override in overrides}
        overrides = [old for old in old_overrides if key_of(old) not in given] + overrides
        config = compose_recipe(recipe, overrides)
        check_top_level(config)
    if config["layout"] is not None:
        _apply_layout(config, given={key_of(override) for override in overrides})
    goes_on = folder is not None
    folder = folder or run_folder.new_run(config)
    checkpoint = run_folder.checkpoint_to_resume(config, folder) if goes_on or config["resume"] != "auto" else None
    config["run_dir"] = str(folder)
    config["resume"] = None if checkpoint is None else str(checkpoint)
    config = resolve(config)
    check_config(config)
    # The next resume asks anew which checkpoint is the newest.
    kept = [override for override in overrides if key_of(override) not in ("resume", "run_dir")]
    return recipe, kept, config, folder


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


def _apply_layout(config: dict[str, Any], *, given: set[str]) -> None:
    """Set the strategy's sizes and the number of processes by ``layout``."""
    layout = Layout.parse(config["layout"])
    twice = sorted(key for key in given if key.removeprefix("strategy.") in _LAYOUT_FIELDS)
    if twice:
        raise ConfigError(f"layout={config['layout']} sets {twice[0]} already. Leave out one of them.")
    strategy, trainer = config["strategy"], config["trainer"]
    for field, value in layout.as_dict().items():
        if field != "num_microbatches":
            strategy[field] = value
    if "trainer.devices" not in given:
        nodes = trainer.get("num_nodes", 1)
        if not isinstance(nodes, int) or nodes < 1 or layout.world_size % nodes:
            raise ConfigError(
                f"layout={config['layout']} has {layout.world_size} processes, which trainer.num_nodes={nodes!r} "
                f"does not divide. Set trainer.num_nodes=1."
            )
        trainer["devices"] = layout.world_size // nodes


def _announce(config: dict[str, Any], folder: Path, *, layout: str) -> None:
    print(f"{config['name']}: {layout}, in {folder}", flush=True)
    if config["resume"] is not None:
        print(f"resumes {config['resume']}", flush=True)


def _started_by_others() -> dict[str, int] | None:
    """Sizes that torchrun or a cluster has set for this process, or None where nobody started it as a rank."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return {"rank": int(os.environ["RANK"]), "world_size": world, "local_world_size": local}
    return None


def _run_as_rank(arguments: Sequence[str], external: dict[str, int]) -> int:
    """Under torchrun: rank 0 makes the run folder and tells the others, then every rank runs."""
    from lightning_3d.cli import rendezvous, worker

    rank, world_size, local = external["rank"], external["world_size"], external["local_world_size"]
    sizes = [f"trainer.devices={local}", f"trainer.num_nodes={world_size // local}"]
    for argument in arguments:
        if argument.split("=")[0] in ("trainer.devices", "trainer.num_nodes") and argument not in sizes:
            raise ConfigError(f"{argument}, but this job was started with {sizes[0]} and {sizes[1]}. Leave it out.")
    message: dict[str, Any] = {}
    if rank == 0:
        try:
            recipe, overrides, config, folder = prepare([*arguments, *sizes])
            layout = check_layout(config, world_size=world_size)
            check_parts(config)
            kept = [override for override in overrides if override not in sizes]
            run_folder.write_config(folder, config, recipe=recipe, overrides=kept)
            _announce(config, folder, layout=layout.name if layout else f"{world_size} processes")
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
        "  resume=auto       go on with the newest checkpoint of the run folder; resume=PATH with that one",
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
        "  torchrun --nproc-per-node 4 -m lightning_3d train layout=zero2x2-pp2",
    ]
    return "\n".join(lines)
