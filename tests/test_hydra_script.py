"""A script of `hydra.main` whose Trainer starts its ranks: they run the job that it runs, in its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_3d.checkpoint import store

pytestmark = pytest.mark.distributed

SCRIPT = """
import json, logging, os, sys, time
from pathlib import Path
import hydra, torch
import lightning as L
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

class Net(L.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.net = cfg, torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if self.cfg.fails == HydraConfig.get().job.get("num") and self.global_rank == 1:
            raise ValueError("the cause")
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.cfg.lr)

@hydra.main(version_base=None, config_path=None, config_name=None)
def main(cfg):
    number = HydraConfig.get().job.get("num")
    if cfg.get("wait") and number == 1:
        time.sleep(cfg.wait)
    cfg = OmegaConf.merge({"seed": 1, "lr": 0.1, "note": "", "fails": -1}, cfg)
    L.seed_everything(cfg.seed, verbose=False)
    out = HydraConfig.get().runtime.output_dir
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="3d", max_steps=2, logger=False, default_root_dir=out,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ModelCheckpoint(Path(out, "checkpoints"))],
    )
    trainer.fit(Net(cfg), DataLoader(torch.randn(8, 4), batch_size=2))
    told = {"config": OmegaConf.to_container(cfg), "folder": os.getcwd(), "out": out}
    if cfg.get("mistake", -1) == number:
        {}["a metric that is not there"]
    Path(out, f"rank-{trainer.global_rank}.json").write_text(json.dumps(told))
    logging.getLogger().info("rank %s is done", trainer.global_rank)

main()
"""


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "job.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


def told_by_ranks(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]


def test_each_job_of_a_sweep_has_ranks_of_its_own_with_its_config_in_its_folder(tmp_path: Path) -> None:
    done = start(tmp_path, "-m", "+seed=1,2", "+note='a b=c'", "hydra.job.chdir=true")
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "multirun.yaml"]
    for job, seed in (("0", 1), ("1", 2)):
        config = {"seed": seed, "lr": 0.1, "note": "a b=c", "fails": -1}
        expected = {"config": config, "folder": str(sweep / job), "out": str(sweep / job)}
        assert told_by_ranks(sweep / job) == [expected, expected]
        assert [path.name for path in store.committed(sweep / job / "checkpoints")] == ["epoch=0-step=2.ckpt"]
    # No rank runs the sweep anew.
    assert done.stdout.count("Launching 2 jobs") == 1


def test_ranks_of_a_single_job_have_its_folder_which_is_named_by_the_time(tmp_path: Path) -> None:
    done = start(tmp_path, "+lr=0.5", "hydra.run.dir='runs/it\\'s ${now:%H-%M-%S-%f}'")
    assert done.returncode == 0, done.stderr
    (out,) = (tmp_path / "runs").iterdir()
    first, second = told_by_ranks(out)
    assert first == second and first["config"]["lr"] == 0.5 and first["folder"] == str(tmp_path)


@pytest.mark.slow
def test_job_that_fails_on_one_rank_does_not_keep_the_next_one_from_its_ranks(tmp_path: Path) -> None:
    done = start(tmp_path, "-m", "+seed=1,2", "+fails=0")
    assert done.returncode != 0 and "rank 1 of 2 raised ValueError: the cause" in done.stderr, done.stderr
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    assert [len(told_by_ranks(sweep / job)) for job in ("0", "1")] == [0, 2]


@pytest.mark.slow
def test_next_job_may_take_its_time_after_one_that_failed(tmp_path: Path) -> None:
    # Longer than a run has to unwind.
    done = start(tmp_path, "-m", "+seed=1,2", "+fails=0", "+wait=14")
    assert done.returncode != 0 and done.stderr.count("rank 1 of 2 raised ValueError: the cause") == 1, done.stderr
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    assert [len(told_by_ranks(sweep / job)) for job in ("0", "1")] == [0, 2]


@pytest.mark.slow
def test_mistake_of_the_script_after_a_run_is_its_own_job_s(tmp_path: Path) -> None:
    done = start(tmp_path, "-m", "+seed=1,2,3", "+mistake=0")
    assert done.returncode != 0 and "a metric that is not there" in done.stderr, done.stderr
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    assert [len(told_by_ranks(sweep / job)) for job in "012"] == [0, 2, 2]


@pytest.mark.slow
def test_jobs_of_one_folder_have_ranks_of_their_own(tmp_path: Path) -> None:
    done = start(tmp_path, "-m", "+seed=1,2", "hydra.sweep.dir=all", "hydra.sweep.subdir=.", "hydra.output_subdir=null")
    assert done.returncode == 0, done.stderr
    assert [told["config"]["seed"] for told in told_by_ranks(tmp_path / "all")] == [2, 2]


LOGGED = """
hydra:
  job_logging:
    handlers:
      file:
        filename: ${hydra.runtime.output_dir}/mine.log
"""

SWEPT = """
seed: 1
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      seed: 1,2
"""


@pytest.mark.slow
def test_a_log_of_the_user_s_is_written_by_one_rank(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(LOGGED)
    done = start(tmp_path, "-cd", ".", "-cn", "c", "hydra.run.dir=out", "hydra.job_logging.root.level=INFO")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "out" / "mine.log").read_text()
    assert "rank 0 is done" in log and "rank 1" not in log
    assert len(told_by_ranks(tmp_path / "out")) == 2


@pytest.mark.slow
def test_ranks_do_not_sweep_where_the_config_says_so(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(SWEPT)
    done = start(tmp_path, "--config-dir", ".", "--config-name", "c")
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    for job, seed in (("0", 1), ("1", 2)):
        assert [told["config"]["seed"] for told in told_by_ranks(sweep / job)] == [seed, seed]
    assert done.stdout.count("Launching") == 1
