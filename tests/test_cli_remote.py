"""Commands on checkpoints below URLs: what they read, write and refuse."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import yaml
from local_shelf import LocalShelf, environment, register
from safetensors.torch import load_file

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.outputs import replacing
from lightning_3d.checkpoint.places import Place, place
from lightning_3d.cli import main
from lightning_3d.cli.job import prepare
from lightning_3d.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.distributed
register()

SETTINGS = [
    "layout=zero3x2",
    "logger=csv",
    "data.files=['*.py']",
    "data.cache_dir=cache",
    "data.vocab_size=270",
    "data.sequence_length=16",
    "data.global_batch_size=4",
    "model.config.hidden_size=16",
    "model.config.num_layers=2",
    "model.config.num_heads=2",
    "model.config.max_sequence_length=16",
    "trainer.limit_val_batches=1",
    "trainer.enable_progress_bar=false",
    "callbacks.checkpoint.every_n_train_steps=2",
    "strategy.storage_options={token: secret}",
]


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "lightning_3d", *arguments],
        cwd=folder,
        env=environment(folder.parent),
        capture_output=True,
        text=True,
        timeout=200,
    )


def dirpath(url: Any) -> str:
    return f"callbacks.checkpoint.dirpath='{url}'"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps in `runs`, whose checkpoints are below `shelf://.../my store`."""
    folder = tmp_path_factory.mktemp("remote") / "work of mine"
    folder.mkdir()
    for number in range(3):
        text = "\n".join(f"def f{line}(x): return x + {number} * {line}" for line in range(200))
        (folder / f"t{number}.py").write_text(text)
    done = command(folder, "train", *SETTINGS, dirpath(f"shelf://{folder}/my store"), "trainer.max_steps=4")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def url(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the store, in its folder."""
    monkeypatch.chdir(here)
    return f"shelf://{here}/my store"


def run_in(folder: Path) -> Path:
    return next((folder / "runs").glob("stdlib_gpt-*"))


def weights(checkpoint: Place) -> dict[str, torch.Tensor]:
    saved = store.saved_tensors(checkpoint)
    state = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in saved.items() if n.startswith("model.")}
    store.load_tensors(checkpoint, state)
    return {name.removeprefix("model."): value for name, value in state.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


# ------------------------------------------------------------------ train


def test_a_run_saves_below_a_url_and_resume_auto_goes_on_from_there(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work of mine"
    shutil.copytree(here, folder)
    # The copy's own store.
    file = run_in(folder) / "overrides.yaml"
    made_of = yaml.safe_load(file.read_text())
    made_of["overrides"] = [one.replace(str(here), str(folder)) for one in made_of["overrides"]]
    file.write_text(yaml.safe_dump(made_of))
    assert not (run_in(folder) / "checkpoints").exists()
    done = command(folder, "train", "resume=auto", "trainer.max_steps=6", "layout=single")
    assert done.returncode == 0, done.stderr
    assert f"resumes shelf://{folder}/my store/last.ckpt" in done.stdout and "steps: 6" in done.stdout
    newest = store.newest(f"shelf://{folder}/my store")
    assert newest is not None and newest.summary()["global_step"] == 6
    assert not (run_in(folder) / "checkpoints").exists()


def test_resume_finds_what_a_url_holds_with_the_run_folder_or_without(url: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, dirpath(url), f"output_dir='{tmp_path}'"]
    resumed = {"run": ["resume=auto"], "no run": [*settings, "resume=auto"]}
    for arguments in resumed.values():
        assert prepare(arguments)[2]["resume"] == f"{url}/last.ckpt"
    LocalShelf.clear_instance_cache()
    LocalShelf.tokens.clear()
    assert prepare([*settings, f"resume='{url}/step=2.ckpt'"])[2]["resume"] == f"{url}/step=2.ckpt"
    assert set(LocalShelf.tokens) == {"secret"}
    with pytest.raises(
        ConfigError, match="dirpath=shelf://.*my store holds checkpoints of an earlier run.*resume=auto"
    ):
        prepare(settings)
    with pytest.raises(ConfigError, match=r"step=3.ckpt: no whole.*Beside it: shelf://.*last.ckpt, .*step=2.ckpt"):
        prepare([*settings, f"resume='{url}/step=3.ckpt'"])
    assert prepare([*SETTINGS, dirpath(f"{url}/other"), "resume=auto", f"output_dir='{tmp_path}'"])[2]["resume"] is None


def test_a_file_url_is_the_folder_that_it_names(url: str, tmp_path: Path) -> None:
    config = prepare([*SETTINGS, dirpath(f"file://{tmp_path}/a b"), f"output_dir='{tmp_path}'"])[2]
    assert config["callbacks"]["checkpoint"]["dirpath"] == f"{tmp_path}/a b"


# ------------------------------------------------------------------ export and generate


def test_export_reads_and_writes_urls(here: Path, url: str, memory: Any, tmp_path: Path) -> None:
    expected = weights(place(f"{url}/step=4.ckpt"))
    out = f"file://{tmp_path}/out of it/model 1.safetensors"
    source = f"file://{tmp_path}/plain/step=4.ckpt"
    store.save(
        source, {f"model.{k}": v for k, v in expected.items()}, extra={}, rank_state={}, summary={"global_step": 4}
    )
    for given in (source, f"{url}/step=4.ckpt"):
        done = command(here, "export", given, "--to", "safetensors", out)
        assert done.returncode == 0, done.stderr
        assert equal(load_file(tmp_path / "out of it" / "model 1.safetensors"), expected)
        shutil.rmtree(tmp_path / "out of it")
    memory.put(f"{here}/my store/step=4.ckpt", "/in memory/step=4.ckpt", recursive=True)
    for out in ("memory://there/a b.safetensors", f"shelf://{tmp_path}/deep er/a b.safetensors"):
        assert main(["export", "memory://in memory/step=4.ckpt", "--to", "safetensors", out]) == 0
    memory.get("/there/a b.safetensors", str(tmp_path / "got"))
    assert equal(load_file(tmp_path / "got"), expected)
    assert equal(load_file(tmp_path / "deep er" / "a b.safetensors"), expected)
    assert memory.ls("/there", detail=False) == ["/there/a b.safetensors"]
    assert [path.name for path in (tmp_path / "deep er").iterdir()] == ["a b.safetensors"]


def test_the_run_folder_stands_for_its_newest_checkpoint_wherever_that_is(
    here: Path, url: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    run = run_in(here)
    wanted = ["prompt=def ", "max_new_tokens=5", "temperature=0"]
    told = []
    for where in ([str(run)], [f"{url}/step=4.ckpt", f"config={run}/config.yaml"]):
        assert main(["generate", *where, *wanted]) == 0, capsys.readouterr().err
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and told[0].startswith("def ")
    # So is a copy of the run folder, checkpoints and all, below a URL.
    copy = tmp_path / "copy" / run.name
    shutil.copytree(run, copy)
    shutil.copytree(here / "my store" / "step=2.ckpt", copy / "checkpoints" / "step=2.ckpt")
    options = ["--storage-options", "token=x", "--storage-options", '{"auto_mkdir": true}']
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["callbacks"]["checkpoint"]["dirpath"] = f"{config['run_dir']}/checkpoints"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    LocalShelf.tokens.clear()
    assert main(["generate", f"shelf://{copy}", *wanted, *options]) == 0, capsys.readouterr().err
    assert main(["export", f"shelf://{copy}", "--to", "ckpt", str(tmp_path / "o"), "--weights-only", *options]) == 0
    assert f"shelf://{copy}/checkpoints/step=2.ckpt -> " in capsys.readouterr().out
    assert set(LocalShelf.tokens) == {"x"}
    assert main(["generate", f"{url}/step=4.ckpt", *wanted]) == 2
    assert "Give config=FILE" in capsys.readouterr().err


def folder_for(kind: str, files: list[str], tmp_path: Path) -> Place:
    """What `_upload` makes of a folder of such files."""
    out = place(f"shelf://{tmp_path}/{kind}/my model")
    with replacing(out) as draft:
        for file in files:
            (draft / file).parent.mkdir(parents=True, exist_ok=True)
            (draft / file).write_text(file)
    return out


FILES = ["config.json", "model.safetensors", "tokenizer.json", "more/z"]


def test_a_folder_below_a_url_gets_whole_files_the_config_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    real = LocalShelf.mv

    def mv(self: Any, one: str, other: str, **kwargs: Any) -> None:
        assert not Path(other).exists() and Path(one).read_text() == other.partition("my model/")[2]
        named.append(other.partition("my model/")[2])
        real(self, one, other, **kwargs)

    monkeypatch.setattr(LocalShelf, "mv", mv)
    folder_for("good", FILES, tmp_path)
    assert sorted(named) == sorted(FILES) and named[-1] == "config.json"
    assert [path.name for path in (tmp_path / "good").iterdir()] == ["my model"]
    with pytest.raises(CheckpointError, match="my model exists"):
        folder_for("good", FILES, tmp_path)


@pytest.mark.parametrize("operation", ["put_file", "mv"])
@pytest.mark.parametrize("number", [0, 2])
def test_an_upload_that_fails_leaves_nothing(
    operation: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(LocalShelf, operation), []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == number + 1:
            raise OSError(28, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LocalShelf, operation, failing)
    with pytest.raises(CheckpointError, match="my model could not be written: OSError.*No space left"):
        folder_for("bad", FILES, tmp_path)
    assert list((tmp_path / "bad").iterdir()) == []


def test_what_came_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    out = place(f"shelf://{tmp_path}/late")
    with pytest.raises(CheckpointError, match="late exists"):
        with replacing(out) as draft:
            draft.write_text("ours")
            (tmp_path / "late").write_text("theirs")
    assert (tmp_path / "late").read_text() == "theirs" and len(list(tmp_path.iterdir())) == 1


# ------------------------------------------------------------------ mistakes


def test_mistakes_in_urls_and_options_are_one_line(
    url: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{url}/step=4.ckpt"

    def told(*arguments: str) -> str:
        assert main(list(arguments)) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    def exported(given: str, out: str, *more: str) -> str:
        return told("export", given, "--to", "safetensors", out, *more)

    here = str(tmp_path / "x")
    unknown, missing = "nowhere://bucket/a b", "gcs://bucket/a"
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for wrong, why in ((unknown, "nowhere"), (missing, "gcsfs")):
        assert wrong in (error := exported(wrong, here)) and why in error
        assert wrong in (error := exported(source, wrong)) and why in error
        assert wrong in (error := told("generate", wrong, "prompt=a")) and why in error
        assert wrong in (error := told("train", *SETTINGS, dirpath(wrong))) and why in error
        assert wrong in (error := told("train", *SETTINGS, f"resume='{wrong}'")) and why in error
    assert "patterns" in exported(source, "memory://a/x*")
    assert "exists" in exported(source, source)
    assert "step=4.ckpt" in exported(f"{url}/step=5.ckpt", here)
    assert "--storage-options a are for URLs" in exported(
        run := str(make_local(tmp_path)), here, "--storage-options", "a=1"
    )
    assert "are for URLs" in told("generate", run, "prompt=a", "--storage-options", "a=1")
    assert "would go to memory and shelf" in exported(source, "memory://x", "--storage-options", "token=1")
    for wrong in ("a", "=1", "{a: 1}", "{}", "a=[", "[1]"):
        assert repr(wrong) in exported(source, here, "--storage-options", wrong)
    assert "sets a twice" in exported(source, here, "--storage-options", "a=1", "--storage-options", "a=2")
    assert "expected one argument" in told("generate", source, "prompt=a", "--storage-options")
    assert "callbacks.checkpoint.dirpath=memory://x" in told("train", *SETTINGS, "run_dir=memory://x")
    assert not Path(here).exists()


def make_local(folder: Path) -> Path:
    path = folder / "step=1.ckpt"
    store.save(path, {"model.a": torch.ones(1)}, extra={}, rank_state={}, summary={"global_step": 1})
    return path


def test_a_store_that_cannot_be_read_is_told(
    url: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError("Access denied")

    monkeypatch.setattr(LocalShelf, "cat_file", refused)
    assert main(["generate", f"{url}/step=4.ckpt", "prompt=a"]) == 2
    assert "cannot be read: PermissionError: Access denied. Check the address" in capsys.readouterr().err
    monkeypatch.setattr(LocalShelf, "exists", refused)
    assert main(["export", str(make_local(tmp_path)), "--to", "safetensors", f"shelf://{tmp_path}/o"]) == 2
    assert "/o cannot be reached: PermissionError: Access denied" in capsys.readouterr().err


def test_keys_to_a_store_are_not_logged(here: Path) -> None:
    (logged,) = run_in(here).rglob("hparams.yaml")
    assert "zero_stage" in logged.read_text() and "secret" not in logged.read_text()
