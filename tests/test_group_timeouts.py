"""`timeout_seconds` holds for every process group of a job, whoever made it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Rows, TinyGPT
from training import ordered, run

from lightning_3d import Layout, ThreeDStrategy

pytestmark = pytest.mark.distributed


class Groups(L.Callback):
    """The timeouts of all groups that a rank is in, by name, as they are in the middle of the run."""

    def __init__(self) -> None:
        self.timeouts: dict[str, timedelta] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        groups: Any = dist.distributed_c10d._world.pg_map
        for group in groups:
            backend = group._get_backend(group._device_types[0])
            self.timeouts[f"{group.group_desc} {group.group_name}"] = backend.options._timeout


def train(layout: str, folder: Path) -> dict[str, timedelta]:
    L.seed_everything(1, verbose=False)
    parsed = Layout.parse(layout)
    groups = Groups()
    trainer = L.Trainer(
        accelerator="cpu", devices=parsed.world_size, max_steps=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[groups, ModelCheckpoint(folder, every_n_train_steps=1)],
        strategy=ThreeDStrategy(**parsed.as_dict(), timeout_seconds=7200, async_checkpoint=True),
    )  # fmt: skip
    # Tied, so that the first and the last stage have a group of their own.
    trainer.fit(TinyGPT(lazy=True), ordered(Rows(), replicas=parsed.data))
    return groups.timeouts


@pytest.mark.parametrize("layout", ["zero2x2-pp2", "hsdp2x2", "tp2"])
def test_every_group_waits_as_long_as_the_job(layout: str, tmp_path: Path) -> None:
    for timeouts in run(layout, train, tmp_path):
        assert len(timeouts) > 2
        # The watchdog comes first: 30 s before a collective gives up.
        assert set(timeouts.values()) == {timedelta(seconds=7230)}, timeouts
