"""A folder in which every rank of a machine tells where it is; it can be read when a rank, or all of them, hang.

rank-N.where      what rank N's watchdog wrote last
rank-N.error      what it died of, where a process of ours started it (see `supervise`)
rank-N.left       it watches no more
NAME              said once for all: `hang`, `verdict`, `stop`; or, with the machine in its name, once on each

A folder that went, or a full disk, makes it mute, never an error: a run does not depend on what is said of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _machine() -> str:
    """Names this machine, or this container of it, as a file may be named: pids mean something only inside.

    Host names may be equal.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


MACHINE = _machine()
HOSTNAME = socket.gethostname()


@dataclass(frozen=True)
class Post:
    """What a rank says of itself.

    Args:
        time: of the post, in seconds since the epoch.
        coordinates: in the mesh, by axis, where there is more than one place on it.
        where: phase, batch and action, in words.
        place: the line of the user's code that it is in.
        still_seconds: since the main thread got on.
        waiting: whether the main thread waits for other ranks.
        awaits: ranks that a pipeline's action needs.
        sequence: collectives begun, by group; a member whose number is lower has not come to the last one.
        failure: what its run died of; `failed_in` is where it was then, `failed_at` when (`time.time`).
        done: its run has ended, well or as agreed.
        host: its `MACHINE`; others cannot see its processes. `hostname` is for people.
        vote: see `AgreedStop`.
    """

    rank: int
    pid: int
    time: float
    coordinates: Mapping[str, int] = field(default_factory=dict)
    where: str = ""
    place: str = ""
    still_seconds: float = 0.0
    waiting: bool = False
    awaits: tuple[int, ...] = ()
    sequence: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""
    failed_in: str = ""
    failed_at: float = 0.0
    done: bool = False
    vote: int | None = None
    host: str = ""
    hostname: str = ""

    @property
    def name(self) -> str:
        """
        >>> Post(rank=2, pid=1, time=0.0, coordinates={"stage": 1, "data": 0}).name
        'rank 2 (stage 1, data 0)'
        """
        return f"rank {self.rank}{told(self.coordinates)}"


def told(coordinates: Mapping[str, int]) -> str:
    """Coordinates in words, with a space before; nothing where there are none."""
    return f" ({', '.join(f'{axis} {place}' for axis, place in coordinates.items())})" if coordinates else ""


def on_host(post: Post, posts: Mapping[int, Post]) -> str:
    """A rank's machine in words, with a space before; nothing where all are on one."""
    return f" on {post.hostname}" if len({other.host for other in posts.values()}) > 1 else ""


class Board:
    """The folder.

    Args:
        folder: of the job, seen by all its ranks on this machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post(self, post: Post) -> None:
        self._write(f"rank-{post.rank}.where", json.dumps(vars(post)))

    def read(self, rank: int) -> Post | None:
        text = self.said(f"rank-{rank}.where")
        if not text:
            return None
        values: dict[str, Any] = json.loads(text)
        return Post(**{**values, "awaits": tuple(values["awaits"])})

    def leave(self, rank: int) -> None:
        """The rank watches no more, nor do dead ones of this machine, which others cannot know."""
        self._write(f"rank-{rank}.left", "")
        for path in self.folder.glob("rank-*.where"):
            post = self.read(int(path.stem.removeprefix("rank-")))
            if post is not None and _dead(post):
                self._write(f"rank-{post.rank}.left", "")

    def left(self, rank: int) -> bool:
        return self.said(f"rank-{rank}.left") is not None

    def deserted(self, world_size: int) -> bool:
        """Whether no rank watches: all have left, or are dead."""
        return all(
            self.left(rank) or ((post := self.read(rank)) is not None and _dead(post)) for rank in range(world_size)
        )

    def read_all(self, world_size: int) -> dict[int, Post]:
        return {rank: post for rank in range(world_size) if (post := self.read(rank)) is not None}

    def claim(self, name: str, text: str = "") -> bool:
        """Say something if nobody has; whether this was the first. False too where the folder can't be written."""
        path, partial = self.folder / name, self.folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            partial.write_text(text)
            try:
                # Whole and only once: a link, unlike a rename, does not replace.
                os.link(partial, path)
            except FileExistsError:
                return False
            except OSError:
                # A file system without links: only once, and whole a moment later.
                with path.open("x") as file:
                    file.write(text)
            finally:
                partial.unlink()
            return True
        return False

    def said(self, name: str) -> str | None:
        return _read(f"{self.folder}/{name}")

    def _write(self, name: str, text: str) -> None:
        partial = f"{self.folder}/.{name}.partial"
        with contextlib.suppress(OSError):
            with open(partial, "w") as file:
                file.write(text)
            os.replace(partial, f"{self.folder}/{name}")


def _dead(post: Post) -> bool:
    return post.host == MACHINE and not runs(post.pid)


def runs(pid: int) -> bool:
    """Whether a process of this machine runs; a stopped one does, one that is dead but not reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = _read(f"/proc/{pid}/stat")
    return stat is None or stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _read(path: str) -> str | None:
    """All of a file, None where there is none. Not by `Path`: a rank looks at many of these twice a second."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None
