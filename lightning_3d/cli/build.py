"""From a resolved config to the objects of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import lightning as L
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_3d.cli.config import nodes_of
from lightning_3d.errors import Lightning3DError
from lightning_3d.strategies.processes.supervise import REPORT_VARIABLE


def build(node: Mapping[str, Any], **others: Any) -> Any:
    """The object that a ``_target_`` and its arguments describe.

    Raises:
        Lightning3DError: as its constructor raised it, without Hydra's wrapping.
    """
    try:
        return instantiate(dict(node), _convert_="all", **others)
    except HydraException as error:
        if isinstance(error.__cause__, Lightning3DError):
            raise error.__cause__ from None
        raise


def build_trainer(config: Mapping[str, Any]) -> L.Trainer:
    """The Trainer of a config, with its strategy, callbacks and loggers."""
    settings = dict(config["trainer"])
    loggers = [build(node) for node in nodes_of(config, "logger").values()]
    callbacks = [build(node) for node in nodes_of(config, "callbacks").values()]
    # What a switch of the Trainer's turns off, Lightning would refuse to find among the callbacks.
    if settings.get("enable_progress_bar") is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    if settings.get("enable_checkpointing") is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    if not loggers:
        callbacks = [callback for callback in callbacks if not isinstance(callback, LearningRateMonitor)]
    # Without one of ours there is to be none: Lightning's own would write outside the run folder.
    settings.setdefault("enable_checkpointing", any(isinstance(callback, Checkpoint) for callback in callbacks))
    if settings.get("default_root_dir") is None:
        settings["default_root_dir"] = config["run_dir"]
    # Ranks that we started are ours also inside a cluster's job, whose variables would say otherwise.
    plugins = [LightningEnvironment()] if REPORT_VARIABLE in os.environ else None
    return build(
        settings, strategy=build(config["strategy"]), callbacks=callbacks, logger=loggers or False, plugins=plugins
    )
