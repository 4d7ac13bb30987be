"""Trains while processes are killed at random, resumes by itself, and compares with the same run undisturbed.

    python -m benchmarks.soak                           # about 30 minutes of kills, and the undisturbed run after them
    python -m benchmarks.soak --minutes 4 --every 25

Each disturbance is drawn: SIGKILL to a rank or to the command, SIGTERM to the command (which saves), SIGSTOP to a rank
(which the watchdogs find). The command must end within 30 s of it, SIGSTOP's timeout added, and leave no process; then
it is started once more with resume=auto. The effective-time ratio is the time that the undisturbed run takes over the
time that this one took, starts and lost steps included. The exit code is 1 if the final weights differ by a bit, or a
command did not end in time. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_3d.checkpoint import store

TOP = Path(__file__).resolve().parent.parent
END_SECONDS = 30.0
# Of a rank that waits for a stopped one.
TIMEOUT_SECONDS = 20
KINDS = ("kill rank", "kill command", "terminate command", "stop rank")


@dataclass
class Report:
    """What a soak found.

    Attributes:
        kills: of each kind.
        end_seconds: from each to the end of the last process.
        faults: what was not as it should be; unfinished: one of the runs did not come to its end.
        seconds: of the disturbed run; `undisturbed_seconds` of the other.
    """

    steps: int = 0
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    end_seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    undisturbed_seconds: float = 0.0
    unfinished: bool = False
    weights_equal: bool = False

    @property
    def effective_ratio(self) -> float:
        return self.undisturbed_seconds / self.seconds


class Command:
    """`lightning-3d train` in a process, with what it starts."""

    def __init__(self, folder: Path, *, steps: int, options: argparse.Namespace) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "lightning_3d", "train", f"recipe={options.recipe}", f"layout={options.layout}",
            "logger=none", "run_dir=run", "resume=auto", f"trainer.max_steps={steps}", "trainer.limit_val_batches=0",
            "trainer.enable_progress_bar=false", f"strategy.timeout_seconds={TIMEOUT_SECONDS}",
            f"callbacks.checkpoint.every_n_train_steps={options.save_every}",
        ]  # fmt: skip
        self.log = folder / "output"
        with self.log.open("a") as output:
            environment = {**os.environ, "PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)

    def ranks(self) -> list[int]:
        pid = self.process.pid
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="for which processes are killed")
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds between a start and a kill")
    parser.add_argument("--recipe", default="digits_mlp")
    parser.add_argument("--layout", default="zero3x2-pp2")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        report = soak(Path(folder), options)
    print_report(report)
    if options.out is not None:
        options.out.write_text(json.dumps({**asdict(report), "effective_ratio": report.effective_ratio}, indent=1))
    return 0 if report.weights_equal and not report.faults else 1


def soak(folder: Path, options: argparse.Namespace) -> Report:
    """Disturb for the time asked for, let the run come to an end, and compare it with one that nobody disturbs."""
    report, draw = Report(), random.Random(options.seed)
    start = time.monotonic()
    checkpoints = folder / "disturbed" / "run" / "checkpoints"
    # Without an end, as long as it is disturbed.
    while time.monotonic() - start < 60 * options.minutes:
        command = Command(folder / "disturbed", steps=-1, options=options)
        _sleep(command, 5.0 + draw.expovariate(1 / options.every))
        if command.process.poll() is not None:
            report.faults.append(f"a run ended by itself, with {command.process.returncode}: {_tail(command.log)}")
            break
        disturb(command, draw.choice(KINDS), draw=draw, report=report)
    # Then as far as the next step that both will save.
    newest = store.newest(checkpoints)
    done = 0 if newest is None else int(store.summary(newest)["global_step"])
    report.steps = (done // options.save_every + 1) * options.save_every
    _finish(folder / "disturbed", options=options, report=report)
    report.seconds = time.monotonic() - start
    start = time.monotonic()
    _finish(folder / "undisturbed", options=options, report=report)
    report.undisturbed_seconds = time.monotonic() - start
    if not report.unfinished:
        ends = [store.newest(folder / name / "run" / "checkpoints") for name in ("disturbed", "undisturbed")]
        report.weights_equal = None not in ends and equal_tensors(*ends)  # type: ignore[arg-type]
    return report


def disturb(command: Command, kind: str, *, draw: random.Random, report: Report) -> None:
    """Do it, and wait for the end of all processes."""
    ranks = command.ranks()
    targets = ranks if kind.endswith("rank") and ranks else [command.process.pid]
    sig = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}[kind.split()[0]]
    if not ranks and kind == "stop rank":
        kind, sig = "kill command", signal.SIGKILL
    report.kills[kind] += 1
    start = time.monotonic()
    os.kill(draw.choice(targets), sig)
    limit = END_SECONDS + (TIMEOUT_SECONDS if sig == signal.SIGSTOP else 0)
    everyone = [command.process.pid, *ranks]
    while any(map(_runs, everyone)) and time.monotonic() - start < limit:
        command.process.poll()
        time.sleep(0.05)
    report.end_seconds.append(time.monotonic() - start)
    for pid in filter(_runs, everyone):
        report.faults.append(f"{kind}: process {pid} still ran after {limit:.0f} s: {_tail(command.log)}")
        os.kill(pid, signal.SIGKILL)
    if command.process.wait() == 0:
        report.faults.append(f"{kind}: the command ended with 0")
    print(f"# {kind}: ended after {report.end_seconds[-1]:.1f} s", file=sys.stderr, flush=True)


def equal_tensors(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same weights and optimizer states, to the bit."""
    states = []
    for path in (one, other):
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype) if _is_tensor(entry) else None
            for name, entry in store.saved_tensors(path).items()
        }
        store.load_tensors(path, state)
        states.append(state)
    first, second = states
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        for name, value in first.items()
    )


def print_report(report: Report) -> None:
    print(f"steps: {report.steps}, disturbances: {sum(report.kills.values())} {report.kills}")
    if report.end_seconds:
        print(f"seconds to the end of all processes: {max(report.end_seconds):.1f} at most")
    print(f"seconds: {report.seconds:.0f}; undisturbed: {report.undisturbed_seconds:.0f}")
    print(f"effective-time ratio: {report.effective_ratio:.2f}")
    print(f"weights and optimizer states equal to the undisturbed run's: {report.weights_equal}")
    for fault in report.faults:
        print(f"FAULT {fault}")


def _finish(folder: Path, *, options: argparse.Namespace, report: Report) -> None:
    command = Command(folder, steps=report.steps, options=options)
    if command.process.wait() != 0:
        report.unfinished = True
        report.faults.append(f"the run did not come to its end: {_tail(command.log)}")


def _sleep(command: Command, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while command.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-5:])


if __name__ == "__main__":
    sys.exit(main())
