"""One fit, validate, test or predict of several ranks: a watchdog beside it, one way to stop, one way to fail."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.layout import Layout
from lightning_3d.parallel.mesh import data_parallel_group
from lightning_3d.parallel.pipeline import STAGES_PER_RANK
from lightning_3d.parallel.waits import note_waits
from lightning_3d.strategies.processes.board import Board
from lightning_3d.strategies.processes.script_launcher import ScriptLauncher
from lightning_3d.strategies.processes.stopping import AgreedStop, interrupting
from lightning_3d.strategies.processes.supervise import REPORT_VARIABLE, board_of_run
from lightning_3d.strategies.processes.watchdog import Watchdog
from lightning_3d.whereabouts import HERE

_NUMBERS = itertools.count()


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
        self._signals = ExitStack()
        self._rank, self._world_size, self._timeout = rank, world_size, timeout_seconds
        self._number = next(_NUMBERS)
        self._watching = False
        # An error that this rank alone may have, until Lightning has torn down.
        self.failed = False
        HERE.failure = ""
        note_waits()
        report = os.environ.get(REPORT_VARIABLE)
        if report is not None and trainer.num_nodes == 1:
            board = board_of_run(Path(report).parent, self._number)
            board.folder.mkdir(parents=True, exist_ok=True)
            self._watch(board)

    def met(self, mesh: DeviceMesh, layout: Layout) -> None:
        """The ranks can talk; collective."""
        if not self._watching:
            self._watch(self._meet())
        self._watchdog.place(_coordinates(mesh, layout), stages=_ranks_of_stages(mesh, layout))

    def _watch(self, board: Board) -> None:
        self._watching = True
        trainer, rank, world_size = self._trainer, self._rank, self._world_size
        self._stop = AgreedStop(board, world_size=world_size)
        self._watchdog = Watchdog(
            board,
            rank=rank,
            world_size=world_size,
            timeout_seconds=self._timeout,
            reports=Path(trainer.default_root_dir, "hang_reports", f"{board.folder.parent.name}-{board.folder.name}"),
            stop=self._stop,
            leaving=ScriptLauncher.dismiss_guardian,
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
        self._signals.close()
        if self._launcher.failed and self._watching:
            for callback in self._unsaved:
                callback.save_on_exception = True
            if self.failed:
                self.failed = False
                del self._trainer.save_checkpoint
            self._close(done=self._stop.agreed)

    # ------------------------------------------------------------------ parts

    def _meet(self) -> Board:
        """A new folder that all ranks see."""
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            shared = self._trainer.default_root_dir if self._trainer.num_nodes > 1 else None
            self._own_folder = Path(tempfile.mkdtemp(prefix="lightning-3d-", dir=shared))
            board = board_of_run(self._own_folder, self._number)
            board.folder.mkdir(parents=True)
            box = [str(board.folder)]
        dist.broadcast_object_list(box, 0)
        return Board(Path(box[0]))

    def _take_over_signals(self) -> None:
        connector: Any = self._trainer._signal_connector

        def register() -> None:
            type(connector).register_signal_handlers(connector)
            self._signals.enter_context(interrupting(self._stop.request))

        # Lightning's own broadcasts from inside the signal handler, between the collectives of whatever goes on, and
        # once more in every step.
        connector.register_signal_handlers = register
        connector._sigterm_notifier_fn = lambda *_: None
        epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        epoch_loop._broadcast_sigterm_tensor = self._before_batch

    def _before_batch(self) -> None:
        """In the place of Lightning's broadcast, which comes before a training batch is fetched."""
        HERE.enter("loading a batch")
        HERE.loading_since, HERE.waited_before_loading = time.monotonic(), HERE.waited_seconds
        window = self._trainer.accumulate_grad_batches
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.ready % window == 0:
            self._boundary()

    def _boundary(self) -> None:
        try:
            self._stop.boundary()
        except BaseException:
            if self._stop.agreed:
                ScriptLauncher.stopped()
                HERE.enter(f"stopping before step {self._trainer.global_step + 1}")
            raise

    def _failed(self, error: BaseException) -> None:
        """Before Lightning's callbacks hear of an error."""
        if self._stop.agreed:
            return
        # It may be an effect of a killed rank, and torchrun ends this one before its watchdog looks again.
        self._watchdog.tell_of_failure()
        HERE.failure = HERE.failure or type(error).__name__
        self.failed = True
        # All ranks write a checkpoint together, and this error may be one rank's alone.
        self._trainer.save_checkpoint = _not_saved  # type: ignore[method-assign]
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
                # It would note and log what is not there.
                callback.save_on_exception = False
                self._unsaved.append(callback)
        if self._unsaved:
            _not_saved("the checkpoint of save_on_exception=True")

    def _succeeded(self) -> None:
        self._close(done=True)

    def _close(self, *, done: bool) -> None:
        self._watchdog.close(done=done)
        if done and self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def _not_saved(filepath: Any, *_: Any, **__: Any) -> None:
    """Stands for Trainer.save_checkpoint."""
    rank_zero_warn(
        f"{filepath} is not saved after an error that one rank alone may have: a checkpoint is written by all ranks "
        "together. After SIGTERM and Ctrl-C it is. Set ModelCheckpoint(every_n_train_steps=...) for other errors."
    )


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
