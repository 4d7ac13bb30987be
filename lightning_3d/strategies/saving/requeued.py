"""What a job that SLURM has queued again goes on from, and what it saves when it is to be queued."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_3d.checkpoint.places import Folder, Place, place_among

_NAME = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


class _WholeOnly(_CheckpointConnector):
    """Lightning's, but a requeued job goes on from a whole checkpoint or from none.

    Lightning joins all digits of any name with `hpc_ckpt_` in it: with those of a killed save's draft, to a number that
    no checkpoint has.
    """

    storage_options: dict[str, Any] | None = None

    @property
    def _hpc_resume_path(self) -> str | None:
        saved = self._saved(self.trainer.default_root_dir)
        return str(saved[max(saved)]) if saved else None

    def hpc_save_path(self, folderpath: Any) -> str:  # type: ignore[override]
        # One that a kill has left half written has the next number, and is replaced.
        number = max(self._saved(folderpath), default=0) + 1
        return str(self._place(folderpath) / f"hpc_ckpt_{number}.ckpt")

    def _saved(self, folder: Any) -> dict[int, Place]:
        root = self._place(folder)
        found = root.whole()
        if isinstance(root, Folder):
            # Plain Lightning's are files.
            found += [Folder(path) for path in root.path.glob("hpc_ckpt_*") if path.is_file()]
        return {int(name[1]): where for where in found if (name := _NAME.fullmatch(where.name))}

    def _place(self, path: Any) -> Place:
        return place_among(path, storage_options=self.storage_options)


def requeue_from_committed(trainer: L.Trainer, *, storage_options: dict[str, Any] | None) -> None:
    """Let a job that SLURM queues again save and resume by names of whole checkpoints."""
    connector: Any = trainer._checkpoint_connector
    connector.__class__ = _WholeOnly
    connector.storage_options = storage_options
