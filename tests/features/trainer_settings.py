"""Settings of the Trainer, and its other loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.tuner import Tuner
from training import trainer_for, whole_weights

from features.case import Net, alike, case, fit, fresh, loader


@case
def settings_that_shorten_a_run(layout: str | None, folder: Path) -> Any:
    found = {}
    for name, kwargs in {
        "fast_dev_run": {"fast_dev_run": True},
        "overfit": {"overfit_batches": 2},
        "limits": {"limit_train_batches": 2, "limit_val_batches": 1},
        "fractions": {"limit_train_batches": 0.67, "val_check_interval": 0.5, "max_steps": 5},
        "inside a window": {"val_check_interval": 1, "accumulate_grad_batches": 2},
    }.items():
        module = fresh(Net)
        trainer, got = fit(layout, module, **kwargs)
        found[name] = got, trainer.global_step, float(trainer.callback_metrics["val_loss"])
    return found


@case
def several_validation_loaders(layout: str | None, folder: Path) -> Any:
    trainer = trainer_for(layout, max_epochs=1, precision="64-true")
    trainer.fit(fresh(Net), loader(layout), [loader(layout, 16), loader(layout, 8), loader(layout, 13)])
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@case
def fit_then_test_then_predict(layout: str | None, folder: Path) -> Any:
    module = fresh(Net)
    trainer, got = fit(layout, module)
    tested = trainer.test(module, loader(layout, 16), verbose=False)
    predicted = trainer.predict(module, loader(layout, 13))
    rows = torch.cat(predicted)
    # Rank 0 has all of them, the others their own.
    return got, tested, rows if trainer.is_global_zero else None


class Tunable(Net):
    def __init__(self) -> None:
        super().__init__()
        self.learning_rate = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


@alike
def finding_a_learning_rate_changes_nothing_else(layout: str | None, folder: Path) -> Any:
    module = fresh(Tunable)
    tuner = Tuner(trainer_for(layout, max_steps=2, precision="64-true", default_root_dir=folder))
    settings: dict[str, Any] = {"num_training": 20, "min_lr": 1e-6, "early_stop_threshold": None}
    finder = tuner.lr_find(module, loader(layout), **settings)
    assert finder is not None and module.learning_rate == finder.suggestion()
    for name, weight in whole_weights(module).items():
        assert torch.equal(weight, fresh(Tunable).state_dict()[name]), name
    assert list(folder.iterdir()) == []
    return finder.results
