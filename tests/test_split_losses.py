"""Losses on logits that are split over the vocabulary are those of one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from modules import VOCAB, Rows
from parity import alone, assert_equal, train
from split_language import LOSSES, Language
from training import ordered, run, trainer_for

from lightning_3d.errors import ModelError
from lightning_3d.models.gpt import GPT, GPTConfig
from lightning_3d.parallel.split_logits import SplitLogits

pytestmark = pytest.mark.distributed


def fit_uneven_vocabulary(layout: str | None) -> dict[str, Any]:
    widths: set[int] = set()

    def build() -> Language:
        module = Language(vocab_size=101)
        module.widths = widths
        return module

    return {**train(layout, build, {}), "widths": widths}


def test_vocabulary_that_does_not_divide_keeps_its_size() -> None:
    for got in run("tp2", fit_uneven_vocabulary):
        assert got["widths"] == {101}
        assert got["weights"]["model.head.weight"].shape == (101, 32)


def fit_loss(layout: str | None, loss: str, settings: dict[str, Any]) -> dict[str, Any]:
    return train(layout, Language, settings, loss)


@pytest.mark.parametrize(
    ("layout", "loss"),
    [*(("tp2", loss) for loss in LOSSES), ("tp4", "ignored targets"), ("tp2-pp2", "of each token"),
     ("tp2-pp2", "ignored targets"), ("zero3x2-tp2", "used in other ways too")],
)  # fmt: skip
def test_loss_on_split_logits_is_that_of_one_process(layout: str, loss: str) -> None:
    settings: dict[str, Any] = {"loss_parallel": True}
    if "ignored" in loss and "pp" in layout:
        # A mean over counted targets is weighted otherwise where micro-batches count differently many.
        settings["num_microbatches"] = 1
    expected = alone(fit_loss, loss, {})
    assert_equal(run(layout, fit_loss, loss, settings), expected)


def count_gathers(layout: str, loss: str) -> int:
    gathers, real = [], SplitLogits.whole

    def whole(self: SplitLogits) -> torch.Tensor:
        gathers.append(self.shape)
        return real(self)

    SplitLogits.whole = whole  # type: ignore[method-assign]
    fit_loss(layout, loss, {"loss_parallel": True})
    return len(gathers)


@pytest.mark.parametrize("loss", ["flat", "ignored targets", "summed", "of each token", "sliced"])
def test_cross_entropy_needs_no_whole_logits(loss: str) -> None:
    assert run("tp2", count_gathers, loss) == [0, 0]


class Beyond(L.LightningModule):
    """A GPT that meets a token, or a target, that the vocabulary does not have."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.model = GPT(GPTConfig(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4))

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        tokens, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
        (tokens if self.where == "tokens" else targets)[0, 0] = VOCAB
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_beyond(layout: str, where: str) -> None:
    trainer_for(layout, max_steps=1, loss_parallel=True).fit(Beyond(where), ordered(Rows(8), replicas=1))


@pytest.mark.parametrize("where", ["tokens", "targets"])
def test_index_beyond_the_vocabulary_is_an_error_as_in_one_process(where: str) -> None:
    with pytest.raises(
        Exception, match=f"IndexError: {where} .*must be in 0 to {VOCAB - 1}, but are from .* to {VOCAB}"
    ):
        run("tp2", fit_beyond, where)


def differentiate_twice(layout: str) -> str:
    module = Beyond("tokens")
    trainer = trainer_for(layout, max_steps=1, loss_parallel=True)

    def step(rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(module.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        (gradient,) = torch.autograd.grad(loss, [module.model.norm.weight], create_graph=True)
        return loss + gradient.square().sum()

    module.training_step = step  # type: ignore[method-assign]
    try:
        trainer.fit(module, ordered(Rows(8), replicas=1))
    except ModelError as error:
        return str(error)
    return ""


def test_second_derivatives_are_refused_rather_than_wrong() -> None:
    for message in run("tp2", differentiate_twice):
        assert "second derivative is taken through a layer that is split" in message
