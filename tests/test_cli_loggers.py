"""Loggers of a run folder keep what an earlier start of the run has logged."""

from __future__ import annotations

from pathlib import Path

from lightning_3d.cli.loggers import build_csv_logger


def test_metrics_of_a_resumed_run_are_kept_beside_the_new_ones(tmp_path: Path) -> None:
    for step in range(3):
        logger = build_csv_logger(tmp_path)
        logger.log_metrics({"loss": float(step)}, step=step)
        logger.save()
    names = ("metrics.1.csv", "metrics.2.csv", "metrics.csv")
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == sorted(names)
    assert [(tmp_path / "csv" / name).read_text().splitlines()[1] for name in names] == ["0.0,0", "1.0,1", "2.0,2"]
