"""Ranks start, return in order, fail with one cause, and leave nothing running."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pids import assert_all_end, note_pid, noted_pids

from lightning_3d.errors import LaunchError
from lightning_3d.strategies.processes import supervise
from lightning_3d.strategies.processes.launch import Outcome, fork_ranks, start_ranks

pytestmark = pytest.mark.distributed


def sum_of_ranks(start: int) -> tuple[int, torch.Tensor]:
    dist.init_process_group("gloo")
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank, total


def test_forked_ranks_return_in_order_and_can_talk():
    results = fork_ranks(sum_of_ranks, world_size=3, timeout_seconds=60, args=(10,))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.item() == 33 for _, total in results)


def test_forked_ranks_see_the_given_environment_and_do_not_change_ours():
    before = dict(os.environ)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "COLOUR")
    results = fork_ranks(
        lambda: [os.environ[name] for name in names], world_size=2, timeout_seconds=30, env={"COLOUR": "red"}
    )
    assert results == [["0", "0", "2", "2", "0", "red"], ["1", "1", "2", "2", "0", "red"]]
    assert dict(os.environ) == before


def test_number_of_threads_is_that_of_the_given_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = "import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS']))"
    assert (
        start_ranks([sys.executable, "-c", code], world_size=1, env={**os.environ, "OMP_NUM_THREADS": "3"}).exit_code
        == 3
    )


def test_large_results_come_back_whole():
    results = fork_ranks(lambda: torch.full((1_000_000,), float(os.environ["RANK"])), world_size=2, timeout_seconds=60)
    assert [result.mean().item() for result in results] == [0.0, 1.0]


def test_first_raising_rank_is_the_one_told_and_the_rest_are_ended(tmp_path):
    def body():
        note_pid(tmp_path)
        if os.environ["RANK"] == "1":
            raise ValueError("the cause")
        try:
            time.sleep(60)
        except BaseException:
            raise RuntimeError("an effect") from None

    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 1 of 3 raised ValueError: the cause") as caught:
        fork_ranks(body, world_size=3, timeout_seconds=60)
    assert "in body" in str(caught.value) and "an effect" not in str(caught.value)
    assert time.monotonic() - start < 10
    assert_all_end(noted_pids(tmp_path, 3))


def test_earlier_of_two_errors_is_the_cause():
    def body():
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(LaunchError, match="rank 1 of 2 raised ValueError: the cause"):
        fork_ranks(body, world_size=2, timeout_seconds=60)


def test_killed_rank_is_named_with_its_signal(tmp_path):
    def body():
        note_pid(tmp_path)
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(LaunchError, match="rank 0 of 2 was killed by SIGKILL"):
        fork_ranks(body, world_size=2, timeout_seconds=60)


def report(path: Path, *, error: str, time: float) -> None:
    path.write_text(json.dumps({"time": time, "error": error, "traceback": "", "where": ""}))


@pytest.mark.parametrize(
    ("code", "reported_at", "told"),
    [
        # A peer's report may make NCCL abort; a death makes peers report. Alive until 10.
        (-signal.SIGABRT, 9.0, "rank 1 of 3 raised ValueError: other"),
        (-signal.SIGABRT, 10.5, "rank 2 of 3 was killed by SIGABRT"),
        (-signal.SIGKILL, 9.0, "rank 2 of 3 was killed by SIGKILL"),
        (-signal.SIGABRT, None, "rank 2 of 3 was killed by SIGABRT"),
    ],
)
def test_cause_of_a_killed_and_a_raising_rank(code: int, reported_at: float | None, told: str, tmp_path: Path) -> None:
    reports = [tmp_path / f"rank-{rank}.error" for rank in range(3)]
    if reported_at is not None:
        report(reports[1], error="ValueError: other", time=reported_at)
    failure = supervise.first_failure([None, None, code], report_paths=reports, alive_at=[12.0, 12.0, 10.0])
    assert failure is not None and failure.sentence(3) == told
    assert failure.exit_code > 0


def test_own_report_of_a_killed_rank_is_the_cause(tmp_path: Path) -> None:
    reports = [tmp_path / f"rank-{rank}.error" for rank in range(2)]
    report(reports[1], error="ValueError: the cause", time=9.0)
    report(reports[0], error="RuntimeError: an effect", time=9.5)
    for code in (-signal.SIGABRT, -signal.SIGKILL):
        failure = supervise.first_failure([1, code], report_paths=reports, alive_at=[10.0, 9.0])
        assert failure is not None and failure.sentence(2) == "rank 1 of 2 raised ValueError: the cause"
        assert failure.exit_code == 1


def test_rank_ends_by_a_signal_from_elsewhere_and_the_job_was_not_stopped(capfd):
    command = python("if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)")
    assert start_ranks(command, world_size=2) == Outcome(143, stopped=False)
    assert "rank 1 of 2 was killed by SIGTERM" in capfd.readouterr().err


def test_fork_is_told_of_by_its_supervisor_alone():
    def body():
        with contextlib.suppress(ValueError), supervise.report_errors():
            raise ValueError("caught")
        return supervise.supervised_folder()

    folders = fork_ranks(body, world_size=2, timeout_seconds=60)
    assert folders[0] == folders[1] != supervise.supervised_folder()


def test_rank_that_ignores_sigterm_is_ended_all_the_same(tmp_path):
    def body():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note_pid(tmp_path)
        if os.environ["RANK"] == "1":
            raise SystemExit(3)
        time.sleep(60)

    with pytest.raises(LaunchError, match="rank 1 of 2 ended with exit code 3"):
        fork_ranks(body, world_size=2, timeout_seconds=60)
    assert_all_end(noted_pids(tmp_path, 2))


def test_timeout_names_the_ranks_that_did_not_finish(tmp_path):
    def body():
        note_pid(tmp_path)
        time.sleep(0 if os.environ["RANK"] == "0" else 60)

    with pytest.raises(LaunchError, match=r"rank 1, 2 of 3 did not finish within 1\.0 s"):
        fork_ranks(body, world_size=3, timeout_seconds=1.0)
    assert_all_end(noted_pids(tmp_path, 3))


def test_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(LaunchError, match="rank 0 of 1 raised .*pickle"):
        fork_ranks(lambda: lambda: 0, world_size=1, timeout_seconds=30)


@pytest.mark.parametrize("world_size", [0, -1, "2"])
def test_impossible_world_size_is_refused(world_size):
    with pytest.raises(LaunchError, match=f"world_size={world_size!r}"):
        fork_ranks(os.getpid, world_size=world_size, timeout_seconds=1)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time, signal\n" + textwrap.dedent(code)]


NOTE = "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(str(os.getpid()))\n"


def test_started_ranks_all_run_and_only_rank_zero_prints(tmp_path, capfd):
    command = python("print('from rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    assert start_ranks(command, world_size=2, log_dir=tmp_path) == Outcome(0)
    assert capfd.readouterr().out == "from rank 0 of 2\n"
    assert (tmp_path / "rank-1.log").read_text() == "from rank 1 of 2\n"


def test_exit_code_is_that_of_the_first_failing_rank_whose_output_is_shown_once(tmp_path, capfd):
    command = python("if os.environ['RANK'] == '1': sys.exit('broken here')\ntime.sleep(60)")
    start = time.monotonic()
    assert start_ranks(command, world_size=2, env=None) == Outcome(1)
    assert time.monotonic() - start < 10
    shown = capfd.readouterr().err
    assert shown.count("rank 1 of 2 ended with exit code 1") == shown.count("broken here") == 1


class Supervisor:
    """A fork of this process that runs `start_ranks`: it has imported torch already."""

    def __init__(self, folder: Path, rank_code: str, before: Callable[[], object] = lambda: None) -> None:
        self.errors = folder / "errors"
        self.pid = os.fork()
        if self.pid == 0:
            before()
            os.dup2(os.open(self.errors, os.O_CREAT | os.O_WRONLY), 2)
            sys.stderr = os.fdopen(2, "w")
            os._exit(start_ranks([*python(NOTE + textwrap.dedent(rank_code)), str(folder)], world_size=2).exit_code)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start_supervisor(folder: Path, rank_code: str) -> tuple[Supervisor, list[int]]:
    return Supervisor(folder, rank_code), noted_pids(folder, 2)


def test_ranks_end_when_their_supervisor_is_killed(tmp_path):
    supervisor, pids = start_supervisor(tmp_path, "time.sleep(60)")
    os.kill(supervisor.pid, signal.SIGKILL)
    assert supervisor.wait() == -signal.SIGKILL
    assert_all_end(pids)


def test_job_ends_when_rank_zero_is_killed(tmp_path):
    supervisor, pids = start_supervisor(tmp_path, "time.sleep(60)")
    os.kill(int((tmp_path / "0").read_text()), signal.SIGKILL)
    assert supervisor.wait() == 128 + signal.SIGKILL
    assert supervisor.errors.read_text().count("rank 0 of 2 was killed by SIGKILL") == 1
    assert_all_end(pids)


def test_signal_reaches_each_rank_once_and_ranks_may_finish_their_work(tmp_path):
    supervisor, pids = start_supervisor(
        tmp_path,
        """
        got = []
        signal.signal(signal.SIGTERM, lambda *_: got.append(1))
        open(os.path.join(sys.argv[1], 'ready-' + os.environ['RANK']), 'w')
        while not got: time.sleep(0.05)
        time.sleep(4)  # longer than peers of a failed rank would be given
        open(os.path.join(sys.argv[1], 'saved-' + os.environ['RANK']), 'w').write(str(len(got)))
        """,
    )
    while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.05)
    os.kill(supervisor.pid, signal.SIGTERM)
    assert supervisor.wait() == 128 + signal.SIGTERM
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert_all_end(pids)


def test_a_signal_that_is_ignored_as_under_nohup_ends_nothing(tmp_path):
    code = "time.sleep(2)\nsys.exit(0 if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else 3)"
    supervisor = Supervisor(tmp_path, code, before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    noted_pids(tmp_path, 2)
    os.kill(supervisor.pid, signal.SIGHUP)
    assert supervisor.wait() == 0


def test_a_signal_while_ranks_are_being_started_ends_those_that_were(tmp_path):
    start = subprocess.Popen

    def start_and_be_told(*args, **kwargs):
        child = start(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)
        return child

    def before():
        subprocess.Popen = start_and_be_told

    begun = time.monotonic()
    assert Supervisor(tmp_path, "time.sleep(60)", before=before).wait() == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 20 and not (tmp_path / "1").exists()
