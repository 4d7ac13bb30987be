"""An ordinary script: `python script.py STRATEGY DEVICES` trains, validates, tests and predicts, and prints JSON."""

import json
import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

STRATEGY, DEVICES = sys.argv[1], int(sys.argv[2])


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.accuracy = MulticlassAccuracy(num_classes=3)
        self.logged = []

    def forward(self, features):
        return self.net(features) * self.scale

    def training_step(self, batch, batch_idx):
        features, label = batch
        loss = F.cross_entropy(self(features), label)
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.logged.append(float(self.trainer.callback_metrics["train_loss_step"]))

    def validation_step(self, batch, batch_idx):
        features, label = batch
        output = self(features)
        self.accuracy(output, label)
        self.log("accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(output, label), sync_dist=True, batch_size=len(label))

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def rows(count):
    generator = torch.Generator().manual_seed(count)
    features = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    label = torch.randint(3, (count,), generator=generator)
    return TensorDataset(features, label)


def loader(count, **kwargs):
    return DataLoader(rows(count), batch_size=8 // DEVICES, **kwargs)


def main():
    L.seed_everything(3)
    module = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy=STRATEGY,
        max_epochs=3,
        precision="64-true",
        gradient_clip_val=0.2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, loader(48), loader(21))
    epoch_loss = float(trainer.callback_metrics["train_loss_epoch"])
    validation = trainer.validate(module, loader(21), verbose=False)
    test = trainer.test(module, loader(33), verbose=False)
    predictions = trainer.predict(module, loader(21))
    if trainer.is_global_zero:
        result = {
            "losses": module.logged,
            "epoch_loss": epoch_loss,
            "validation": validation[0],
            "test": test[0],
            "predictions": torch.cat(predictions).tolist(),
            "world_size": trainer.world_size,
        }
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
