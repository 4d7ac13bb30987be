"""What the callables that a config names by ``_target_`` take: arguments, and types that their annotations allow."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

from lightning_3d.errors import ConfigError


def locate(target: str) -> Any:
    """The object with this dotted name.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = str(target).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"_target_={target!r} cannot be imported ({error}). Name a class or function with its module, "
            f"e.g. lightning_3d.models.digits.DigitsMLP."
        ) from error


def parameters(target: str) -> dict[str, inspect.Parameter]:
    """Keyword arguments by name, their annotations resolved; a ``**`` argument keeps its name with the stars."""
    function = locate(target)
    code = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
    try:
        hints = typing.get_type_hints(code)
    except Exception:  # Annotations that exist for type checkers only; what cannot be known is not checked.
        hints = {}
    found = {}
    for name, parameter in inspect.signature(code).parameters.items():
        if name == "self" or parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            continue
        key = f"**{name}" if parameter.kind is parameter.VAR_KEYWORD else name
        found[key] = parameter.replace(annotation=hints.get(name, Any))
    return found


def accepts(target: str, name: str) -> bool:
    """Whether the target has an argument of this name."""
    known = parameters(target)
    return name in known or any(key.startswith("**") for key in known)


def matches(value: Any, annotation: Any) -> bool:
    """Whether a config's value fits an annotation; annotations that say nothing about plain values fit everything.

    >>> matches(3, float), matches(True, int), matches(None, int | None), matches("a", Literal["a", "b"])
    (True, False, True, True)
    >>> matches([0.9, "x"], list[float]), matches({"a": 1}, dict)
    (False, True)
    """
    if annotation in (Any, inspect.Parameter.empty, object) or isinstance(annotation, (str, typing.TypeVar)):
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(matches(value, argument) for argument in arguments)
    if origin is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in arguments)
    if annotation in (None, type(None)):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = origin or annotation
    if not isinstance(kind, type):
        return True
    if kind is str or issubclass(kind, Path) or kind.__name__ == "PathLike":
        return isinstance(value, str)
    if isinstance(value, dict) and "_target_" in value:
        return True
    if issubclass(kind, collections.abc.Mapping):
        return isinstance(value, dict)
    if issubclass(kind, (list, tuple, set)) or kind in (collections.abc.Sequence, collections.abc.Iterable):
        item = arguments[0] if arguments else Any
        return isinstance(value, list) and all(matches(one, item) for one in value)
    return isinstance(value, kind)


def described(annotation: Any) -> str:
    """An annotation in the words of a config file.

    >>> described(int | None), described(Literal["a", "b"]), described(list[float])
    ('a whole number or null', "'a' or 'b'", 'a list of a number')
    """
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if annotation in plain:
        return plain[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(described(argument) for argument in arguments))
    if origin is Literal:
        return " or ".join(repr(argument) for argument in arguments)
    kind = origin or annotation
    if isinstance(kind, type):
        if issubclass(kind, Path) or kind.__name__ == "PathLike":
            return "a path"
        if issubclass(kind, collections.abc.Mapping):
            return "a mapping"
        if issubclass(kind, (list, tuple)) or kind in (collections.abc.Sequence, collections.abc.Iterable):
            return f"a list of {described(arguments[0])}" if arguments else "a list"
        return f"a {kind.__name__}"
    return str(annotation)
