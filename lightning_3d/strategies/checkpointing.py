"""What Lightning asks a strategy about checkpoints, answered with folders that all ranks write and read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.parallel.share import Share
from lightning_3d.strategies import resume
from lightning_3d.strategies.agreement import agree_on_best
from lightning_3d.strategies.mesh_strategy import MeshStrategy


class CheckpointingStrategy(MeshStrategy):
    """A strategy over a mesh whose ranks each hold a share of the model, and save and load it together.

    Args:
        layout, process_group_backend, timeout_seconds: as in `MeshStrategy`.
    """

    def __init__(self, layout: Layout, *, process_group_backend: str | None, timeout_seconds: float) -> None:
        super().__init__(layout, process_group_backend=process_group_backend, timeout_seconds=timeout_seconds)
        self._share: Share | None = None
        self._pending_random_state: dict[str, Any] | None = None

    @property
    def share(self) -> Share:
        """This rank's share of the model, from `setup` on."""
        if self._share is None:
            raise RuntimeError("the model is composed only inside trainer.fit, validate, test or predict.")
        return self._share

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self.share.reshard()
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return resume.optimizer_state(self, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise ConfigError("save_checkpoint(storage_options=...) has no use here: ranks write a folder themselves.")
        assert self.lightning_module is not None
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        agree_on_best(callbacks, broadcast=self.broadcast, device=self.root_device)
        resume.save(self, checkpoint, Path(self.broadcast(os.fspath(filepath))))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = resume.load(self, Path(self.broadcast(os.fspath(checkpoint_path))), weights_only=weights_only)
        self._pending_random_state = checkpoint.pop("random_state", None)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        resume.load_model(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        resume.load_optimizers(self, checkpoint["optimizer_states"])

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            resume.remove(Path(filepath))

    def _continue_random_state(self) -> None:
        # At the first step: making loaders and iterators draws numbers that the saved run had drawn long before.
        if self._pending_random_state is not None:
            resume.set_random_state(self._pending_random_state)
            self._pending_random_state = None
