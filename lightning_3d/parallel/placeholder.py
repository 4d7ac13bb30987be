"""Stand-ins for parts of a model that live on other ranks: right shapes, no values, and nothing may depend on them."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_any, tree_flatten, tree_map_only

from lightning_3d.errors import ModelError

# Told of a module's call: its name and its arguments.
OnCall = Callable[[str, tuple[Any, ...], dict[str, Any]], None]

# These take a tensor's shape, dtype and device, and not its values.
_SHAPE_ONLY = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, torch.Tensor.new_full,
    torch.Tensor.new_tensor,
}  # fmt: skip

# What is known of a weight without having it.
_FACTS = {
    *(getattr(torch.Tensor, name).__get__ for name in (
        "dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "layout")),
    torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.element_size, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex, torch.is_floating_point, torch.is_complex,
}  # fmt: skip

_READS = {"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy"}


class Placeholder(torch.Tensor):
    """A tensor whose values mean nothing; so is everything that is computed from it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise ModelError(
                "the step reads the value of a tensor that was computed by a part of the model that another pipeline "
                f"rank has (Tensor.{name}). Do so inside of that part, or set pipeline_parallel_size=1."
            )
        if func in _SHAPE_ONLY or name == "__repr__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


class AbsentWeight(torch.Tensor):
    """A weight that another rank has: its shape, dtype and device are known, and all else is refused by name."""

    _owner: str
    _weight: str

    @staticmethod
    def of(weight: torch.Tensor, *, owner: str, name: str) -> torch.Tensor:
        """In the place of `weight`, the parameter or buffer `name` of the module `owner`; takes no memory."""
        number = torch.zeros((), dtype=weight.dtype, device=weight.device, requires_grad=weight.requires_grad)
        absent = number.expand(weight.shape).as_subclass(AbsentWeight)
        absent._owner, absent._weight = owner, name
        return absent

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentWeight({self._owner}.{self._weight}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS or func in _SHAPE_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in (torch.Tensor.type_as, torch.Tensor.to) and not isinstance(args[0], AbsentWeight):
            return args[0].to(args[1].device, args[1].dtype)
        absent = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, AbsentWeight))
        raise ModelError(
            f"{absent._owner}.{absent._weight} is read where another pipeline rank has {absent._owner}. Call the "
            "module, or tie the parameter to one that this part of the model has."
        )


def is_placeholder(value: Any) -> bool:
    """Whether any tensor in a nest of values is a placeholder."""
    return tree_any(lambda leaf: isinstance(leaf, Placeholder), value)


class Shadow:
    """Tells what a module would return, without its parameters and without computing.

    Args:
        module: of any device; nothing of it is kept but its structure.
        device: where the results would be.
    """

    def __init__(self, module: nn.Module, *, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Made before the copy, so that not even one block is copied.
        tensors = [*module.parameters(), *module.buffers()]
        with self._mode, torch.no_grad():
            memo: dict[int, Any] = {}
            for tensor in tensors:
                # From its shape alone: the mode would keep a reference to the tensor itself.
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if _is_parameter(tensor) else fake
            for part in module.modules():
                # The user's hooks are to see what is computed, and may hold the whole model.
                for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
                    memo[id(hooks)] = OrderedDict()
        self.module = copy.deepcopy(module, memo)
        self._known: dict[Any, Any] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for these arguments, as placeholders."""
        key = _call_key((args, kwargs))
        if key not in self._known:
            self._known[key] = self._run(self.module, args, kwargs)
        return tree_map_only(torch.Tensor, self._placeholder, self._known[key])

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a method of the module, or of a part of it, returns: tensors as placeholders."""
        return tree_map_only(torch.Tensor, self._placeholder, self._run(method, args, kwargs))

    def part(self, module: nn.Module) -> Shadow:
        """The shadow of a submodule of `self.module`."""
        shadow = copy.copy(self)
        shadow.module, shadow._known = module, {}
        return shadow

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._mode, torch.no_grad():
            fakes = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
            return function(*fakes[0], **fakes[1])

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _placeholder(self, fake: torch.Tensor) -> torch.Tensor:
        return _memory(fake.numel(), fake.dtype, fake.device).view(fake.shape).as_subclass(Placeholder)


class Absent(nn.Module):
    """In the place of a submodule that another rank has; its parts are absent too.

    Args:
        shadow: of the module whose place it takes.
        name: of it, for messages.
        on_call: told of each call with its arguments; may raise.
        on_part: the same for calls of its parts.
    """

    def __init__(self, shadow: Shadow, *, name: str, on_call: OnCall, on_part: OnCall | None = None) -> None:
        super().__init__()
        self.__dict__["_shadow"] = shadow
        self.__dict__["_name"] = name
        self.__dict__["_on_call"] = on_call
        self.__dict__["_on_part"] = on_part or on_call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._on_call(self._name, args, kwargs)
        return self._shadow(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self._stand_in(getattr(self.__dict__["_shadow"].module, name), name)

    def __getitem__(self, key: Any) -> Any:
        return self._stand_in(self._shadow.module[key], str(key))

    def __iter__(self) -> Iterator[Any]:
        return (self._stand_in(value, str(index)) for index, value in enumerate(self._shadow.module))

    def __len__(self) -> int:
        return len(self._shadow.module)

    def __bool__(self) -> bool:
        return True

    def _stand_in(self, value: Any, name: str) -> Any:
        """What the step may have of an attribute: never a tensor of the shadow's, which is no one's."""
        if isinstance(value, torch.Tensor):
            return AbsentWeight.of(value, owner=self._name, name=name)
        if isinstance(value, nn.Module):
            part = self._shadow.part(value)
            return Absent(part, name=f"{self._name}.{name}", on_call=self._on_part, on_part=self._on_part)
        if inspect.ismethod(value) and isinstance(value.__self__, nn.Module):
            return partial(self._shadow.call, value)
        return value


# One for all placeholders of a kind: whatever in-place operations leave there, the values mean nothing.
_MEMORY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    known = _MEMORY.get((dtype, device))
    if known is None or known.numel() < numel:
        known = _MEMORY[dtype, device] = torch.zeros(numel, dtype=dtype, device=device)
    return known[:numel]


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _call_key(value: Any) -> Any:
    """Equal for calls whose results have equal shapes and dtypes."""
    leaves, spec = tree_flatten(value)
    described = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else _describe(leaf)
        for leaf in leaves
    )
    return described, str(spec), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _describe(leaf: Any) -> Any:
    return leaf if isinstance(leaf, int | float | str | bool | None.__class__) else type(leaf)
