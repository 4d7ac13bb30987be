"""Notes when the main thread waits for other ranks, and for how long."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from lightning_3d.whereabouts import HERE


def note_waits() -> None:
    """From now on every wait for a collective or a message is in `HERE`; costs a microsecond each.

    torch has no hook for this. All its Python, FSDP2 and the pipeline schedules wait by these two calls; on CUDA they
    return at once, since there the stream waits.
    """
    for owner, name in ((dist.Work, "wait"), (functional, "wait_tensor")):
        original = getattr(owner, name)
        if not hasattr(original, "notes_waits"):
            setattr(owner, name, _noting(original))


def _noting(original: Any) -> Any:
    main = threading.main_thread().ident

    def wait(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != main or HERE.waiting_since is not None:
            return original(*args, **kwargs)
        start = HERE.waiting_since = time.monotonic()
        HERE.waits += 1
        try:
            return original(*args, **kwargs)
        finally:
            HERE.waited_seconds += time.monotonic() - start
            HERE.waiting_since = None

    wait.notes_waits = True  # type: ignore[attr-defined]
    return wait
