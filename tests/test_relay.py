"""What the last stage has reaches all ranks, and a step under a pipeline sends little besides its activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from modules import Rows, TinyGPT
from training import ordered, run, trainer_for

from lightning_3d.parallel.relay import Relay
from lightning_3d.strategies.processes.launch import fork_ranks

pytestmark = pytest.mark.distributed


@contextmanager
def counted_messages() -> Iterator[dict[str, int]]:
    """Calls of collectives inside, by name."""
    counts: dict[str, int] = {}
    originals = {name: getattr(dist, name) for name in ("broadcast", "all_reduce", "broadcast_object_list")}

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(name, original))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


def nests() -> list[Any]:
    """One after the other, as a step might return them."""
    half, double = torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(math.pi, dtype=torch.float64)
    nests: list[Any] = [
        {"loss": half, "logs": [("a", double, {"on_step": True, "batch_size": 3, "reduce_fx": "mean"})]},
        {"loss": half * 2, "logs": [("a", double * 2, {"on_step": True, "batch_size": 4, "reduce_fx": "mean"})]},
        {"loss": half, "logs": [("b", double, {"on_step": False, "batch_size": 4, "reduce_fx": max})]},
        {"loss": None, "logs": [], "rows": torch.arange(6).view(2, 3), "flag": torch.tensor(True)},
        {"loss": None, "logs": [], "rows": torch.arange(6).view(2, 3) + 1, "flag": torch.tensor(False)},
        {"loss": None, "logs": [], "rows": torch.arange(3).view(1, 3), "flag": torch.tensor(False)},
        {"count": 2**60, "big": 0.1, "nan": math.nan, "text": "x", "number": torch.tensor(2**60)},
        {"count": 2**60 + 1, "big": 0.2, "nan": 1.0, "text": "y", "number": torch.tensor(2**60 + 1)},
        (True, [1, 2.5]),
        (False, [2, 2.5]),
        (1, [2, 2.5]),
        None,
    ]
    opaque = Opaque(1)
    return [*nests, [opaque], [opaque]]


def relayed() -> list[tuple[str, int]]:
    dist.init_process_group("gloo")
    relay = Relay(dist.group.WORLD, source=1, device=torch.device("cpu"))
    found = []
    with counted_messages() as counts:
        for number, nest in enumerate(nests()):
            if isinstance(nest, list):
                # Changed in place, the same object still.
                nest[0].value = number
            counts.clear()
            got = relay.share(nest if dist.get_rank() == 1 else None, kind="step")
            shown = str(got[0].value) if isinstance(got, list) else repr(got)
            found.append((shown, counts.get("broadcast_object_list", 0)))
    return found


def test_nests_reach_the_other_rank_unchanged_and_are_pickled_only_where_they_are_built_anew() -> None:
    expected = [*(repr(nest) for nest in nests()[:-2]), "12", "13"]
    for ranks in fork_ranks(relayed, world_size=2, timeout_seconds=60):
        assert [shown for shown, _ in ranks] == expected
        assert [pickled for _, pickled in ranks] == [1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]


def count_messages_of_steps(layout: str) -> list[dict[str, int]]:
    module = TinyGPT()
    trainer = trainer_for(layout, max_steps=3, num_microbatches=4)
    steps = []

    class Noting(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            original: Any = trainer.strategy._train_pipelined  # type: ignore[attr-defined]

            def noting(*args: Any) -> Any:
                with counted_messages() as counts:
                    result = original(*args)
                steps.append(dict(counts))
                return result

            trainer.strategy._train_pipelined = noting  # type: ignore[attr-defined]

    trainer.callbacks.append(Noting())  # type: ignore[attr-defined]
    trainer.fit(module, ordered(Rows(24), replicas=1))
    return steps


def test_step_sends_one_small_tensor_besides_activations_and_shared_gradients() -> None:
    for steps in run("pp2", count_messages_of_steps):
        assert "broadcast_object_list" in steps[0]
        # The all-reduces: the log's sync_dist; of the tied weight and of the temperature, which every stage has, the
        # gradient and whether there is one.
        assert steps[1:] == 2 * [{"broadcast": 1, "all_reduce": 5}]
