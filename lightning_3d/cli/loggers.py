"""Loggers that need to know the run folder."""

from __future__ import annotations

import os
import secrets
import warnings
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

_ID_FILE = "wandb_run_id"


def build_wandb_logger(
    save_dir: str | Path,
    project: str = "lightning-3d",
    name: str | None = None,
    mode: Literal["offline", "online", "disabled"] | None = None,
    entity: str | None = None,
    group: str | None = None,
    tags: list[str] | None = None,
) -> WandbLogger:
    """A W&B logger that goes on with the run folder's W&B run, or begins it.

    Args:
        save_dir: the run folder.
        mode: None takes the environment variable WANDB_MODE, else offline.
        name: None takes the run folder's name.
    """
    folder = Path(save_dir)
    settings: dict[str, Any] = {"entity": entity, "group": group, "tags": tags}
    return WandbLogger(
        project=project,
        name=name or folder.name,
        save_dir=folder,
        id=wandb_run_id(folder),
        # Not offline=True: that sets WANDB_MODE for this process and all it starts.
        mode=mode or os.environ.get("WANDB_MODE") or "offline",
        **{key: value for key, value in settings.items() if value is not None},
    )


def build_csv_logger(
    save_dir: str | Path, name: str = "csv", version: str = "", flush_logs_every_n_steps: int = 100
) -> CSVLogger:
    """Lightning's CSVLogger, which would delete the metrics of a run that is resumed: they are kept beside new ones.

    Args:
        save_dir: the run folder; an earlier ``metrics.csv`` in it becomes ``metrics.1.csv``, and so on.
    """
    # Lightning says of a folder that is not empty that its logs will be deleted; those are no longer where it looks.
    warnings.filterwarnings("ignore", message="Experiment logs directory")
    logger = CSVLogger(save_dir, name, version, flush_logs_every_n_steps=flush_logs_every_n_steps)
    earlier = Path(logger.log_dir, "metrics.csv")
    if getattr(rank_zero_only, "rank", 0) == 0 and earlier.exists():
        number = 1
        while (kept := earlier.with_name(f"metrics.{number}.csv")).exists():
            number += 1
        earlier.rename(kept)
    return logger


def wandb_run_id(folder: Path) -> str:
    """The W&B run of a run folder, chosen when it is first asked for."""
    file = folder / _ID_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    return file.read_text().strip()
