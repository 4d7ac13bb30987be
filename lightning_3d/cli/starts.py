"""Who has started this command, and how often."""

from __future__ import annotations

import os

from lightning_3d.errors import ConfigError


def started_as_rank() -> dict[str, int] | None:
    """Sizes that torchrun or a cluster has set for this process, or None where nobody started it as a rank."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return {"rank": int(os.environ["RANK"]), "world_size": world, "local_world_size": local}
    return None


def refuse_starts(command: str) -> None:
    """
    Raises:
        ConfigError: torchrun or srun has started a command several times of which each would do all of the work.
        SystemExit: so it has, and rank 0 tells it.
    """
    external = started_as_rank() or {"rank": _number("SLURM_PROCID", 0), "world_size": _tasks_of_slurm()}
    if external["world_size"] == 1:
        return
    if external["rank"]:
        raise SystemExit(2)
    raise ConfigError(
        f"torchrun or srun has started lightning-3d {command} {external['world_size']} times, and each would do all of "
        "the work. Start it once: without torchrun, or with srun --ntasks=1."
    )


def refuse_tasks_of_slurm() -> None:
    """
    Raises:
        ConfigError: srun has started a command, which starts its ranks itself, more than once.
    """
    if (tasks := _tasks_of_slurm()) != 1:
        raise ConfigError(
            f"srun has started this command {tasks} times, but it starts its ranks itself: these would be {tasks} "
            "runs. Use srun --ntasks=1, or srun --ntasks-per-node=1 torchrun ... to train on several machines."
        )


def _tasks_of_slurm() -> int:
    return _number("SLURM_STEP_NUM_TASKS", 1)


def _number(variable: str, default: int) -> int:
    return int(os.environ.get(variable, default))
