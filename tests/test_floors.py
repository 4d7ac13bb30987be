"""Imports only go down: the floors of the house, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_3d

PACKAGE = Path(lightning_3d.__file__).parent

# Errors lie under all floors.
FLOORS = {
    "errors": 0,
    "models": 1, "data": 1, "whereabouts": 1,
    "layout": 2, "checkpoint": 2, "callbacks": 2,
    "parallel": 3,
    "strategies": 4,
    "cli": 5,
}  # fmt: skip

# The package's own __init__ brings the strategies.
PUBLIC = FLOORS["strategies"]

# The functional core, which serves without Lightning too.
WITHOUT_LIGHTNING = ("errors", "layout", "checkpoint", "parallel", "whereabouts")


def room(module: str) -> str:
    """The folder or single file below the package: ``lightning_3d.parallel.zero`` is in ``parallel``."""
    return module.split(".")[1] if "." in module else ""


def sources() -> list[Path]:
    return sorted(
        path
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py") or path.parent != PACKAGE
    )


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """All imported modules, those inside functions and of type checking too; `from a import b` counts as a.b."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations(path: Path) -> list[str]:
    own = room(name_of(path))
    if own not in FLOORS:
        return [f"{own} stands on no floor: give it one here and in the design"]
    found = []
    for target in imports(path):
        top = target.split(".")[0]
        if top == "lightning_3d":
            other = room(target)
            floor = FLOORS.get(other, PUBLIC)
            if other != own and floor >= FLOORS[own]:
                found.append(f"floor {FLOORS[own]} imports {target} of floor {floor}")
        if top in ("lightning", "lightning_fabric", "lightning_utilities") and own in WITHOUT_LIGHTNING:
            found.append(f"the functional core imports {target}")
        if top == "pytorch_lightning":
            found.append(f"imports {target} where lightning is meant")
        if top in ("hydra", "omegaconf") and own != "cli":
            found.append(f"imports {target}, which belongs to cli/")
    return found


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_only_go_down(path: Path) -> None:
    assert violations(path) == []


def test_a_violation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lightning_3d" / "parallel"
    folder.mkdir(parents=True)
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path / "lightning_3d")
    (folder / "bad.py").write_text(
        "import lightning as L\n"
        "from lightning_3d.strategies.three_d import ThreeDStrategy\n"
        "from ..layout import Layout\n"
        "def late():\n    from ..cli import train\n    import hydra\n"
    )
    found = violations(folder / "bad.py")
    assert len(found) == 4
    assert [
        word
        for word in ("core imports lightning", "strategies.three_d", "lightning_3d.cli", "hydra")
        if not any(word in text for text in found)
    ] == []
