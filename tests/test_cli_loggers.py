"""Loggers of a run: one or several by name, which keep what an earlier start of the run has logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from lightning_3d.cli import main, worker
from lightning_3d.cli.build import build_trainer
from lightning_3d.cli.job import plan
from lightning_3d.cli.loggers import build_csv_logger


def test_metrics_of_a_resumed_run_are_kept_beside_the_new_ones(tmp_path: Path) -> None:
    for step in range(3):
        logger = build_csv_logger(tmp_path)
        logger.log_metrics({"loss": float(step)}, step=step)
        logger.save()
    names = ("metrics.1.csv", "metrics.2.csv", "metrics.csv")
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == sorted(names)
    assert [(tmp_path / "csv" / name).read_text().splitlines()[1] for name in names] == ["0.0,0", "1.0,1", "2.0,2"]


RECIPE = """
defaults:
  - base
  - strategy: 3d
  - model: digits_mlp
  - data: digits
  - trainer: default
  - callbacks: default
  - _self_

name: mine

logger:
  first: &csv
    _target_: lightning_3d.cli.loggers.build_csv_logger
    save_dir: ${run_dir}
    name: first
  second:
    <<: *csv
    name: second
  third: null
"""
ARGUMENTS = ["recipe=mine.yaml", "layout=single", "trainer.max_steps=1", "trainer.accelerator=cpu"]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


def test_several_loggers_by_name_are_all_of_them_loggers_of_the_run(recipe: Path) -> None:
    trainer = build_trainer(plan(ARGUMENTS).config)
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    assert [logger.name for logger in loggers] == ["first", "second"]
    assert any(isinstance(callback, LearningRateMonitor) for callback in trainer.callbacks)


def test_every_one_of_several_loggers_has_the_settings_of_the_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning.Trainer.fit", stop)
    logged: list[str] = []
    monkeypatch.setattr(CSVLogger, "log_hyperparams", lambda logger, settings: logged.append(str(logger.name)))
    with pytest.raises(KeyboardInterrupt):
        worker.run(plan(ARGUMENTS).config)
    assert logged == ["first", "second"]


def test_folder_of_any_of_several_loggers_that_cannot_be_written_is_told_before_the_start(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe / "taken").write_text("a file")
    assert main(["train", *ARGUMENTS, "logger.second.save_dir=taken"]) == 2
    assert "logger.second.save_dir=taken" in capsys.readouterr().err


def test_settings_of_any_of_several_loggers_are_checked(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *ARGUMENTS, "logger.second.flush_logs_every_n_steps=0"]) == 2
    assert "logger.second.flush_logs_every_n_steps=0 is not a whole number from 1 on" in capsys.readouterr().err


def test_folder_that_describes_no_logger_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *ARGUMENTS, "~logger.second._target_"]) == 2
    assert "logger.second has no _target_" in capsys.readouterr().err
