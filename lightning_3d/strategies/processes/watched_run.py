"""One fit, validate, test or predict: a watchdog beside it, one way to stop, one way to fail."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.errors import NumbersError
from lightning_3d.layout import Layout
from lightning_3d.parallel.mesh import data_parallel_group
from lightning_3d.parallel.pipeline import STAGES_PER_RANK
from lightning_3d.parallel.waits import note_waits
from lightning_3d.strategies.processes.board import Board
from lightning_3d.strategies.processes.loading import note_loading
from lightning_3d.strategies.processes.meeting import meet
from lightning_3d.strategies.processes.script_launcher import ScriptLauncher
from lightning_3d.strategies.processes.signals import STOP_SIGNALS, Signals
from lightning_3d.strategies.processes.stopping import AgreedStop
from lightning_3d.strategies.processes.supervise import board_of_run, supervised_folder
from lightning_3d.strategies.processes.watchdog import Watchdog
from lightning_3d.whereabouts import HERE


class WatchedRun:
    """Starts the watchdog, and puts itself where Lightning handles signals and the launcher handles errors.

    Where a launcher of ours has made a folder for this machine's ranks, it watches from now on, so that a rank that
    does not come is named too; else from `met` on.

    Args:
        trainer: about to run.
        launcher: that runs it.
        timeout_seconds: as in `Watchdog`.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        launcher: ScriptLauncher,
        *,
        rank: int,
        world_size: int,
        timeout_seconds: float,
    ) -> None:
        self._trainer = trainer
        self._launcher = launcher
        self._own_folder: Path | None = None
        self._unsaved: list[ModelCheckpoint] = []
        self._signals: Signals | None = None
        self._rank, self._world_size, self._timeout = rank, world_size, timeout_seconds
        self._number = ScriptLauncher.runs
        ScriptLauncher.runs += 1
        self._watching = False
        # An error that this rank alone may have, until Lightning has torn down.
        self.failed = False
        HERE.failure = ""
        note_waits()
        note_loading()
        folder = supervised_folder()
        if folder is not None and trainer.num_nodes == 1:
            board = board_of_run(folder, self._number)
            # A board that can't be written is mute.
            with contextlib.suppress(OSError):
                board.folder.mkdir(parents=True, exist_ok=True)
            self._watch(board)

    def met(self, mesh: DeviceMesh, layout: Layout) -> None:
        """The ranks can talk; collective."""
        if not self._watching:
            self._own_folder, board = meet(self._trainer, self._number)
            self._watch(board)
        self._watchdog.place(_coordinates(mesh, layout), stages=_ranks_of_stages(mesh, layout))

    def _watch(self, board: Board) -> None:
        self._watching = True
        trainer, rank, world_size = self._trainer, self._rank, self._world_size
        self._board = board
        self._keeper = _KeepsSignals(self)
        self._stop = AgreedStop(board, world_size=world_size)
        self._watchdog = Watchdog(
            board,
            rank=rank,
            world_size=world_size,
            timeout_seconds=self._timeout,
            reports=Path(trainer.default_root_dir, "hang_reports", f"{board.folder.parent.name}-{board.folder.name}"),
            stop=self._stop,
            leaving=self._leave,
        )
        self._watchdog.start()
        self._launcher.on_failure, self._launcher.on_success = self._failed, self._succeeded
        self._take_over_signals()

    def begin_step(self, step: str) -> None:
        """
        Raises:
            KeyboardInterrupt, SIGTERMException: where all ranks are to stop, if this is an evaluation of its own.
        """
        if step != "training_step" and self._trainer.state.fn != TrainerFn.FITTING:
            self._boundary()

    def unwound(self) -> None:
        """Lightning has torn down: what comes after an error is the script's own."""
        if self._signals is not None:
            self._signals.close()
        for callback in self._unsaved:
            callback.save_on_exception = True
        self._unsaved, self.failed = [], False
        vars(self._trainer).pop("save_checkpoint", None)
        if self._launcher.failed and self._watching:
            if self._keeper in self._callbacks:
                self._callbacks.remove(self._keeper)
            self._close(done=self._stop.agreed)

    # ------------------------------------------------------------------ parts

    @property
    def _callbacks(self) -> list[L.Callback]:
        trainer: Any = self._trainer
        return trainer.callbacks

    def _take_over_signals(self) -> None:
        connector: Any = self._trainer._signal_connector
        # Lightning would save inside the handler, on each rank at another place.
        requeue = _requeue_signal(self._trainer)

        def register() -> None:
            type(connector).register_signal_handlers(connector)
            numbers = STOP_SIGNALS if requeue is None else (*STOP_SIGNALS, requeue)
            self._signals = Signals(self._stop.request, numbers=numbers, users=connector._original_handlers)
            self._watchdog.signals = self._signals

        # Lightning's own broadcasts from inside the signal handler, between the collectives of whatever goes on, and
        # once more in every step.
        connector.register_signal_handlers = register
        connector._sigterm_notifier_fn = lambda *_: None
        epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        epoch_loop._broadcast_sigterm_tensor = lambda: None

        def advance(fetcher: Any) -> None:
            self._before_batch()
            type(epoch_loop).advance(epoch_loop, fetcher)

        epoch_loop.advance = advance

    def _before_batch(self) -> None:
        """Before a training batch is fetched."""
        HERE.enter("callbacks before a step")
        HERE.loading_since, HERE.waited_before_loading = time.monotonic(), HERE.waited_seconds
        window = self._trainer.accumulate_grad_batches
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.ready % window == 0:
            self._boundary()

    def _boundary(self) -> None:
        try:
            self._stop.boundary()
        except BaseException:
            if self._stop.agreed:
                sig = self._stop.signal or signal.SIGTERM
                ScriptLauncher.stopped(sig)
                HERE.enter(f"stopping before step {self._trainer.global_step + 1}")
                if sig == _requeue_signal(self._trainer):
                    connector: Any = self._trainer._signal_connector
                    try:
                        connector._slurm_sigusr_handler_fn(sig, None)
                    finally:
                        # A rank that ends before rank 0 has queued the job may take it along.
                        self._trainer.strategy.barrier("requeue")
            raise

    def _failed(self, error: BaseException) -> None:
        """Before Lightning's callbacks hear of an error."""
        if self._stop.agreed:
            self._callbacks.insert(0, self._keeper)
            return
        self._watchdog.fail(error)
        if self._world_size == 1:
            return
        # All ranks write a checkpoint together, and this error may be one rank's alone.
        why = next((why for kind, why in _TOGETHER.items() if isinstance(error, kind)), _ALONE)
        self._unwind_alone(partial(_not_saved, why))
        if self._unsaved:
            _not_saved(why, "the checkpoint of save_on_exception=True")

    def _succeeded(self) -> None:
        """
        Raises:
            KeyboardInterrupt, SIGTERMException: a signal came too late for a last step that all could agree on. The
                run is done, and the script goes no further.
        """
        error, sig = self._stop.error(), self._stop.signal
        if sig is not None and sig == _requeue_signal(self._trainer):
            rank_zero_warn("SLURM told that time is over when the run was done: the job is not queued again.")
            sig = None
        if sig is not None:
            # Before all else, which a second one may interrupt.
            ScriptLauncher.stopped(sig)
        self._close(done=True)
        if sig is not None:
            # There is nothing to save that was not, and others may not save with this rank.
            self._unwind_alone(lambda *_, **__: None)
            raise error

    def _unwind_alone(self, instead: Callable[..., None]) -> None:
        """Until Lightning has torn down, nothing is saved; `instead` is called for it."""
        self.failed = True
        self._trainer.save_checkpoint = instead  # type: ignore[method-assign]
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
                # It would note and log what is not there.
                callback.save_on_exception = False
                self._unsaved.append(callback)

    def _close(self, *, done: bool) -> None:
        self._watchdog.close(done=done)
        self._remove_folder()

    def _leave(self) -> None:
        """The watchdog ends this process."""
        self._board.leave(self._rank)
        # It removes a folder that nobody may write into from then on.
        ScriptLauncher.dismiss_guardian()
        self._remove_folder()

    def _remove_folder(self) -> None:
        """The last rank to leave does."""
        if self._own_folder is not None and self._board.deserted(self._world_size):
            shutil.rmtree(self._own_folder, ignore_errors=True)


# Why there is no checkpoint.
_ALONE = (
    " after an error that one rank alone may have: a checkpoint is written by all ranks together. After SIGTERM and "
    "Ctrl-C it is. Set ModelCheckpoint(every_n_train_steps=...) for other errors."
)
_TOGETHER: dict[type[BaseException], str] = {
    KeyboardInterrupt: ": Ctrl-C came outside of training, or once more, and ended each rank where it was. A "
    "checkpoint is written by all ranks together.",
    NumbersError: ": its weights may hold the numbers that the error tells of.",
}


def _not_saved(why: str, filepath: Any, *_: Any, **__: Any) -> None:
    """Stands for Trainer.save_checkpoint."""
    rank_zero_warn(f"{filepath} is not saved{why}")


class _KeepsSignals(L.Callback):
    """Before all others when a run stops."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._run._signals is not None:
            self._run._signals.take_back()


def _requeue_signal(trainer: L.Trainer) -> int | None:
    """By which SLURM tells that time is over, if Lightning is to put the job into its queue again."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return int(environment.requeue_signal or signal.SIGUSR1)
    return None


def _coordinates(mesh: DeviceMesh, layout: Layout) -> dict[str, int]:
    """This rank's place on each axis that has more than one."""
    data = dist.get_group_rank(data_parallel_group(mesh), dist.get_rank())
    pipeline = "stage" if STAGES_PER_RANK[layout.schedule] == 1 else "pipeline rank"
    places = {
        pipeline: (layout.pipeline, mesh.get_local_rank("pp")),
        "data": (layout.data, data),
        "tensor": (layout.tensor, mesh.get_local_rank("tp")),
    }
    return {axis: place for axis, (size, place) in places.items() if size > 1}


def _ranks_of_stages(mesh: DeviceMesh, layout: Layout) -> dict[int, tuple[int, ...]]:
    """Of this rank's pipeline: who holds each stage."""
    ranks = dist.get_process_group_ranks(mesh["pp"].get_group())
    return {stage: (ranks[stage % len(ranks)],) for stage in range(len(ranks) * STAGES_PER_RANK[layout.schedule])}
