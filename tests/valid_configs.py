"""Makes configurations that all work: a recipe in a layout, with a few settings changed to other good values."""

from __future__ import annotations

import random
from typing import Any

from invalid_configs import Case, draw
from setting_values import RECIPES, fields_of

# Layouts with the number of blocks, heads and data-parallel ranks that they ask for.
LAYOUTS = (
    "single", "dp2", "dp4", "zero1x2", "zero2x4", "zero3x2", "zero3x8", "hsdp2x2", "dp2-zero1x2", "tp2", "pp2",
    "pp2@gpipe", "pp2@interleaved1f1b", "pp4", "tp4", "tp2-pp2", "zero3x2-tp2", "zero3x2-tp2-pp2", "hsdp2x2-pp2",
    "dp2-tp2-pp2@gpipe",
)  # fmt: skip

# Settings that decide the layout, which valid cases set by name, or that only mean something together.
_NOT_ALONE = {
    "layout", "strategy.data_parallel_size", "strategy.data_parallel_replicas", "strategy.tensor_parallel_size",
    "strategy.pipeline_parallel_size", "strategy.zero_stage", "strategy.schedule", "strategy.num_microbatches",
    "trainer.devices", "trainer.max_steps", "trainer.max_epochs", "trainer.check_val_every_n_epoch", "resume",
    "trainer.gradient_clip_algorithm", "callbacks.checkpoint.mode", "model.config.model_type",
}  # fmt: skip
_OF_SIZES = ("hidden_size", "heads", "layers", "intermediate_size", "ffn_size", "global_batch_size", "sequence_length")


def valid(seed: int, count: int) -> list[Case]:
    """So many different cases that all work."""
    rng = random.Random(seed)
    return draw(rng, [valid_run, valid_run, valid_in_code], count)


def valid_run(rng: random.Random) -> Case:
    recipe = rng.choice(RECIPES)
    layout = rng.choice(LAYOUTS)
    fields = fields_of(recipe)
    # Sizes change only where nothing is split by them.
    loose = [key for key in fields if key not in _NOT_ALONE and (layout == "single" or not key.endswith(_OF_SIZES))]
    if layout == "single":
        loose = [key for key in loose if not key.endswith(("heads", "hidden_size"))]
    chosen = rng.sample(sorted(loose), rng.randrange(1, 6))
    arguments = [f"{key}={rng.choice(fields[key].good)}" for key in chosen]
    if recipe == "digits_mlp" and "pp" in layout:
        arguments = [a for a in arguments if not a.startswith("model.num_hidden_layers")] + [
            "model.num_hidden_layers=3"
        ]
    if "model.loss=labels" in arguments:
        # The model gets the rows with their last tokens: 129, which two ranks do not divide.
        arguments = [a for a in arguments if a != "strategy.sequence_parallel=true"]
    if "trainer.accumulate_grad_batches=2" in arguments:
        arguments = [a for a in arguments if not a.startswith("strategy.replay_every_n_steps")]
    rng.shuffle(arguments)
    how = rng.choice(["layout", "strategy"]) if layout in ("tp2", "pp2", "zero1x2", "zero3x2", "tp2-pp2") else "layout"
    if how == "layout":
        arguments.append(f"layout={layout}")
    else:
        option = {"tp2": "tp", "pp2": "pp", "zero1x2": "zero1", "zero3x2": "zero3", "tp2-pp2": "tp2-pp2"}[layout]
        arguments += [f"strategy={option}", f"trainer.devices={4 if layout == 'tp2-pp2' else 2}"]
    return Case("valid_run", (f"recipe={recipe}", *arguments))


def valid_in_code(rng: random.Random) -> Case:
    sizes: dict[str, Any] = {
        f"{axis}_parallel_size": rng.choice([1, 2, 3, 4]) for axis in ("data", "tensor", "pipeline")
    }
    devices = 1
    for size in sizes.values():
        devices *= size
    if rng.random() < 0.5:
        sizes[rng.choice(sorted(sizes))] = "auto"
        if sizes["data_parallel_size"] != "auto":
            sizes.setdefault("data_parallel_size", 1)
    sizes |= {"zero_stage": rng.choice([0, 1, 2, 3]), "schedule": rng.choice(["gpipe", "1f1b", "interleaved1f1b"])}
    sizes |= {"timeout_seconds": rng.choice([1, 60.5, 1800]), "loss_parallel": rng.choice([True, False])}
    return Case("valid_in_code", settings=sizes, devices=devices)
