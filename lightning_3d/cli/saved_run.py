"""A checkpoint named on the command line, and the config of the run that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lightning_3d.checkpoint import store
from lightning_3d.cli.run_folder import CHECKPOINTS, CONFIG
from lightning_3d.errors import CheckpointError, ConfigError


def find_checkpoint(text: str) -> Path:
    """The checkpoint folder at a path, or the newest one of a run folder.

    Raises:
        CheckpointError: no whole checkpoint is there.
    """
    path = Path(text)
    if (path / CHECKPOINTS).is_dir():
        newest = store.newest(path / CHECKPOINTS)
        if newest is None:
            raise CheckpointError(f"{path} is a run folder without a whole checkpoint.")
        return newest
    store.require_committed(path)
    return path


def run_config(checkpoint: Path) -> dict[str, Any] | None:
    """The resolved config of the run folder that a checkpoint lies in, or None where it lies elsewhere."""
    file = checkpoint.absolute().parent.parent / CONFIG
    if checkpoint.absolute().parent.name != CHECKPOINTS or not file.is_file():
        return None
    return read_config(file)


def read_config(file: Path) -> dict[str, Any]:
    """
    Raises:
        ConfigError: the file is not there, or no config of a run.
    """
    if not file.is_file():
        raise ConfigError(f"there is no file {file}. Give the config.yaml of a run folder.")
    config = yaml.safe_load(file.read_text())
    if not isinstance(config, dict) or not {"model", "data"} <= config.keys():
        raise ConfigError(f"{file} has no model and data. Give the config.yaml of a run folder.")
    return config
