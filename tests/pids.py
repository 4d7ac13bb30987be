"""Processes that ranks are: their pids, and whether they are gone."""

import os
import time
from pathlib import Path


def is_running(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def assert_all_end(pids: list[int], *, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if is_running(pid)] == []


def note_pid(folder: Path) -> None:
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))


def noted_pids(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        pids = [int(text) for path in folder.iterdir() if path.name.isdigit() and (text := path.read_text())]
        if len(pids) == count:
            return pids
        time.sleep(0.05)
    raise AssertionError(f"{count} ranks did not start")
