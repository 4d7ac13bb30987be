"""How a checkpoint is written: by all ranks beside its place, and committed when all have finished."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lightning_3d.checkpoint.places import Place
from lightning_3d.checkpoint.together import own_rank, together
from lightning_3d.errors import CheckpointError

EXTRA = "extra.pt"
# Of what a checkpoint holds under which names; raised where an earlier reader would read it wrongly.
FORMAT = 1


@dataclass(frozen=True)
class Contents:
    """What one rank gives to a checkpoint.

    Args:
        tensors: sharded or whole, and small objects, by name. Entries of one name are copies of one value.
        extra: what is equal on every rank, as `packed` makes it; rank 0's is kept.
        rank_state: what belongs to one rank, likewise; each rank's is kept.
        summary: JSON values; rank 0's is kept.
    """

    tensors: Mapping[str, Any]
    extra: bytes
    rank_state: bytes
    summary: Mapping[str, Any]


def packed(value: Any) -> bytes:
    """As `torch.save` writes it: a copy that later changes do not reach."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def rank_file(rank: int) -> str:
    """The name of one rank's state in a checkpoint."""
    return f"rank_{rank:05d}.pt"


def write(place: Place, contents: Contents, *, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint; it exists at its place once and only once every rank has written all of it; collective.

    Args:
        place: equal on all ranks; what was there before stays until the new one is whole.
        group: of all ranks, for the talk; None is the default group.

    Raises:
        CheckpointError: on every rank, if any rank could not write; nothing at the place has changed then, and
            what was written of the new one is deleted.
    """
    rank, what = own_rank(), f"saving checkpoint {place}"

    def begin() -> str:
        if rank != 0:
            return ""
        draft = place.begin()
        try:
            place.write(draft, EXTRA, contents.extra)
        except Exception:
            place.drop(draft)
            raise
        return draft

    def find() -> None:
        # Else torch would make a folder of this name where this rank looks, and rank 0 commit one without its part.
        if not place.holds(draft, EXTRA):
            raise CheckpointError(
                f"what rank 0 began at {place} is not seen from here (in {os.getcwd()}). All ranks of a job write into "
                "one folder: give an absolute path, on a file system that all machines share."
            )

    def write_tensors() -> None:
        # Copies of one tensor come from the lowest rank, so that buffers belong to one another.
        # A list or dictionary is one entry: its parts would have names of their own, which nobody asks for.
        # torch's search for sharded tensors of an older kind would build it anew, without what is empty in it.
        planner = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )
        writer: Any = place.writer(draft)
        writer.write_data = _telling_cause(writer.write_data)
        dcp.save(dict(contents.tensors), storage_writer=writer, planner=planner, process_group=group)

    def write_rest() -> None:
        place.write(draft, rank_file(rank), contents.rank_state)

    def commit() -> None:
        if rank == 0:
            place.commit(draft, contents.summary)

    draft = _from_first(together(begin, what, group=group), group=group)
    try:
        for step in (find, write_tensors, write_rest):
            together(step, what, group=group)
    except CheckpointError:
        # All ranks have come here, so none writes any more. On a full disk, the next save needs the room.
        if rank == 0:
            place.drop(draft)
        raise
    together(commit, what, group=group)


def _telling_cause(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where a disk is full, torch's zip writer says that a position is unexpected."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None or cause is error:
                raise
            raise cause from None

    return call


def _from_first(text: str, *, group: dist.ProcessGroup | None) -> str:
    if not dist.is_initialized():
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]
