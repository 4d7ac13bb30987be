"""Refuses a config that cannot work, field by field, before any process starts."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from hydra.errors import HydraException
from hydra.utils import instantiate

from lightning_3d.checkpoint.places import is_url
from lightning_3d.cli.config import closest, nodes_of, one_line, value_at
from lightning_3d.cli.fit import check_batch, check_end, check_lengths, check_model
from lightning_3d.cli.targets import accepts, described, matches, parameters
from lightning_3d.data.text import TextDataModule
from lightning_3d.errors import ConfigError, Lightning3DError
from lightning_3d.layout import Layout
from lightning_3d.strategies.guards.replay import refuse_windows

# Settings that are no arguments of their target, but for Hydra.
_HYDRA_KEYS = {"_target_", "_convert_", "_recursive_", "_partial_", "_args_"}
# Arguments of the Trainer that have a group of settings of their own.
_TRAINER_GROUPS = {"strategy": "strategy", "callbacks": "callbacks", "logger": "logger", "plugins": "strategy"}

_TOP_LEVEL: dict[str, tuple[Any, str]] = {
    "name": (str, "my_run"),
    "seed": (int, "0"),
    "output_dir": (str, "runs"),
    "run_dir": (str | None, "null"),
    "resume": (str | None, "auto"),
    "layout": (str | None, "zero3x2"),
    "metric": (str, "val_loss"),
}
_GROUPS = ("strategy", "model", "data", "trainer", "callbacks", "logger")
# Groups of any number of things by name.
_SEVERAL = ("callbacks", "logger")


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _share_or_count(value: Any) -> bool:
    return 0.0 <= value <= 1.0 if isinstance(value, float) else value >= 0


def _is_time(value: str | Mapping[str, Any]) -> bool:
    try:
        if isinstance(value, str):
            return any(int(part) > 0 for part in value.split(":")) and value.count(":") == 3
        return timedelta(**value) > timedelta(0)
    except (TypeError, ValueError):
        return False


# Ranges that Lightning takes without a word, or refuses in the middle of a run: (holds, what is meant, works)
_RANGES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "trainer.devices": (lambda v: not isinstance(v, int) or v >= 1 or v == -1, "a number of processes from 1 on", "2"),
    "trainer.num_nodes": (lambda v: _count(v, 1), "a whole number from 1 on", "1"),
    "trainer.max_epochs": (lambda v: _count(v, -1), "a whole number from 0 on, or -1 for no limit", "10"),
    "trainer.max_steps": (lambda v: _count(v, -1), "a whole number from 0 on, or -1 for no limit", "100"),
    "trainer.log_every_n_steps": (lambda v: _count(v, 1), "a whole number from 1 on", "10"),
    "trainer.check_val_every_n_epoch": (lambda v: _count(v, 1), "a whole number from 1 on, or null", "1"),
    "trainer.accumulate_grad_batches": (lambda v: _count(v, 1), "a whole number from 1 on", "1"),
    "trainer.num_sanity_val_steps": (lambda v: _count(v, -1), "a whole number from 0 on, or -1 for all", "0"),
    "trainer.gradient_clip_val": (lambda v: 0 < v < math.inf, "a number above 0, or null", "1.0"),
    "trainer.gradient_clip_algorithm": (lambda v: v in ("norm", "value"), "'norm' or 'value'", "norm"),
    "trainer.val_check_interval": (
        lambda v: _is_time(v) if isinstance(v, (str, dict)) else (0 < v <= 1 if isinstance(v, float) else v >= 1),
        "a whole number of batches from 1 on, a share of an epoch up to 1.0, or a time as DD:HH:MM:SS or {hours: 1}",
        "100",
    ),
    "trainer.limit_train_batches": (_share_or_count, "a whole number, or a share from 0.0 to 1.0", "1.0"),
    "trainer.limit_val_batches": (_share_or_count, "a whole number, or a share from 0.0 to 1.0", "1.0"),
    "callbacks.checkpoint.save_top_k": (lambda v: _count(v, -1), "a whole number from 0 on, or -1 for all", "2"),
    "callbacks.checkpoint.every_n_train_steps": (lambda v: _count(v, 1), "a whole number from 1 on", "50"),
    "callbacks.checkpoint.mode": (lambda v: v in ("min", "max"), "'min' or 'max'", "max"),
    "callbacks.gradient_norm.norm_type": (lambda v: v > 0, "a number above 0", "2.0"),
    "callbacks.progress.refresh_rate": (lambda v: _count(v, 0), "a whole number from 0 on", "10"),
    # transformers builds models without a word of sizes that are no sizes.
    **{
        f"model.config.{size}": (lambda v: _count(v, 1), "a whole number from 1 on", "4")
        for size in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions"),
        )
    },
    # What W&B takes for a project; it would say so in the middle of the start, on one rank.
    "logger.project": (
        lambda v: 0 < len(v.strip()) <= 128 and not set(v) & set("/\\#?%:"),
        "a name of up to 128 letters without any of / \\ # ? % :",
        "lightning-3d",
    ),
    "logger.flush_logs_every_n_steps": (lambda v: _count(v, 1), "a whole number from 1 on", "100"),
}


def check_config(config: Mapping[str, Any]) -> None:
    """Check every setting of a resolved config: its name, type and range, and that what it describes can be made.

    Raises:
        ConfigError: the message names the field and a value that works.
    """
    check_top_level(config)
    for group in _GROUPS:
        _check_node(group, config[group])
    for setting, (holds, meant, works) in _RANGES.items():
        group, _, name = setting.partition(".")
        for path in [f"{place}.{name}" for place in nodes_of(config, "logger")] if group == "logger" else [setting]:
            value = value_at(config, path)
            if value is not None and not holds(value):
                raise ConfigError(f"{path}={value!r} is not {meant}. Set {path}={works}, say.")
    for place, callback in nodes_of(config, "callbacks").items():
        if callback.get("filename") and accepts(callback["_target_"], "dirpath"):
            _check_filename(f"{place}.filename", callback)


def _check_filename(path: str, callback: Mapping[str, Any]) -> None:
    """Refuse names that lead checkpoints out of their folder, which alone is where a resumed run looks."""
    name = callback["filename"]
    # Of {val/loss} only the value is written where metrics' names are left out.
    written = name if callback.get("auto_insert_metric_name", True) else re.sub(r"\{.*?\}", "", name)
    if "/" in written:
        raise ConfigError(
            f"{path}={name!r} leads out of the checkpoints' folder, where resume=auto looks. Leave out '/'; for a "
            "metric with one in its name set auto_insert_metric_name=false."
        )


def check_top_level(config: Mapping[str, Any]) -> None:
    """Check the settings outside the groups, and that there is something in each group that a run cannot do without."""
    for key in config:
        if key not in _TOP_LEVEL and key not in _GROUPS:
            raise ConfigError(f"there is no setting {key}. {closest(key, [*_TOP_LEVEL, *_GROUPS])}")
    for group in _GROUPS:
        advice = f"Add it to the recipe's defaults, e.g. - {group}: ..."
        if group not in config:
            raise ConfigError(f"the config has no {group}. {advice}")
        if group not in _SEVERAL and value_at(config, f"{group}._target_") is None:
            raise ConfigError(f"{group} describes nothing, for it has no _target_. {advice}")
    for key, (kind, works) in _TOP_LEVEL.items():
        if not matches(config.get(key), kind):
            raise ConfigError(f"{key}={config.get(key)!r} is not {described(kind)}. Set {key}={works}, say.")
    if not 0 <= config["seed"] < 2**32:
        raise ConfigError(f"seed={config['seed']} is not a whole number from 0 to {2**32 - 1}. Set seed=0, say.")
    if not config["name"] or "/" in config["name"]:
        raise ConfigError(f"name={config['name']!r} is part of a folder's name, without '/'. Set name=my_run, say.")
    if not config["metric"].strip():
        raise ConfigError(f"metric={config['metric']!r} is no metric's name. Set metric=val_loss, say.")
    for key, works in (("output_dir", "runs"), ("run_dir", "runs/mine")):
        if config[key] == "":
            raise ConfigError(f"{key}='' is no folder. Set {key}={works}, say.")
        if is_url(config[key] or ""):
            raise ConfigError(
                f"{key}={config[key]}, but run folders are on this machine. Set {key} to a local folder, and "
                f"callbacks.checkpoint.dirpath={config[key]} for checkpoints there."
            )


def _check_node(path: str, node: Any) -> None:
    """Check a folder of settings: one target's arguments, or several folders by name."""
    if node is None or (isinstance(node, Mapping) and node.get("_target_", "") is None):
        return
    if not isinstance(node, Mapping):
        raise ConfigError(f"{path}={node!r} is not a folder of settings.")
    if "_target_" not in node:
        if path not in _SEVERAL and node:
            raise ConfigError(f"{path} has no _target_, the class that it describes. Give it one, or leave it out.")
        for key, value in node.items():
            _check_node(f"{path}.{key}", value)
        return
    try:
        known = parameters(node["_target_"])
    except ConfigError as error:
        raise ConfigError(f"{path}.{error}") from error
    open_ended = any(name.startswith("**") for name in known)
    for name, value in node.items():
        if name in _HYDRA_KEYS:
            continue
        if path == "trainer" and name in _TRAINER_GROUPS:
            raise ConfigError(
                f"trainer.{name} is set by the settings under {_TRAINER_GROUPS[name]}. Leave it out here."
            )
        if name not in known:
            if open_ended:
                continue
            names = [f"{path}.{one}" for one in known if path != "trainer" or one not in _TRAINER_GROUPS]
            raise ConfigError(f"there is no setting {path}.{name}. {closest(f'{path}.{name}', names)}")
        _check_type(f"{path}.{name}", value, known[name])
    for name, parameter in known.items():
        if name not in node and parameter.default is inspect.Parameter.empty and not name.startswith("**"):
            raise ConfigError(
                f"{path}.{name} has no value: write {path}.{name}=VALUE ({described(parameter.annotation)})."
            )


def _check_type(path: str, value: Any, parameter: inspect.Parameter) -> None:
    if matches(value, parameter.annotation):
        if isinstance(value, Mapping) and "_target_" in value:
            _check_node(path, value)
        return
    if path in _RANGES:
        works = _RANGES[path][2]
    elif parameter.default is not inspect.Parameter.empty:
        works = "null" if parameter.default is None else str(parameter.default)
    else:
        works = ""
    advice = f" Set {path}={works}, say." if works else ""
    raise ConfigError(f"{path}={value!r} is not {described(parameter.annotation)}.{advice}")


def number_of_processes(trainer: Mapping[str, Any]) -> int:
    """Processes on this machine that the trainer's settings ask for.

    Raises:
        ConfigError: an accelerator that is unknown or not here, or more devices than there are.
    """
    from lightning.pytorch.accelerators import AcceleratorRegistry

    name = _accelerator(trainer)
    accelerator = AcceleratorRegistry[name]["accelerator"]
    if not accelerator.is_available():
        raise ConfigError(f"trainer.accelerator={name!r} is not on this machine. Set trainer.accelerator=cpu.")
    devices = trainer.get("devices", "auto")
    there_are = accelerator.auto_device_count()
    if devices in ("auto", -1, "-1"):
        return there_are
    try:
        parsed = accelerator.parse_devices(devices)
    except Exception as error:
        raise ConfigError(
            f"trainer.devices={devices!r}: {one_line(error)} Set trainer.devices={there_are}, say."
        ) from error
    return len(parsed) if isinstance(parsed, (list, tuple)) else int(parsed)


def _accelerator(trainer: Mapping[str, Any]) -> str:
    from lightning.fabric.utilities.device_parser import _select_auto_accelerator
    from lightning.pytorch.accelerators import AcceleratorRegistry

    name = "auto" if trainer.get("accelerator") is None else trainer["accelerator"]
    names = ["auto", "gpu", *AcceleratorRegistry.available_accelerators()]
    if name not in names:
        raise ConfigError(f"trainer.accelerator={name!r} is unknown. {closest(name, names)}")
    if name in ("auto", "gpu"):
        found = _select_auto_accelerator()
        if name == "gpu" and found not in ("cuda", "mps"):
            raise ConfigError("trainer.accelerator='gpu', but this machine has none. Set trainer.accelerator=cpu.")
        name = found
    return str(name)


def check_layout(config: Mapping[str, Any], *, world_size: int) -> Layout | None:
    """The layout that the strategy's settings make of so many processes; None for a strategy without one.

    Raises:
        LayoutError: sizes that do not fit each other or the number of processes.
        ConfigError: a global batch that the data-parallel size does not divide.
    """
    strategy = _make("strategy", config["strategy"])
    layout = getattr(strategy, "layout", None)
    if not isinstance(layout, Layout):
        return None
    layout = layout.resolve(world_size)
    check_batch(config, layout)
    if config["strategy"].get("process_group_backend") == "nccl" and _accelerator(config["trainer"]) != "cuda":
        raise ConfigError(
            "strategy.process_group_backend='nccl' joins GPUs, but this run has none (trainer.accelerator). Set "
            "strategy.process_group_backend=null, which takes what fits."
        )
    if config["strategy"].get("replay_every_n_steps"):
        with _named("strategy"):
            refuse_windows(accumulate_grad_batches=value_at(config, "trainer.accumulate_grad_batches") or 1)
    return layout


def check_parts(config: Mapping[str, Any], layout: Layout | None = None) -> None:
    """Make the data module, the model, callbacks and Trainer once, so that they refuse what only they know.

    Args:
        layout: that the model is to fit; None leaves that out.

    Raises:
        ConfigError: with what they say.
    """
    data = _make("data", config["data"])
    if isinstance(data, TextDataModule) and data.files is not None:
        with _named("data"):
            data.split_files()
    # Only their checks are wanted: on the meta device weights take neither time nor memory.
    with torch.device("meta"):
        model = _make("model", config["model"])
    check_lengths(config, layout)
    check_end(config)
    # Stored weights are not read twice.
    if layout is not None and isinstance(model, L.LightningModule) and value_at(config, "model.path") is None:
        with _named("model"):
            check_model(model, layout)
    for place, callback in nodes_of(config, "callbacks").items():
        _make(place, callback)
    with _quiet():
        _make(
            "trainer",
            {**config["trainer"], "accelerator": "cpu", "devices": 1, "num_nodes": 1},
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )


def _make(path: str, node: Mapping[str, Any], **others: Any) -> Any:
    try:
        return instantiate(dict(node), _convert_="all", **others)
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, Lightning3DError):
            raise type(cause)(f"{path}: {one_line(cause)}") from cause
        # What else comes may come of the meta device alone; the real attempt will tell.
        if (
            isinstance(cause, (TypeError, ValueError, ModuleNotFoundError))
            or "Misconfiguration" in type(cause).__name__
        ):
            raise ConfigError(f"{path}: {one_line(cause)}") from cause
        return None


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Put the settings' place before what one of our own errors says."""
    try:
        yield
    except Lightning3DError as error:
        raise type(error)(f"{path}: {one_line(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
