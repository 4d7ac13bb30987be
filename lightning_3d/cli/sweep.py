"""``lightning-3d train -m``: a run for each combination of values, chosen by one of Hydra's sweepers.

The sweeper and Hydra's own launcher call a function for each job. It composes the job as a single run is composed and
starts ranks on the resolved file, so that ranks never see the sweep. Only the settings that vary go through Hydra.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_3d.checkpoint.places import is_url
from lightning_3d.cli import run_folder
from lightning_3d.cli.config import (
    DEFAULT_RECIPE,
    check_once,
    closest,
    is_hydras_own,
    nodes_of,
    one_line,
    parse_override,
    recipe_file,
    search_path,
    split_recipe,
)
from lightning_3d.cli.job import plan, start
from lightning_3d.errors import ConfigError, Lightning3DError

# Settings that say where one run is: a sweep decides that for each of its jobs.
_OF_ONE_RUN = ("run_dir", "resume")
# Why a job has no value if somebody wanted an end.
_STOPPED = "stopped"
_HYDRA_SETTINGS = ("hydra/sweeper", "hydra.sweeper", "hydra.sweep.dir")


@dataclass
class Row:
    """A job's line in the table at the end."""

    number: int
    overrides: list[str]
    folder: Path
    value: float | None = None
    failure: str | None = None


class _JobError(Exception):
    """What a sweeper gets of a job without a value."""


class _Ended(BaseException):
    """Ends the sweep from inside a job. No Exception, which Hydra would keep as the job's result."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(arguments: Sequence[str]) -> int:
    """Run all jobs, then print a table; the exit code is 0 if each has a value, else 1, or 128 + n after signal n.

    Raises:
        Lightning3DError: a mistake in the call; no job has begun.
    """
    check_once(arguments)
    recipe, lines = split_recipe(arguments)
    recipe = recipe or DEFAULT_RECIPE
    if "," in recipe:
        raise ConfigError(f"recipe={recipe}: a sweep has one recipe. Start a sweep for each.")
    overrides = [parse_override(line) for line in lines]
    own = [override for override in overrides if is_hydras_own(override)]
    varied = [override for override in overrides if override.is_sweep_override() and override not in own]
    fixed = [override for override in overrides if override not in own and override not in varied]
    _check(own, [*varied, *fixed])
    loader, master = _master(recipe, _text(own))
    chosen = _chosen_folder(master) if _sets(own, "hydra.sweep.dir") else None
    probes = _probes(master, loader, _text(varied))
    common = [f"recipe={recipe}", *_text(fixed)]
    # Mistakes are told before the first job, those of later jobs too.
    configs = [plan([*common, *probe]).config for probe in probes]
    folder = chosen or _new_folder(configs[0])
    if earlier := next(folder.glob(f"*/{run_folder.CONFIG}"), None):
        raise ConfigError(f"hydra.sweep.dir={folder} holds a job of an earlier sweep ({earlier.parent}). Name another.")
    OmegaConf.update(master, "hydra.sweep.dir", str(folder))
    jobs = _Jobs(common, group=folder.name, wandb=_unnamed_wandb(configs[0], varied))
    sweeper = _sweeper(master, loader, jobs, sets_failure_rate=_sets(own, "hydra.sweeper.max_failure_rate"))
    jobs.raises = not _is_basic(master)
    return _run(sweeper, _text(varied), jobs, folder)


def _run(sweeper: Sweeper, varied: list[str], jobs: _Jobs, folder: Path) -> int:
    trouble, code = "", 0
    try:
        with _without_study_stop():
            sweeper.sweep(varied)
    except _Ended as error:
        trouble, code = str(error), error.exit_code
    except KeyboardInterrupt:
        trouble, code = "stopped by SIGINT", 128 + 2
    except Exception as error:
        if not jobs.rows:
            raise ConfigError(f"hydra.sweeper: {type(error).__name__}: {one_line(error)}") from error
        # A sweeper that has no value at all has nothing to choose the best of; the table says why.
        if any(row.failure is None for row in jobs.rows):
            trouble = f"the sweeper ended the sweep: {type(error).__name__}: {one_line(error)}"
            code = 1
    _print(jobs, folder)
    if trouble:
        print(f"error: {trouble}", file=sys.stderr)
    return code or int(any(row.value is None for row in jobs.rows))


@contextmanager
def _without_study_stop() -> Iterator[None]:
    """Optuna's grid sampler stops its study after the last trial, which raises outside of Optuna's own loop.

    Hydra's sweeper catches that, but not where the last trial has failed; it would end without naming the best.
    """
    study = sys.modules.get("optuna.study")
    with patch.object(study.Study, "stop", lambda self: None) if study is not None else nullcontext():
        yield


class _Jobs:
    """Runs a job when Hydra's launcher calls it, and keeps what came of it.

    Args:
        common: arguments of all jobs.
        group: joins the jobs' W&B runs.
        wandb: places of the loggers that make them.
    """

    def __init__(self, common: list[str], *, group: str, wandb: list[str]) -> None:
        self.rows: list[Row] = []
        self.metric = ""
        # The basic sweeper would end at the first exception; others count it as a failed trial.
        self.raises = True
        self._common = common
        self._group = group
        self._wandb = wandb

    def __call__(self, _: DictConfig) -> float | None:
        hydra = HydraConfig.get()
        # As they were written: what they refer to is the job's.
        varied: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        number = int(hydra.job.num)
        row = Row(number, varied, Path(str(hydra.sweep.dir), str(hydra.sweep.subdir)))
        self.rows.append(row)
        print(f"\njob {number}: {' '.join(varied) or 'the recipe as it is'}", flush=True)
        names = {"group": self._group, "name": f"{self._group}-{number}"}
        named = [f"{place}.{key}={_quoted(name)}" for place in self._wandb for key, name in names.items()]
        arguments = [*named, *self._common, *varied]
        try:
            row.failure = self._run(arguments, row)
        except KeyboardInterrupt:
            row.failure = _STOPPED
            raise
        except Exception as error:
            # What the machine does to one job, as a full disk does, it may not do to the next.
            row.failure = f"{type(error).__name__}: {one_line(error)}"
        if row.failure is None:
            return row.value
        print(f"job {number}: {row.failure}", file=sys.stderr, flush=True)
        if self.raises:
            raise _JobError(row.failure)
        return None

    def _run(self, arguments: list[str], row: Row) -> str | None:
        """Run the job to its end; the result says why it has no value."""
        try:
            job = plan(arguments, folder=row.folder)
        except Lightning3DError as error:
            return f"refused: {error}"
        self.metric = job.config["metric"]
        ended = start(job)
        if ended.stopped:
            # Somebody wants an end, of the sweep too.
            row.failure = _STOPPED
            raise _Ended(f"the sweep was stopped in job {row.number}", ended.exit_code)
        return f"exit code {ended.exit_code}, see above" if ended.exit_code else self._take_value(row)

    def _take_value(self, row: Row) -> str | None:
        """Read the job's metric; the result says what is wrong with it."""
        metrics = run_folder.read_result(row.folder)["metrics"]
        if self.metric not in metrics:
            row.failure = f"it logged no metric={self.metric}. {closest(self.metric, metrics)}"
            # A misspelt name would cost every job of the sweep.
            if all(other.value is None for other in self.rows):
                raise _Ended(f"job {row.number}: {row.failure} It is the value at the end of the run.", 1)
            return row.failure
        if not math.isfinite(metrics[self.metric]):
            return f"{self.metric}={metrics[self.metric]}"
        row.value = metrics[self.metric]
        return None


class _VariedOnly:
    """A config loader for sweepers: a job's config is the master's with the job's overrides noted, not composed."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        config = copy.deepcopy(master_config)
        with open_dict(config):
            config.hydra.overrides.task = list(sweep_overrides)
        return config


def _check(own: list[Override], others: list[Override]) -> None:
    for override in own:
        key = override.key_or_group
        if not any(key == known or key.startswith((f"{known}.", f"{known}/")) for known in _HYDRA_SETTINGS):
            raise ConfigError(
                f"{override.input_line!r}: of Hydra's own settings a sweep has {', '.join(_HYDRA_SETTINGS)}."
            )
    for override in others:
        if override.key_or_group in _OF_ONE_RUN:
            raise ConfigError(
                f"{override.input_line!r} is of one run, and each job of a sweep has a folder of its own and begins "
                f"anew. Leave it out; hydra.sweep.dir=FOLDER says where the jobs' folders are."
            )
        if override.key_or_group in ("name", "output_dir") and override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line!r}: a sweep has one folder. Give {override.key_or_group} one value."
            )


def _master(recipe: str, own: list[str]) -> tuple[_VariedOnly, DictConfig]:
    """Hydra's settings for the sweep: those of the recipe's file, changed by those given."""
    file = recipe_file(recipe)
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"]
    if any(line.split("=")[0] == "hydra/sweeper" and line.split("=")[1] == "optuna" for line in own):
        _need_optuna()
    try:
        with initialize_config_dir(str(file.parent), version_base="1.3", job_name="lightning-3d"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            overrides = [search_path(), *quiet, *own]
            config = hydra.config_loader.load_configuration(file.stem, overrides, run_mode=RunMode.MULTIRUN)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from error
    return _VariedOnly(hydra.config_loader), config


def _need_optuna() -> None:
    try:
        import hydra_plugins.hydra_optuna_sweeper  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "hydra/sweeper=optuna needs Hydra's plugin for Optuna. Install it: pip install 'lightning-3d[sweep]'."
        ) from error


def _sweeper(master: DictConfig, loader: _VariedOnly, jobs: _Jobs, *, sets_failure_rate: bool) -> Sweeper:
    if "max_failure_rate" in master.hydra.sweeper and not sets_failure_rate:
        # By default one failed job would end Optuna's sweep.
        master.hydra.sweeper.max_failure_rate = 1.0
    context = HydraContext(config_loader=loader, callbacks=Callbacks(master))  # type: ignore[arg-type]
    try:
        return Plugins.instance().instantiate_sweeper(hydra_context=context, task_function=jobs, config=master)
    except Exception as error:
        raise ConfigError(f"hydra.sweeper: {one_line(error.__cause__ or error)}") from error


def _probes(master: DictConfig, loader: _VariedOnly, varied: list[str]) -> list[list[str]]:
    """Overrides of jobs to check beforehand: all of a grid, else one with each setting's least or first value."""
    if _is_basic(master):
        lines = [f"{key}={value}" for key, value in (master.hydra.sweeper.params or {}).items()]
        parsed = OverridesParser.create(config_loader=loader).parse_overrides([*lines, *varied])  # type: ignore[arg-type]
        try:
            return list(itertools.chain(*BasicSweeper.split_arguments(parsed, None)))
        except HydraException as error:
            raise ConfigError(
                f"{' '.join(varied)}: {one_line(error)}. The basic sweeper takes lists of values (a,b), range() and "
                f"glob(); for an interval() add hydra/sweeper=optuna."
            ) from error
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(varied)  # type: ignore[arg-type]
    return [[f"{override.get_key_element()}={_first_value(override)}" for override in parsed]]


def _is_basic(master: DictConfig) -> bool:
    # By name: Hydra's search for plugins runs their modules again, so that its class is not the one that is imported.
    return str(master.hydra.sweeper._target_).endswith(".BasicSweeper")


def _first_value(override: Override) -> str:
    if override.is_discrete_sweep():
        return next(iter(override.sweep_string_iterator()))
    return str(override.value().start)  # type: ignore[union-attr]


def _chosen_folder(master: DictConfig) -> Path:
    text = str(master.hydra.sweep.dir)
    if is_url(text):
        raise ConfigError(
            f"hydra.sweep.dir={text}, but run folders are on this machine. Set hydra.sweep.dir to a local folder."
        )
    run_folder.check_writable("hydra.sweep.dir", text)
    return Path(text)


def _new_folder(config: dict[str, Any]) -> Path:
    return run_folder.unused(Path(config["output_dir"]), run_folder.stem(f"{config['name']}-sweep"))


def _unnamed_wandb(config: dict[str, Any], varied: list[Override]) -> list[str]:
    """Places of the W&B loggers whose runs have neither group nor name yet."""
    if any(override.key_or_group.split(".")[0] == "logger" for override in varied):
        return []
    nodes = nodes_of(config, "logger").items()
    return [place for place, node in nodes if all(node.get(key, "") is None for key in ("group", "name"))]


def _sets(overrides: list[Override], key: str) -> bool:
    return any(override.key_or_group == key for override in overrides)


def _text(overrides: Sequence[Override]) -> list[str]:
    return [override.input_line or "" for override in overrides]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _print(jobs: _Jobs, folder: Path) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table(box=box.SIMPLE, title=f"sweep in {folder}", title_justify="left", pad_edge=False)
    table.add_column("job", justify="right")
    table.add_column("overrides", overflow="fold")
    table.add_column(jobs.metric or "value", justify="right")
    table.add_column("folder", overflow="fold")
    for row in jobs.rows:
        without = _STOPPED if row.failure == _STOPPED else "failed"
        value = without if row.value is None else f"{row.value:.6g}"
        table.add_row(str(row.number), " ".join(row.overrides), value, str(row.folder))
    console.print()
    console.print(table, markup=False)
    for row in jobs.rows:
        if row.failure is not None:
            print(f"job {row.number}: {row.failure}", flush=True)
