"""The layouts that are timed, each with those that ours is timed beside."""

from __future__ import annotations

from dataclasses import dataclass, field

OURS = "benchmarks.ours"


@dataclass(frozen=True)
class Case:
    """How a layout is timed.

    Attributes:
        peers: modules with a ``train(job, clock)`` that does what our strategy does, by the contender's name: "hand"
            with raw collectives, "torch" with torch's parallel API.
        threads: of each rank.
    """

    peers: dict[str, str] = field(default_factory=dict)
    threads: int = 1

    @property
    def contenders(self) -> dict[str, str]:
        """Each contender's module, ours first."""
        return {"ours": OURS, **self.peers}


_COMPOSED = Case({"hand": "benchmarks.hand.composed", "torch": "benchmarks.torch_api.composed"})

# Keys as `Layout.parse` reads them.
CASES: dict[str, Case] = {
    "single": Case({"hand": "benchmarks.hand.replicated"}, threads=2),
    "dp2": Case({"hand": "benchmarks.hand.replicated"}),
    "zero1x2": Case({"hand": "benchmarks.hand.zero1"}),
    "zero2x2": Case({"hand": "benchmarks.hand.zero23"}),
    "zero3x2": Case({"hand": "benchmarks.hand.zero23"}),
    "tp2": _COMPOSED,
    "pp2": _COMPOSED,
    "tp2-pp2": _COMPOSED,
    "zero3x2-tp2": _COMPOSED,
}
