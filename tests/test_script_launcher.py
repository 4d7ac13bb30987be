"""A script that starts its own ranks ends with one cause, and leaves nothing running."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from pids import assert_all_end, noted_pids

pytestmark = pytest.mark.distributed

# A script under ScriptLauncher, without a Trainer: what a strategy does with it.
SCRIPT = """
import os, sys, time, signal
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning_3d.strategies.processes.script_launcher import ScriptLauncher

def run(step):
    rank, folder = os.environ["LOCAL_RANK"], sys.argv[1]
    open(os.path.join(folder, rank), "w").write(str(os.getpid()))
    # Where this rank's Lightning will look for the others.
    assert LightningEnvironment().main_port == launcher.cluster_environment.main_port == int(os.environ["MASTER_PORT"])
    with open(os.path.join(folder, "calls"), "a") as calls:
        calls.write(f"{step}:{rank} ")
    return step

def body(rank): pass
BODY
for step in ("fit", "test"):
    launcher = ScriptLauncher(LightningEnvironment(), num_processes=2)
    assert launcher.launch(run, step) == step
    body(os.environ["LOCAL_RANK"])
"""


def start_script(folder: Path, body: str) -> subprocess.Popen:
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("BODY", textwrap.dedent(body)))
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)], stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    )


def heed_ctrl_c() -> None:
    """What a shell starts in the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_script_runs_once_per_rank_however_often_it_launches(tmp_path):
    script = start_script(tmp_path, "")
    _, errors = script.communicate(timeout=180)
    assert script.returncode == 0, errors
    assert sorted((tmp_path / "calls").read_text().split()) == ["fit:0", "fit:1", "test:0", "test:1"]
    assert_all_end(noted_pids(tmp_path, 2))


def test_script_with_a_failing_rank_ends_with_its_cause_even_when_rank_zero_hangs(tmp_path):
    script = start_script(
        tmp_path,
        """
        def run(step):
            open(os.path.join(sys.argv[1], os.environ["LOCAL_RANK"]), "w").write(str(os.getpid()))
            if os.environ["LOCAL_RANK"] == "1": raise ValueError("the cause")
            time.sleep(60)
        """,
    )
    noted_pids(tmp_path, 2)
    _, errors = script.communicate(timeout=120)
    # From the failure on: a script that starts from nothing takes its time on a busy machine.
    assert time.time() - (tmp_path / "1").stat().st_mtime < 30
    assert script.returncode == 1
    assert errors.count("rank 1 of 2 raised ValueError: the cause") == 1
    assert_all_end(noted_pids(tmp_path, 2))


def test_script_whose_rank_dies_after_rank_zero_is_done_does_not_end_well(tmp_path):
    script = start_script(
        tmp_path,
        """
        def body(rank):
            if rank == "1": time.sleep(1); os._exit(7)
        """,
    )
    _, errors = script.communicate(timeout=180)
    assert script.returncode == 7, errors
    assert "rank 1 of 2 ended with exit code 7" in errors


@pytest.mark.parametrize("twice", [pytest.param(False, marks=pytest.mark.slow), True])
def test_interrupt_after_a_run_is_no_failure_of_a_rank(twice, tmp_path):
    script = start_script(
        tmp_path,
        f"""
        def again(*_):  # In torch's hook, before it has called ours.
            if os.environ["LOCAL_RANK"] == "1": os._exit(1)
            raise KeyboardInterrupt

        def body(rank):
            if {twice}: sys.excepthook = again
            os.kill(os.getpid(), signal.SIGINT)
        """,
    )
    _, errors = script.communicate(timeout=180)
    assert script.returncode not in (0, None) and "KeyboardInterrupt" in errors
    assert "of 2" not in errors and (twice or "sys.excepthook" not in errors), errors


def test_interrupt_while_rank_zero_waits_for_the_others_ends_them(tmp_path):
    script = start_script(
        tmp_path,
        """
        def body(rank):
            if rank == "1": signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(100)
            elif step == "test": open(os.path.join(sys.argv[1], "done"), "w")
        """,
    )
    pids = noted_pids(tmp_path, 2)
    deadline = time.monotonic() + 120
    while not (tmp_path / "done").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    script.send_signal(signal.SIGINT)
    _, errors = script.communicate(timeout=30)
    assert script.returncode == 128 + signal.SIGINT, errors
    assert errors == ""
    assert_all_end(pids)


def test_killed_script_leaves_no_rank_behind(tmp_path):
    script = start_script(tmp_path, "def body(rank): time.sleep(60)")
    pids = noted_pids(tmp_path, 2)
    script.kill()
    assert_all_end(pids)


@pytest.mark.parametrize("how", ["-c", "-"])
def test_program_without_a_script_is_refused_before_any_process_starts(how):
    code = (
        "from lightning.fabric.plugins.environments import LightningEnvironment as E\n"
        "from lightning_3d.strategies.processes.script_launcher import ScriptLauncher\n"
        "ScriptLauncher(E(), num_processes=1)\n"
        "ScriptLauncher(E(), num_processes=2)\n"
    )
    command = [sys.executable, "-c", code] if how == "-c" else [sys.executable, "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "no script that further processes could run" in done.stderr and "devices=1" in done.stderr


@pytest.mark.parametrize(("error", "told"), [("gloo/transport/tcp: closed by peer", True), ("the cause", False)])
def test_killed_rank_0_is_told_also_where_others_have_failed_of_it_by_then(
    error: str, told: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "rank-1.error").write_text(json.dumps({"error": f"RuntimeError: {error}", "traceback": ""}))
    program = (
        "import os, pathlib, sys\n"
        "from lightning_3d.strategies.processes.guardian import Guardian\n"
        "Guardian([], folder=pathlib.Path(sys.argv[1]), rank=0, world_size=2)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60)
    assert ("rank 0 of 2 was killed" in done.stderr) == told
