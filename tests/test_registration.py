"""The names are known to Lightning without an import of ours, and nobody pays for them who does not use them."""

import importlib
import json
import subprocess
import sys
import textwrap
from functools import partial

import pytest

import lightning_3d_autoload
from lightning_3d.strategies.presets import PRESETS

NAMES = {"3d", "tp", "pp", "zero1", "zero2", "zero3"}

# In a fresh interpreter, step by step: the facts at each step.
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
facts = {}
import torch
facts["loaded by torch"] = [name for name in ("lightning", "lightning_3d") if name in sys.modules]
import lightning as L
from lightning.pytorch.strategies import StrategyRegistry
facts["loaded by lightning"] = [name for name in ("lightning_3d",) if name in sys.modules]
facts["registered"] = sorted(StrategyRegistry)
facts["loader"] = type(sys.modules["lightning.pytorch.strategies"].__spec__.loader).__name__

def build(trainer_class, name):
    try:
        strategy = trainer_class(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
        return [type(strategy).__module__, strategy.layout.name, strategy.layout.zero_stage]
    except Exception as error:
        return [type(error).__name__, str(error)]

for name in ("3d", "3D", "zero1", "zero2", "zero3"):
    facts[name] = build(L.Trainer, name)
import pytorch_lightning
facts["pytorch_lightning"] = build(pytorch_lightning.Trainer, "zero2")
facts["unknown"] = build(pytorch_lightning.Trainer, "4d")
import lightning_3d
lightning_3d.register()
facts["hooks"] = sum(type(finder).__module__ == "lightning_3d_autoload" for finder in sys.meta_path)
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_torch_loads_neither_lightning_nor_this_package(facts):
    assert facts["loaded by torch"] == []


def test_names_are_registered_by_importing_lightning_alone(facts):
    assert set(facts["registered"]) >= NAMES
    assert facts["loaded by lightning"] == []


def test_module_of_the_registry_keeps_its_own_loader(facts):
    assert facts["loader"] == "SourceFileLoader"


@pytest.mark.parametrize(("name", "stage"), [("3d", 3), ("3D", 3), ("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_name_builds_our_strategy_without_an_import(facts, name, stage):
    assert facts[name] == ["lightning_3d.strategies.three_d", "single", stage]


def test_pytorch_lightning_is_told_to_use_lightning(facts):
    kind, message = facts["pytorch_lightning"]
    assert kind == "ConfigError"
    assert "import lightning as L" in message and "'zero2'" in message


def test_other_names_are_still_unknown(facts):
    assert "invalid strategy name" in facts["unknown"][1]


def test_importing_the_package_installs_no_second_hook(facts):
    assert facts["hooks"] == 1


def test_every_name_has_a_preset():
    assert set(lightning_3d_autoload.STRATEGIES) == set(PRESETS) == NAMES


REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description):
        BODY
StrategyRegistry = Registry()
"""


@pytest.fixture
def fake_lightning(tmp_path, monkeypatch):
    """Writes a module with a registry, for which the hook waits."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "a_module_with_a_registry"
    extend = partial(lightning_3d_autoload._register, build_factory=lambda name: name.upper)
    monkeypatch.setitem(lightning_3d_autoload._AT_IMPORT, name, ("StrategyRegistry", extend))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def write(body: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(REGISTRY.replace("BODY", body)))
        return name

    yield write
    sys.modules.pop(name, None)


def test_registry_that_refuses_does_not_break_the_import(fake_lightning):
    lightning_3d_autoload.install()
    module = importlib.import_module(fake_lightning("raise RuntimeError"))
    assert module.StrategyRegistry == {}


def test_module_that_is_imported_already_is_registered_with_at_once(fake_lightning):
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "lightning_3d_autoload"]
    module = importlib.import_module(fake_lightning("self[name] = strategy"))
    assert module.StrategyRegistry == {}
    lightning_3d_autoload.install()
    assert set(module.StrategyRegistry) == NAMES


def test_name_that_somebody_else_registered_is_left_to_them(fake_lightning):
    module = importlib.import_module(fake_lightning("self[name] = strategy"))
    module.StrategyRegistry.clear()
    module.StrategyRegistry["3d"] = "theirs"
    lightning_3d_autoload.install()
    assert module.StrategyRegistry["3d"] == "theirs"
    assert set(module.StrategyRegistry) == NAMES
