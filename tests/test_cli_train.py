"""`lightning-3d train` as a user runs it: killed, resumed, in one W&B run, in one folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.proto import wandb_internal_pb2

from lightning_3d.checkpoint import store
from lightning_3d.layout import Layout

pytestmark = pytest.mark.distributed

TRAIN = [sys.executable, "-m", "lightning_3d", "train", "recipe=digits_mlp", "trainer.enable_progress_bar=false"]
# Small batches, so that 1437 images make epochs of 179 steps.
SETTINGS = [
    "output_dir=runs",
    "trainer.max_steps=400",
    "trainer.val_check_interval=100",
    "trainer.log_every_n_steps=1",
    "data.global_batch_size=8",
    "callbacks.checkpoint.every_n_train_steps=20",
]


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*TRAIN, *arguments], cwd=folder, capture_output=True, text=True, timeout=200)


def wandb_records(file: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Records of an offline run: a 7-byte header, then 32 KiB blocks of (crc, length, kind, bytes)."""
    data, position, whole = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def logged(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of an offline run's history."""
    for record in wandb_records(file):
        if record.HasField("history"):
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def ranks_in(folder: Path) -> list[int]:
    """Processes whose working folder is this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The folder in which a run was killed after its first checkpoints; it holds `runs`."""
    folder = tmp_path_factory.mktemp("killed")
    with (folder / "output").open("w") as output:
        process = subprocess.Popen([*TRAIN, *SETTINGS], cwd=folder, stdout=output, stderr=output)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any(store.newest(run / "checkpoints") for run in (folder / "runs").glob("*")):
            break
        time.sleep(0.05)
    assert process.poll() is None, (folder / "output").read_text()
    process.kill()
    process.wait()
    return folder


@pytest.fixture(scope="module")
def resumed(killed) -> tuple[Path, int, subprocess.CompletedProcess]:
    """Run folder, the step at which it was killed at the latest, and the process that went on with it."""
    run = next((killed / "runs").iterdir())
    newest = store.newest(run / "checkpoints")
    assert newest is not None
    step = store.summary(newest)["global_step"]
    return run, step, train(killed, "output_dir=runs", "resume=auto")


def test_killed_run_leaves_no_process_behind(killed):
    deadline = time.monotonic() + 10
    while ranks_in(killed) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks_in(killed) == []


def test_resume_goes_on_from_the_last_committed_step_to_the_end(resumed):
    run, step, done = resumed
    assert done.returncode == 0, done.stderr
    assert 0 < step < 400
    assert f"resumes {run.relative_to(run.parent.parent)}/checkpoints/" in done.stdout
    assert "steps: 400" in done.stdout and "val_loss: " in done.stdout
    newest = store.newest(run / "checkpoints")
    assert newest is not None and store.summary(newest)["global_step"] == 400
    assert [path.name for path in run.parent.iterdir()] == [run.name]


def test_resume_keeps_the_settings_of_the_run(resumed):
    run, _, _ = resumed
    config = yaml.safe_load((run / "config.yaml").read_text())
    before = yaml.safe_load((run / "config.1.yaml").read_text())
    assert config.pop("resume").startswith(str(run.relative_to(run.parent.parent)))
    assert before.pop("resume") is None
    assert config == before
    assert config["data"]["global_batch_size"] == 8


def test_killed_and_resumed_are_one_wandb_run_with_every_step_and_setting(resumed):
    run, step, _ = resumed
    identity = (run / "wandb_run_id").read_text()
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    config, steps, keys = {}, set(), set()
    for file in files:
        for record in wandb_records(file):
            for update in [*record.run.config.update, *record.config.update]:
                config[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
        for row in logged(file):
            keys |= row.keys()
            steps |= {row["trainer/global_step"]} if "train_loss" in row else set()
    assert {"train_loss", "val_loss", "val_accuracy", "grad_norm", "samples_per_second", "lr-AdamW"} <= keys
    # The killed process may not have written its last rows; the resumed one has all of its own.
    assert set(range(step, 400)) <= steps
    assert config["layout"] == "zero3x2"
    assert config["trainer"]["max_steps"] == 400


def test_run_folder_in_use_is_not_overwritten(resumed):
    run, _, _ = resumed
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    done = train(run.parent.parent, f"run_dir={run}")
    assert done.returncode == 2
    assert "Set resume=auto to go on with it" in done.stderr
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


@pytest.mark.parametrize(
    ("launcher", "layout"),
    [
        ("own", "pp2"),
        pytest.param("own", "dp2-tp2-pp2", marks=pytest.mark.slow),
        pytest.param("torchrun", "dp2-tp2-pp2", marks=pytest.mark.slow),
    ],
)
def test_loss_of_the_last_stage_is_in_one_wandb_run_that_a_resumed_run_goes_on_with(launcher, layout, tmp_path):
    ranks = str(Layout.parse(layout).world_size)
    command = TRAIN
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *TRAIN[1:]]
    command = [
        *command,
        f"layout={layout}",
        "run_dir=here",
        "model.num_hidden_layers=3",
        "trainer.val_check_interval=3",
        "trainer.log_every_n_steps=1",
        "callbacks.checkpoint.every_n_train_steps=3",
    ]
    environment = {**os.environ, "WANDB_MODE": "offline"}
    for more in (["trainer.max_steps=6"], ["trainer.max_steps=12", "resume=auto"]):
        done = subprocess.run(
            [*command, *more], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    identity = (tmp_path / "here" / "wandb_run_id").read_text()
    files = sorted((tmp_path / "here" / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    steps = [[row["trainer/global_step"] for row in logged(file) if "train_loss" in row] for file in files]
    assert steps == [list(range(6)), list(range(6, 12))]
    assert any("val_loss" in row for row in logged(files[1]))


# By which the first checkpoint stays the best.
FALLING = [
    "callbacks.checkpoint.monitor=train_loss",
    "callbacks.checkpoint.mode=max",
    "callbacks.checkpoint.save_top_k=1",
]


@pytest.mark.parametrize(
    ("save_last", "best"),
    [("link", FALLING), *(pytest.param(kind, [], marks=pytest.mark.slow) for kind in ("true", "link"))],
)
def test_last_step_is_saved_where_the_checkpoints_do_not_come_out_even(tmp_path, save_last, best):
    settings = ["run_dir=here", "logger=none", "callbacks.checkpoint.every_n_train_steps=2", "data.global_batch_size=8"]
    settings += [f"callbacks.checkpoint.save_last={save_last}", "layout=dp2", *best]
    for more, last in ((["trainer.max_steps=5"], 5), (["trainer.max_steps=9", "resume=auto"], 9)):
        done = train(tmp_path, *settings, *more)
        assert done.returncode == 0 and f"steps: {last}" in done.stdout, done.stderr
        newest = store.newest(tmp_path / "here" / "checkpoints")
        assert newest is not None and newest.summary()["global_step"] == last
        found = [path.name for path in (tmp_path / "here" / "checkpoints").iterdir() if path.name.startswith("last")]
        assert found == ["last.ckpt"] and store.summary(tmp_path / "here/checkpoints/last.ckpt")["global_step"] == last


def test_failing_rank_is_told_and_ends_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "from lightning_3d.models.digits import DigitsMLP\n"
        "class Failing(DigitsMLP):\n"
        "    def on_train_batch_end(self, *_):\n"
        "        if self.trainer.global_rank == 1: raise ValueError('not today')\n"
    )
    start = time.monotonic()
    done = train(tmp_path, "model._target_=mine.Failing", "logger=none")
    assert done.returncode == 1
    assert "rank 1 of 2 raised ValueError: not today" in done.stderr
    assert time.monotonic() - start < 60


def test_error_that_all_ranks_have_is_told_once(tmp_path):
    done = train(tmp_path, "layout=dp2", "logger=none", "model.learning_rate=1e30")
    assert done.returncode in (1, 2)
    assert (done.stdout + done.stderr).count("the loss is not finite") == 1, done.stderr
    assert "NumbersError: step 1: the loss is not finite" in done.stderr
    assert "one rank alone" not in done.stderr
    assert "save_on_exception=True is not saved: its weights may hold the numbers" in done.stderr


def test_ctrl_c_ends_the_run_and_every_rank(tmp_path):
    process = subprocess.Popen(
        [*TRAIN, "trainer.max_steps=-1", "logger=none", "callbacks.checkpoint.every_n_train_steps=5"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*/checkpoints/*.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    assert ranks_in(tmp_path) == []
