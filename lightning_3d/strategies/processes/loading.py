"""Notes when the main thread loads: whatever loop asks for a batch, ahead of time or not."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops import fetchers

from lightning_3d.whereabouts import HERE


def note_loading() -> None:
    """From now on `HERE` says when a batch is fetched, or a loader's iterator made.

    Lightning has a hook for it, the profiler's, but not for what is read before the first batch of a run.
    """
    for name in ("__iter__", "__next__"):
        original = getattr(fetchers._DataFetcher, name)
        if not hasattr(original, "notes_loading"):
            setattr(fetchers._DataFetcher, name, _noting(original))


def _noting(original: Any) -> Any:
    def fetch(self: Any) -> Any:
        return HERE.load(lambda: original(self))

    fetch.notes_loading = True  # type: ignore[attr-defined]
    return fetch
