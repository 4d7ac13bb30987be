"""From the batch that one optimizer step sees to the batch that each rank loads."""

from __future__ import annotations

from typing import Any

from lightning_3d.errors import DataError


def data_parallel_size(trainer: Any) -> int:
    """Ranks that see different rows: what the trainer's strategy tells its samplers, else 1."""
    # Not trainer.world_size: ranks that differ only in a tensor or pipeline axis load the same rows.
    sampler = getattr(getattr(trainer, "strategy", None), "distributed_sampler_kwargs", None)
    return 1 if sampler is None else int(sampler["num_replicas"])


def per_rank_batch_size(*, global_batch_size: int, data_parallel_size: int) -> int:
    """Rows per data-parallel rank.

    Raises:
        DataError: the global batch does not divide evenly.

    >>> per_rank_batch_size(global_batch_size=32, data_parallel_size=4)
    8
    """
    per_rank, rest = divmod(global_batch_size, data_parallel_size)
    if rest or not per_rank:
        above = (per_rank + 1) * data_parallel_size
        near = f"{per_rank * data_parallel_size} or {above}" if per_rank else f"{above}"
        sizes = [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
        raise DataError(
            f"global_batch_size={global_batch_size} does not divide by the data-parallel size {data_parallel_size}. "
            f"Set global_batch_size to {near}, or the data-parallel size to one of {sizes}."
        )
    return per_rank


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Refuse what is not a whole number of at least `least`.

    Raises:
        DataError: it is not; the message names the field.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{name}={value!r} is not a whole number of at least {least}; {name}={max(least, 1)} would do.")


def check_fraction(name: str, value: object) -> None:
    """Refuse what is not a share between 0 and 1.

    Raises:
        DataError: it is not; the message names the field.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise DataError(f"{name}={value!r} must be above 0 and below 1; {name}=0.1 would do.")
