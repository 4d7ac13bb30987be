"""Starts the ranks of a job on one machine: forks of this process, or a command once per rank."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lightning_3d.errors import LaunchError
from lightning_3d.strategies.processes import supervise
from lightning_3d.strategies.processes.orphans import die_with_parent
from lightning_3d.strategies.processes.supervise import Failure, ForkedProcess

T = TypeVar("T")

_LAST_LINES = 30


def free_port() -> int:
    """A port of this machine that nobody listens on, below the range from which the kernel takes ports for others."""
    candidates = random.SystemRandom()
    for _ in range(200):
        port = candidates.randrange(15000, 32000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise LaunchError(
        "no free port between 15000 and 32000 was found in 200 tries. Set MASTER_PORT to one that is free."
    )


def rank_environment(
    rank: int, *, world_size: int, address: str, port: int, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables by which torch, Lightning and we know rank `rank` of `world_size`, all on this machine.

    Args:
        given: the environment that they are added to, whose number of threads holds; that of this process by default.
    """
    threads = max(1, (os.cpu_count() or 1) // world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": (os.environ if given is None else given).get("OMP_NUM_THREADS", str(threads)),
    }


def fork_ranks(
    function: Callable[..., T],
    *,
    world_size: int,
    timeout_seconds: float,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call ``function(*args)`` in `world_size` forks of this process, and return the results in the order of ranks.

    A fork has all that this process has imported and built, at no cost. So this process must not have used CUDA or
    run a backward pass, whose threads a fork does not have. Results travel as pickles: tensors by value, on the CPU.

    Args:
        function: any callable; it sees the environment of its rank (RANK, WORLD_SIZE, MASTER_ADDR and so on).
        timeout_seconds: for all ranks together.
        env: more environment variables.

    Raises:
        LaunchError: a rank raised, died, or was not done in time. No child is left running.
    """
    _check_world_size(world_size)
    port = int(os.environ.get("MASTER_PORT", 0)) or free_port()
    with tempfile.TemporaryDirectory(prefix="lightning-3d-") as folder:
        reports = [Path(folder, f"rank-{rank}.error") for rank in range(world_size)]
        results = [Path(folder, f"rank-{rank}.result") for rank in range(world_size)]
        sys.stdout.flush()
        sys.stderr.flush()
        children: list[ForkedProcess] = []
        try:
            for rank in range(world_size):
                variables = rank_environment(rank, world_size=world_size, address="127.0.0.1", port=port)
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    # What the function catches is no failure, so it isn't to be reported from inside.
                    os.environ.pop(supervise.REPORT_VARIABLE, None)
                    variables[supervise.FOLDER_VARIABLE] = folder
                    os.environ.update({**variables, **(env or {})})
                    _run_fork(function, args, parent=parent, report=reports[rank], result=results[rank])
                children.append(ForkedProcess(pid))
            deadline = time.monotonic() + timeout_seconds
            failure = supervise.supervise(children, report_paths=reports, deadline=deadline)
        except TimeoutError as error:
            late = ", ".join(map(str, error.args[0]))
            raise LaunchError(
                f"rank {late} of {world_size} did not finish within {timeout_seconds} s and was ended. A rank that "
                f"waits in a collective for one that does not come looks like this; else give more timeout_seconds."
            ) from None
        finally:
            supervise.end(children, grace_seconds=0.0)
        if failure is not None:
            raise LaunchError(f"{failure.sentence(world_size)}\n{failure.traceback}".rstrip())
        return [pickle.loads(path.read_bytes()) for path in results]


def _run_fork(
    function: Callable[..., Any], args: Sequence[Any], *, parent: int, report: Path, result: Path
) -> NoReturn:
    code = 1
    try:
        die_with_parent()
        if os.getppid() != parent:  # It ended before the kernel was asked to tell.
            os._exit(1)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # OpenMP's threads are not in a fork, and asking libgomp for more than one of them would hang.
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        with supervise.report_errors(report):
            result.write_bytes(pickle.dumps(function(*args)))
        code = 0
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1
    finally:
        # Not sys.exit: what the parent registered for its own end (test reports, loggers) must not run here.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        exit_code: 0, that of the first rank that failed, or 128 + n after signal n.
        stopped: whether it ended well because this process was asked to end it.
    """

    exit_code: int
    stopped: bool = False


def start_ranks(
    command: Sequence[str], *, world_size: int, env: Mapping[str, str] | None = None, log_dir: Path | None = None
) -> Outcome:
    """Run `command` once per rank and wait for all.

    Rank 0 has this process's output. What the others print goes to ``rank-N.log`` in `log_dir` (a temporary folder by
    default), so that lines do not mix; after a failure the end of the first failing rank's output is shown, once.
    SIGINT, SIGTERM and SIGHUP are passed on; a rank that fails after that is told like any other. When this process
    ends, whatever the reason, all ranks do. Once rank 0 has ended well, the others have a minute.

    Args:
        env: the environment of every rank; that of this process by default. Variables of a rank are added to it.
    """
    _check_world_size(world_size)
    base = dict(os.environ if env is None else env)
    address, port = base.get("MASTER_ADDR", "127.0.0.1"), int(base.get("MASTER_PORT", 0)) or free_port()
    with tempfile.TemporaryDirectory(prefix="lightning-3d-") as folder:
        logs = Path(log_dir or folder)
        logs.mkdir(parents=True, exist_ok=True)
        reports = [Path(folder, f"rank-{rank}.error") for rank in range(world_size)]
        children: list[subprocess.Popen] = []
        with supervise.stopping_on_signals(children) as stopped_by:
            try:
                for rank in range(world_size):
                    if stopped_by:
                        break
                    variables = rank_environment(rank, world_size=world_size, address=address, port=port, given=base)
                    variables[supervise.REPORT_VARIABLE] = str(reports[rank])
                    # Sessions of their own: Ctrl+C then reaches the ranks once, through us.
                    with _output_of(rank, logs) as output:
                        children.append(
                            subprocess.Popen(
                                list(command),
                                env={**base, **variables},
                                stdin=subprocess.DEVNULL,
                                stdout=output,
                                stderr=subprocess.STDOUT if rank else None,
                                start_new_session=True,
                                preexec_fn=die_with_parent,
                            )
                        )
                if stopped_by:
                    # Not all have heard it, who would wait for those that were never started.
                    supervise.signal_all(children, stopped_by[0])
                failure = supervise.supervise(
                    children,
                    report_paths=reports[: len(children)],
                    exit_seconds=supervise.EXIT_SECONDS,
                    stopped_by=stopped_by,
                )
            finally:
                supervise.end(children, grace_seconds=0.0)
        if stopped_by:
            print(f"stopped by {signal.Signals(stopped_by[0]).name}", file=sys.stderr)
        if failure is not None:
            tell(failure, world_size=world_size, log=logs / f"rank-{failure.rank}.log" if failure.rank else None)
            return Outcome(failure.exit_code)
        return Outcome(128 + stopped_by[0], stopped=True) if stopped_by else Outcome(0)


class _Inherited:
    """Stands for this process's own output where a file is expected."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


def _output_of(rank: int, folder: Path) -> Any:
    return (folder / f"rank-{rank}.log").open("ab") if rank else _Inherited()


def tell(failure: Failure, *, world_size: int, log: Path | None) -> None:
    print(f"{failure.sentence(world_size)}. The other ranks were ended.", file=sys.stderr)
    if log is not None and log.exists():
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        print(f"the end of what rank {failure.rank} printed ({log}):", *lines, sep="\n  ", file=sys.stderr)
    sys.stderr.flush()


def _check_world_size(world_size: int) -> None:
    if not isinstance(world_size, int) or world_size < 1:
        raise LaunchError(f"world_size={world_size!r} is no number of processes. Give a whole number from 1 on.")
