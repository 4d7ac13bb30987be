"""Loaders that keep their own place, of which Lightning fetches batches ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_3d.strategies.batches.global_batches import Progress
from lightning_3d.strategies.batches.in_step import changed


def remembering(loader: Any, *, progress: Callable[[], Progress]) -> Any:
    """The loader, whose `state_dict` tells the place after the batches that are done, not after those fetched.

    Args:
        progress: of the epoch.
    """
    states: dict[int, Any] = {}

    def remember(batches: Iterator[Any]) -> Iterator[Any]:
        count = progress().batches
        states.clear()
        states[count] = tell()
        for batch in batches:
            count += 1
            states[count] = tell()
            states.pop(count - 3, None)
            yield batch
        # Of a loader that knows that it is at its end: the next epoch begins at the start.
        states[count] = tell()

    def state_dict() -> Any:
        done = progress().batches
        return states[done] if done in states else tell()

    own = changed(loader, remember)
    tell = own.state_dict
    own.__dict__["state_dict"] = state_dict
    return own
