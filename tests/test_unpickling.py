"""A checkpoint's table of contents can make what torch puts into one, and do nothing else."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_3d.checkpoint.unpickling import load_metadata
from lightning_3d.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"


def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value.encode()).to_bytes(4, "little") + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def called(function: bytes, *args: bytes) -> bytes:
    return function + pickle.MARK + b"".join(args) + pickle.TUPLE + pickle.REDUCE


def with_attribute(target: bytes, name: str, value: bytes) -> bytes:
    """What pickle writes for an object with `__slots__`."""
    slots = pickle.EMPTY_DICT + text(name) + value + pickle.SETITEM
    return target + pickle.NONE + slots + pickle.TUPLE2 + pickle.BUILD


def with_state(target: bytes, name: str, value: bytes) -> bytes:
    return target + pickle.EMPTY_DICT + text(name) + value + pickle.SETITEM + pickle.BUILD


def read(content: bytes) -> Metadata:
    return load_metadata(io.BytesIO(pickle.PROTO + b"\x04" + content + pickle.STOP), name=".metadata")


def contents() -> Metadata:
    properties = [
        TensorProperties(dtype=torch.bfloat16),
        TensorProperties(memory_format=torch.channels_last),
        TensorProperties(layout=torch.sparse_coo, memory_format=torch.preserve_format),
    ]
    size = torch.Size([2, 3])
    tensors = {
        f"model.{index}": TensorStorageMetadata(one, size, [ChunkStorageMetadata(torch.Size([0, 0]), size)])
        for index, one in enumerate(properties)
    }
    return Metadata(
        {**tensors, "lr": BytesStorageMetadata()},
        planner_data={"model.0": ("model", 0)},
        storage_data={
            MetadataIndex("model.0", size, 1): _StorageInfo("__0_0.distcp", 0, 24),
            "prefix": _StoragePrefix("__0_"),
        },
        storage_meta=StorageMeta(checkpoint_id=Path("/runs/step=1"), save_id="a"),
        version="1",
    )


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_torch_writes_is_read_as_it_was(protocol: int) -> None:
    written = contents()
    got = load_metadata(io.BytesIO(pickle.dumps(written, protocol)), name=".metadata")
    assert got == written and type(got.storage_meta.checkpoint_id) is PosixPath  # type: ignore[union-attr]
    assert [vars(entry) for entry in got.state_dict_metadata.values()] == [
        vars(entry) for entry in written.state_dict_metadata.values()
    ]


def test_a_memory_format_that_an_early_python_3_11_wrote_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    content = pickle.dumps(contents())
    assert b"getattr" in content
    assert load_metadata(io.BytesIO(content), name=".metadata") == contents()


_GLOBALS = named("torch.serialization", "_get_layout.__globals__")
_OS = called(named("collections", "OrderedDict.get"), _GLOBALS, text("os"))
_GETATTR = named("builtins", "getattr")
_ENCODING = named(_METADATA, "_MEM_FORMAT_ENCODING")


@pytest.mark.parametrize(
    "function",
    [
        called(named("collections", "OrderedDict.__getattribute__"), _OS, text("system")),
        called(named(_METADATA, "Metadata.__getattribute__"), _OS, text("system")),
        called(named(_METADATA, "_MEM_FORMAT_ENCODING.__getattribute__"), _OS, text("system")),
        called(_GETATTR, named("pathlib", "PosixPath"), text("touch")),
        called(_GETATTR, _ENCODING, text("__class__")),
        called(_GETATTR, called(_ENCODING, pickle.BININT1 + b"\x00"), text("__class__")),
        named("os", "system"),
        named("posix", "system"),
        named("builtins", "eval"),
        named("torch", "load"),
        named("torch", "serialization.os.system"),
        named("torch", "float32.__class__"),
        named("pathlib", "PosixPath.touch"),
    ],
)
def test_no_function_is_reached(tmp_path: Path, function: bytes) -> None:
    for argument in (
        text(f"touch {tmp_path}/sprung"),
        text(f"open({str(tmp_path / 'sprung')!r}, 'w')"),
        called(named("pathlib", "PosixPath"), text(f"{tmp_path}/sprung")),
    ):
        with pytest.raises((CheckpointError, KeyError)):
            read(called(function, argument))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "target",
    [
        named("pathlib", "PosixPath"),
        named("torch.serialization", "_get_layout"),
        *(named(_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING")),
        named("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        called(_ENCODING, pickle.BININT1 + b"\x00"),
        named("torch", "float32"),
        called(named("torch.serialization", "_get_layout"), text("torch.strided")),
    ],
)
@pytest.mark.parametrize("how", [with_attribute, with_state])
def test_nothing_that_outlives_the_reading_is_changed(target: bytes, how: Any) -> None:
    lasting: list[Any] = [
        *(PosixPath, Metadata, MetadataIndex, TensorProperties, _MEM_FORMAT_ENCODING, _StorageInfo),
        torch.serialization._get_layout,
        *_MEM_FORMAT_ENCODING,
    ]
    before = [copy.copy(dict(vars(one))) for one in lasting]
    try:
        with pytest.raises((CheckpointError, AttributeError, TypeError)):
            # Else every path of this process would be this one.
            read(how(target, "_str", text("/elsewhere")))
        assert [dict(vars(one)) for one in lasting] == before
    finally:
        for one in lasting:
            if "_str" in vars(one):
                delattr(one, "_str")


def test_another_object_is_no_table_of_contents() -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata is no table of contents of a checkpoint, but PosixPath"):
        read(called(named("pathlib", "PosixPath"), text("/")))
