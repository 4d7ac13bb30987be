"""Lightning's loops go on where a checkpoint has left them."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loops.loop import _Loop


def go_on_(trainer: L.Trainer) -> None:
    """Tell an epoch that had come to its end from one that was ended early; to be called once the loops are restored.

    Lightning passes over what is left of an epoch that max_steps, max_time or `should_stop` ended. And after a
    checkpoint of an epoch's end it goes on with the next one only where max_steps is not set: else it runs the finished
    epoch's end once more, and the data of the next epoch are passed over.
    """
    loop: Any = trainer.fit_loop
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    if not epochs.current.ready == epochs.current.started == epochs.current.processed:
        return
    if batches.is_last_batch or not batches.current.processed:
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
        # Lightning would count it only after it has made the next epoch's loaders, and make them anew.
        for counts in (epochs.current, epochs.total):
            counts.completed = counts.processed
        return
    # As a checkpoint that was saved at the end of its last batch has it.
    for counts in (epochs.current, epochs.total):
        counts.processed -= 1
        counts.completed = min(counts.completed, counts.processed)
    for counts in (batches.current, batches.total):
        counts.completed -= 1
    loop.epoch_loop._batches_that_stepped -= not loop.epoch_loop._should_accumulate()
    loop.restarting = True
