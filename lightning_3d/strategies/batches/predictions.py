"""`trainer.predict` returns every prediction, in the data's order, on rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch.distributed as dist


def gather_predictions(trainer: L.Trainer, *, shared_out: Sequence[bool], group: dist.ProcessGroup) -> None:
    """Replace rank 0's predictions by those of all ranks of `group`, batch by batch in the data's order; collective.

    The ranks' batches follow one another (`sampling`), so the k-th of each rank stand together. Other ranks keep their
    own.

    Args:
        shared_out: of each loader, whether its batches are dealt out that way; those of others stay where they are.
    """
    loop = trainer.predict_loop
    if group.size() == 1 or not loop.return_predictions:
        return
    first = dist.get_global_rank(group, 0)
    for predictions, ours in zip(loop._predictions, shared_out, strict=True):
        if not ours:
            continue
        gathered: list[list[object]] | None = [[]] * group.size() if dist.get_rank() == first else None
        dist.gather_object(predictions, gathered, dst=first, group=group)
        if gathered is not None:
            # In place: the loop has already handed this list to its caller.
            predictions[:] = [batch for batches in zip(*gathered, strict=True) for batch in batches]
