"""Where the names of stored weights lie among those of a module that holds their model somewhere inside."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from lightning_3d.errors import CheckpointError

# Old checkpoints of transformers store these caches; every version computes them from the config.
_STALE = r"(^|\.)rotary_emb\.inv_freq$"


def saved_name(name: str) -> str:
    """A name without what `torch.compile` puts into it, so that checkpoints with and without it are the same.

    >>> saved_name("model._orig_mod.layers.0._orig_mod.weight")
    'model.layers.0.weight'
    """
    return name.replace("_orig_mod.", "")


def own_names(names: Iterable[str]) -> dict[str, str]:
    """A module's names by what they are saved as.

    >>> own_names(["net._orig_mod.weight", "scale"])
    {'net.weight': 'net._orig_mod.weight', 'scale': 'scale'}
    """
    return {saved_name(name): name for name in names}


def find_prefix(stored: Collection[str], own: Collection[str]) -> str:
    """What the stored names lack in front to be the module's own ("model." of a LightningModule, say).

    Args:
        stored: names of the weights of one model.
        own: names of the module's state.

    Raises:
        CheckpointError: several places in the module have these names.

    >>> find_prefix(["embed.weight", "head.weight"], ["net.embed.weight", "net.head.weight", "scale"])
    'net.'
    """
    mine, names = set(own), list(stored)
    candidates = {""}
    # The first names of a model are met at the end of every prefix that it can have; all names are then counted.
    for name in names[:4]:
        candidates.update(other.removesuffix(name) for other in mine if other.endswith(f".{name}"))
    counts = {prefix: sum(prefix + name in mine for name in names) for prefix in candidates}
    best = max(counts.values())
    found = sorted(prefix for prefix, count in counts.items() if count == best)
    if best == 0:
        return ""
    if len(found) > 1:
        places = ", ".join(prefix or "(its top)" for prefix in found)
        raise CheckpointError(
            f"the stored weights fit in several places of the module: {places}. "
            "Load them in configure_model(), or rename them to the module's own names."
        )
    return found[0]


def without_stale(names: Iterable[str], patterns: Collection[str] = ()) -> list[str]:
    """Names without those of caches that are computed anew, and those that the model says it ignores."""
    ignored = [_STALE, *patterns]
    return [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]
