"""Makes ``Trainer(strategy="3d")`` work without an import of lightning_3d.

torch calls `install` at the end of its own import (entry point group ``torch.backends``). So this file stands outside
the package, needs the standard library only, costs microseconds and never raises: it must not get in the way of a
program that imports torch and has no use for us. When ``lightning.pytorch.strategies`` is imported later, the names are
put into its registry, each with a factory that imports lightning_3d only when the name is used. Likewise what opens a
checkpoint outside of our strategy (`load_from_checkpoint`, a stock Trainer) learns that ours are folders.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The names, each with what Lightning's registry says of it.
STRATEGIES = {
    "3d": "ZeRO-3 over all processes; sizes of all axes with lightning_3d.ThreeDStrategy",
    "tp": "tensor parallelism over all processes",
    "pp": "pipeline parallelism over all processes",
    "zero1": "data parallelism, optimizer states sharded",
    "zero2": "data parallelism, optimizer states and gradients sharded",
    "zero3": "data parallelism, optimizer states, gradients and parameters sharded",
}


def install() -> None:
    """Register our names with Lightning's registry: now where it is imported already, else at its import."""
    # A broken hook must not break `import torch`; the name is then unknown, which Lightning says.
    with contextlib.suppress(Exception):
        if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _RegistryFinder())
        for name, (attribute, extend) in _AT_IMPORT.items():
            module = sys.modules.get(name)
            # A module that is still being imported lacks it; the hook may have come too late for it.
            if module is not None and hasattr(module, attribute):
                extend(module)


def _register(module: ModuleType, build_factory: Callable[[str], Callable[..., Any]]) -> None:
    registry: Any = module.StrategyRegistry
    for name, description in STRATEGIES.items():
        if name not in registry:
            registry.register(name, build_factory(name), description=description)


def _open_folders(module: Any, *, optimizer: bool) -> None:
    """Lightning opens a checkpoint as one file, whatever it is; there is no hook but the function that does."""
    load_file = module.pl_load
    if getattr(load_file, "opens_folders", False):
        return

    def pl_load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not _is_folder(path_or_url):
            return load_file(path_or_url, map_location=map_location, weights_only=weights_only)
        from lightning_3d.checkpoint.plain import read_plain

        return read_plain(
            path_or_url, optimizer=optimizer, map_location=map_location, weights_only=weights_only is not False
        )

    pl_load.opens_folders = True  # type: ignore[attr-defined]
    module.pl_load = pl_load


def _is_folder(path_or_url: Any) -> bool:
    if not isinstance(path_or_url, str | os.PathLike):
        return False
    # A web server has no folders.
    if "://" not in os.fspath(path_or_url) or os.fspath(path_or_url).startswith("http"):
        return os.path.isdir(path_or_url)
    from lightning_3d.checkpoint.plain import is_folder

    return is_folder(os.fspath(path_or_url))


def _lazy_factory(name: str) -> Callable[..., Any]:
    def build_strategy(**settings: Any) -> Any:
        from lightning_3d.strategies.presets import PRESETS

        return PRESETS[name](**settings)

    build_strategy.__name__ = build_strategy.__qualname__ = f"build_{name}"
    return build_strategy


def _refusing_factory(name: str) -> Callable[..., Any]:
    def refuse(**settings: Any) -> Any:
        from lightning_3d.errors import ConfigError

        raise ConfigError(
            f"strategy={name!r} belongs to the package `lightning`, but this Trainer is of `pytorch_lightning`, whose "
            f"classes are not the same. Write `import lightning as L` and L.Trainer(strategy={name!r}), and let your "
            f"modules, data modules and callbacks come from `lightning` too."
        )

    return refuse


# Modules that are extended once they are imported, each by what it must have for that.
_AT_IMPORT: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "lightning.pytorch.strategies": ("StrategyRegistry", partial(_register, build_factory=_lazy_factory)),
    "pytorch_lightning.strategies": ("StrategyRegistry", partial(_register, build_factory=_refusing_factory)),
    "lightning.pytorch.core.saving": ("pl_load", partial(_open_folders, optimizer=False)),
    "lightning.fabric.plugins.io.torch_io": ("pl_load", partial(_open_folders, optimizer=True)),
}


class _RegistryFinder(MetaPathFinder):
    """Finds nothing itself: it has the module found as ever, and extends it after it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _AT_IMPORT:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _RegistryFinder))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is as if it had been loaded without us: reloading and inspection see its own loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(Exception):
            _AT_IMPORT[module.__name__][1](module)
