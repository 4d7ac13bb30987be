"""Initial weights that do not depend on the layout, of models too large for one process.

A model is built on the meta device while every operation on its tensors is recorded. Later each rank replays, for one
tensor at a time, the operations that this tensor's value depends on, and keeps its own part. Each random operation
draws from a generator seeded by the job's seed and the operation's place in the record, so the full values are equal
for every mesh, one process included. Whatever the constructor does (its own `normal_`, scaled residual layers, rotary
tables, tied weights) is replayed as it was written; nothing is guessed from names or classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_flatten, tree_map_only

from lightning_3d.errors import ModelError
from lightning_3d.parallel.local import local_tensor, part_like

# Built from Python values: under the meta device their values would be lost.
_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)

# These give a tensor without a value.
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")


@dataclass(frozen=True)
class _View:
    """A meta tensor as a window on its storage."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Operation:
    """One recorded call that wrote to at least one storage."""

    function: Any
    arguments: tuple[Any, ...]
    outputs: tuple[_View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]


class Recording:
    """What was done to meta tensors, in order; filled by `record_initialization`."""

    def __init__(self, seed: int = 0) -> None:
        # Equal on every rank by the time of the replay.
        self.seed = seed
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        # A storage's address is its name here, so none may be freed while the recording lives.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def view(self, tensor: torch.Tensor) -> _View:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._storages.setdefault(key, storage)
        return _View(key, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def add(self, function: Any, arguments: tuple[Any, ...], outputs: list[Any], mutated: list[torch.Tensor]) -> None:
        """Note a call on meta tensors, unless it only made a view."""
        tensors = [leaf for leaf in tree_flatten(arguments)[0] if _is_meta(leaf)]
        reads = frozenset(self.view(tensor).storage for tensor in tensors)
        written = [self.view(leaf) if _is_meta(leaf) else None for leaf in outputs]
        new = {view.storage for view in written if view is not None and view.storage not in reads}
        writes = frozenset(new | {self.view(tensor).storage for tensor in mutated if _is_meta(tensor)})
        if not writes or function.__name__.split(".")[0] in _EMPTY:
            return
        frozen = tree_map_only(torch.Tensor, lambda t: self.view(t) if t.is_meta else t, arguments)
        for storage in writes:
            self._writers.setdefault(storage, []).append(len(self._operations))
        self._operations.append(_Operation(function, frozen, tuple(written), reads, writes))

    def has_value(self, tensor: torch.Tensor) -> bool:
        """Whether anything was ever written to this tensor's storage."""
        return tensor.untyped_storage()._cdata in self._writers

    @torch.no_grad()
    def replay(self, tensor: torch.Tensor, *, device: torch.device) -> torch.Tensor:
        """The value that this meta tensor would have had, whole, on `device`."""
        wanted = self.view(tensor)
        values: dict[int, torch.UntypedStorage] = {}
        for index in self._needed(wanted.storage):
            self._run(index, values, device)
        return self._open(wanted, values, device)

    def copied_from(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor that this meta tensor is a plain copy of (weights mapped from a file), or None."""
        wanted = self.view(tensor)
        writers = self._writers.get(wanted.storage)
        if not writers:
            return None
        operation = self._operations[writers[-1]]
        if operation.function is not torch.ops.aten.copy_.default:
            return None
        target, source = operation.arguments[0][:2]
        whole = target == wanted and isinstance(source, torch.Tensor) and source.shape == wanted.size
        return source if whole else None

    def _needed(self, storage: int) -> list[int]:
        """Indices, in order, of the operations that a storage's final value depends on."""
        needed: set[int] = set()
        pending = [(storage, len(self._operations))]
        while pending:
            key, before = pending.pop()
            for index in self._writers.get(key, ()):
                if index < before and index not in needed:
                    needed.add(index)
                    operation = self._operations[index]
                    pending.extend((read, index) for read in operation.reads)
        return sorted(needed)

    def _run(self, index: int, values: dict[int, torch.UntypedStorage], device: torch.device) -> None:
        operation = self._operations[index]
        args, kwargs = tree_map_only(_View, lambda view: self._open(view, values, device), operation.arguments)
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device) if t.dim() else t, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": device}
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
        with self._seeded(index, device):
            result = operation.function(*args, **kwargs)
        for view, output in zip(operation.outputs, tree_flatten(result)[0], strict=True):
            if view is not None and view.storage not in operation.reads:
                self._open(view, values, device).copy_(output)

    @contextmanager
    def _seeded(self, index: int, device: torch.device) -> Iterator[None]:
        """Random numbers that depend on the job's seed and the operation alone."""
        if torch.Tag.nondeterministic_seeded not in self._operations[index].function.tags:
            yield
            return
        digest = hashlib.sha256(f"{self.seed}/{index}".encode()).digest()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            yield

    def _open(self, view: _View, values: dict[int, torch.UntypedStorage], device: torch.device) -> torch.Tensor:
        if view.storage not in values:
            size = self._storages[view.storage].nbytes()
            values[view.storage] = torch.UntypedStorage(size, device=device)
        empty = torch.empty(0, dtype=view.dtype, device=device)
        return empty.set_(values[view.storage], view.offset, view.size, view.stride)


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = tree_flatten(result)[0]
        if any(_is_meta(leaf) for leaf in [*tree_flatten((args, kwargs))[0], *outputs]):
            self._recording.add(func, (tuple(args), dict(kwargs)), outputs, _mutated(func, args, kwargs))
        return result


def _mutated(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found.extend(leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))
    return found


class _MetaDevice(TorchFunctionMode):
    """`torch.device("meta")`, except that tensors made from Python values keep them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FROM_VALUES and kwargs.get("device") is None and not isinstance(args[0], torch.Tensor):
            with torch.device("cpu"):
                value = func(*args, **kwargs)
            # Copying from a real tensor is an operation like any other: it is recorded and replayed.
            requires_grad = value.requires_grad
            made = torch.empty_like(value, device="meta").copy_(value.detach())
            return made.requires_grad_(requires_grad)
        return func(*args, **kwargs)


@contextmanager
def record_initialization(recording: Recording) -> Iterator[None]:
    """Build a model on the meta device inside; `materialize_` then gives it values.

    Raises:
        ModelError: the code inside asked for the value of a tensor, which does not exist yet.
    """
    try:
        with torch.device("meta"), _MetaDevice(), record_operations(recording):
            yield
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        raise ModelError(
            f"configure_model() asked for the value of a tensor while the model is built on the meta device: {error} "
            "Give that tensor device='cpu', compute the value with Python's math, or build the model in __init__()."
        ) from error


@contextmanager
def record_operations(recording: Recording) -> Iterator[None]:
    """What the code inside does to tensors that are already on the meta device belongs to their initialisation."""
    with _Recorder(recording):
        yield


def meta_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers on the meta device, by name; to be taken before the module is sharded."""
    # Detached: materialising swaps what is behind the module's own tensors.
    return {name: tensor.detach() for name, tensor in _named_tensors(module) if tensor.is_meta}


def check_initialized(sources: dict[str, torch.Tensor], recording: Recording) -> None:
    """Refuse tensors that no recorded operation ever wrote.

    Raises:
        ModelError: with their names and the ways out.
    """
    missing = [name for name, source in sources.items() if not recording.has_value(source)]
    if missing:
        raise ModelError(
            f"no initial value for {', '.join(missing)}: made on the meta device and never filled. Fill it in the "
            "constructor (torch.nn.init.zeros_(parameter), or torch.zeros in place of torch.empty), or build the "
            "model in __init__()."
        )


@torch.no_grad()
def materialize_(
    module: nn.Module,
    *,
    roots: Sequence[nn.Module] = (),
    sources: dict[str, torch.Tensor],
    recording: Recording,
    device: torch.device,
) -> None:
    """Move a module to `device`; its meta tensors get their recorded values, each rank keeping its own part.

    Args:
        module: with whole or sharded (DTensor) parameters; may lack parts of what was recorded.
        roots: FSDP2's, whose parameters must move through them.
        sources: `meta_tensors(module)` from before it was changed.
    """
    swap = torch.__future__.get_swap_module_params_on_conversion()
    # Swapping keeps a parameter's identity, and so ties and what FSDP2 knows of it.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for root in roots:
            root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    _move_whole_(module, device)
    _fill_attributes_(module, recording, device)
    filled: set[int] = set()
    for name, target in _named_tensors(module):
        if name not in sources or id(target) in filled:
            continue
        filled.add(id(target))
        value = recording.copied_from(sources[name])
        if value is None:
            value = recording.replay(sources[name], device=device)
        local_tensor(target).copy_(part_like(value, target))


def _fill_attributes_(module: nn.Module, recording: Recording, device: torch.device) -> None:
    """Tensors that modules keep as plain attributes (a torchmetrics state, say), which no list of parameters names."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.device) and value.type == "meta":
                part.__dict__[name] = device
            if name in ("_parameters", "_buffers", "_modules") or not tree_any(_is_meta, value):
                continue
            part.__dict__[name] = tree_map_only(
                torch.Tensor, lambda t: recording.replay(t, device=device) if t.is_meta else t, value
            )


def _move_whole_(module: nn.Module, device: torch.device) -> None:
    """Move what FSDP2 does not manage; parameters keep their identity."""
    for parameter in module.parameters():
        if parameter.is_meta or parameter.device != device:
            moved = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.to(device)
            torch.utils.swap_tensors(parameter, nn.Parameter(moved.detach(), parameter.requires_grad))
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and (buffer.is_meta or buffer.device != device):
                part._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    # One buffer under two names becomes two when it moves.
    yield from module.named_buffers(remove_duplicate=False)
