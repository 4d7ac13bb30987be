"""Kill a training run at random moments, again and again: it always goes on from a whole checkpoint, near its end.

Half of the kills come while a checkpoint is being saved, half while none is. Each round forks the ranks of a layout
anew, resumes with ckpt_path="last", trains, and ends by SIGKILL to all ranks, or to one and then to the others.

    python tests/soak_checkpoints.py --kills 100 [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Rows, TinyGPT
from training import ordered, trainer_for

from lightning_3d import Layout, ThreeDStrategy
from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.places import Place
from lightning_3d.strategies.processes.launch import free_port, rank_environment

EVERY = 3
# The two best and the last; one that has just come, and one that is about to go.
KEPT = 5
# Each with ranks that write at once; in the background a save may be under way while the next is due.
LAYOUTS = [("zero3x2", False), ("tp2", False), ("zero1x2", True), ("pp2", True)]
ROUND_SECONDS = 120.0


class Tell(L.Callback):
    """The step that rank 0 started from, and those it has finished, in a file that a kill cannot tear."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._tell(trainer, "start")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._tell(trainer, "done")

    def _tell(self, trainer: L.Trainer, what: str) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{what} {trainer.global_step}\n")


def train(layout: str, in_background: bool, folder: Path, told: Path, slow: float) -> None:
    """One rank; it never ends by itself."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        time.sleep(slow)
        real(descriptor)

    os.fsync = fsync
    L.seed_everything(1, verbose=False)
    parsed = Layout.parse(layout)
    saver = ModelCheckpoint(
        folder, filename="{step}", monitor="train_loss", save_top_k=2, save_last=True, every_n_train_steps=EVERY
    )
    trainer = trainer_for(
        layout,
        max_steps=-1,
        max_epochs=-1,
        callbacks=[Tell(told), saver],
        enable_checkpointing=True,
        strategy=ThreeDStrategy(**parsed.as_dict(), async_checkpoint=in_background, timeout_seconds=60),
    )
    trainer.fit(TinyGPT(lazy=True), ordered(Rows(), replicas=parsed.data), ckpt_path="last")


def start(layout: str, *args: Any) -> list[int]:
    world_size, port = Layout.parse(layout).world_size, free_port()
    sys.stdout.flush()
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(rank_environment(rank, world_size=world_size, address="127.0.0.1", port=port))
            torch.set_num_threads(1)
            output = os.open(f"{args[2]}.rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                train(layout, *args)
            finally:
                os._exit(1)
        pids.append(pid)
    return pids


def kill(pids: list[int], *, one_first: bool) -> None:
    if one_first:
        os.kill(random.choice(pids), signal.SIGKILL)
        time.sleep(random.random() * 0.3)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def steps_in(told: Path, what: str) -> list[int]:
    if not told.exists():
        return []
    return [int(line.split()[1]) for line in told.read_text().splitlines() if line.startswith(what)]


def is_saving(folder: Path) -> bool:
    return any(folder.glob(".*.saving"))


def wait_for(moment: str, folder: Path, told: Path, pids: list[int]) -> None:
    """Until some steps are done, then until a save is, or is not, under way; then a little longer."""
    deadline, enough = time.monotonic() + ROUND_SECONDS, random.randint(1, 2 * EVERY + 2)
    while len(steps_in(told, "done")) < enough:
        check_alive(pids, told, deadline)
        time.sleep(0.005)
    while is_saving(folder) != (moment == "save"):
        check_alive(pids, told, deadline)
    if moment == "save":
        time.sleep(random.random() * 0.03)


def check_alive(pids: list[int], told: Path, deadline: float) -> None:
    if time.monotonic() > deadline or any(os.waitpid(pid, os.WNOHANG)[0] for pid in pids):
        logs = "\n".join(path.read_text()[-3000:] for path in told.parent.glob(f"{told.name}.rank*"))
        raise SystemExit(f"a rank ended or got no further by itself:\n{logs}")


def check_readable(path: Place) -> None:
    saved = store.saved_tensors(path)
    state = {k: torch.empty(v.size, dtype=v.properties.dtype) if hasattr(v, "size") else None for k, v in saved.items()}
    store.load_tensors(path, state)
    store.load_extra(path)
    # All ranks' parts are of one step.
    counted = {int(value) for name, value in state.items() if name.endswith(".step") and value is not None}
    assert counted == {store.summary(path)["global_step"]}, f"{path} holds parts of steps {counted}"


def soak(folder: Path, kills: int) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    worst, most_kept = {False: 0, True: 0}, 0
    expected_start = dict.fromkeys(LAYOUTS, 0)
    for number in range(kills):
        moment = "save" if number % 2 else "training"
        kind = layout, in_background = LAYOUTS[number // 2 % len(LAYOUTS)]
        checkpoints, told = folder / f"{layout}-{in_background}" / "checkpoints", folder / f"told-{number}"
        checkpoints.mkdir(parents=True, exist_ok=True)
        pids = start(layout, in_background, checkpoints, told, 0.004 if moment == "save" else 0.0)
        wait_for(moment, checkpoints, told, pids)
        counts["in a save" if is_saving(checkpoints) else "in training"] += 1
        kill(pids, one_first=number % 4 > 1)

        started, done = steps_in(told, "start"), steps_in(told, "done")
        assert started == [expected_start[kind]], f"started from {started}, the last one was of {expected_start[kind]}"
        committed = store.committed(checkpoints)
        for path in committed:
            check_readable(path)
            counts["read"] += 1
        last = [path for path in committed if path.name.startswith("last")]
        names = sorted(path.name for path in committed)
        assert len(names) <= KEPT, f"{names} are kept, more than {KEPT}: what kills leave behind adds up"
        most_kept = max(most_kept, len(names))
        step = max((store.summary(path)["global_step"] for path in last), default=0)
        lost = max(done, default=0) - step
        limit = EVERY * (2 if in_background else 1)
        assert lost <= limit, f"{lost} steps were lost, more than {limit}, after {done} from {started}"
        worst[in_background] = max(worst[in_background], lost)
        expected_start[kind] = step
        print(f"{number + 1}/{kills} {layout} {moment}: done {max(done, default=0)}, goes on from {step}", flush=True)
    return {"kills": kills, **counts, "unreadable": 0, "most kept": most_kept, "most steps lost": worst[False],
            "most steps lost, in the background": worst[True], "steps done": sum(expected_start.values())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    random.seed(settings.seed)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(soak(Path(folder), settings.kills), indent=1))


if __name__ == "__main__":
    main()
