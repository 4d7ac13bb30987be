"""One message from rank 0 to the others of a job that torchrun started, before any process group exists."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import yaml
from torch.distributed import TCPStore

from lightning_3d.errors import LaunchError

_WAIT_SECONDS = 120


def tell(message: dict[str, Any]) -> None:
    """Rank 0's part."""
    _store().set(_key(), yaml.safe_dump(message))


def hear() -> dict[str, Any]:
    """The other ranks' part.

    Raises:
        LaunchError: rank 0 says nothing.
    """
    try:
        # JSON would make texts of keys that are numbers.
        return yaml.safe_load(_store().get(_key()))
    except Exception as error:
        raise LaunchError(f"rank 0 told nothing within {_WAIT_SECONDS} s; see its output for the reason.") from error


def _key() -> str:
    return f"lightning_3d/config/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def check() -> None:
    """
    Raises:
        LaunchError: there is nobody through whom the ranks could talk.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise LaunchError(
            "this process was started as one rank of several, but not by torchrun. Start the command once, without "
            "RANK and WORLD_SIZE in the environment, or with torchrun."
        )


def _store() -> TCPStore:
    # torchrun's own store, which outlives the ranks; a store of ours would be in the way of the process group's.
    check()
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_WAIT_SECONDS),
    )
