"""A text is written alike in every layout: sampled during validation by all ranks, or from a checkpoint by one."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from modules import Rows, TinyGPT
from tokenizers import Tokenizer
from training import ordered, run, trainer_for

from lightning_3d import Layout
from lightning_3d.callbacks import SampleText
from lightning_3d.checkpoint import store
from lightning_3d.cli import main
from lightning_3d.cli.generate import generate, parse
from lightning_3d.cli.saved_run import find_run
from lightning_3d.data.tokenizer import train_tokenizer
from lightning_3d.errors import CheckpointError, ConfigError, LaunchError
from lightning_3d.models.generation import generate_tokens
from lightning_3d.models.language_model import LanguageModel

LAYOUTS = ["zero3x2", "tp2-pp2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("zero2x2", "dp2", "pp2", "tp2"))]
VOCAB = 270


class Texts(L.LightningDataModule):
    """Rows of tokens, and a tokenizer."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replicas = replicas

    @property
    def tokenizer(self) -> Tokenizer:
        return train_tokenizer(["def f(x):\n    return x\n" * 20], vocab_size=VOCAB)

    def train_dataloader(self) -> Any:
        return ordered(_Tokens(), replicas=self.replicas)

    def val_dataloader(self) -> Any:
        return ordered(_Tokens(8), replicas=self.replicas)


class _Tokens(Rows):
    def __getitem__(self, index: int) -> Any:
        return {"tokens": super().__getitem__(index)}


def sample(layout: str, folder: Path) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    config = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_sequence_length": 16}
    module = LanguageModel(config, learning_rate=1e-2, max_steps=4)
    # Longer than the model's 16 tokens.
    likeliest = SampleText(["def ", "return x"], max_new_tokens=14, temperature=0)
    chosen = SampleText(["def "], max_new_tokens=6, temperature=1.5, top_k=20)
    trainer = trainer_for(layout, max_steps=4, val_check_interval=2, precision="64-true", callbacks=[likeliest, chosen])
    modes = []
    trainer.callbacks.append(_Modes(modes))
    trainer.fit(module, datamodule=Texts(Layout.parse(layout).data))
    return {"samples": [likeliest.samples, chosen.samples], "modes": modes}


class _Modes(L.Callback):
    """Whether the model trains at each step."""

    def __init__(self, modes: list[bool]) -> None:
        self.modes = modes

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.modes.append(all(part.training for part in module.modules()))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_those_of_one_process_on_every_rank(tmp_path: Path, layout: str) -> None:
    (expected,) = run("single", sample, tmp_path)
    for rank in run(layout, sample, tmp_path):
        assert rank["samples"] == expected["samples"]
        assert all(rank["modes"][2:]) and len(rank["modes"]) == 4
    assert len(set(expected["samples"][0])) == 2 and expected["samples"][0][0].startswith("def ")


def test_each_token_is_the_likeliest_after_those_before_it() -> None:
    torch.manual_seed(0)
    table = torch.randn(9, 9)
    seen = []

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape)
        return table[tokens]

    start = torch.tensor([[3], [5]])
    written = generate_tokens(logits, start, count=4, temperature=0)
    for row in written.tolist():
        assert all(after == int(table[before].argmax()) for before, after in pairwise(row))
    assert set(seen) == {(2, 5)}, "one shape for all forwards"
    only = generate_tokens(logits, start, count=3, temperature=1.0, top_k=1)
    assert torch.equal(only, written[:, :4])
    again = [generate_tokens(logits, start, count=6, temperature=1.0, seed=seed).tolist() for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_a_long_text_is_seen_from_its_end() -> None:
    seen = []

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.tolist()[0])
        return torch.nn.functional.one_hot(tokens + 1, 20).float()

    written = generate_tokens(logits, torch.tensor([[1, 2]]), count=4, temperature=0, longest=3)
    assert written.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert seen == [[1, 2, 0], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_calls_that_cannot_work_are_refused(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    for wrong in (["prompt="], ["prompt=a", "max_new_tokens=0"], ["prompt=a", "top_k=0"], ["prompt=a", "seed=x"]):
        with pytest.raises(ConfigError):
            parse(wrong)
    assert parse(["prompt=1"]).prompt == "1"
    assert main(["generate", "prompt=a"]) == 2
    assert main(["generate", str(tmp_path / "step=1.ckpt"), "prompt=a"]) == 2
    assert "does not exist" in capsys.readouterr().err
    for settings in ({"prompts": "def "}, {"prompts": []}, {"every_n_validations": 0}, {"temperature": -1}):
        with pytest.raises(ConfigError):
            SampleText(**settings)


def test_a_link_to_a_checkpoint_of_a_run_is_of_that_run(tmp_path: Path) -> None:
    checkpoint, config = tmp_path / "run" / "checkpoints" / "step=1.ckpt", {"model": {}, "data": {}}
    store.save(checkpoint, {"model.w": torch.ones(1)}, extra={}, rank_state={}, summary={"global_step": 1})
    (tmp_path / "run" / "config.yaml").write_text("{model: {}, data: {}}")
    (tmp_path / "best.ckpt").symlink_to(checkpoint)
    assert find_run(str(tmp_path / "best.ckpt"), storage_options={}).config == config
    # The folder of checkpoints may be a link itself.
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "large disk")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "large disk")
    assert find_run(str(checkpoint), storage_options={}).config == config


def test_a_hugging_face_folder_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"Hugging Face folder.*from_pretrained"):
        find_run(str(tmp_path), storage_options={})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature=1e-1", 0.1),
        ("temperature=0", 0.0),
        ("max_new_tokens=010", 10),
        ("top_k=null", None),
        ("top_k=5", 5),
        ("trust=true", True),
        ("device=cpu:0", "cpu:0"),
    ],
)
def test_numbers_are_read_as_they_are_written(setting: str, value: Any) -> None:
    assert getattr(parse(["prompt=a", setting]), setting.split("=")[0]) == value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["temperature=["], "temperature='[' is not a number"),
        (["temperature=nan"], "temperature=nan"),
        (["temperature=inf"], "temperature=inf"),
        (["max_new_tokens=1.5"], "max_new_tokens='1.5' is not a whole number"),
        (["max_new_tokens=0x10"], "max_new_tokens='0x10' is not a whole number"),
        (["top_k=many"], "top_k='many' is not a whole number or null"),
        (["seed=-1"], "seed=-1 is not a whole number from 0 to"),
        (["trust=1"], "trust='1' is not true or false"),
        (["device=gpu"], "device='gpu'"),
        (["device="], "device=''"),
        (["device=meta"], "device='meta'"),
        (["device=cuda:99"], "device='cuda:99'"),
        (["seed=1", "seed=2"], "'seed=1' and 'seed=2' set seed twice"),
        (["prompt=b"], "set prompt twice"),
    ],
    ids=str,
)
def test_setting_that_cannot_work_is_told_before_the_checkpoint_is_read(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(["prompt=a", *settings])


def refused(_: str | None) -> str:
    trainer = trainer_for(None, max_steps=1, callbacks=[SampleText()])
    with pytest.raises(ConfigError) as caught:
        trainer.fit(TinyGPT(), ordered(Rows(), replicas=1), ordered(Rows(), replicas=1))
    return str(caught.value)


@pytest.mark.distributed
def test_a_module_that_gives_no_logits_is_refused_before_training() -> None:
    assert "token_logits" in run(None, refused)[0]


class Opinion:
    """Nothing that torch loads unasked."""


def untrusted(_: None, path: Path, trust: bool) -> str:
    settings = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_sequence_length": 16}
    state = {f"model.{name}": value for name, value in built(LanguageModel(settings)).state_dict().items()}
    kept = {"hyper_parameters": {"opinion": Opinion()}}
    store.save(path, state, extra=kept, rank_state={}, summary={"global_step": 1})
    model = {"_target_": "lightning_3d.models.language_model.LanguageModel", "config": settings}
    data = {"_target_": "test_generate.Texts", "replicas": 1}
    request = ["prompt=def ", "max_new_tokens=2", f"trust={str(trust).lower()}"]
    return generate(path, {"model": model, "data": data}, parse(request))


def built(module: L.LightningModule) -> L.LightningModule:
    module.configure_model()
    return module


@pytest.mark.distributed
def test_a_checkpoint_with_objects_is_written_from_only_if_trusted(tmp_path: Path) -> None:
    (text,) = run(None, untrusted, tmp_path / "step=1.ckpt", True)
    assert text.startswith("def ")
    with pytest.raises(LaunchError, match="trust=true"):
        run(None, untrusted, tmp_path / "step=1.ckpt", False)
    with pytest.raises(ConfigError, match="trust='maybe'"):
        parse(["prompt=a", "trust=maybe"])
