"""Loggers that need to know the run folder."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger

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


def wandb_run_id(folder: Path) -> str:
    """The W&B run of a run folder, chosen when it is first asked for."""
    file = folder / _ID_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    return file.read_text().strip()
