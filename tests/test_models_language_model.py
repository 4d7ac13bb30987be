"""Next-token training: the loss, the optimizer and the schedule are what they say."""

import math

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_3d.data.text import TextDataModule
from lightning_3d.errors import ConfigError
from lightning_3d.models.language_model import LanguageModel
from lightning_3d.models.optimization import build_adamw, warmup_cosine

TINY = {"vocab_size": 17, "hidden_size": 12, "num_layers": 2, "num_heads": 3, "max_sequence_length": 10}


def quiet_trainer(tmp_path, **settings):
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **settings,
    )


def rows(count=8, length=7):
    generator = torch.Generator().manual_seed(1)
    return [{"tokens": torch.randint(17, (length,), generator=generator)} for _ in range(count)]


def test_loss_is_the_mean_surprise_of_each_next_token():
    module = LanguageModel(TINY)
    torch.manual_seed(0)
    module.configure_model()
    tokens = torch.stack([row["tokens"] for row in rows(2)])
    logits = module.model(tokens)  # one position more than the step computes: the last has no target
    by_hand = [
        -math.log(logits[b, t].exp()[tokens[b, t + 1]].item() / logits[b, t].exp().sum().item())
        for b in range(2)
        for t in range(6)
    ]
    assert module.batch_loss(tokens).item() == pytest.approx(sum(by_hand) / 12, rel=1e-5)
    torch.testing.assert_close(
        module.predict_step({"tokens": tokens}, 0), torch.tensor([sum(by_hand[:6]) / 6, sum(by_hand[6:]) / 6])
    )


def test_validation_loss_weighs_batches_by_their_rows(tmp_path):
    module = LanguageModel(TINY)
    loader = DataLoader(rows(5), batch_size=4)
    trainer = quiet_trainer(tmp_path)
    [results] = trainer.validate(module, loader, verbose=False)
    everything = torch.stack([row["tokens"] for row in rows(5)])
    with torch.no_grad():
        assert results["val_loss"] == pytest.approx(module.batch_loss(everything).item(), rel=1e-5)
    [results] = trainer.test(module, loader, verbose=False)
    assert set(results) == {"test_loss"}
    predictions = torch.cat(trainer.predict(module, loader))
    assert predictions.shape == (5,)


def test_configure_model_builds_once():
    module = LanguageModel(TINY)
    module.configure_model()
    first = module.model
    module.configure_model()
    assert module.model is first


def test_only_matrices_decay_and_frozen_parameters_are_left_out():
    module = LanguageModel({**TINY, "tie_embeddings": True})
    module.configure_model()
    module.model.layers[0].attention.wq.weight.requires_grad_(False)
    optimizer = build_adamw(module, learning_rate=1e-3, weight_decay=0.2)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert {id(p) for p in plain["params"]} == {id(p) for n, p in module.named_parameters() if "norm" in n}
    trainable = [p for p in module.parameters() if p.requires_grad]
    assert len(decayed["params"]) + len(plain["params"]) == len(trainable)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_adamw(module, learning_rate=1e-3, weight_decay=0.2)


def test_a_resumed_schedule_takes_the_new_settings():
    def schedule(max_steps):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, warmup_cosine(optimizer, warmup_steps=0, max_steps=max_steps, min_learning_rate_ratio=0.0)

    _, old = schedule(10)
    for _ in range(5):
        old.optimizer.step()
        old.step()
    optimizer, new = schedule(20)
    new.load_state_dict(old.state_dict())
    optimizer.step()
    new.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * (1 + math.cos(math.pi * 6 / 20)))


@pytest.mark.parametrize("max_steps", [None, 4])
def test_the_trainer_steps_the_schedule_each_step_to_the_end(tmp_path, max_steps):
    module = LanguageModel(TINY, learning_rate=0.01, warmup_steps=1, max_steps=max_steps, min_learning_rate_ratio=0.2)
    trainer = quiet_trainer(tmp_path, max_steps=4)
    trainer.fit(module, DataLoader(rows(8), batch_size=2))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.002)


def test_a_schedule_without_an_end_is_refused(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=-1)
    with pytest.raises(ConfigError, match="max_steps"):
        trainer.fit(LanguageModel(TINY), DataLoader(rows(8), batch_size=2))


def test_hyperparameters_rebuild_the_module(tmp_path):
    module = LanguageModel(TINY, learning_rate=0.01, betas=(0.8, 0.9))
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(module, DataLoader(rows(8), batch_size=2))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = LanguageModel.load_from_checkpoint(tmp_path / "one.ckpt")
    assert loaded.config == module.config and loaded.optimization == module.optimization
    assert torch.equal(loaded.model.head.weight, module.model.head.weight)


def test_data_with_more_tokens_than_the_model_is_refused(tmp_path):
    class Data(L.LightningDataModule):
        vocab_size = 40

        def train_dataloader(self):
            return DataLoader(rows(8), batch_size=2)

    with pytest.raises(ConfigError, match="40 tokens, but the model's vocab_size=17"):
        quiet_trainer(tmp_path, max_steps=1).fit(LanguageModel(TINY), datamodule=Data())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"config": {**TINY, "num_layer": 2}}, "num_layer'. Did you mean num_layers"),
        ({"config": {"vocab_size": 17}}, "lacks hidden_size"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"learning_rate": "3e-4"}, "learning_rate='3e-4'"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"min_learning_rate_ratio": 2}, "min_learning_rate_ratio=2"),
    ],
)
def test_bad_settings_are_refused_by_the_field_s_name(settings, says):
    with pytest.raises(ConfigError, match=says):
        LanguageModel(**{"config": TINY, **settings})


def test_thirty_steps_on_real_text_lower_the_loss(tmp_path):
    L.seed_everything(0, verbose=False)
    data = TextDataModule(
        max_bytes=200_000, vocab_size=400, sequence_length=32, global_batch_size=8, cache_dir=tmp_path / "cache"
    )
    module = LanguageModel(
        {"vocab_size": 400, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_sequence_length": 32},
        learning_rate=1e-2,
        warmup_steps=3,
    )
    trainer = quiet_trainer(tmp_path, max_steps=30, limit_val_batches=10, num_sanity_val_steps=0)
    [before] = trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    last_train_loss = trainer.callback_metrics["train_loss"].item()
    [after] = trainer.validate(module, datamodule=data, verbose=False)
    assert before["val_loss"] == pytest.approx(math.log(400), abs=0.2)
    assert after["val_loss"] < before["val_loss"] - 0.7
    assert last_train_loss < before["val_loss"] - 0.7
