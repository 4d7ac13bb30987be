"""A short text that differs where two values do, to be compared between ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten


def fingerprint(value: Any) -> str:
    """Of a nest of tensors, arrays, strings and numbers; of other objects only the class counts, of
    sparse and nested tensors the dtype.

    >>> import torch
    >>> fingerprint([torch.ones(2), "a"]) == fingerprint([torch.ones(2), "a"]) != fingerprint([torch.ones(2), "b"])
    True
    """
    leaves, structure = tree_flatten(value)
    seen = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            seen.update(repr((leaf.dtype, leaf.layout)).encode())
            # Others have no bytes in one piece.
            if leaf.layout == torch.strided and not (leaf.is_nested or leaf.is_quantized or leaf.is_meta):
                seen.update(repr(tuple(leaf.shape)).encode())
                flat = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
                seen.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != object:
            seen.update(leaf.tobytes())
        elif isinstance(leaf, str | bytes | int | float | bool | type(None)):
            seen.update(repr(leaf).encode())
        else:
            seen.update(type(leaf).__qualname__.encode())
    return seen.hexdigest()[:16]
