"""The digits classifier learns, and logs its accuracy, under plain Lightning."""

import lightning as L
import pytest
import torch

from lightning_3d.errors import ConfigError
from lightning_3d.models.digits import DigitsMLP

pytest.importorskip("sklearn")

from lightning_3d.data.digits import DigitsDataModule


@pytest.mark.parametrize(("optimizer", "learning_rate"), [("adamw", 1e-2), ("sgd", 1e-1)])
def test_five_epochs_reach_nine_in_ten(tmp_path, optimizer, learning_rate):
    L.seed_everything(0, verbose=False)
    data = DigitsDataModule(global_batch_size=64)
    module = DigitsMLP(hidden_size=64, num_hidden_layers=2, optimizer=optimizer, learning_rate=learning_rate)
    trainer = L.Trainer(
        strategy="auto",
        accelerator="cpu",
        devices=1,
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, datamodule=data)
    assert trainer.callback_metrics["val_accuracy"] > 0.9
    [results] = trainer.test(module, datamodule=data, verbose=False)
    predicted = torch.cat(trainer.predict(module, datamodule=data))
    labels = torch.cat([labels for _, labels in data.predict_dataloader()])
    # The held-out images are all predicted, in order.
    assert results["test_accuracy"] == pytest.approx((predicted == labels).float().mean().item())
    assert type(trainer.optimizers[0]) is {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers=1.5"),
        ({"optimizer": "adam"}, "optimizer='adam' must be 'adamw' or 'sgd'"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"weight_decay": -1}, "weight_decay=-1"),
    ],
)
def test_bad_settings_are_refused_by_the_field_s_name(settings, says):
    with pytest.raises(ConfigError, match=says):
        DigitsMLP(**settings)
