"""Finding a model's repeated blocks: the units in which it is sharded, split and recomputed."""

from __future__ import annotations

from collections import Counter

from torch import nn


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The children of every outermost container of like blocks, in the model's order.

    A container is a ModuleList, ModuleDict or Sequential in which at least two children with parameters have the same
    class. A child that shares a parameter with something outside itself (a tied weight, one block listed twice) is
    left out: whoever shards it alone would split the tie.

    >>> [type(b).__name__ for b in repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))]
    ['Linear', 'Linear']
    """
    names = _names_of(module)
    found: list[nn.Module] = []
    _collect(module, found)
    return [block for block in found if all(names[key] == count for key, count in _names_of(block).items())]


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    for child in module.children():
        blocks = _like_blocks(child)
        if blocks:
            found.extend(block for block in blocks if block not in found)
        else:
            _collect(child, found)
    # A bare container is a model too (nn.Sequential as the whole model).
    if not found:
        found.extend(_like_blocks(module))


def _like_blocks(container: nn.Module) -> list[nn.Module]:
    if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return []
    filled = [child for child in container.children() if any(True for _ in child.parameters())]
    if not filled:
        return []
    kind, count = Counter(type(child) for child in filled).most_common(1)[0]
    return [child for child in filled if type(child) is kind] if count > 1 else []


def _names_of(module: nn.Module) -> Counter[int]:
    """How many names each parameter has: more than one where it is shared or its module is listed twice."""
    return Counter(
        id(parameter)
        for _, submodule in module.named_modules(remove_duplicate=False)
        for parameter in submodule.parameters(recurse=False)
    )
