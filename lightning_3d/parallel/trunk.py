"""What a pipeline cuts: a model's trunk of blocks that are called one after the other, and what lies around it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_3d.errors import ModelError

# A lookup computes next to nothing for its size.
_EMBEDDING_COST = 0.1

_WAY_OUT = (
    "Define `pipeline_blocks(self)` on the model or the LightningModule: it returns the ModuleList, ModuleDict or "
    "Sequential whose children are called in order, each with the last one's output as its first argument."
)


@dataclass(frozen=True)
class Trunk:
    """Names, in the whole module, of the parts that a pipeline deals out.

    Args:
        container: the module whose children are the blocks.
        blocks: the blocks' own names in the container, in order.
        before: the largest submodules with parameters that come before the container.
        after: those that come after it.
        everywhere: parameters that belong to the modules around the container themselves.
    """

    container: str
    blocks: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    everywhere: tuple[str, ...]


def find_trunk(module: nn.Module) -> Trunk:
    """The trunk that the module names itself, else the largest container of blocks.

    Raises:
        ModelError: no container has two blocks.
    """
    name = _named_by_user(module) or _largest(module)
    if name is None:
        raise ModelError(f"{type(module).__name__} has no list of blocks that a pipeline could cut. {_WAY_OUT}")
    container = module.get_submodule(name)
    before, after, everywhere = _around(module, name)
    return Trunk(name, tuple(dict(container.named_children())), tuple(before), tuple(after), tuple(everywhere))


def cost(module: nn.Module) -> float:
    """Work of one forward, in parameters that are multiplied once per sample; 1 at least."""
    total = 1.0
    for part in module.modules():
        weight = _EMBEDDING_COST if isinstance(part, nn.Embedding) else 1.0
        total += weight * sum(parameter.numel() for parameter in part.parameters(recurse=False))
    return total


def cut(costs: list[float], *, parts: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Consecutive ranges of blocks, none empty, whose most expensive one is as cheap as can be.

    Args:
        costs: of each block.
        first, last: of what comes before the first block and after the last.

    Raises:
        ModelError: fewer blocks than parts.

    >>> cut([1, 1, 1, 1], parts=2, last=2.0)
    [range(0, 3), range(3, 4)]
    """
    count = len(costs)
    if count < parts:
        raise ModelError(
            f"{count} blocks cannot make {parts} pipeline stages. Use at most {count} stages: a smaller "
            "pipeline_parallel_size, or a schedule with fewer stages per rank."
        )
    costs = [costs[0] + first, *costs[1:]] if count > 1 else [costs[0] + first + last]
    if count > 1:
        costs[-1] += last
    sums = [0.0]
    for value in costs:
        sums.append(sums[-1] + value)
    # best[k][i]: the least possible maximum for the first i blocks in k parts, and where the last of them starts.
    best: list[list[tuple[float, int]]] = [[(0.0 if i == 0 else float("inf"), 0) for i in range(count + 1)]]
    for _ in range(parts):
        row = best[-1]
        best.append(
            [(float("inf"), 0)]
            + [min((max(row[j][0], sums[i] - sums[j]), j) for j in range(i)) for i in range(1, count + 1)]
        )
    ranges: list[range] = []
    end = count
    for part in range(parts, 0, -1):
        start = best[part][end][1]
        ranges.insert(0, range(start, end))
        end = start
    return ranges


def _named_by_user(module: nn.Module) -> str | None:
    for submodule in module.modules():
        method = getattr(type(submodule), "pipeline_blocks", None)
        if method is None:
            continue
        wanted = method(submodule)
        for name, candidate in module.named_modules():
            if candidate is wanted:
                return name
        raise ModelError(f"{type(submodule).__name__}.pipeline_blocks() returned no submodule of it. {_WAY_OUT}")
    return None


def _largest(module: nn.Module) -> str | None:
    found = {name: part for name, part in module.named_modules() if _is_trunk(part)}
    if not found:
        return None
    name = max(found, key=lambda key: _size(found[key]))
    # A Sequential of (embedding, Sequential of blocks, head): the inner one can be cut finer.
    while inner := [
        key
        for key, part in found.items()
        if key != name
        and (key.startswith(f"{name}.") or not name)
        and len(part._modules) >= len(found[name]._modules)
        and 2 * _size(part) >= _size(found[name])
    ]:
        name = max(inner, key=lambda key: _size(found[key]))
    return name


def _is_trunk(part: nn.Module) -> bool:
    filled = [child for child in part.children() if _size(child)]
    if len(filled) < 2:
        return False
    if isinstance(part, nn.Sequential):
        return True
    return isinstance(part, nn.ModuleList | nn.ModuleDict) and len({type(child) for child in filled}) == 1


def _around(module: nn.Module, container: str) -> tuple[list[str], list[str], list[str]]:
    before: list[str] = []
    after: list[str] = []
    everywhere: list[str] = []
    path = container.split(".") if container else []
    here, prefix = module, ""
    for step in path:
        everywhere.extend(prefix + name for name, _ in here.named_parameters(recurse=False))
        side = before
        for name, child in here.named_children():
            if name == step:
                side = after
            elif _size(child):
                side.append(prefix + name)
        here, prefix = here.get_submodule(step), f"{prefix}{step}."
    everywhere.extend(prefix + name for name, _ in here.named_parameters(recurse=False))
    return before, after, everywhere


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
