"""Starts the ranks of a script that builds a Trainer: this process is rank 0, the others run the script once more."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import _TunerExitException

from lightning_3d.errors import LaunchError
from lightning_3d.strategies.processes import hydra_job, supervise
from lightning_3d.strategies.processes.attempts import attempt, flush
from lightning_3d.strategies.processes.guardian import Guardian
from lightning_3d.strategies.processes.launch import free_port, rank_environment, tell
from lightning_3d.strategies.processes.orphans import die_with_parent
from lightning_3d.strategies.processes.supervise import Failure

T = TypeVar("T")

# How long it may take for its own end once a rank has failed: callbacks, loggers, its complaint about lost connections.
UNWIND_SECONDS = 10.0


class ScriptLauncher(_Launcher):
    """Makes this process rank 0, and starts ranks 1 to N-1 by running its script once more for each.

    It does so at the first `launch` of the process only: the copies come to the same calls by themselves. Of a sweep of
    `hydra.main`, each job has ranks of its own.

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
    _started: _Started | None = None
    # How many runs there were, with these ranks.
    runs = 0
    _failed = False
    # By Ctrl-C where no handler of ours was, or a second one: what ranks fail of from then on is its effect.
    _interrupted = False
    # By which signal all ranks end at an agreed place; see `supervise.Ranks.failure`.
    _stopped_by: list[int] = []
    # The first, before its peers are ended and fail in their turn.
    _failure: Failure | None = None
    # The first of a job of a sweep that is over, told already.
    _former_failure: Failure | None = None

    def __init__(self, cluster_environment: Any, num_processes: int, num_nodes: int = 1) -> None:
        super().__init__()
        self.cluster_environment = cluster_environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes
        # Whether the last function raised; and what the strategy does then, before Lightning unwinds, or else after it.
        self.failed = False
        self.on_failure: Callable[[BaseException], Any] = lambda error: None
        self.on_success: Callable[[], Any] = lambda: None
        former, job = ScriptLauncher._started, hydra_job.identity()
        if former is not None and None not in (former.job, job) and former.job != job:
            ScriptLauncher._end_job()
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
        _report_uncaught_exceptions()
        self.failed = ScriptLauncher._interrupted = False
        tuned: _TunerExitException | None = None
        try:
            with supervise.report_errors():
                try:
                    result = function(*args, **kwargs)
                except _TunerExitException as end:
                    # So ends what Lightning's tuner runs, when it went well.
                    tuned = end
        except BaseException as error:
            self.failed = True
            self.on_failure(error)
            ScriptLauncher._note(error)
            raise
        self.on_success()
        if tuned is not None:
            raise tuned
        return result

    @classmethod
    def stopped(cls, sig: int) -> None:
        """All ranks end by this signal: that is no failure of theirs."""
        cls._stopped_by.append(sig)

    @classmethod
    def _note(cls, error: BaseException) -> None:
        cls._failed = True
        cls._interrupted = isinstance(error, KeyboardInterrupt) and not cls._stopped_by

    @classmethod
    def dismiss_guardian(cls) -> None:
        """This process ends by itself now."""
        if cls._started is not None:
            cls._started.guardian.dismiss()

    def kill(self, signum: int) -> None:
        for child in ScriptLauncher._children:
            if child.poll() is None:
                child.send_signal(signum)

    def _start_children(self) -> None:
        command, folder_of_start = script_command(), hydra_job.working_folder()
        before = dict(os.environ)
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(free_port())
        # The environment has the last word: it may have settled on a port before.
        address, port = self.cluster_environment.main_address, self.cluster_environment.main_port
        # The guardian removes it, since this process may end in any way.
        folder = Path(tempfile.mkdtemp(prefix="lightning-3d-"))
        reports = [Path(folder, f"rank-{local}.error") for local in range(self.num_processes)]
        node = self.cluster_environment.node_rank()
        first_rank, world_size = node * self.num_processes, self.num_nodes * self.num_processes
        variables: list[dict[str, str]] = []
        for local in range(self.num_processes):
            own = rank_environment(local, world_size=self.num_processes, address=address, port=port)
            own["RANK"] = str(first_rank + local)
            own["WORLD_SIZE"] = str(world_size)
            own["NODE_RANK"] = str(node)
            own[supervise.REPORT_VARIABLE] = str(reports[local])
            variables.append(own)
        for own in variables[1:]:
            ScriptLauncher._children.append(
                subprocess.Popen(command, env={**os.environ, **own}, cwd=folder_of_start, preexec_fn=die_with_parent)
            )
        pids = [child.pid for child in ScriptLauncher._children]
        guardian = Guardian(pids, folder=folder, rank=first_rank, world_size=world_size)
        threads_were_set = "OMP_NUM_THREADS" in os.environ
        os.environ.update(variables[0])
        if not threads_were_set and "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(variables[0]["OMP_NUM_THREADS"]))
        ranks = supervise.Ranks([None, *ScriptLauncher._children], report_paths=reports, first_rank=first_rank)
        own = variables[0]
        restored = {name: (value, before.get(name)) for name, value in own.items()}
        started = _Started(ranks, world_size, guardian, hydra_job.identity(), restored)
        ScriptLauncher._started = started
        watch = threading.Thread(target=_watch_children, args=(started,), daemon=True)
        watch.start()
        atexit.unregister(_end_script)
        atexit.register(_end_script)

    @classmethod
    def _end_job(cls) -> None:
        """The next job of a sweep begins, with ranks of its own; those of the last one come to their end."""
        started = cls._started
        assert started is not None
        failure = _end_ranks(started)
        started.guardian.dismiss()
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, (own, value) in started.restored.items():
            # Unless the next job has set it meanwhile.
            if os.environ.get(name) == own:
                del os.environ[name]
                os.environ.update({} if value is None else {name: value})
        cls._children, cls._stopped_by, cls._started, cls._failure = [], [], None, None
        cls._failed, cls.runs = False, 0
        if failure is not None:
            # The sweep goes on, as Hydra has it; its exit code tells.
            cls._former_failure = cls._former_failure or failure
            tell(failure, world_size=started.world_size, log=None)


@dataclass
class _Started:
    """Ranks of this machine that this process has started.

    Args:
        job: of Hydra, whose other jobs they take no part in.
        restored: the variables of rank 0: what they are and what they were.
    """

    ranks: supervise.Ranks
    world_size: int
    guardian: Guardian
    job: tuple[str, int | None] | None
    restored: dict[str, tuple[str, str | None]]
    done: threading.Event = field(default_factory=threading.Event)


def script_command() -> list[str]:
    """The command that runs this process's script once more.

    Raises:
        LaunchError: there is no script.
    """
    main = sys.modules["__main__"]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return [sys.executable, *flags, "-m", spec.name.removesuffix(".__main__"), *hydra_job.arguments(sys.argv[1:])]
    file = getattr(main, "__file__", None)
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "get_ipython")
    if interactive or file is None or not Path(file).is_file():
        where = "a notebook or an interactive session" if interactive else "`python -c` or standard input"
        raise LaunchError(
            f"this program comes from {where}, so there is no script that further processes could run. Save it as a "
            f"file and run that (alone, or with torchrun), use `lightning-3d train`, or set Trainer(devices=1)."
        )
    return [sys.executable, *flags, str(Path(file).absolute()), *hydra_job.arguments(sys.argv[1:])]


def _report_uncaught_exceptions() -> None:
    """What comes after a run is told as well: a save at SIGTERM that fails, the script's own mistakes."""
    before = sys.excepthook
    if supervise.REPORT_VARIABLE not in os.environ or getattr(before, "reports", False):
        return

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        ScriptLauncher._note(error)
        with contextlib.suppress(KeyboardInterrupt):
            before(kind, error, trace)
        # Ctrl-C is no Exception, and reported by nobody.
        with contextlib.suppress(type(error)), supervise.report_errors():
            raise error

    note.reports = True  # type: ignore[attr-defined]
    sys.excepthook = note


def _watch_children(started: _Started) -> None:
    """In the first rank: when one fails, end the job, also when this one hangs in a collective or in its unwinding."""
    ranks, done = started.ranks, started.done
    while not done.wait(supervise.POLL_SECONDS * 4):
        failure = ranks.failure(stopped_by=ScriptLauncher._stopped_by)
        if failure is None or done.is_set():
            continue
        ScriptLauncher._failure = None if _interrupted() else failure
        supervise.end(ScriptLauncher._children, grace_seconds=supervise.FAILURE_GRACE_SECONDS)
        if not done.wait(UNWIND_SECONDS):
            if started.job is not None and hydra_job.identity() != started.job:
                # Hydra has ended the job, and may be in the next one.
                return
            own = failure.traceback if failure.rank == ranks.first_rank else ""
            _exit(failure, world_size=started.world_size, before=own)
        return


def _interrupted() -> bool:
    # Python notes an exception before it calls the hook for it: torch's, and then ours, which Ctrl-C may interrupt.
    return ScriptLauncher._interrupted or isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)


def _exit(failure: Failure, *, world_size: int, before: str = "") -> None:
    def say() -> None:
        if before:
            print(before, file=sys.stderr)
        if ScriptLauncher._failure is not None or not _interrupted():
            tell(failure, world_size=world_size, log=None)

    try:
        attempt(say, seconds=2.0)
        flush()
        ScriptLauncher.dismiss_guardian()
    finally:
        os._exit(failure.exit_code)


def _end_script() -> None:
    """At the first rank's end: let the others finish, but leave none behind and end with an error if one failed."""
    started = ScriptLauncher._started
    if started is None:
        return
    try:
        failure = _end_ranks(started)
        if failure is not None:
            # Told last, after this rank's own complaint about it; and an error even where the script has caught that.
            _exit(failure, world_size=started.world_size)
        ScriptLauncher.dismiss_guardian()
        if ScriptLauncher._former_failure is not None:
            flush()
            os._exit(ScriptLauncher._former_failure.exit_code)
    except KeyboardInterrupt:
        # Nobody waits for them any longer.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        started.done.set()
        supervise.end(ScriptLauncher._children, grace_seconds=0.0)
        flush()
        ScriptLauncher.dismiss_guardian()
        os._exit(128 + signal.SIGINT)


def _end_ranks(started: _Started) -> Failure | None:
    """Wait for the others, which have come as far as this one; what one failed of, if it did."""
    ranks, failed, stopped_by = started.ranks, ScriptLauncher._failed, ScriptLauncher._stopped_by
    seconds = supervise.FAILURE_GRACE_SECONDS if failed and not stopped_by else supervise.EXIT_SECONDS
    deadline = time.monotonic() + seconds
    failure = ScriptLauncher._failure
    while failure is None and None in ranks.codes()[1:] and time.monotonic() < deadline:
        time.sleep(supervise.POLL_SECONDS)
        failure = ranks.failure(stopped_by=stopped_by)
    started.done.set()
    failure = ScriptLauncher._failure or failure or ranks.failure(stopped_by=stopped_by)
    if failure is None and not failed:
        failure = ranks.late()
    supervise.end(ScriptLauncher._children, grace_seconds=supervise.FAILURE_GRACE_SECONDS)
    return failure
