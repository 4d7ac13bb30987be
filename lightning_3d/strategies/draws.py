"""What a step draws at random: named by its place in the run, so that ranks which must draw alike do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L

from lightning_3d.checkpoint.random_state import random_state, set_random_state
from lightning_3d.parallel.cursor import seed_generators, seed_other_generators


class StepSeeds:
    """A text for each step from which its generators are seeded; on a resumed run the same.

    Args:
        module: the user's, with a Trainer.
        seed: of the job, equal on all ranks.
        data_parallel_rank: ranks that share one draw alike.
    """

    def __init__(self, module: L.LightningModule, *, seed: int, data_parallel_rank: int) -> None:
        self._module, self._seed, self._rank = module, seed, data_parallel_rank
        # Steps without training since a batch was trained on: validation is not counted by Lightning's loops.
        self._since, self._others = 0, 0

    def next(self, step: str) -> str:
        """Of the step of this name that begins now."""
        trained: int = self._module.trainer.fit_loop.epoch_loop.total_batch_idx
        place = str(trained)
        if step != "training_step":
            self._others = self._others + 1 if self._since == trained else 1
            self._since = trained
            place = f"{trained}+{self._others}"
        return f"{self._seed}/{step}/{place}/{self._rank}"

    @contextmanager
    def drawing(self, step: str) -> Iterator[None]:
        """All generators of this process depend on the step alone inside, and go on afterwards as if unused."""
        seed, before = self.next(step), random_state()
        seed_generators(seed)
        seed_other_generators(seed)
        try:
            yield
        finally:
            set_random_state(before)
