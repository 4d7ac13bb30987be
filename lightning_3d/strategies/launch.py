"""Starts the ranks of a job on one machine: forks of this process, a command once per rank, or the script once more."""

from __future__ import annotations

import atexit
import builtins
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_3d.errors import LaunchError
from lightning_3d.strategies import supervise
from lightning_3d.strategies.supervise import Failure, ForkedProcess

T = TypeVar("T")

# How long rank 0 of a script, itself done, waits for the others; and for its own end after another rank has failed.
EXIT_SECONDS = 60.0
UNWIND_SECONDS = 5.0

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


def rank_environment(rank: int, *, world_size: int, address: str, port: int) -> dict[str, str]:
    """The variables by which torch, Lightning and we know rank `rank` of `world_size`, all on this machine."""
    threads = max(1, (os.cpu_count() or 1) // world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
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
            raise LaunchError(f"rank {failure.rank} of {world_size} {failure.reason}\n{failure.traceback}".rstrip())
        return [pickle.loads(path.read_bytes()) for path in results]


def _run_fork(
    function: Callable[..., Any], args: Sequence[Any], *, parent: int, report: Path, result: Path
) -> NoReturn:
    code = 1
    try:
        supervise.die_with_parent()
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


def start_ranks(
    command: Sequence[str], *, world_size: int, env: Mapping[str, str] | None = None, log_dir: Path | None = None
) -> int:
    """Run `command` once per rank and wait for all; the exit code is 0, or that of the first rank that failed.

    Rank 0 has this process's output. What the others print goes to ``rank-N.log`` in `log_dir` (a temporary folder by
    default), so that lines do not mix; after a failure the end of the first failing rank's output is shown, once.
    SIGINT, SIGTERM and SIGHUP are passed on. When this process ends, whatever the reason, all ranks do.

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
                    variables = rank_environment(rank, world_size=world_size, address=address, port=port)
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
                                preexec_fn=supervise.die_with_parent,
                            )
                        )
                failure = supervise.supervise(children, report_paths=reports, stopped_by=stopped_by)
            finally:
                supervise.end(children, grace_seconds=0.0)
        if stopped_by:
            print(f"stopped by {signal.Signals(stopped_by[0]).name}", file=sys.stderr)
            return 128 + stopped_by[0]
        if failure is None:
            return 0
        _tell(failure, world_size=world_size, log=logs / f"rank-{failure.rank}.log" if failure.rank else None)
        return failure.exit_code


class _Inherited:
    """Stands for this process's own output where a file is expected."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


def _output_of(rank: int, folder: Path) -> Any:
    return (folder / f"rank-{rank}.log").open("ab") if rank else _Inherited()


def _tell(failure: Failure, *, world_size: int, log: Path | None) -> None:
    print(f"rank {failure.rank} of {world_size} {failure.reason}; the other ranks were ended.", file=sys.stderr)
    if log is not None and log.exists():
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        print(f"the end of what rank {failure.rank} printed ({log}):", *lines, sep="\n  ", file=sys.stderr)
    sys.stderr.flush()


def _check_world_size(world_size: int) -> None:
    if not isinstance(world_size, int) or world_size < 1:
        raise LaunchError(f"world_size={world_size!r} is no number of processes. Give a whole number from 1 on.")


class ScriptLauncher(_Launcher):
    """Makes this process rank 0, and starts ranks 1 to N-1 by running its script once more for each.

    It does so at the first `launch` of the process only: the copies come to the same calls by themselves.

    Args:
        cluster_environment: Lightning's; where it has processes created by others (torchrun, SLURM), none are started.
        num_processes: on this machine.
        num_nodes: of the job.

    Raises:
        LaunchError: processes are needed and there is no script to run again (a notebook, ``python -c``, standard
            input), or the script has started another number of processes before.
    """

    # Of this process, not of one launcher: a second Trainer finds the ranks that the first one started.
    _children: list[subprocess.Popen] = []
    _failed = False

    def __init__(self, cluster_environment: Any, num_processes: int, num_nodes: int = 1) -> None:
        super().__init__()
        self.cluster_environment = cluster_environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes
        started = os.environ.get("LOCAL_WORLD_SIZE") if supervise.REPORT_VARIABLE in os.environ else None
        if started is not None and int(started) != num_processes:
            raise LaunchError(
                f"this script runs in {started} processes already, and a Trainer asks for devices={num_processes}. "
                f"Set devices={started} in every Trainer of a script, or put the other run into a script of its own."
            )
        if num_processes > 1 and not cluster_environment.creates_processes_externally:
            script_command()

    @property
    def is_interactive_compatible(self) -> bool:
        # The constructor refuses notebooks itself, with advice that fits.
        return True

    def launch(self, function: Callable[..., T], *args: Any, trainer: Any = None, **kwargs: Any) -> T:
        """Start the other ranks if nobody has, then call ``function(*args, **kwargs)``."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if self.num_processes > 1 and not environment.creates_processes_externally:
            self._start_children()
        try:
            with supervise.report_errors():
                return function(*args, **kwargs)
        except BaseException:
            ScriptLauncher._failed = True
            raise

    def kill(self, signum: int) -> None:
        for child in ScriptLauncher._children:
            if child.poll() is None:
                child.send_signal(signum)

    def _start_children(self) -> None:
        command = script_command()
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(free_port())
        # The environment has the last word: it may have settled on a port before.
        address, port = self.cluster_environment.main_address, self.cluster_environment.main_port
        folder = tempfile.TemporaryDirectory(prefix="lightning-3d-")
        reports = [Path(folder.name, f"rank-{rank}.error") for rank in range(self.num_processes)]
        node = self.cluster_environment.node_rank()
        variables: list[dict[str, str]] = []
        for local in range(self.num_processes):
            own = rank_environment(local, world_size=self.num_processes, address=address, port=port)
            own["RANK"] = str(node * self.num_processes + local)
            own["WORLD_SIZE"] = str(self.num_nodes * self.num_processes)
            own["NODE_RANK"] = str(node)
            own[supervise.REPORT_VARIABLE] = str(reports[local])
            variables.append(own)
        for own in variables[1:]:
            ScriptLauncher._children.append(
                subprocess.Popen(command, env={**os.environ, **own}, preexec_fn=supervise.die_with_parent)
            )
        threads_were_set = "OMP_NUM_THREADS" in os.environ
        os.environ.update(variables[0])
        if not threads_were_set and "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(variables[0]["OMP_NUM_THREADS"]))
        done = threading.Event()
        watch = threading.Thread(target=_watch_children, args=(ScriptLauncher._children, reports, done), daemon=True)
        watch.start()
        _fail_on_uncaught_exceptions()
        atexit.register(_end_script, ScriptLauncher._children, reports, done, folder)


def script_command() -> list[str]:
    """The command that runs this process's script once more.

    Raises:
        LaunchError: there is no script.
    """
    main = sys.modules["__main__"]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return [sys.executable, *flags, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    file = getattr(main, "__file__", None)
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "get_ipython")
    if interactive or file is None or not Path(file).is_file():
        where = "a notebook or an interactive session" if interactive else "`python -c` or standard input"
        raise LaunchError(
            f"this program comes from {where}, so there is no script that further processes could run. Save it as a "
            f"file and run that (alone, or with torchrun), use `lightning-3d train`, or set Trainer(devices=1)."
        )
    return [sys.executable, *flags, str(Path(file).absolute()), *sys.argv[1:]]


def _fail_on_uncaught_exceptions() -> None:
    before = sys.excepthook

    def note(*exception: Any) -> None:
        ScriptLauncher._failed = True
        before(*exception)

    sys.excepthook = note


def _watch_children(children: list[subprocess.Popen], reports: list[Path], done: threading.Event) -> None:
    """In rank 0: when another rank fails, say so and end the job, also when this rank hangs in a collective."""
    while not done.wait(supervise.POLL_SECONDS * 4):
        if any(child.poll() for child in children) or any(report.exists() for report in reports[1:]):
            time.sleep(supervise.SETTLE_SECONDS)
            failure = _failure_of_children(children, reports)
            if failure is None or done.is_set():
                continue
            if not reports[0].exists() or failure.rank:
                _tell(failure, world_size=len(reports), log=None)
            supervise.end(children, grace_seconds=supervise.FAILURE_GRACE_SECONDS)
            # This rank's own complaint about lost connections comes now, and lets loggers close.
            if not done.wait(UNWIND_SECONDS):
                os._exit(failure.exit_code)
            return


def _failure_of_children(children: list[subprocess.Popen], reports: list[Path]) -> Failure | None:
    return supervise.first_failure([None, *(child.poll() for child in children)], report_paths=reports)


def _end_script(
    children: list[subprocess.Popen], reports: list[Path], done: threading.Event, folder: tempfile.TemporaryDirectory
) -> None:
    """At rank 0's end: let the others finish, but leave none behind and end with an error if one of them did."""
    failed = ScriptLauncher._failed
    finished = supervise.wait_all(children, seconds=supervise.FAILURE_GRACE_SECONDS if failed else EXIT_SECONDS)
    done.set()
    failure = _failure_of_children(children, reports)
    supervise.end(children, grace_seconds=supervise.FAILURE_GRACE_SECONDS)
    folder.cleanup()
    if failed:
        return
    if failure is not None:
        _tell(failure, world_size=len(reports), log=None)
    elif not finished:
        print(f"other ranks still ran {EXIT_SECONDS:.0f} s after rank 0 had ended; they were ended.", file=sys.stderr)
    if failure is not None or not finished:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.exit_code if failure else 1)
