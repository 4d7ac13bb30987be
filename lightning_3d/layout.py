"""The sizes of all axes of parallelism: the one object that travels from a config to the device mesh. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lightning_3d.errors import LayoutError

Size = int | Literal["auto"]

ZERO_STAGES = (0, 1, 2, 3)
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b")

_SIZES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
_SHORT = {"data_parallel_size": "data", "tensor_parallel_size": "tensor", "pipeline_parallel_size": "pipeline"}
_GRAMMAR = (
    "axes joined by '-': dpN, zeroSxN, hsdpRxN, tpN, ppN or ppN@schedule, e.g. 'zero3x4', 'hsdp2x2', 'dp2-tp2-pp2'"
)


@dataclass(frozen=True)
class Layout:
    """How many processes share a job, and in what way.

    Args:
        data_parallel_size: replicas x shards; ``"auto"`` takes the processes that the other axes leave.
        data_parallel_replicas: groups that hold the same shards (HSDP). Stage 0 has no shards: all are replicas.
        tensor_parallel_size: ranks that split each layer; one size of the three may be ``"auto"``.
        pipeline_parallel_size: ranks that split the stack of layers.
        zero_stage: what the shards of data parallelism split: 0 nothing, 1 optimizer states, 2 also gradients,
            3 also parameters.
        schedule: order of a pipeline's work, one of ``gpipe``, ``1f1b``, ``interleaved1f1b``.
        num_microbatches: parts that a pipeline cuts a batch into; None chooses.

    Raises:
        LayoutError: a value outside its range, or sizes that cannot go together; the message says what would work.

    >>> Layout(zero_stage=3).resolve(4).name
    'zero3x4'
    >>> Layout.parse("hsdp2x2").data_parallel_shards
    2
    """

    data_parallel_size: Size = "auto"
    data_parallel_replicas: int = 1
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    zero_stage: int = 3
    schedule: str = "1f1b"
    num_microbatches: int | None = None

    def __post_init__(self) -> None:
        for field in _SIZES:
            _check_count(field, getattr(self, field), auto=True)
        _check_count("data_parallel_replicas", self.data_parallel_replicas)
        if self.num_microbatches is not None:
            _check_count("num_microbatches", self.num_microbatches)
        if not _is_int(self.zero_stage) or self.zero_stage not in ZERO_STAGES:
            raise LayoutError(f"zero_stage={self.zero_stage!r} is no ZeRO stage. Set one of 0, 1, 2, 3.")
        if self.schedule not in SCHEDULES:
            raise LayoutError(f"schedule={self.schedule!r} is unknown. Set one of {', '.join(SCHEDULES)}.")
        automatic = [field for field in _SIZES if getattr(self, field) == "auto"]
        if len(automatic) > 1:
            names = " and ".join(automatic)
            raise LayoutError(f"only one size may be 'auto', but {names} are. Set {automatic[0]}=1, say.")
        self._check_replicas()
        self._check_microbatches()

    def _check_microbatches(self) -> None:
        stages, count = self.pipeline_parallel_size, self.num_microbatches
        if self.schedule != "interleaved1f1b" or stages == "auto" or stages == 1 or count is None:
            return
        if not fits_interleaved(count, stages):
            fits = [other for other in range(1, count + stages + 1) if fits_interleaved(other, stages)]
            raise LayoutError(
                f"num_microbatches={count} makes no whole rounds over pipeline_parallel_size={stages} under "
                f"interleaved1f1b. Set num_microbatches to one of {', '.join(map(str, fits[-6:]))}."
            )

    def _check_replicas(self) -> None:
        data, replicas = self.data_parallel_size, self.data_parallel_replicas
        if data == "auto":
            return
        if self.zero_stage == 0 and replicas not in (1, data):
            raise LayoutError(
                f"zero_stage=0 has no shards, so data_parallel_replicas={replicas} cannot differ from "
                f"data_parallel_size={data}. Leave data_parallel_replicas=1, or set zero_stage=3 for HSDP."
            )
        if data % replicas:
            raise LayoutError(
                f"data_parallel_replicas={replicas} does not divide data_parallel_size={data}. "
                f"Set data_parallel_replicas to one of {', '.join(map(str, _divisors(data)))}."
            )

    def resolve(self, world_size: int) -> Layout:
        """The same layout with every size known, for `world_size` processes.

        Raises:
            LayoutError: the sizes do not multiply to `world_size`.
        """
        _check_count("world_size", world_size)
        known: dict[str, int] = {field: getattr(self, field) for field in _SIZES if getattr(self, field) != "auto"}
        product = 1
        for size in known.values():
            product *= size
        shown = " x ".join(f"{_SHORT[field]} {size}" for field, size in known.items())
        automatic = next((field for field in _SIZES if field not in known), None)
        if automatic is None:
            if product != world_size:
                raise LayoutError(
                    f"{shown} = {product} processes, but there are {world_size}. {self._way_out(known, world_size)}"
                )
            return self
        size, rest = divmod(world_size, product)
        if size == 0 or rest:
            raise LayoutError(
                f"{shown} = {product} processes for each of {automatic}='auto', which does not divide the {world_size} "
                f"processes that there are. Start a multiple of {product} processes, or set "
                f"{' and '.join(known)} to sizes whose product is one of {', '.join(map(str, _divisors(world_size)))}."
            )
        return replace(self, **{automatic: size})  # type: ignore[arg-type]

    def _way_out(self, known: dict[str, int], world_size: int) -> str:
        other = known["tensor_parallel_size"] * known["pipeline_parallel_size"]
        product = other * known["data_parallel_size"]
        if world_size % other:
            return (
                f"Start {product} processes (Trainer(devices=...)), or set {', '.join(known)} to sizes that multiply "
                f"to {world_size}."
            )
        return f"Set data_parallel_size={world_size // other} or 'auto', or start {product} processes."

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """`data_parallel_size` as a number."""
        return self._resolved("data_parallel_size")

    @property
    def tensor(self) -> int:
        """`tensor_parallel_size` as a number."""
        return self._resolved("tensor_parallel_size")

    @property
    def pipeline(self) -> int:
        """`pipeline_parallel_size` as a number."""
        return self._resolved("pipeline_parallel_size")

    @property
    def replicas(self) -> int:
        """Size of the mesh's axis `dp_replicate`."""
        return self.data if self.zero_stage == 0 else self.data_parallel_replicas

    @property
    def data_parallel_shards(self) -> int:
        """Size of the mesh's axis `dp_shard`: 1 for stage 0."""
        return self.data // self.replicas

    def _resolved(self, field: str) -> int:
        size = getattr(self, field)
        if size == "auto":
            raise LayoutError(f"{field}='auto' is not known before Layout.resolve(world_size).")
        return size

    @property
    def name(self) -> str:
        """The short name, as `parse` reads it: ``'zero3x2-tp2-pp2'``; ``'single'`` is one process."""
        axes = []
        if self.data > 1:
            shards = self.data_parallel_shards
            if shards == 1:
                axes.append(f"dp{self.data}")
            elif self.replicas > 1:
                both = f"hsdp{self.replicas}x{shards}"
                axes.append(both if self.zero_stage == 3 else f"dp{self.replicas}-zero{self.zero_stage}x{shards}")
            else:
                axes.append(f"zero{self.zero_stage}x{shards}")
        if self.tensor > 1:
            axes.append(f"tp{self.tensor}")
        if self.pipeline > 1:
            axes.append(f"pp{self.pipeline}" + ("" if self.schedule == "1f1b" else f"@{self.schedule}"))
        return "-".join(axes) or "single"

    @classmethod
    def parse(cls, name: str) -> Layout:
        """The layout with this short name.

        Raises:
            LayoutError: a name outside the grammar, or an axis named twice.

        >>> Layout.parse("zero1x2-pp2@gpipe").world_size
        4
        """
        values: dict[str, Any] = {"data_parallel_size": 1}
        seen: set[str] = set()
        for axis in [] if name == "single" else str(name).split("-"):
            found = re.fullmatch(r"(dp|tp|pp)(\d+)(?:@(\w+))?|zero([0-3])x(\d+)|hsdp(\d+)x(\d+)", axis)
            if not found or (found[3] and found[1] != "pp"):
                raise LayoutError(f"layout {name!r}: {axis!r} is no axis. Write {_GRAMMAR}, or 'single'.")
            kind = found[1] or ("zero" if found[4] else "hsdp")
            if kind in seen or (kind == "hsdp" and seen & {"dp", "zero"}):
                raise LayoutError(f"layout {name!r} sets the axis of {axis!r} twice. Write {_GRAMMAR}.")
            seen.add(kind)
            if kind == "tp":
                values["tensor_parallel_size"] = int(found[2])
            elif kind == "pp":
                values["pipeline_parallel_size"] = int(found[2])
                values["schedule"] = found[3] or "1f1b"
            elif kind == "dp":
                values["data_parallel_size"] *= int(found[2])
                values["data_parallel_replicas"] = int(found[2])
            elif kind == "zero":
                values["data_parallel_size"] *= int(found[5])
                values["zero_stage"] = int(found[4])
            else:
                values["data_parallel_size"] = int(found[6]) * int(found[7])
                values["data_parallel_replicas"], values["zero_stage"] = int(found[6]), 3
            if "hsdp" in seen and seen & {"dp", "zero"}:
                raise LayoutError(f"layout {name!r} sets the data axis twice. Write {_GRAMMAR}.")
        if "dp" in seen and "zero" not in seen:
            values["zero_stage"], values["data_parallel_replicas"] = 0, 1
        try:
            return cls(**values)
        except LayoutError as error:
            raise LayoutError(f"layout {name!r}: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def fits_interleaved(count: int, stages: int) -> bool:
    """Whether interleaved 1F1B can run `count` micro-batches: they go round the ranks in equal parts.

    Source: torch.distributed.pipelining.ScheduleInterleaved1F1B.
    """
    return count % max(1, count // stages) == 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(field: str, value: object, *, auto: bool = False) -> None:
    if auto and value == "auto":
        return
    if not _is_int(value) or value < 1:  # type: ignore[operator]
        allowed = "a whole number from 1 on" + (" or 'auto'" if auto else "")
        raise LayoutError(f"{field}={value!r} is not {allowed}. Set {field}=1 to leave it out.")


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]
