"""What Lightning asks a strategy about checkpoints, answered with folders that all ranks write and read."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.background import BackgroundWriter
from lightning_3d.checkpoint.places import Place, is_url, place, place_among
from lightning_3d.checkpoint.random_state import set_random_state
from lightning_3d.checkpoint.together import together
from lightning_3d.checkpoint.writing import write
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.layout import Layout
from lightning_3d.parallel.mesh import new_group
from lightning_3d.parallel.share import Share
from lightning_3d.strategies.mesh_strategy import MeshStrategy
from lightning_3d.strategies.saving import dictionary, resume
from lightning_3d.strategies.saving.averaging import leave_averages_to_strategy, refuse_whole_averages
from lightning_3d.strategies.saving.links import Links
from lightning_3d.strategies.saving.loops import BATCH_ENDED, MONITORED, LoopsGoOn, monitored
from lightning_3d.strategies.saving.names import keep_names_apart
from lightning_3d.strategies.saving.redone import Redone
from lightning_3d.strategies.saving.requeued import requeue_from_committed
from lightning_3d.strategies.saving.selection import (
    Selection,
    agree_on_best,
    note_ckpt_path,
    pick_last_of_committed,
    tell_leftovers,
)
from lightning_3d.strategies.saving.weights import load_weights_
from lightning_3d.strategies.saving.windows import SaveAtWindowEnd
from lightning_3d.whereabouts import HERE


class CheckpointingStrategy(MeshStrategy):
    """A strategy over a mesh whose ranks each hold a share of the model, and save and load it together.

    Args:
        layout, process_group_backend, timeout_seconds: as in `MeshStrategy`.
        async_checkpoint: go on training while a copy is written.
        storage_options: for fsspec, where checkpoints are below a URL.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        process_group_backend: str | None,
        timeout_seconds: float,
        async_checkpoint: bool,
        storage_options: dict[str, Any] | None,
    ) -> None:
        super().__init__(layout, process_group_backend=process_group_backend, timeout_seconds=timeout_seconds)
        self._async_checkpoint = async_checkpoint
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise ConfigError(
                f"storage_options={storage_options!r} must be a dict of what fsspec's file system takes. "
                "Set storage_options=None for folders of this machine."
            )
        self._storage_options = storage_options
        self._background = BackgroundWriter(new_group=partial(new_group, backend="gloo"))
        self._selection = Selection()
        self._windows = SaveAtWindowEnd()
        self._links = Links(self._selection, asked=self._link_asked)
        self._weights_only: bool | None = None
        # What the run that begins is to load.
        self._ckpt_path: Any = None
        # Checkpoints that callbacks want removed, until nothing needs them; on rank 0.
        self._removals: list[str] = []
        self._share: Share | None = None
        self._pending_random_state: dict[str, Any] | None = None
        self._loops = LoopsGoOn()
        self._redone = Redone()

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
        return together(lambda: resume.optimizer_state(self, optimizer), "saving an optimizer's state")

    # ------------------------------------------------------------------ saving

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.lightning_module is not None
        HERE.enter("saving a checkpoint")
        path = self.broadcast(os.fspath(filepath))
        where = place(path, storage_options=storage_options) if storage_options else self.place(path)
        # It may have been unwanted, until now.
        self._removals = [other for other in self._removals if other != path]
        if self._windows.postpone(self.lightning_module.trainer, checkpoint, path, storage_options):
            return
        if "loops" in checkpoint:
            checkpoint.update(monitored(self.lightning_module.trainer))
            checkpoint.update(self._loops.place(self.lightning_module.trainer))
        # At most one is under way; and a failed one is not overtaken in silence.
        self._settle(self._background.wait)
        # Not earlier: the end of the one before must not let go what belongs to this one.
        self._windows.begin(path)
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        agree_on_best(callbacks, broadcast=self.broadcast, device=self.root_device)
        self._selection.propose(callbacks, saving=path)
        # Before and after the training, nobody would come back to a write in the background.
        later = self._async_checkpoint and self._windows.lasting(self.lightning_module.trainer)
        with self._keeping_selection():
            contents = together(
                lambda: dictionary.contents(self, checkpoint, origin=self._redone.origin), f"saving checkpoint {where}"
            )
            if later:
                self._background.start(where, contents)
            else:
                write(where, contents)
        if not later:
            self._committed()

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._removals.append(os.fspath(filepath))
            self._remove_former()

    def _link_asked(self) -> None:
        if not self._saving:
            self._let_go()

    def _let_go(self) -> None:
        """Links move to what is whole; then what nothing needs any more is removed."""
        if self.is_global_zero:
            self._links.move()
            if not self.unwinding:
                self._remove_former()
        self.barrier()

    @property
    def _saving(self) -> bool:
        """Whether a checkpoint that was asked for is not whole yet; alike on all ranks."""
        return self._background.busy or self._windows.waiting

    def _remove_former(self) -> None:
        # Each may be the only whole one until what is being saved is.
        if self._saving:
            return
        removals, self._removals = self._removals, []
        for filepath in removals:
            # Lightning asks for a removal before it lets the link move.
            if self._links.point_to(filepath):
                self._removals.append(filepath)
            else:
                self._remove(filepath)

    def _asked_for(self) -> list[str]:
        """Paths of what is not there yet."""
        under_way = self._background.under_way
        return [*self._windows.paths, *self._links.paths, *([] if under_way is None else [str(under_way)])]

    def _remove(self, filepath: str) -> None:
        try:
            store.remove(self.place(filepath))
        # What a store's client raises is of no common class.
        except Exception as error:
            # Training can go on, and other ranks know nothing of this.
            told = f"{type(error).__name__}: {error}"
            rank_zero_warn(f"the checkpoint {filepath} could not be removed and stays: {told}.")

    def _settle(self, ask: Callable[[], bool]) -> None:
        """Ask for the checkpoint under way; where it is found whole, do what had to wait for it."""
        with self._keeping_selection():
            finished = ask()
        if finished:
            self._committed()

    def _committed(self) -> None:
        self._selection.commit()
        self._let_go()

    @contextmanager
    def _keeping_selection(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            self._selection.restore()
            self._removals.clear()
            self._links.forget()
            raise

    def place(self, path: Any) -> Place:
        """Of a checkpoint, with the storage options where it is a URL of another file system."""
        return place_among(path, storage_options=self._storage_options)

    # ------------------------------------------------------------------ in the course of a run

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher: Any = self._launcher
        launch = launcher.launch

        @wraps(launch)
        def launch_checked(function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            if trainer is not None:
                self._check_callbacks(trainer)
                # Lightning drops it on its way to strategies that restore after their setup.
                given = inspect.signature(function).bind(*args, **kwargs).arguments
                self._weights_only = given.get("weights_only")
            return launch(function, *args, trainer=trainer, **kwargs)

        launcher.launch = launch_checked

    def _check_callbacks(self, trainer: L.Trainer) -> None:
        refuse_whole_averages(trainer)
        requeue_from_committed(trainer, storage_options=self._storage_options)
        # Lightning does not ask where the Trainer's ckpt_path is set.
        self._redone.last(None)
        pick_last_of_committed(trainer, storage_options=self._storage_options, note=self._redone.last)
        note_ckpt_path(trainer, partial(setattr, self, "_ckpt_path"))
        for callback in trainer.checkpoint_callbacks:
            _, wrong, path = os.fspath(getattr(callback, "dirpath", None) or "").partition("/file:/")
            if wrong:
                raise ConfigError(
                    f"{type(callback).__name__}(dirpath='file:///{path}') means a folder {callback.dirpath} to "  # type: ignore[attr-defined]
                    f"Lightning. Set dirpath='/{path}'."
                )

    def setup_environment(self) -> None:
        super().setup_environment()
        # Of a run that ended before its first step.
        self._pending_random_state = None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        # Those of a run that failed: what was to take their place may not be there.
        self._removals.clear()
        leave_averages_to_strategy(trainer)
        # The module's own are among them by now.
        self._links.take_over(trainer.checkpoint_callbacks)
        self._redone.begin()
        keep_names_apart(
            trainer.checkpoint_callbacks,
            asked_for=self._asked_for,
            is_redone=lambda path: self._redone.holds(lambda: self.place(path).summary()),
        )
        if self._windows not in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.append(self._windows)  # type: ignore[attr-defined]

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        # A save under way looks like one that was killed.
        self._settle(self._background.wait)
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        self._selection.propose(callbacks)
        self._selection.commit()
        self._links.forget()
        if self.is_global_zero:
            for folder in {getattr(callback, "dirpath", None) for callback in callbacks}:
                if folder is not None and not is_url(folder):
                    tell_leftovers(Path(folder))
        self.barrier()
        self._loops.begin(self.lightning_module.trainer)

    def _before_step(self) -> None:
        self._settle(self._background.poll)
        # At the first step: making loaders and iterators draws numbers that the saved run had drawn long before.
        if self._pending_random_state is not None:
            set_random_state(self._pending_random_state)
            self._pending_random_state = None

    def on_train_end(self) -> None:
        super().on_train_end()
        self._settle(self._background.wait)

    def teardown(self) -> None:
        # After an exception or a signal too: what was begun is finished.
        failing = sys.exc_info()[0] is not None
        try:
            self._settle(self._background.close)
        except CheckpointError as error:
            if not failing:
                raise
            rank_zero_warn(str(error))
        # After an error that this rank alone may have there are some.
        self._removals.clear()
        super().teardown()

    # ------------------------------------------------------------------ loading

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        HERE.enter("loading a checkpoint")
        path = self.broadcast(os.fspath(checkpoint_path))
        # It may be the one that is wanted.
        self._settle(self._background.wait)
        weights_only = self._weights_only if weights_only is None else weights_only
        checkpoint = resume.load(self, path, weights_only=weights_only)
        random_state = checkpoint.pop("random_state", None)
        if not self._goes_on:
            return checkpoint
        if self.is_global_zero:
            self._redone.resume(path, lambda: self.place(path).summary())
        self._pending_random_state = random_state
        assert self.lightning_module is not None
        for callback in self.lightning_module.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                # Else it saves this step once more at the next batch, which may be inside an accumulation window.
                callback._last_global_step_saved = checkpoint.get("global_step", 0)
        return checkpoint

    @property
    def _goes_on(self) -> bool:
        """Whether the run under way trains: an evaluation's checkpoint has no bearing on the fit that comes next."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        source = f"the checkpoint {self.lightning_module.trainer.ckpt_path}"
        load_weights_(self, checkpoint["state_dict"], strict=strict, source=source)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        resume.load_optimizers(self, checkpoint)
        # The loops were restored just before.
        self._loops.load(self.lightning_module.trainer, checkpoint.get(MONITORED), checkpoint.get(BATCH_ENDED))
