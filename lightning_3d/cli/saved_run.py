"""A checkpoint named on the command line, and the config of the run that made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.places import Folder, Place, place_among
from lightning_3d.cli.run_folder import CHECKPOINTS, CONFIG, checkpoint_folders
from lightning_3d.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class SavedRun:
    """
    Args:
        checkpoint: whole.
        config: resolved, of the run folder that was named or that the checkpoint lies in; None where it lies elsewhere.
    """

    checkpoint: Place
    config: dict[str, Any] | None


def find_run(text: str, *, storage_options: Mapping[str, Any]) -> SavedRun:
    """The checkpoint at a path or URL, or the newest one of a run folder, wherever that run saves.

    Args:
        storage_options: for URLs, instead of those in the run's config.

    Raises:
        CheckpointError: no whole checkpoint is there.
    """
    where = place_among(text, storage_options=storage_options)
    if where.is_whole():
        # As it is named, and where a link leads.
        paths = [where, Folder(where.path.resolve())] if isinstance(where, Folder) else [where]
        runs = [path.parent.parent for path in paths if path.parent.name == CHECKPOINTS]
        return SavedRun(where, next(filter(None, map(_config_in, runs)), None))
    config = _config_in(where)
    if config is None and isinstance(where, Folder) and (where.path / "config.json").is_file():
        raise CheckpointError(
            f"{where} is a Hugging Face folder, and no checkpoint of this strategy. transformers reads it: "
            "AutoModelForCausalLM.from_pretrained(FOLDER), and its own generate()."
        )
    newest = store.newest(*checkpoint_folders(config or {}, where, storage_options=storage_options))
    if newest is None and config is not None:
        raise CheckpointError(f"{where} is a run folder without a whole checkpoint.")
    if newest is None:
        store.require_committed(where)
    assert newest is not None
    return SavedRun(newest, config)


def read_config(file: Place) -> dict[str, Any]:
    """
    Raises:
        ConfigError: the file is not there, or no config of a run.
    """
    try:
        config = yaml.safe_load(file.read_bytes())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ConfigError(f"there is no file {file}. Give the config.yaml of a run folder.") from error
    if not isinstance(config, dict) or not {"model", "data"} <= config.keys():
        raise ConfigError(f"{file} has no model and data. Give the config.yaml of a run folder.")
    return config


def _config_in(folder: Place) -> dict[str, Any] | None:
    try:
        return read_config(folder / CONFIG)
    except ConfigError:
        return None
