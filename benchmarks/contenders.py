"""The layouts that are timed, each with its hand-written peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """How a layout is timed.

    Attributes:
        hand: the module with ``train(job, clock)`` that does by hand what our strategy does.
        threads: of each rank.
    """

    hand: str
    threads: int = 1


# Keys as `Layout.parse` reads them.
CASES: dict[str, Case] = {
    "single": Case(hand="benchmarks.hand.replicated", threads=2),
    "dp2": Case(hand="benchmarks.hand.replicated"),
    "zero1x2": Case(hand="benchmarks.hand.zero1"),
    "zero2x2": Case(hand="benchmarks.hand.zero23"),
    "zero3x2": Case(hand="benchmarks.hand.zero23"),
}


def module_of(contender: str, layout: str) -> str:
    """Where `contender` ("ours" or "hand") keeps its ``train(job, clock)`` for a layout."""
    return "benchmarks.ours" if contender == "ours" else CASES[layout].hand
