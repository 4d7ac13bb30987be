"""From a checkpoint folder to files of other formats, tensor by tensor, in one process and bounded memory.

At no time more is held than `BATCH_BYTES` of tensors, or one larger tensor, and what torch reads it from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.outputs import replacing
from lightning_3d.checkpoint.places import delete
from lightning_3d.checkpoint.plain import COPIES, MODEL, OPTIMIZER, assemble, is_tensor, read_in_turn
from lightning_3d.checkpoint.safetensors_file import Entries, can_hold, write_safetensors

BATCH_BYTES = 256 * 2**20


def export_ckpt(
    source: store.AnyPlace,
    out: store.AnyPlace,
    *,
    weights_only: bool = False,
    trust: bool = False,
    batch_bytes: int = BATCH_BYTES,
) -> None:
    """Write a plain Lightning .ckpt, optimizer states included, that a stock Trainer resumes from.

    Args:
        weights_only: without optimizer states and averages.
        trust: load objects too, which can run code of whoever wrote them.

    Its tensors go through a file beside `out`, as large as it, from which they are mapped while torch writes. Those of
    dtypes that such a file does not have (complex128) are held in memory.

    Raises:
        CheckpointError: `out` exists, the optimizer's numbers are not known, or there are objects and no `trust`.
    """
    saved = store.saved_tensors(source)
    wanted = [name for name in saved if name.startswith(MODEL) or not weights_only]
    tensors = [name for name in wanted if _can_map(saved[name])]
    extra = store.load_extra(source, weights_only=not trust)
    # Before anything is written.
    assemble(extra, dict.fromkeys(wanted), optimizer=not weights_only)
    with replacing(out) as draft:
        raw = draft.with_name(draft.name + ".tensors")
        try:
            entries = {name: (saved[name].size, saved[name].properties.dtype) for name in tensors}
            write_safetensors(raw, entries, read_in_turn(source, tensors, batch_bytes=batch_bytes))
            others = [name for name in wanted if name not in entries]
            values = dict(read_in_turn(source, others, batch_bytes=batch_bytes, weights_only=not trust))
            with safe_open(raw, framework="pt", device="cpu") as file:
                mapped = {name: file.get_tensor(name) for name in tensors}
            values.update(mapped)
            checkpoint = assemble(extra, {name: values[name] for name in wanted}, optimizer=not weights_only)
            # By name: into a Python file, torch would copy each tensor to bytes first.
            try:
                torch.save(checkpoint, draft)
            except RuntimeError as error:
                # All that torch says of a full disk: unexpected pos 576 vs 534.
                free = shutil.disk_usage(draft.parent).free
                raise OSError(f"torch.save: {error}; {free:,} bytes are free") from error
            with draft.open("rb") as written:
                os.fsync(written.fileno())
        finally:
            delete(raw)


def export_safetensors(
    source: store.AnyPlace,
    out: store.AnyPlace,
    *,
    names: Mapping[str, str],
    dtype: torch.dtype | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> None:
    """Write one .safetensors file.

    Args:
        names: of the module's tensors, each with its name in the file.
        dtype: of floating-point tensors, if another than the saved one.
    """
    with replacing(out) as draft:
        _write(source, draft, names=names, dtype=dtype, batch_bytes=batch_bytes)


def write_shards(
    source: store.AnyPlace,
    folder: Path,
    *,
    names: Mapping[str, str],
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
    batch_bytes: int = BATCH_BYTES,
) -> None:
    """Write Hugging Face's files of weights into a folder: model.safetensors, or shards of it with an index.

    Args:
        names: of the module's tensors, each with its name in the files.
        shard_bytes: no file is larger, unless one tensor is.
    """
    saved = store.saved_tensors(source)
    sizes = {name: _size(saved[MODEL + name], dtype) for name in names}
    shards: list[dict[str, str]] = [{}]
    held = 0
    for name, stored in names.items():
        if shards[-1] and held + sizes[name] > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = stored
        held += sizes[name]
    if len(shards) == 1:
        _write(source, folder / "model.safetensors", names=names, dtype=dtype, batch_bytes=batch_bytes)
        return
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(source, folder / file, names=shard, dtype=dtype, batch_bytes=batch_bytes)
        places.update(dict.fromkeys(shard.values(), file))
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def model_tensors(source: store.AnyPlace) -> dict[str, torch.Size]:
    """Names and shapes of the module's tensors in a checkpoint."""
    saved = store.saved_tensors(source)
    return {
        name.removeprefix(MODEL): entry.size
        for name, entry in saved.items()
        if name.startswith(MODEL) and is_tensor(entry)
    }


def left_out(source: store.AnyPlace) -> list[str]:
    """What a checkpoint holds beside the module's tensors, in words."""
    saved = store.saved_tensors(source)
    found = [name for name, entry in saved.items() if name.startswith(MODEL) and not is_tensor(entry)]
    for prefix, what in ((OPTIMIZER, "optimizer states"), (COPIES, "averages of weights")):
        found += [what] if any(name.startswith(prefix) for name in saved) else []
    return found


def _write(
    source: store.AnyPlace, path: Path, *, names: Mapping[str, str], dtype: torch.dtype | None, batch_bytes: int
) -> None:
    saved = store.saved_tensors(source)
    entries: Entries = {
        stored: (saved[MODEL + name].size, _dtype(saved[MODEL + name], dtype)) for name, stored in names.items()
    }

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key, tensor in read_in_turn(source, [MODEL + name for name in names], batch_bytes=batch_bytes):
            yield names[key.removeprefix(MODEL)], tensor

    write_safetensors(path, entries, tensors())


def _can_map(entry: Any) -> bool:
    # Empty ones would all be mapped at one address, which torch.save takes for one tensor of several dtypes.
    return is_tensor(entry) and can_hold(entry.properties.dtype) and entry.size.numel() > 0


def _dtype(entry: Any, dtype: torch.dtype | None) -> torch.dtype:
    own: torch.dtype = entry.properties.dtype
    return dtype if dtype is not None and own.is_floating_point else own


def _size(entry: Any, dtype: torch.dtype | None) -> int:
    return int(entry.size.numel()) * _dtype(entry, dtype).itemsize
