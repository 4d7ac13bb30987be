"""One rank of one run: ``python -m benchmarks.rank CONTENDER LAYOUT STEPS BATCH TIMEOUT_SECONDS FOLDER``."""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.contenders import CASES
from benchmarks.job import Clock, Job
from lightning_3d.layout import Layout


@dataclass(frozen=True)
class RankResult:
    """What a rank reports; memory is that of the process, in bytes."""

    wall_seconds: list[float]
    cpu_seconds: list[float]
    losses: list[float | None]
    imported_bytes: int
    peak_bytes: int


def main(contender: str, name: str, steps: str, batch: str, timeout_seconds: str, folder: str) -> None:
    faulthandler.dump_traceback_later(float(timeout_seconds), exit=True)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(CASES[name].threads)
    rank = int(os.environ["RANK"])
    job = Job(Layout.parse(name), steps=int(steps), batch=int(batch), rank=rank)
    module = importlib.import_module(CASES[name].contenders[contender])
    imported = _status_bytes("VmRSS")
    clock = Clock()
    if contender != "ours" and job.layout.world_size > 1:
        dist.init_process_group("gloo")
    module.train(job, clock)
    result = RankResult(clock.wall_seconds, clock.cpu_seconds, clock.losses, imported, _status_bytes("VmHWM"))
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(asdict(result)))
    if dist.is_initialized():
        dist.destroy_process_group()


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main(*sys.argv[1:])
