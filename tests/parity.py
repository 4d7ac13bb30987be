"""Runs of modules in a layout, and what must be equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from modules import GAN, Points, Rows, TinyGPT
from pipelined_modules import CLASSES, MLP, Encoder, Sentences, collate
from torch.distributed.tensor import DTensor
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d import Layout


def replicas(layout: str | None) -> int:
    return Layout.parse(layout).data if layout else 1


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def fit_gpt(layout: str | None, accumulate: int, clip: dict[str, Any], lazy: bool = False) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), TinyGPT(lazy=lazy)
    trainer = trainer_for(
        layout, max_epochs=2, accumulate_grad_batches=accumulate, precision="64-true", callbacks=[recorder], **clip
    )
    loader = ordered(Rows(), replicas=replicas(layout))
    trainer.fit(module, loader, ordered(Rows(21), replicas=replicas(layout)))
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "weights": whole_weights(module),
    }


GPT_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "accumulated and clipped by norm": (2, {"gradient_clip_val": 0.3}),
    "accumulated and clipped by value": (3, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
}


def fit_gan(layout: str | None, toggle: bool) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), GAN(toggle=toggle)
    trainer = trainer_for(layout, max_epochs=2, precision="64-true", callbacks=[recorder])
    trainer.fit(module, ordered(Points(48), replicas=replicas(layout)))
    return {"losses": recorder.losses, "weights": whole_weights(module)}


def united(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The whole model's weights; copies of one weight must be equal to the bit."""
    weights: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, value in rank["weights"].items():
            assert torch.equal(weights.setdefault(name, value), value), name
    return weights


def fit_encoder(
    layout: str | None, accumulate: int, kind: type[Encoder] = Encoder, samples: int = 28
) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), kind()
    trainer = trainer_for(
        layout,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        precision="64-true",
        callbacks=[recorder],
    )
    count = replicas(layout)
    loaders = [ordered(Sentences(size), replicas=count, collate_fn=collate) for size in (samples, 21)]
    trainer.fit(module, *loaders)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    predictions: Any = trainer.predict(module, loaders[1])
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "metrics": metrics,
        "rates": rates,
        "weights": whole_weights(module),
        "logits": torch.cat([batch["logits"] for batch in predictions]),
        "kinds": {batch["kind"] for batch in predictions},
        "split": {name for name, p in module.named_parameters() if isinstance(p, DTensor)},
    }


def assert_encoder_equal(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Everything that a run shows; predictions are whole and in order on rank 0."""
    assert len(expected["losses"]) == 8 and min(expected["norms"]) > 0
    assert expected["metrics"].keys() == {"train_loss", "train_mean", "largest", "accuracy", "val_loss"}
    for got in ranks:
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert got["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        assert got["rates"] == expected["rates"]
        assert got["kinds"] == {"class"}
    assert largest_difference(united(ranks), expected["weights"]) < 1e-9
    assert ranks[0]["logits"].shape == expected["logits"].shape == (21, CLASSES)
    assert torch.allclose(ranks[0]["logits"], expected["logits"], rtol=0, atol=1e-9)


def fit_mlp(layout: str | None, samples: int = 43) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), MLP()
    trainer = trainer_for(layout, max_epochs=1, precision="64-true", callbacks=[recorder])
    trainer.fit(module, ordered(Points(samples), replicas=replicas(layout)))
    return {"losses": recorder.losses, "norms": recorder.norms, "weights": whole_weights(module)}


def train(
    layout: str | None, build: Callable[..., L.LightningModule], settings: dict[str, Any], *args: Any
) -> dict[str, Any]:
    """A short run of `build(*args)` under a Trainer of these settings."""
    L.seed_everything(1, verbose=False)
    recorder, module = Recorder(), build(*args)
    trainer = trainer_for(layout, **{"max_steps": 3, "precision": "64-true", "callbacks": [recorder], **settings})
    trainer.fit(module, ordered(module.data(), replicas=replicas(layout)))  # type: ignore[operator]
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": whole_weights(module),
    }


def assert_equal(ranks: list[dict[str, Any]], expected: dict[str, Any], *, tolerance: float = 1e-9) -> None:
    for got in ranks:
        assert len(got["losses"]) == len(expected["losses"]) > 0
        assert got["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert got["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        assert got["metrics"] == pytest.approx(expected["metrics"], rel=tolerance)
    assert largest_difference(united(ranks), expected["weights"]) < tolerance


_ALONE: dict[tuple[Any, ...], dict[str, Any]] = {}


def alone(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What one process gets, once."""
    key = (function.__name__, *map(str, args))
    if key not in _ALONE:
        _ALONE[key] = run(None, function, *args)[0]
    return _ALONE[key]
