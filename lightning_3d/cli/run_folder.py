"""The folder of a run: a new one, or one to go on with; its config, and the checkpoint that it resumes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.checkpoint import store
from lightning_3d.errors import ConfigError

CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
CHECKPOINTS = "checkpoints"


def find_run(config: Mapping[str, Any]) -> Path | None:
    """The existing run folder that ``resume`` means, or None where there is none to go on with.

    Raises:
        ConfigError: ``resume`` is a path without a whole checkpoint.
    """
    if config["resume"] is None:
        return None
    if config["resume"] != "auto":
        path = Path(config["resume"])
        if not store.is_committed(path):
            beside = store.committed(path.parent) if path.parent.is_dir() else []
            raise ConfigError(
                f"resume={config['resume']}: no whole checkpoint is there. "
                f"Beside it: {', '.join(map(str, beside)) or 'none'}. Set resume=auto for the newest of a run folder."
            )
        # A checkpoint elsewhere starts a new run; one in a run folder goes on with that run.
        folder = path.absolute().parent.parent
        return folder if path.absolute().parent.name == CHECKPOINTS and (folder / CONFIG).exists() else None
    if config["run_dir"] is not None:
        folder = Path(config["run_dir"])
        return folder if (folder / CONFIG).exists() else None
    runs = [path.parent for path in Path(config["output_dir"]).glob(f"{config['name']}-*/{CONFIG}")]
    return max(runs, key=lambda run: (run / CONFIG).stat().st_mtime, default=None)


def new_run(config: Mapping[str, Any]) -> Path:
    """The folder for a new run: ``run_dir``, or one that is named after the run and the time.

    Raises:
        ConfigError: ``run_dir`` holds checkpoints of another run.
    """
    if config["run_dir"] is not None:
        folder = Path(config["run_dir"])
        if store.committed(folder / CHECKPOINTS):
            raise ConfigError(
                f"run_dir={folder} holds checkpoints of an earlier run. "
                f"Set resume=auto to go on with it, or another run_dir to start anew."
            )
        return folder
    stem = f"{config['name']}-{datetime.now():%Y%m%d-%H%M%S}"
    parent = Path(config["output_dir"])
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(parent / name for name in names if not (parent / name).exists())


def checkpoint_to_resume(config: Mapping[str, Any], folder: Path) -> Path | None:
    """The checkpoint that a run in this folder starts from, or None for its beginning."""
    if config["resume"] is None:
        return None
    return store.newest(folder / CHECKPOINTS) if config["resume"] == "auto" else Path(config["resume"])


def write_config(folder: Path, config: Mapping[str, Any], *, recipe: str, overrides: list[str]) -> Path:
    """Write the resolved config, and what it was made of; an earlier one is kept as ``config.N.yaml``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIG
    text = yaml.safe_dump(dict(config), sort_keys=False)
    if path.exists() and path.read_text() != text:
        number = 1
        while (folder / f"config.{number}.yaml").exists():
            number += 1
        os.link(path, folder / f"config.{number}.yaml")
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


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
