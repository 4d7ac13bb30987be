"""`trainer.predict` returns every prediction, in the data's order, on rank 0."""

from __future__ import annotations

import lightning as L
import torch.distributed as dist


def gather_predictions(trainer: L.Trainer, *, group: dist.ProcessGroup) -> None:
    """Replace rank 0's predictions by those of all ranks of `group`, batch by batch in the data's order; collective.

    The ranks' batches follow one another (`sampling`), so the k-th of each rank stand together. Other ranks keep their
    own.
    """
    loop = trainer.predict_loop
    if group.size() == 1 or not loop.return_predictions:
        return
    first = dist.get_global_rank(group, 0)
    for predictions in loop._predictions:
        gathered: list[list[object]] | None = [[]] * group.size() if dist.get_rank() == first else None
        dist.gather_object(predictions, gathered, dst=first, group=group)
        if gathered is not None:
            # In place: the loop has already handed this list to its caller.
            predictions[:] = [batch for batches in zip(*gathered, strict=True) for batch in batches]
