"""One rank's failure is every rank's: nobody waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_3d.errors import CheckpointError

T = TypeVar("T")


def together(action: Callable[[], T], what: str, *, group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on every rank; if one fails, all raise the same error, and none goes on alone; collective.

    Args:
        what: is done, for the error.
        group: of all ranks, for the talk; None is the default group.

    Raises:
        CheckpointError: names the lowest rank that failed, and what it raised.
    """
    result, failure = _tried(action)
    failures = [failure]
    if dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure, group=group)
    told = [failure for failure in failures if failure is not None]
    if told:
        raise _error(what, *min(told))
    return result  # type: ignore[return-value]


def alone(action: Callable[[], T], what: str) -> T:
    """Run `action` on this rank, which waits for no other; the error is told as `together` tells it.

    Raises:
        CheckpointError: it failed.
    """
    result, failure = _tried(action)
    if failure is not None:
        # torch calls a rank that is alone 0.
        raise _error(what, own_rank(), failure[1])
    return result  # type: ignore[return-value]


def own_rank() -> int:
    """0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def _tried(action: Callable[[], T]) -> tuple[T | None, tuple[int, str] | None]:
    try:
        return action(), None
    except CheckpointException as error:
        # torch tells every rank of the ranks that failed.
        origin = min(error.failures)
        return None, (origin, _told(error.failures[origin][0]))
    except Exception as error:
        return None, (own_rank(), _told(error))


def _error(what: str, rank: int, text: str) -> CheckpointError:
    return CheckpointError(f"{what} failed on rank {rank}: {text}")


def _told(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}".strip()
