"""Recipes and groups of settings: which there are, and the one config that a recipe and overrides make."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lightning_3d
from lightning_3d.cli.targets import accepts
from lightning_3d.errors import ConfigError

DEFAULT_RECIPE = "stdlib_gpt"


def settings_folder(name: str) -> Path:
    """Where ``conf`` or ``recipes`` is: in the package when installed from a wheel, beside it in a checkout."""
    package = Path(lightning_3d.__file__).parent
    return next(folder for folder in (package / name, package.parent / name) if folder.is_dir())


def search_path() -> str:
    """The override that tells Hydra where groups of settings are."""
    return f"hydra.searchpath=['file://{settings_folder('conf')}']"


def recipes() -> dict[str, str]:
    """Names of the recipes that come with the package, each with its first comment."""
    return _described(settings_folder("recipes"))


def groups() -> dict[str, dict[str, str]]:
    """Options of each group of settings, each with its first comment."""
    folders = sorted(path for path in settings_folder("conf").iterdir() if path.is_dir())
    return {folder.name: _described(folder) for folder in folders}


def _described(folder: Path) -> dict[str, str]:
    first_lines = {path.stem: path.read_text().split("\n", 1)[0] for path in sorted(folder.glob("*.yaml"))}
    return {name: line.removeprefix("#").strip() for name, line in first_lines.items()}


def split_recipe(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe that ``recipe=NAME`` names, or None, and the other arguments."""
    named = [argument.split("=", 1)[1] for argument in arguments if argument.startswith("recipe=")]
    return (named[-1] if named else None), [a for a in arguments if not a.startswith("recipe=")]


def compose_recipe(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe's config with overrides, as plain values; interpolations are not resolved yet.

    Args:
        recipe: a name of `recipes`, or the path of a YAML file like theirs.
        overrides: ``key=value``, in Hydra's grammar. A key that the config lacks is taken where what it configures
            has such an argument.

    Raises:
        ConfigError: an unknown recipe, option or key, or an override that cannot be read.
    """
    file = recipe_file(recipe)
    parsed = _parse(overrides)
    options = groups()
    choices = [override for override in parsed if override.key_or_group in options]
    for choice in choices:
        _check_choice(choice, options[choice.key_or_group])
    base = _compose(file, [line for _, line in _lines(choices)])
    # What a class of one's own takes can be given too.
    targets = [override for override in parsed if override.key_or_group.endswith("._target_")]
    if targets := [one for one in targets if one.is_add() or one.is_force_add() or _has(base, one.key_or_group)]:
        base = _compose(file, [line for _, line in _lines([*choices, *targets])])
    lines = [line if override in choices else _addable(override, base) for override, line in _lines(parsed)]
    config = _compose(file, lines)
    missing = sorted(_missing(config))
    if missing:
        raise ConfigError(f"{missing[0]} has no value: write {missing[0]}=VALUE.")
    return config


def resolve(config: dict[str, Any]) -> dict[str, Any]:
    """The config with every ``${...}`` replaced by its value.

    Raises:
        ConfigError: one that refers to nothing.
    """
    try:
        return OmegaConf.to_container(OmegaConf.create(config), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = error.full_key
        value = value_at(config, key) if key else None
        raise ConfigError(
            f"{key}={value} refers to nothing: {first_line(error)}. Write {key}=VALUE, or a ${{key}} that there is."
        ) from error


def parse_override(line: str) -> Override:
    """One argument in Hydra's grammar, with its key, value or several values.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if not line.startswith("="):
            return OverridesParser.create().parse_override(line)
    except HydraException:
        pass
    raise ConfigError(f"{line!r} cannot be read: write key=value, e.g. trainer.max_steps=10.")


def is_hydras_own(override: Override) -> bool:
    """Whether it sets Hydra instead of a run: ``hydra/sweeper=optuna``, ``hydra.sweeper.n_trials=20``."""
    return override.key_or_group.replace("/", ".").split(".")[0] == "hydra"


def key_of(override: str) -> str:
    """``trainer.max_steps`` of ``++trainer.max_steps=10``."""
    return _parse([override])[0].key_or_group


def closest(name: str, known: Iterable[str]) -> str:
    """A sentence that says which of the known names was meant, or which there are."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        # Namesakes in several places are all named; else the best one is enough.
        alike = [other for other in close if other.rpartition(".")[2] == close[0].rpartition(".")[2]]
        return f"Did you mean {' or '.join(alike)}?"
    return f"There are {', '.join(other for other in names if '.' not in other) or ', '.join(names)}."


def value_at(config: Any, path: str) -> Any:
    """The value at ``trainer.max_steps``, or None where there is nothing."""
    for part in path.split("."):
        if not isinstance(config, dict) or part not in config:
            return None
        config = config[part]
    return config


def nodes_of(config: Mapping[str, Any], group: str) -> dict[str, dict[str, Any]]:
    """What a group describes, by its place: ``logger``, or ``logger.csv`` and others where there are several by name.

    What is null, or has a ``_target_`` that is, is left out.
    """
    node = config.get(group) or {}
    places = {group: node} if "_target_" in node else {f"{group}.{name}": one for name, one in node.items()}
    return {place: one for place, one in places.items() if isinstance(one, dict) and one.get("_target_")}


def recipe_file(recipe: str) -> Path:
    """The YAML file of a recipe's name or path.

    Raises:
        ConfigError: there is none.
    """
    if recipe.endswith((".yaml", ".yml")):
        path = Path(recipe).absolute()
        if not path.is_file():
            raise ConfigError(f"recipe={recipe}: there is no such file. Name a recipe: {', '.join(recipes())}.")
        return path
    if recipe not in recipes():
        raise ConfigError(
            f"recipe={recipe!r} is unknown. {closest(recipe, recipes())} A path to a .yaml file works too."
        )
    return settings_folder("recipes") / f"{recipe}.yaml"


def _parse(overrides: Sequence[str]) -> list[Override]:
    parsed = [parse_override(line) for line in overrides]
    for override in parsed:
        line = override.input_line
        if override.is_sweep_override():
            raise ConfigError(
                f"{line!r} gives several values; a run has one. For a list write 'key=[a,b]'; for a run of each value "
                f"add -m."
            )
        if is_hydras_own(override):
            raise ConfigError(f"{line!r}: Hydra's own settings play no part in a single run. Leave it out, or add -m.")
    return parsed


def check_once(arguments: Sequence[str]) -> None:
    """Refuse two values for one setting, of which Hydra would take the last without a word.

    Raises:
        ConfigError: names both.
    """
    first: dict[str, str] = {}
    for argument in arguments:
        key = argument.split("=", 1)[0].lstrip("+~")
        if first.setdefault(key, argument) != argument:
            raise ConfigError(f"{first[key]!r} and {argument!r} set {key} twice. Leave out one of them.")


def _lines(parsed: Sequence[Override]) -> list[tuple[Override, str]]:
    return [(override, override.input_line or "") for override in parsed]


def _check_choice(choice: Override, options: dict[str, str]) -> None:
    value = choice.value()
    if value not in options:
        key = choice.key_or_group
        raise ConfigError(f"{key}={value!r} is no option of {key}. {closest(str(value), options)}")


def _addable(override: Override, base: dict[str, Any]) -> str:
    """The override as Hydra will take it: with ``++`` where the key is new but its target has such an argument."""
    line, key = override.input_line or "", override.key_or_group
    if override.is_add() or override.is_force_add() or override.is_delete() or _has(base, key):
        return line
    parent, _, name = key.rpartition(".")
    node = value_at(base, parent) if parent else base
    if isinstance(node, dict) and parent:
        if "_target_" in node:
            if accepts(node["_target_"], name):
                return f"++{line}"
        elif _inside_argument(base, parent):
            return f"++{line}"
    raise ConfigError(f"there is no setting {key}. {_what_there_is(node, parent, name, base)}")


def _what_there_is(node: Any, parent: str, name: str, base: dict[str, Any]) -> str:
    if not isinstance(node, dict):
        known = [path for path in _paths(base) if path.rpartition(".")[2] == name]
        return closest(f"{parent}.{name}", known or _paths(base))
    names = [f"{parent}.{known}" if parent else known for known in node if not known.startswith("_")]
    elsewhere = [path for path in _paths(base) if path.endswith(f".{name}")]
    return closest(f"{parent}.{name}" if parent else name, elsewhere or names)


def _inside_argument(base: dict[str, Any], path: str) -> bool:
    """Whether a folder of settings is (part of) one argument, a mapping that its target checks itself."""
    parts = path.split(".")
    return any("_target_" in (value_at(base, ".".join(parts[:n])) or {}) for n in range(1, len(parts)))


def _has(config: dict[str, Any], path: str) -> bool:
    parent, _, name = path.rpartition(".")
    node = value_at(config, parent) if parent else config
    return isinstance(node, dict) and name in node


def _paths(config: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        if key.startswith("_"):
            continue
        found.append(prefix + key)
        if isinstance(value, dict):
            found += _paths(value, f"{prefix}{key}.")
    return found


def _missing(config: dict[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in config.items():
        if value == "???":
            yield prefix + key
        elif isinstance(value, dict):
            yield from _missing(value, f"{prefix}{key}.")


def _compose(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        with initialize_config_dir(str(file.parent), version_base="1.3", job_name="lightning-3d"):
            composed = compose(file.stem, [search_path(), *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(first_line(error)) from error
    return OmegaConf.to_container(composed, resolve=False)  # type: ignore[return-value]


def one_line(error: BaseException) -> str:
    """All that an error says, without line breaks."""
    return " ".join(str(error).split())


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
