"""Where all threads of this process are, for the report of a hang."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_3d.whereabouts import HERE


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.txt"


def write_stacks(folder: Path, rank: int) -> None:
    """Write this process's stacks, once.

    Raises:
        OSError: the folder can't be written.
    """
    path = stacks_file(folder, rank)
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    frames = sys._current_frames()
    lines = [f"rank {rank}: {HERE.describe()}", f"collectives begun, by group: {sequence_numbers()}", ""]
    for thread in threading.enumerate():
        if not thread.name.startswith("lightning-3d-") and thread.ident in frames:
            lines += [f"thread {thread.name}", *traceback.format_stack(frames[thread.ident])]
    _write_flight_record(folder / f"rank_{rank:05d}.flight_recorder")
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines))
    partial.replace(path)


def sequence_numbers() -> dict[str, int]:
    """Collectives begun, by the name of the group; the names are equal on all its members."""
    found = {}
    groups: list[tuple[Any, str]] = list(distributed_c10d._world.pg_names.items())
    for group, name in groups:
        with contextlib.suppress(RuntimeError):
            found[str(name)] = group._get_sequence_number_for_group()
    return found


def _write_flight_record(path: Path) -> None:
    """What torch noted of the last collectives on CUDA; torch's `fr_trace` reads it."""
    if dist.is_initialized() and torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if dump is not None:
            path.write_bytes(dump())
