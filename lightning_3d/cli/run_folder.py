"""The folder of a run: a new one, or one to go on with; its config, and the checkpoint that it resumes from."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.places import Folder, Place, is_url, place_among
from lightning_3d.cli.config import nodes_of, resolve, value_at
from lightning_3d.errors import ConfigError

CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
RESULT = "result.json"
CHECKPOINTS = "checkpoints"

# Between a run's name and the end of its folder's name.
_STAMP = r"-\d{8}-\d{6}(-[0-9a-f]{4})?(-\d+)?"


def find_run(config: Mapping[str, Any]) -> Path | None:
    """The existing run folder that ``resume`` means, or None where there is none to go on with.

    Raises:
        ConfigError: ``resume`` is a file, or a path or URL without a whole checkpoint.
    """
    if config["resume"] is None:
        return None
    if config["resume"] != "auto":
        where = place_among(config["resume"], storage_options=_storage_options(resolve(dict(config))))
        if isinstance(where, Folder) and where.path.is_file():
            raise ConfigError(
                f"resume={config['resume']} is a file, and this command goes on with folders that it has saved. To "
                f"start from the file's weights: strategy.initial_weights={config['resume']}."
            )
        if not where.is_whole():
            beside = ", ".join(map(str, where.parent.whole()))
            raise ConfigError(
                f"resume={config['resume']}: no whole checkpoint is there. Beside it: {beside or 'none'}. "
                "Set resume=auto for the newest of a run folder."
            )
        # A checkpoint elsewhere starts a new run; one in a run folder goes on with that run.
        if not isinstance(where, Folder):
            return None
        folder = where.path.absolute().parent.parent
        if where.path.absolute().parent.name != CHECKPOINTS or not (folder / CONFIG).exists():
            return None
        if config["run_dir"] is not None and Path(config["run_dir"]).absolute() != folder:
            raise ConfigError(
                f"resume={config['resume']} goes on with the run in {folder}, so run_dir={config['run_dir']} cannot be "
                f"its folder. Leave out run_dir."
            )
        return folder
    if config["run_dir"] is not None:
        folder = Path(config["run_dir"])
        return folder if (folder / CONFIG).exists() else None
    # Of this name: another's may begin with it.
    named = re.compile(re.escape(config["name"]) + _STAMP)
    found = (path.parent for path in Path(config["output_dir"]).glob(f"*/{CONFIG}"))
    runs = [run for run in found if named.fullmatch(run.name)]
    return max(runs, key=lambda run: (run / CONFIG).stat().st_mtime, default=None)


def new_run(config: Mapping[str, Any]) -> Path:
    """The folder for a new run: ``run_dir``, or one that is named after the run and the time."""
    if config["run_dir"] is not None:
        return Path(config["run_dir"])
    return unused(Path(config["output_dir"]), stem(config["name"]))


def stem(name: str) -> str:
    """A folder's name that no other command takes: it is made later, and two may start in the same second."""
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def unused(parent: Path, stem: str) -> Path:
    """A folder below `parent` that does not exist, named `stem`, with a number if need be."""
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(parent / name for name in names if not (parent / name).exists())


def check_writable(key: str, text: str) -> None:
    """Refuse a folder of this machine that could not be made or written to.

    Args:
        key: the setting that names it.

    Raises:
        ConfigError: says what is in the way.
    """
    if is_url(text):
        return
    if not text:
        raise ConfigError(f"{key}='' is no folder. Name one, or leave it out.")
    path = Path(text)
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise ConfigError(f"{key}={path}: {there} is a file, so nothing can be written there. Set {key} to a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={path}: {there} cannot be written to. Set {key} to a folder that can.")


def checkpoint_folders(config: Mapping[str, Any], run: Place, *, storage_options: Mapping[str, Any]) -> list[Place]:
    """Where the checkpoints of a run are: in its folder, and wherever else its callbacks save.

    Args:
        config: resolved.
        run: its folder, which may have been moved since.
        storage_options: for URLs, instead of those of the config.
    """
    nodes = nodes_of(config, "callbacks").values()
    named = dict.fromkeys(node["dirpath"] for node in nodes if node.get("dirpath"))
    options = storage_options or _storage_options(config)
    folders = [run / CHECKPOINTS]
    for path in named:
        inside = not is_url(path) and Path(path).is_relative_to(config["run_dir"])
        found = run / os.path.relpath(path, config["run_dir"]) if inside else place_among(path, storage_options=options)
        folders += [] if found in folders else [found]
    return folders


def checkpoint_to_resume(config: Mapping[str, Any], folder: Path, *, goes_on: bool) -> Place | None:
    """The checkpoint that a run in this folder starts from, or None for its beginning.

    Args:
        config: resolved and checked.
        goes_on: whether the folder is that of an earlier run.

    Raises:
        ConfigError: a run that is to start anew would save among checkpoints of another.
    """
    folders = checkpoint_folders(config, Folder(folder), storage_options={})
    if config["resume"] == "auto":
        return store.newest(*folders)
    chosen = None
    if config["resume"] is not None:
        chosen = place_among(config["resume"], storage_options=_storage_options(config))
    if not goes_on and (chosen is None or chosen.parent not in folders):
        for number, there in enumerate(folders):
            if store.committed(there):
                key, value = ("callbacks.checkpoint.dirpath", there) if number else ("run_dir", folder)
                raise ConfigError(
                    f"{key}={value} holds checkpoints of an earlier run. "
                    f"Set resume=auto to go on with it, or another {key} to start anew."
                )
    return chosen


def _storage_options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return value_at(config, "strategy.storage_options") or {}


def write_config(folder: Path, config: Mapping[str, Any], *, recipe: str, overrides: list[str]) -> Path:
    """Write the resolved config, and what it was made of; an earlier one is kept as ``config.N.yaml``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIG
    text = yaml.safe_dump(dict(config), sort_keys=False)
    if path.exists() and path.read_text() != text:
        number = 1
        while (folder / f"config.{number}.yaml").exists():
            number += 1
        # A copy, for not every file system has hard links.
        shutil.copy2(path, folder / f"config.{number}.yaml")
    _write(folder / OVERRIDES, yaml.safe_dump({"recipe": recipe, "overrides": overrides}, sort_keys=False))
    _write(path, text)
    return path


def read_overrides(folder: Path) -> tuple[str | None, list[str]]:
    """Recipe and overrides of the run in this folder."""
    path = folder / OVERRIDES
    if not path.exists():
        return None, []
    made_of = yaml.safe_load(path.read_text())
    return made_of["recipe"], list(made_of["overrides"])


def write_result(folder: Path, *, global_step: int, metrics: Mapping[str, float]) -> None:
    """Write what a run ended with: its steps, and the last value of each metric."""
    # JSON has no words for these.
    told = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
    text = json.dumps({"global_step": global_step, "metrics": told}, indent=2, allow_nan=False)
    _write(folder / RESULT, f"{text}\n")


def read_result(folder: Path) -> dict[str, Any]:
    """What `write_result` wrote."""
    result = json.loads((folder / RESULT).read_text())
    return {**result, "metrics": {name: float(value) for name, value in result["metrics"].items()}}


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
