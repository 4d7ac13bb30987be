"""Lightning's loops go on where a checkpoint has left them, with all that the run had still to do there."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.loops.loop import _Loop

MONITORED = "plateau_metrics"
BATCH_ENDED = "batch_ended"


def monitored(trainer: L.Trainer) -> dict[str, Any]:
    """What is known of the metrics that schedules go by, to be saved: the run may use it long after; collective."""
    keys = _monitors(trainer)
    if not keys:
        return {}
    metrics = dict(trainer.callback_metrics)
    steps = trainer.fit_loop.epoch_loop
    if trainer.training or trainer.validating:
        # Averages over the epoch, which Lightning makes at its end only and does not go on with.
        metrics.update(steps._results.metrics(False)["callback"] if steps._num_ready_batches_reached() else {})
    return {MONITORED: {key: metrics[key].detach().cpu() for key in sorted(keys & metrics.keys())}}


class LoopsGoOn:
    """Where a run that loads a checkpoint goes on.

    Lightning passes over what is left of an epoch that max_steps, max_time or `should_stop` ended; over the validation
    that follows the batch at whose end was saved; and over schedules that go by a metric, in the first epoch. And it
    does twice what follows a batch between which and the next one the run was stopped.
    """

    def __init__(self) -> None:
        # Of how many batches, over all epochs, all is done that follows them.
        self._ended: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._metrics: dict[str, Any] | None = None
        self._counted = self._batch_ends = self._epoch_ends = self._validating = False

    def place(self, trainer: L.Trainer) -> dict[str, Any]:
        """What the counts of the loops do not tell of the place of a checkpoint that is saved now."""
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        ended = not batches.current.ready or batches.total.ready == self._ended
        # Where the run goes on the counts tell enough: the last hook in which it may save is `on_validation_end`.
        return {BATCH_ENDED: ended} if ended or trainer.interrupted else {}

    def load(self, trainer: L.Trainer, metrics: dict[str, Any] | None, batch_ended: bool | None) -> None:
        """Put the counts of the loops right, which were just restored.

        Args:
            metrics: what `monitored` gave; None where plain Lightning saved.
            batch_ended: what `place` gave, if anything.
        """
        self._forget()
        self._metrics = metrics
        loop: Any = trainer.fit_loop
        epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
        done = batches.current.processed
        # After an exception in a batch, Lightning puts the counts of the epoch right only.
        for name in ("ready", "started"):
            setattr(batches.total, name, batches.total.processed + getattr(batches.current, name) - done)
        window = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
        # An exception has ended a window inside: it is begun anew.
        inside = batch_ended is False and done % window and not batches.is_last_batch
        # The batches are still those of the epoch before.
        opening = epochs.current.ready > epochs.current.started
        if opening:
            for counts in (epochs.current, epochs.total):
                counts.ready = counts.started
        if not epochs.current.ready == epochs.current.started == epochs.current.processed:
            if not done == batches.current.started == batches.current.ready:
                # An exception has ended the batch that comes next.
                self._counted = True
            elif batch_ended or inside:
                self._counted = True
                # As if the next one had begun: else Lightning does the end of this one once more.
                for counts in (batches.current, batches.total):
                    counts.ready += 1
                    counts.completed = counts.processed
            elif batches.current.completed < done:
                self._batch_ends = True
                # Else Lightning leaves out the batch's end.
                for counts in (batches.current, batches.total):
                    counts.completed = counts.processed
            else:
                self._batch_ends = batch_ended is not None
                validated = loop.epoch_loop.val_loop.batch_progress.current
                self._validating = not validated.completed or validated.completed < validated.ready
        elif opening or batches.is_last_batch or not done:
            # Where max_steps is set, Lightning would end the epoch once more, and pass over the data of the next.
            _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
            self._epoch_ends = epochs.total.completed < epochs.total.processed
            # Lightning would count it only after it has made the next epoch's loaders, and make them anew.
            for counts in (epochs.current, epochs.total):
                counts.completed = counts.processed
        else:
            self._counted = True
            # As a checkpoint that was saved at the end of its last batch has it.
            for counts in (epochs.current, epochs.total):
                counts.processed -= 1
                counts.completed = min(counts.completed, counts.processed)
            for counts in (batches.current, batches.total):
                counts.completed -= 1
            loop.restarting = True

    def begin(self, trainer: L.Trainer) -> None:
        """Do what was still to be done, or let Lightning do it; to be called at the start of the training."""
        loop: Any = trainer.fit_loop
        steps = loop.epoch_loop
        self._note_ends(steps)
        stepped = not steps._should_accumulate()
        ended = steps._num_ready_batches_reached() and not self._counted
        validates = (self._batch_ends or self._validating) and steps._should_check_val_fx(loop._data_fetcher)
        trainer.callback_metrics.update(self._metrics or {})
        # Lightning steps no such schedule at the end of the first epoch, since it has none of these metrics.
        lacking = _monitors(trainer) - trainer.callback_metrics.keys()
        loop._restarting = loop._restarting and bool(lacking) and (self._metrics is None or (ended and not validates))
        if self._counted:
            # Lightning counts a step for the last batch, which was counted.
            steps._batches_that_stepped -= stepped
            total = steps.batch_progress.total
            # Lightning takes back only the epoch's counts of a batch that had begun.
            self._ended = total.ready = total.started = total.processed
        elif validates:
            # So Lightning goes on with the validation, and what comes after it.
            steps.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
            _Loop.restarting.fset(steps.val_loop, False)  # type: ignore[attr-defined]
        elif self._batch_ends:
            if not lacking:
                steps.update_lr_schedulers("step", update_plateau_schedulers=True)
            steps._batches_that_stepped += stepped
            if ended:
                # With a length, Lightning would read the first batch of another pass.
                loop._data_fetcher.batches, loop._data_fetcher.done = [], True
            else:
                self._ended = steps.batch_progress.total.ready
        elif self._epoch_ends:
            _step_plateaus(trainer)
        self._forget()

    def _note_ends(self, steps: Any) -> None:
        self._ended = None

        def on_advance_end(fetcher: Any) -> None:
            type(steps).on_advance_end(steps, fetcher)
            self._ended = steps.batch_progress.total.ready

        steps.on_advance_end = on_advance_end


def _monitors(trainer: L.Trainer) -> set[str]:
    return {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.monitor}


def _step_plateaus(trainer: L.Trainer) -> None:
    """Those of the epoch that has ended."""
    module = trainer.lightning_module
    for config in trainer.lr_scheduler_configs if module.automatic_optimization else []:
        due = config.interval == "epoch" and trainer.current_epoch % config.frequency == 0
        metric = trainer.callback_metrics.get(config.monitor or "")
        if config.reduce_on_plateau and due and metric is not None:
            module.lr_scheduler_step(config.scheduler, metric)
