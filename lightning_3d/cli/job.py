"""One run before it starts: what was asked for, resolved, checked and given a folder; and its start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_3d.checkpoint.places import place_among
from lightning_3d.cli import run_folder
from lightning_3d.cli.check import check_config, check_layout, check_parts, check_top_level, number_of_processes
from lightning_3d.cli.config import (
    DEFAULT_RECIPE,
    check_once,
    compose_recipe,
    groups,
    key_of,
    nodes_of,
    resolve,
    split_recipe,
    value_at,
)
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.strategies.processes.launch import Outcome, start_ranks

# Settings that are folders which a run writes to, beside its loggers'.
_FOLDERS = ("callbacks.checkpoint.dirpath", "data.cache_dir", "trainer.default_root_dir")
# Settings that are folders or files of a model, which whoever uses the run later must find.
_MODEL_FOLDERS = ("model.path", "data.tokenizer")
# What a layout's name says; micro-batches are no part of it.
_LAYOUT_FIELDS = tuple(field for field in Layout.__dataclass_fields__ if field != "num_microbatches")
# What an earlier run may have been asked for that a new layout takes the place of.
_LAID_OUT_BY = {"strategy", "trainer.devices", *(f"strategy.{field}" for field in _LAYOUT_FIELDS)}


@dataclass(frozen=True)
class Job:
    """A run that can start.

    Args:
        recipe: as it was named.
        overrides: what was asked for, and what a resumed run was asked for before.
        config: resolved and checked.
        folder: of the run; nothing is in it yet unless it is resumed.
        world_size: processes.
        layout: None for a strategy without one.
    """

    recipe: str
    overrides: list[str]
    config: dict[str, Any]
    folder: Path
    world_size: int
    layout: Layout | None


def plan(arguments: Sequence[str], *, folder: Path | None = None) -> Job:
    """The run that these arguments ask for, checked throughout; nothing is written or started.

    Args:
        folder: the run's own, where it is not the arguments' to say.

    Raises:
        Lightning3DError: it cannot work; the message names the setting.
    """
    recipe, overrides, config, folder = prepare(arguments, folder=folder)
    world_size = number_of_processes(config["trainer"])
    if config["trainer"].get("num_nodes", 1) != 1:
        raise ConfigError(
            f"trainer.num_nodes={config['trainer']['num_nodes']} needs a launcher on every machine: start this command "
            f"with torchrun on each, or set trainer.num_nodes=1."
        )
    layout = check_layout(config, world_size=world_size)
    check_parts(config, layout)
    return Job(recipe, overrides, config, folder, world_size, layout)


def start(job: Job) -> Outcome:
    """Write the run's folder, start its ranks and wait for them."""
    path = run_folder.write_config(job.folder, job.config, recipe=job.recipe, overrides=job.overrides)
    announce(job.config, job.folder, layout=job.layout, world_size=job.world_size)
    command = [sys.executable, "-m", "lightning_3d.cli.worker", str(path.absolute())]
    return start_ranks(command, world_size=job.world_size, log_dir=job.folder / "logs")


def announce(config: dict[str, Any], folder: Path, *, layout: Layout | None, world_size: int) -> None:
    """One line that says what starts where, and one if it resumes."""
    print(f"{config['name']}: {layout.name if layout else f'{world_size} processes'}, in {folder}", flush=True)
    if config["resume"] is not None:
        print(f"resumes {config['resume']}", flush=True)


def prepare(arguments: Sequence[str], *, folder: Path | None = None) -> tuple[str, list[str], dict[str, Any], Path]:
    """Recipe, overrides, resolved and checked config, and run folder; nothing is written.

    With ``resume=auto`` the overrides of the run to go on with hold too, unless they are given anew.
    """
    check_once(arguments)
    named, overrides = split_recipe(arguments)
    recipe = named or DEFAULT_RECIPE
    config = compose_recipe(recipe, overrides)
    if folder is not None:
        config["run_dir"] = str(folder)
    check_top_level(config)
    found = run_folder.find_run(config)
    if found is not None:
        old_recipe, old_overrides = run_folder.read_overrides(found)
        if named is not None and old_recipe not in (None, named):
            raise ConfigError(
                f"{found} is a run of recipe={old_recipe}, not {named}. Leave recipe= out to go on with it."
            )
        recipe = old_recipe or recipe
        given = {key_of(override) for override in overrides}
        superseded = given | _LAID_OUT_BY if "layout" in given else given
        overrides = [old for old in old_overrides if key_of(old) not in superseded] + overrides
        config = compose_recipe(recipe, overrides)
        check_top_level(config)
    if config["layout"] is not None:
        _check_strategy(config["layout"], overrides)
        _apply_layout(config, given={key_of(override) for override in overrides})
    goes_on = found is not None
    folder = found or run_folder.new_run(config)
    run_folder.check_writable("output_dir" if config["run_dir"] is None else "run_dir", str(folder))
    config["run_dir"] = str(folder)
    config = resolve(config)
    check_config(config)
    _name_local_folders(config)
    _name_model_folders(config)
    for key in [*_FOLDERS, *(f"{place}.save_dir" for place in nodes_of(config, "logger"))]:
        if (path := value_at(config, key)) is not None:
            run_folder.check_writable(key, path)
    checkpoint = run_folder.checkpoint_to_resume(config, folder, goes_on=goes_on)
    config["resume"] = None if checkpoint is None else str(checkpoint)
    # The next resume asks anew which checkpoint is the newest.
    kept = [_kept(override, config) for override in overrides if key_of(override) not in ("resume", "run_dir")]
    return recipe, kept, config, folder


def _check_strategy(layout: str, overrides: Sequence[str]) -> None:
    chosen = next((override.split("=", 1)[1] for override in overrides if key_of(override) == "strategy"), "3d")
    if chosen != "3d" and chosen in groups()["strategy"]:
        raise ConfigError(
            f"layout={layout} and strategy={chosen} each say how the model is laid out. Leave out one of them; "
            "strategy=3d goes with every layout."
        )


def _name_local_folders(config: dict[str, Any]) -> None:
    """Write file:///a as /a: Lightning would take it for a path below the working folder."""
    for node in nodes_of(config, "callbacks").values():
        if node.get("dirpath"):
            options = value_at(config, "strategy.storage_options")
            node["dirpath"] = str(place_among(node["dirpath"], storage_options=options))


def _name_model_folders(config: dict[str, Any]) -> None:
    """Write those that are on this machine by their whole path."""
    for key in _MODEL_FOLDERS:
        path = value_at(config, key)
        if isinstance(path, str) and Path(path).exists():
            group, _, name = key.partition(".")
            config[group][name] = os.path.abspath(path)


def _kept(override: str, config: dict[str, Any]) -> str:
    """What is asked for again when the run goes on, from whatever folder."""
    key = key_of(override)
    path = value_at(config, key)
    if key not in _MODEL_FOLDERS or not isinstance(path, str) or not os.path.isabs(path):
        return override
    quoted = path.replace("'", "\\'")
    return f"{key}='{quoted}'"


def _apply_layout(config: dict[str, Any], *, given: set[str]) -> None:
    """Set the strategy's sizes and the number of processes by ``layout``."""
    layout = Layout.parse(config["layout"])
    twice = sorted(key for key in given if key.removeprefix("strategy.") in _LAYOUT_FIELDS)
    if twice:
        raise ConfigError(f"layout={config['layout']} sets {twice[0]} already. Leave out one of them.")
    strategy, trainer = config["strategy"], config["trainer"]
    for field in _LAYOUT_FIELDS:
        strategy[field] = getattr(layout, field)
    if "trainer.devices" not in given:
        nodes = trainer.get("num_nodes", 1)
        if not isinstance(nodes, int) or nodes < 1 or layout.world_size % nodes:
            raise ConfigError(
                f"layout={config['layout']} has {layout.world_size} processes, which trainer.num_nodes={nodes!r} "
                f"does not divide. Set trainer.num_nodes=1."
            )
        trainer["devices"] = layout.world_size // nodes
