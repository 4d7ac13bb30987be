"""A small process that outlives rank 0 of a script: tells that it was killed, ends its ranks, removes their folder.

It ends rank 0 too where all ranks of this machine are stopped, and those of another have judged.

The kernel ends those on Linux. But nobody would say why: rank 0 was their supervisor. This file is run by itself, with
nothing but the standard library, so that it costs milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# What rank 0 writes before it ends by itself.
GOODBYE = b"."
# For the kernel's own signal to arrive.
_SECONDS = 0.5
# For ranks to end by themselves once the end of the job is decided.
_LEAVE_SECONDS = 10.0


class Guardian:
    """Starts the process, which watches this one.

    Args:
        children: pids of the other ranks of this machine.
        folder: where ranks post what they are in; it is removed at the end.
        rank: this one's number in the job, 0 on the first machine.
        world_size: of the job.
    """

    def __init__(self, children: Sequence[int], *, folder: Path, rank: int, world_size: int) -> None:
        # Not where this file is run by itself.
        from lightning_3d.strategies.processes.failures import LOST

        reading, self._pipe = os.pipe()
        arguments = [json.dumps(LOST), str(reading), str(folder), str(rank), str(world_size), *map(str, children)]
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *arguments],
            pass_fds=[reading],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Ctrl-C is for the ranks.
            start_new_session=True,
        )
        os.close(reading)

    def dismiss(self) -> None:
        """This process ends by itself, and has ended the others."""
        with contextlib.suppress(OSError):
            os.write(self._pipe, GOODBYE)
            os.close(self._pipe)


def watch(
    pipe: int, folder: Path, rank: int, world_size: int, children: Sequence[int], *, effects: Sequence[str] = ()
) -> None:
    """Wait for the end of the parent, which holds the other end of `pipe`; so may forks of it, a loader's workers.

    Args:
        effects: words of errors by which other ranks tell that they have lost this one.
    """
    parent = os.getppid()
    decided_at: float | None = None
    while os.getppid() == parent:
        verdicts = list(folder.glob("run-*/verdict"))
        if verdicts:
            decided_at = decided_at or time.monotonic()
            if time.monotonic() - decided_at > _LEAVE_SECONDS and stopped(parent):
                print(verdicts[-1].read_text(), file=sys.stderr, flush=True)
                os.kill(parent, signal.SIGKILL)
                break
        if select.select([pipe], [], [], _SECONDS)[0]:
            if os.read(pipe, 1) == GOODBYE:
                return
            break
    posts = sorted(folder.glob(f"run-*/rank-{rank}.where"))
    errors = [json.loads(path.read_text())["error"] for path in folder.glob("rank-*.error")]
    causes = [error for error in errors if not any(word in error for word in effects)]
    known = bool(causes) or any(folder.glob("run-*/verdict"))
    last = json.loads(posts[-1].read_text()) if posts else {}
    if not known:
        # As the supervisors say it, of which this file may import nothing.
        place = ", ".join(f"{axis} {number}" for axis, number in last.get("coordinates", {}).items())
        where = f"; last seen in {last['where']}{f' ({place})' if place else ''}" if last else ""
        told = f"rank {rank} of {world_size} was killed by a signal or os._exit{where}. The other ranks were ended."
        print(told, file=sys.stderr, flush=True)
    time.sleep(_SECONDS)
    for child in children:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def stopped(pid: int) -> bool:
    """Whether a process is, so that it ends by no other signal than SIGKILL; False where there is no /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def remove(folder: Path, children: Sequence[int]) -> None:
    """Once the ranks are gone, which may write into it."""
    for _ in range(20):
        if not any(Path(f"/proc/{child}").exists() for child in children):
            break
        time.sleep(_SECONDS)
    for _ in range(3):
        # What was written into it meanwhile stops that.
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(_SECONDS)


if __name__ == "__main__":
    words, place = json.loads(sys.argv[1]), Path(sys.argv[3])
    numbers = [int(number) for number in sys.argv[4:]]
    try:
        watch(int(sys.argv[2]), place, numbers[0], numbers[1], numbers[2:], effects=words)
    finally:
        remove(place, numbers[2:])
