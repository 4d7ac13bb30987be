"""Whether settings of several groups fit one another: the model its layout, the data the model and the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_3d.cli.config import value_at
from lightning_3d.data.batch import per_rank_batch_size
from lightning_3d.errors import ConfigError, Lightning3DError
from lightning_3d.layout import Layout
from lightning_3d.parallel.adapters import plain_layer
from lightning_3d.parallel.pipeline import STAGES_PER_RANK
from lightning_3d.parallel.tensor_plan import resolve_plan
from lightning_3d.parallel.trunk import find_trunk


def check_batch(config: Mapping[str, Any], layout: Layout) -> None:
    """Refuse a global batch that does not make equal batches for ranks, or fewer samples than micro-batches.

    Raises:
        ConfigError: with sizes that would do.
    """
    batch = value_at(config, "data.global_batch_size")
    if not isinstance(batch, int):
        return
    try:
        rows = per_rank_batch_size(global_batch_size=batch, data_parallel_size=layout.data)
    except Lightning3DError as error:
        raise ConfigError(f"data: {error}") from error
    count = layout.num_microbatches
    if count is not None and count > rows:
        raise ConfigError(
            f"strategy.num_microbatches={count}, but data.global_batch_size={batch} over data-parallel size "
            f"{layout.data} is {rows} samples a rank. Set strategy.num_microbatches={rows} or less, or "
            f"data.global_batch_size={count * layout.data}."
        )


def check_lengths(config: Mapping[str, Any], layout: Layout | None) -> None:
    """Refuse sequences that are longer than the model's positions, or that sequence parallelism cannot cut.

    Raises:
        ConfigError: with lengths that would do.
    """
    rows = value_at(config, "data.sequence_length")
    if not isinstance(rows, int) or not str(value_at(config, "model._target_")).startswith("lightning_3d."):
        return
    # The model's own loss shifts what it is given; ours gives it one token less.
    length = rows + (value_at(config, "model.loss") == "labels")
    for key in ("model.config.max_sequence_length", "model.config.max_position_embeddings"):
        most = value_at(config, key)
        if isinstance(most, int) and most < length:
            raise ConfigError(
                f"{key}={most}, but data.sequence_length={rows} feeds the model {length} tokens. "
                f"Set {key}={length}, or data.sequence_length={rows - (length - most)}."
            )
    if layout is not None and value_at(config, "strategy.sequence_parallel") and length % layout.tensor:
        fits = length - length % layout.tensor or layout.tensor
        raise ConfigError(
            f"strategy.sequence_parallel cuts {length} tokens (data.sequence_length={rows}) over "
            f"tensor_parallel_size={layout.tensor}, which does not divide them. Set data.sequence_length="
            f"{rows - length + fits}, or strategy.sequence_parallel=false."
        )


def check_end(config: Mapping[str, Any]) -> None:
    """Refuse a schedule of the learning rate that ends with the run, in a run that has no end.

    Raises:
        ConfigError: with an end.
    """
    trainer, model = config["trainer"], config["model"]
    endless = trainer.get("max_steps", -1) == -1 and trainer.get("max_epochs") == -1 and not trainer.get("max_time")
    if endless and "warmup_steps" in model and model.get("max_steps") is None and not trainer.get("fast_dev_run"):
        raise ConfigError(
            "trainer.max_steps=-1 and trainer.max_epochs=-1 let the run go on for ever, and model.max_steps=null ends "
            "the learning rate's cosine with it. Set model.max_steps=1000, say."
        )


def check_model(model: nn.Module, layout: Layout) -> None:
    """Refuse a model that has too few blocks for a pipeline, or layers that tensor parallelism cannot split.

    Args:
        model: a LightningModule on the meta device, as its constructor leaves it.

    Raises:
        ConfigError: with sizes that would do.
        ModelError: nobody knows how to cut or split it; says how to tell.
    """
    if layout.pipeline == layout.tensor == 1 or not _build(model):
        return
    if layout.pipeline > 1:
        _check_blocks(model, layout)
    if layout.tensor > 1:
        _check_splits(model, layout.tensor)


def _build(model: nn.Module) -> bool:
    """Have a model that is built in `configure_model` build itself; False where it cannot without a run."""
    try:
        with torch.device("meta"):
            model.configure_model()  # type: ignore[operator]
    except Exception:  # What it lacks here may be there in the run.
        return False
    return any(True for _ in model.parameters())


def _check_blocks(model: nn.Module, layout: Layout) -> None:
    blocks = len(find_trunk(model).blocks)
    per_rank = STAGES_PER_RANK[layout.schedule]
    if blocks < layout.pipeline * per_rank:
        each = f" x {per_rank} stages each ({layout.schedule})" if per_rank > 1 else ""
        fits = f"pipeline_parallel_size={blocks // per_rank} or less" if blocks >= per_rank else "schedule=1f1b"
        raise ConfigError(
            f"strategy.pipeline_parallel_size={layout.pipeline}{each} needs {layout.pipeline * per_rank} blocks, but "
            f"the model has {blocks}. Set strategy.{fits}, or give the model more layers."
        )


def _check_splits(model: nn.Module, ranks: int) -> None:
    parts = dict(model.named_modules())
    plan = resolve_plan(model)

    def parent_of(name: str) -> nn.Module:
        return parts[name.rpartition(".")[0]]

    for name, style in plan.items():
        part, attention = parts[name], parent_of(name)
        size = _split_size(part, style)
        if size is None:
            continue
        unit = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
        if not isinstance(unit, int) or size % unit:
            if size % ranks:
                _refuse(name, f"{size} {'inputs' if style == 'rowwise' else 'outputs'}", ranks, size)
            continue
        heads = size // unit
        # Neighbours may share heads of keys and values; of queries, as wide as what comes out, each rank has its own.
        after = [parts[key] for key, how in plan.items() if how == "rowwise" and parent_of(key) is attention]
        widest = max((_split_size(other, "rowwise") or 0 for other in after), default=0)
        shared = style == "colwise" and heads < ranks and size < widest
        if ranks % heads if shared else heads % ranks:
            _refuse(name, f"{heads} heads", ranks, heads)


def _split_size(part: nn.Module, style: str) -> int | None:
    """Of the dimension that a style splits evenly, for one of the matrices that the module packs; None without one."""
    part = plain_layer(part)
    weight = getattr(part, "weight", None)
    if style not in ("colwise", "rowwise", "packed_qkv") or weight is None or weight.ndim != 2:
        return None
    # transformers' Conv1D keeps (inputs, outputs).
    inputs, outputs = weight.shape if type(part).__name__ == "Conv1D" else reversed(weight.shape)
    return int(inputs if style == "rowwise" else outputs // 3 if style == "packed_qkv" else outputs)


def _refuse(name: str, what: str, ranks: int, size: int) -> None:
    fits = [count for count in range(1, min(size, 64) + 1) if size % count == 0]
    raise ConfigError(
        f"strategy.tensor_parallel_size={ranks} does not divide the {what} of the model's {name}. "
        f"Set strategy.tensor_parallel_size to one of {', '.join(map(str, fits))}."
    )
