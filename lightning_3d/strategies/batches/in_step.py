"""Ranks whose loaders give different numbers of batches stop at the same one, since each step waits for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader

from lightning_3d.errors import DataError


class InStep:
    """Makes loaders agree on how many batches there are.

    Args:
        group: all ranks of the job, which can exchange tensors of the CPU.
    """

    def __init__(self, *, group: ProcessGroup | None) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def _gather(self, value: Any) -> list[Any]:
        box: list[Any] = [None] * self._size
        dist.all_gather_object(box, value, group=self._group)
        return box

    def keep(self, loader: Any, *, name: str, sharded: bool) -> Any:
        """The loader itself where all ranks know that they have equally many batches, else one that stops in time.

        Collective; all ranks must be at their loader of this name.

        Args:
            sharded: by us, so that a stream must give all ranks the same.
        """
        lengths = self._gather(sized_len(loader))
        stream = getattr(loader, "sampler", None) if sharded and hasattr(loader, "__dict__") else None
        seen = (lambda: stream.seen) if hasattr(stream, "seen") and stream.shards is None else None  # type: ignore[union-attr]
        if None in lengths or seen is not None:
            return changed(loader, lambda batches: self._voted(batches, name=name, seen=seen))
        if len(set(lengths)) == 1:
            return loader
        rank_zero_warn(
            f"the {name} loader has other numbers of batches on other ranks ({_by_rank(lengths)}): all stop after "
            f"{min(lengths)}. What the others have more is left out."
        )
        return changed(loader, lambda batches: islice(batches, min(lengths)), length=min(lengths))

    def _voted(self, batches: Iterator[Any], *, name: str, seen: Callable[[], str | None] | None) -> Iterator[Any]:
        count = 0
        while True:
            try:
                batch = next(batches)
                has = 1
            except StopIteration:
                has = 0
            votes = torch.zeros(self._size, dtype=torch.int32)
            votes[self._rank] = has
            dist.all_reduce(votes, group=self._group)
            if not votes.all():
                if votes.any():
                    ended = ", ".join(str(rank) for rank, vote in enumerate(votes.tolist()) if not vote)
                    rank_zero_warn(
                        f"the {name} loader of rank {ended} ended after {count} batches, where other ranks have more: "
                        "all stop there. What the others have more is left out in this epoch."
                    )
                return
            if count == 0 and seen is not None:
                self._compare(seen(), name=name)
            count += 1
            yield batch

    def _compare(self, seen: str | None, *, name: str) -> None:
        """What all ranks have read first of a stream."""
        found = self._gather(seen)
        different = [rank for rank, mine in enumerate(found) if mine != found[0]]
        if different:
            raise DataError(
                f"the dataset of the {name} loader gives rank {_listed(different)} other samples than rank 0, but "
                "this strategy lets all ranks read the same and keep their parts. If the dataset takes the part of "
                "its rank itself, set Trainer(use_distributed_sampler=False) and let it go by "
                "trainer.strategy.distributed_sampler_kwargs; if it shuffles, seed it alike on all ranks."
            )


def _by_rank(lengths: list[Any]) -> str:
    return ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def changed(
    loader: Any,
    change: Callable[[Iterator[Any]], Iterator[Any]],
    *,
    length: int | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """A loader whose iterators are changed; of the same class where it is torch's.

    Args:
        length: other than the loader's own.
        around: a context in which its iterators are made.
    """
    if not isinstance(loader, DataLoader):
        return _Changed(loader, change, length, around)
    kind = type(loader)

    class Changed(kind):  # type: ignore[misc, valid-type]
        of_ours = True

        def __iter__(self) -> Any:
            with around():
                batches = iter(super().__iter__())
            return change(batches)

        def __len__(self) -> int:
            return super().__len__() if length is None else length

    Changed.__name__, Changed.__qualname__ = kind.__name__, kind.__qualname__
    # The user's object stays as it is.
    own = loader if getattr(kind, "of_ours", False) else copy.copy(loader)
    own.__class__ = Changed
    return own


class _Changed:
    """Any iterable that is no DataLoader."""

    def __init__(
        self,
        loader: Iterable[Any],
        change: Callable[[Iterator[Any]], Iterator[Any]],
        length: int | None,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._loader, self._change, self._length, self._around = loader, change, length, around

    def __iter__(self) -> Iterator[Any]:
        with self._around():
            batches = iter(self._loader)
        return self._change(batches)

    def __len__(self) -> int:
        return len(self._loader) if self._length is None else self._length  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)
