"""What every rank of ``lightning-3d train`` runs: the whole run, from one resolved config."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.cli import run_folder
from lightning_3d.cli.build import build, build_trainer
from lightning_3d.errors import Lightning3DError
from lightning_3d.layout import Layout
from lightning_3d.strategies.processes.supervise import report_errors, reported


def run(config: Mapping[str, Any]) -> None:
    """Train, and tell the result on rank 0."""
    L.seed_everything(config["seed"], workers=True, verbose=False)
    # Hints at Lightning's other products, and its own use of what torch has deprecated.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "litlogger" not in str(record.msg)
    )
    trainer = build_trainer(config)
    # Last, so that it sees what the others have saved.
    trainer.callbacks.append(SaveLastStep())  # type: ignore[attr-defined]
    model, data = build(config["model"]), build(config["data"])
    # Storage options may be keys to a bucket.
    strategy = {key: value for key, value in config["strategy"].items() if key != "storage_options"}
    for logger in trainer.loggers:
        logger.log_hyperparams({**config, "strategy": strategy, "layout": _layout_name(trainer)})
    try:
        trainer.fit(model, datamodule=data, ckpt_path=config["resume"])
        if trainer.is_global_zero:
            _tell_result(trainer, data, run_dir=config["run_dir"])
    finally:
        _finish_wandb(failed=sys.exc_info()[0] is not None)


class SaveLastStep(L.Callback):
    """Has a run's last step saved as "last" where it is none at which the ModelCheckpoints save."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for saver in trainer.checkpoint_callbacks:
            if not isinstance(saver, ModelCheckpoint) or not saver.save_last:
                continue
            if saver._last_global_step_saved >= trainer.global_step:
                continue
            metrics = saver._monitor_candidates(trainer)
            if saver.save_last == "link":
                # It points to one that was saved under a name of its own, be it among the best or not.
                if saver.monitor is None or saver.monitor in metrics:
                    saver._save_topk_checkpoint(trainer, metrics)
                if saver._last_global_step_saved < trainer.global_step:
                    saver._save_checkpoint(trainer, saver.format_checkpoint_name(metrics))
            saver._save_last_checkpoint(trainer, metrics)


def _layout_name(trainer: L.Trainer) -> str:
    layout = getattr(trainer.strategy, "layout", None)
    return layout.name if isinstance(layout, Layout) else type(trainer.strategy).__name__


def _tell_result(trainer: L.Trainer, data: Any, *, run_dir: str) -> None:
    """Print the result, and keep it in the run folder."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    run_folder.write_result(Path(run_dir), global_step=trainer.global_step, metrics=metrics)
    lines = [f"steps: {trainer.global_step}"]
    if "val_loss" in metrics:
        line = f"val_loss: {metrics['val_loss']:.4f}"
        unigram = getattr(data, "unigram_loss", None)
        if callable(unigram):
            line += f"  (a unigram model: {unigram():.4f})"
        lines.append(line)
    print("", *lines, f"run folder: {run_dir}", sep="\n", flush=True)


def _finish_wandb(*, failed: bool) -> None:
    if "wandb" in sys.modules and sys.modules["wandb"].run is not None:
        sys.modules["wandb"].finish(exit_code=int(failed))


def main(path: str) -> int:
    """Run the config in this file; the result is the exit code."""
    config = yaml.safe_load(Path(path).read_text())
    try:
        with report_errors():
            run(config)
    except Lightning3DError as error:
        # Else the launcher tells it, once for all ranks that have it.
        if not reported(error):
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
