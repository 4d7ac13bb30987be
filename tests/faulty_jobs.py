"""Jobs of several ranks in which one rank fails on purpose, started as users start them but by forks: no imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from modules import Rows, TinyGPT
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader
from training import ordered

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.checkpoint import optimizer_state, store, writing
from lightning_3d.strategies.processes import launch, script_launcher, supervise
from lightning_3d.strategies.processes.orphans import die_with_parent

PHASES = ("setup", "load", "forward", "schedule", "save", "validation", "teardown")
# Of a load: what it holds, its loops and callbacks, a rank's tensors, its random states, the module's own hook, and the
# optimizer's state.
LOADING = ("contents", "extra", "load", "random state", "hook", "optimizer")
KINDS = ("exception", "SIGKILL")
WORLD_SIZE = 4


def fail(kind: str) -> None:
    """Raise, die, or stop."""
    if kind == "exception":
        raise ValueError("the cause")
    if kind == "endless":
        endless()
    os.kill(os.getpid(), getattr(signal, kind))


def endless() -> None:
    while True:
        time.sleep(0.1)


@dataclass
class Fault:
    """What happens to one rank, and when.

    Args:
        phase: one of PHASES or of LOADING, or "loss": the step returns None; with any other nothing happens.
        kind: of KINDS, or "SIGSTOP", "endless", "slow".
        rank: -1 is all of them.
        seconds: how slow.
    """

    phase: str
    rank: int
    kind: str
    seconds: float = 0.0
    happened: bool = field(default=False, init=False)
    # Where its time is noted.
    folder: Path | None = field(default=None, init=False)

    def at(self, phase: str) -> None:
        if phase == self.phase and self.rank in (-1, int(os.environ.get("RANK", "0"))) and not self.happened:
            self.happened = True
            if self.folder is not None:
                (self.folder / "happened").touch()
            if self.kind == "slow":
                time.sleep(self.seconds)
            else:
                fail(self.kind)


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.fault.at("schedule")
        return gradient, None


class Model(TinyGPT):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        # Not an attribute of the module that pipelines would look through.
        self.__dict__["fault"] = fault

    def setup(self, stage: str) -> None:
        self.fault.at("setup")

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        if batch_idx == 2:
            if self.fault.phase == "loss" and self.fault.rank == int(os.environ.get("RANK", "0")):
                return None
            self.fault.at("forward")
        return super().training_step(rows, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            # Whatever stage this rank has: one of its blocks' outputs, in the backward.
            for block in self.model.layers:
                block.register_forward_hook(
                    lambda module, args, output: (
                        _FailsInBackward.apply(output, self.fault)
                        if isinstance(output, torch.Tensor) and output.requires_grad
                        else None
                    )
                )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fault.at("hook")

    def validation_step(self, rows: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.fault.at("validation")
        super().validation_step(rows, batch_idx)

    def teardown(self, stage: str) -> None:
        self.fault.at("teardown")


class Slow(L.Callback):
    """Steps of which a signal hits one, on ranks that are out of step; rank 0 tells when the first is done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        (self.folder / f"step-{trainer.global_rank}").write_text(str(trainer.global_step))
        time.sleep(0.05 * (1 + trainer.global_rank))


def train(
    fault: Fault,
    folder: Path,
    *,
    layout: str,
    timeout_seconds: float,
    ckpt_path: Path | None = None,
    async_checkpoint: bool = False,
    **settings: Any,
) -> None:
    """A small run with validation and a checkpoint, as a user's script has it.

    Args:
        ckpt_path: to go on from.
    """
    note_pid(folder)
    fault.folder = folder
    if "RANK" in os.environ:
        fault.at("start")
    L.seed_everything(1, verbose=False)
    rank_file = writing.rank_file

    def failing(rank: int) -> str:
        fault.at("save")
        return rank_file(rank)

    # Between a rank's tensors and its random states.
    writing.rank_file = failing
    fail_in_load(fault)
    parsed = Layout.parse(layout)
    arguments: dict[str, Any] = {
        "devices": parsed.world_size,
        "default_root_dir": folder,
        "max_steps": 6,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
        "callbacks": [L.pytorch.callbacks.ModelCheckpoint(folder / "checkpoints", every_n_train_steps=4)],
        **settings,
    }
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=ThreeDStrategy(**parsed.as_dict(), timeout_seconds=timeout_seconds, async_checkpoint=async_checkpoint),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )
    trainer.fit(Model(fault), *(loader(parsed) for _ in range(2)), ckpt_path=ckpt_path)


def fail_in_load(fault: Fault) -> None:
    """Before each of LOADING, but for the hook."""

    def failing(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fault.at(phase)
            return function(*args, **kwargs)

        return call

    store.saved_tensors = failing("contents", store.saved_tensors)
    store.load_extra = failing("extra", store.load_extra)
    FileSystemReader.read_data = failing("load", FileSystemReader.read_data)  # type: ignore[method-assign]
    store.load_rank_state = failing("random state", store.load_rank_state)
    optimizer_state.restore_ = failing("optimizer", optimizer_state.restore_)


def save_one(folder: Path, *, layout: str) -> Path:
    """A checkpoint of a run without a fault."""
    body = partial(train, Fault("none", 0, "none"), folder, layout=layout, timeout_seconds=60)
    ended = Job(body, how="script", folder=folder, world_size=Layout.parse(layout).world_size).wait()
    assert ended.code == 0, ended.errors
    (checkpoint,) = store.committed(folder / "checkpoints")
    return Path(str(checkpoint))


def loader(layout: Layout) -> DataLoader:
    return ordered(Rows(), replicas=layout.data)


def note_pid(folder: Path) -> None:
    (folder / f"pid-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Args:
        code: exit code; negative for a signal.
        seconds: it took.
        errors: what its processes wrote to stderr, all of them.
        alive: pids that still ran two seconds later.
    """

    code: int
    seconds: float
    errors: str
    alive: list[int]


class Job:
    """A job in a fork of this process, which starts its ranks as `Trainer(strategy="3d")` or the command line do.

    Args:
        body: what each rank runs.
        how: "script" or "ranks".
        folder: for its output.
    """

    def __init__(self, body: Callable[[], Any], *, how: str, folder: Path, world_size: int = WORLD_SIZE) -> None:
        self.folder = folder
        self.start = time.monotonic()
        self._errors = folder / "errors"
        self.pid = os.fork()
        if self.pid == 0:
            self._run(body, how, world_size)

    def _run(self, body: Callable[[], Any], how: str, world_size: int) -> None:
        code = 1
        try:
            os.setsid()
            output = os.open(self._errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 2)
            os.dup2(output, 1)
            sys.stderr, sys.stdout = os.fdopen(2, "w", buffering=1), os.fdopen(1, "w", buffering=1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", supervise.REPORT_VARIABLE):
                os.environ.pop(name, None)
            forks = _forking(body)
            if how == "ranks":
                launch.subprocess = forks  # type: ignore[assignment]
                code = launch.start_ranks(["rank"], world_size=world_size, log_dir=self.folder / "logs").exit_code
            else:
                script_launcher.subprocess = forks  # type: ignore[assignment]
                script_launcher.script_command = lambda: ["rank"]
                code = _as_script(body)
        finally:
            os._exit(code)

    def kill(self, sig: int, *, to: str) -> None:
        """Send a signal to the first process, to "rank N", or to "all" as a terminal does."""
        if to == "all":
            os.killpg(self.pid, sig)
        else:
            os.kill(self.pid if to == "first" else self.pids()[int(to.removeprefix("rank "))], sig)

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.folder.glob("pid-*"))]

    def wait(self, *, seconds: float = 60.0) -> Ended:
        deadline = time.monotonic() + seconds
        status = 0
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"the job still ran after {seconds} s:\n{self._errors.read_text()}")
            time.sleep(0.05)
        took = time.monotonic() - self.start
        limit = time.monotonic() + 2.0
        while (alive := [pid for pid in self.pids() if runs(pid)]) and time.monotonic() < limit:
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(status)
        # For the last word of a process that outlives rank 0; where it was killed there is one, at most seconds later.
        time.sleep(0.7)
        limit = time.monotonic() + 5.0
        while code < 0 and "were ended" not in self._errors.read_text() and time.monotonic() < limit:
            time.sleep(0.05)
        return Ended(code, took, self._errors.read_text(), alive)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _forking(body: Callable[[], Any]) -> Any:
    """The module `subprocess`, but its processes are forks that run `body`."""

    class Forked:
        DEVNULL, STDOUT = subprocess.DEVNULL, subprocess.STDOUT
        _args_from_interpreter_flags = staticmethod(subprocess._args_from_interpreter_flags)  # type: ignore[attr-defined]

        class Popen(supervise.ForkedProcess):
            def __init__(self, command: list[str], *, env: dict[str, str], stdout: Any = None, **_: Any) -> None:
                pid = os.fork()
                if pid == 0:
                    die_with_parent()
                    for name in list(sys.modules["signal"].Signals):
                        if name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                            signal.signal(name, signal.SIG_DFL if name != signal.SIGINT else signal.default_int_handler)
                    os.environ.clear()
                    os.environ.update(env)
                    if stdout is not None:
                        os.dup2(stdout.fileno(), 1)
                        os.dup2(stdout.fileno(), 2)
                    os._exit(_as_script(body))
                super().__init__(pid)

    return Forked


def _as_script(body: Callable[[], Any]) -> int:
    """What the interpreter does with a script: its exit code, its traceback, what was registered for its end."""
    import atexit

    code = 0
    atexit._clear()
    torch.set_num_threads(1)
    try:
        body()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    # FOLDER PHASE RANK KIND SETTINGS (of `train`, as JSON; or until_stopped), started as a script or by torchrun.
    place, settings = Path(sys.argv[1]), json.loads(sys.argv[5])
    if settings.pop("until_stopped", False):
        checkpoint = L.pytorch.callbacks.ModelCheckpoint(place / "checkpoints", save_on_exception=True)
        settings |= {"max_steps": 10_000, "val_check_interval": None, "callbacks": [checkpoint, Slow(place)]}
    train(Fault(sys.argv[2], int(sys.argv[3]), sys.argv[4]), place, layout="zero1x2-pp2", **settings)
