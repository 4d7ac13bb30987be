"""The job of a script of `hydra.main`: its other ranks run this job with this config, not the sweep it is one of."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

# Options of hydra.main whose value is the next argument, and those that other ranks do without.
_WITH_VALUE = (
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
    "--package",
    "-p",
    "--experimental-rerun",
)
_SWEEPING = ("--multirun", "-m")
# Settings of Hydra that are of the sweep, or set below.
_LEFT_OUT = (
    "hydra.mode", "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.num",
    "hydra.job.id", "hydra/sweeper", "hydra.sweeper", "hydra/launcher", "hydra.launcher",
)  # fmt: skip


def current() -> Any | None:
    """Hydra's own config of the job that runs; None where there is none."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    found = module.HydraConfig.get()
    # A script may have set one itself, for its resolvers.
    return None if found.runtime.get("output_dir") is None else found


def identity() -> tuple[str, int | None] | None:
    """By which jobs of a sweep are known: the folder, which they may share, and the number."""
    job = current()
    return None if job is None else (str(job.runtime.output_dir), job.job.get("num"))


def working_folder() -> str | None:
    """Where the script was started, which a job may have left."""
    job = current()
    return None if job is None else str(job.runtime.cwd)


def arguments(argv: Sequence[str]) -> list[str]:
    """What a script is to be given to run the same job once more: `argv` itself where Hydra runs none.

    Its folder, which may be named by the time, is this process's, whose config and log are written there already.

    Source: https://hydra.cc/docs/advanced/hydra-command-line-flags, configure_hydra/workdir, .../logging.
    """
    job = current()
    if job is None:
        return list(argv)
    settings = {"hydra.run.dir": str(job.runtime.output_dir)}
    if job.job.get("num") is not None:
        # One of a sweep's.
        for group, name in (("sweep", "dir"), ("sweep", "subdir"), ("job", "num"), ("job", "id")):
            settings[f"hydra.{group}.{name}"] = str(job[group][name])
    kept = [override for override in job.overrides.hydra if not _key(override).startswith(_LEFT_OUT)]
    pinned = [f"{key}={_quoted(value)}" for key, value in settings.items()]
    return [
        *_options(argv), *job.overrides.task, *kept, *pinned, "hydra.mode=RUN", "hydra.output_subdir=null",
        # Else each would write into the one log, or, without its handler, not know what its settings are for.
        "hydra.job_logging.root=null",
    ]  # fmt: skip


def _options(argv: Sequence[str]) -> Iterator[str]:
    rest = iter(argv)
    for argument in rest:
        if argument in _WITH_VALUE:
            yield from (argument, next(rest))
        elif argument.startswith("-") and argument not in _SWEEPING:
            yield argument


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
