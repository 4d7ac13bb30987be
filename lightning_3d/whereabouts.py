"""Where this process stands in a run: the main thread writes it, a watchdog and error reports read it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Whereabouts:
    """One process's place. Marks are a few assignments: they are set many times in a step.

    Args:
        phase: what the run does: `"setup"`, `"training"`, `"saving a checkpoint"`, ...
        batch: of that phase, where it goes by batches.
        bounded: whether what goes on may not last for ever, even if no rank waits for it: a step, loading, teardown.
        action: what is done with a micro-batch: `"forward"`, ...
        stage, microbatch: of the action.
        awaits: the stage that must act before the action can go on.
        marks: counts up; a main thread that gets on changes it.
        waiting_since: on the clock of `time.monotonic`, while the main thread waits for other ranks.
        waits: how often it did, `waited_seconds` how long in all.
        loading_since: on the same clock, when the next batch was asked for; `waited_before_loading` is
            `waited_seconds` at that time.
        failure: what the run of this process died of; `failed_in` is where it was then, in words,
            `failed_at` when, on the clock of `time.time`.
    """

    phase: str = "start"
    batch: int | None = None
    bounded: bool = False
    action: str = ""
    stage: int | None = None
    microbatch: int | None = None
    awaits: int | None = None
    marks: int = 0
    waiting_since: float | None = None
    waits: int = 0
    waited_seconds: float = 0.0
    loading_since: float | None = None
    waited_before_loading: float = 0.0
    failure: str = ""
    failed_in: str = ""
    failed_at: float = 0.0

    def enter(self, phase: str, *, batch: int | None = None, bounded: bool = False) -> None:
        """A phase begins, or its next batch, which is bounded."""
        self.phase, self.batch, self.bounded = phase, batch, bounded or batch is not None
        self.action, self.stage, self.microbatch, self.awaits = "", None, None, None
        self.marks += 1

    def act(self, action: str, *, stage: int, microbatch: int, awaits: int | None = None) -> None:
        """A pipeline's action begins."""
        self.action, self.stage, self.microbatch, self.awaits = action, stage, microbatch, awaits
        self.marks += 1

    def load(self, function: Callable[[], T]) -> T:
        """Call what fetches a batch. An error leaves the place as it was then."""
        before = (self.phase, self.batch, self.bounded, self.action, self.stage, self.microbatch, self.awaits)
        self.enter("loading a batch", bounded=True)

        def go_back() -> None:
            self.phase, self.batch, self.bounded, self.action, self.stage, self.microbatch, self.awaits = before
            self.marks += 1

        try:
            result = function()
        except StopIteration:
            go_back()
            raise
        go_back()
        return result

    def fail(self, failure: str, *, where: str | None = None) -> None:
        """The run of this process dies, here or at `where`, unless it does so already."""
        if not self.failure:
            # Read by another thread: no failure is without its place.
            self.failed_in, self.failed_at = where or self.describe(), time.time()
            self.failure = failure

    def describe(self) -> str:
        """
        >>> Whereabouts(phase="training", batch=3, action="forward", stage=1, microbatch=0).describe()
        'training, batch 3: forward of micro-batch 0 on stage 1'
        """
        text = self.phase if self.batch is None else f"{self.phase}, batch {self.batch}"
        if self.action:
            text += f": {self.action} of micro-batch {self.microbatch} on stage {self.stage}"
        return text


# Of this process; a fork goes on with a copy.
HERE = Whereabouts()
