"""The wheel is complete: modules, the hook beside them, settings and recipes inside."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return next(folder.glob("*.whl"))


def test_wheel_has_every_module_setting_and_recipe_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_3d").rglob("*.py")}
    settings = {
        f"lightning_3d/{path.relative_to(ROOT)}"
        for kind in ("conf", "recipes")
        for path in (ROOT / kind).rglob("*.yaml")
    }
    assert len(settings) > 10
    assert names == modules | settings | {"lightning_3d_autoload.py"}


def test_installed_wheel_finds_its_own_settings(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "from lightning_3d.cli.config import compose_recipe, recipes, settings_folder\n"
        "compose_recipe('stdlib_gpt')\n"
        "print(*recipes(), settings_folder('conf'), sep='\\n')"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "digits_mlp",
        "finetune_hf",
        "stdlib_gpt",
        "stdlib_llama_hf",
        str(tmp_path / "lightning_3d/conf"),
    ]


def test_wheel_declares_the_command_and_the_hook(wheel):
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(name for name in archive.namelist() if name.endswith("entry_points.txt"))).decode()
    assert "lightning-3d = lightning_3d.cli:main" in text
    assert "[torch.backends]\nlightning_3d = lightning_3d_autoload:install" in text


def test_every_dependency_has_a_tested_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {requirement.split(">=")[0] for requirement in asked if not requirement.startswith("lightning-3d[")}
    assert len(names) > 10
    assert names <= pinned


def test_continuous_integration_is_make_test():
    assert (ROOT / ".ci" / "run").read_text() == "make test\n"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
