"""The board of ranks that no launcher of ours has started: a folder that they agree on."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist

from lightning_3d.errors import ConfigError
from lightning_3d.strategies.processes.board import Board
from lightning_3d.strategies.processes.supervise import board_of_run, supervised_folder

# A file server may show a new folder late.
_SECONDS = 10.0
_PREFIX = "lightning-3d-"
# Ranks that live post twice a second; clocks of machines may differ.
_DESERTED_SECONDS = 24 * 3600.0


def meet(trainer: L.Trainer, number: int) -> tuple[Path, Board]:
    """A new folder that all ranks see, and the board of run `number` in it; collective.

    Raises:
        ConfigError: on all ranks: the folder can't be made, or not all machines share it.
    """
    box: list[Any] = [None]
    shared = trainer.default_root_dir if trainer.num_nodes > 1 else None
    place = shared or tempfile.gettempdir()
    if dist.get_rank() == 0:
        try:
            if shared is not None:
                Path(shared).mkdir(parents=True, exist_ok=True)
                remove_deserted(Path(shared))
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared))
            board_of_run(folder, number).folder.mkdir()
            box = [str(folder)]
        except OSError as error:
            box = [error]
    dist.broadcast_object_list(box, 0)
    if isinstance(box[0], OSError):
        raise ConfigError(
            f"the ranks talk through a folder in {place}, which rank 0 cannot make: {box[0]}. "
            f"Set {'default_root_dir' if shared else 'TMPDIR'} to a folder that can be written."
        )
    folder = Path(box[0])
    board = board_of_run(folder, number)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, _appears(board.folder))
    if not all(seen):
        blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
        raise ConfigError(
            f"default_root_dir={place} is not one folder for all: rank 0 has made {folder.name} there, which rank "
            f"{blind} cannot see. Set the Trainer's default_root_dir to a folder that all machines share."
        )
    supervised = supervised_folder()
    if supervised is not None:
        link(board, supervised)
    return folder, board


def link(board: Board, folder: Path) -> None:
    """Let those who watch the ranks of this machine from outside find the board in their folder."""
    with contextlib.suppress(OSError):
        Path(folder, board.folder.name).symlink_to(board.folder.absolute())


def remove_deserted(place: Path) -> None:
    """The folders of jobs that lost a machine, whose ranks nobody could tell to be gone, a day later."""
    for folder in place.glob(f"{_PREFIX}*"):
        # One that goes meanwhile, or is not ours.
        with contextlib.suppress(OSError):
            runs = list(folder.iterdir())
            posts = [list(run.glob("rank-*.where")) for run in runs]
            # A user's folder may have such a name.
            ours = all(run.name.startswith("run-") for run in runs) and runs and all(posts)
            if ours and all(
                time.time() - path.stat().st_mtime > _DESERTED_SECONDS for paths in posts for path in paths
            ):
                shutil.rmtree(folder, ignore_errors=True)


def _appears(folder: Path) -> bool:
    deadline = time.monotonic() + _SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
