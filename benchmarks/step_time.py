"""Times a training step of our strategy beside torch written by hand, and torch's parallel API, in the same layout.

    python -m benchmarks.step_time
    python -m benchmarks.step_time --layouts dp2,zero3x2 --rounds 5 --batch 8 --out times.json

All train the same model from the same weights on the same batches, so their losses must agree. Runs alternate (ours,
hand, torch, torch, hand, ours, ...), each in processes of its own, so that a machine that slows down slows all. A
smaller batch makes overheads count more. The exit code is 1 where losses differ or the ratio of ours to the fastest
peer is above the limit. Time nothing while the machine does something else: the spread between rounds tells.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contenders import CASES
from benchmarks.rank import RankResult
from lightning_3d.layout import Layout
from lightning_3d.strategies.processes.launch import start_ranks

TOP = Path(__file__).resolve().parent.parent
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Summary:
    """A contender in a layout, over all rounds.

    Attributes:
        wall_seconds: of a step, which lasts as long as its slowest rank's; the median over rounds of their medians.
        cpu_seconds: of a step, all ranks and threads together; likewise.
        spread: the slowest round over the fastest, less 1.
        memory_bytes: the largest that any rank needed, over what its imports took.
        loss: of the last step, of all samples.
    """

    wall_seconds: float
    cpu_seconds: float
    spread: float
    memory_bytes: int
    loss: float


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    results: dict[str, dict[str, list[list[RankResult]]]] = {}
    summaries: dict[str, dict[str, Summary]] = {}
    for layout in options.layouts:
        contenders = [name for name in CASES[layout].contenders if not options.only or name in options.only]
        runs: dict[str, list[list[RankResult]]] = {contender: [] for contender in contenders}
        for number in range(options.rounds):
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                ranks = run_once(contender, layout, steps=options.steps, batch=options.batch, timeout=options.timeout)
                runs[contender].append(ranks)
                wall = statistics.median(_step_walls(ranks, skip=options.skip))
                cpu = statistics.median(_step_cpus(ranks, skip=options.skip))
                told = f"# {layout} {contender}, round {number + 1}: {wall:.3f} s, CPU {cpu:.3f} s"
                print(told, file=sys.stderr, flush=True)
        results[layout] = runs
        summaries[layout] = {contender: summarize(runs[contender], skip=options.skip) for contender in contenders}
        # After each layout, so that a run that is stopped keeps what it has measured.
        if options.out is not None:
            _write(options, summaries, results)
    failures = print_table(summaries, limit=options.limit)
    return 1 if failures else 0


def run_once(contender: str, layout: str, *, steps: int, batch: int, timeout: float) -> list[RankResult]:
    """One training in a fresh group of processes; the ranks' results in order.

    Raises:
        SystemExit: a rank failed; it has told why.
    """
    # Read where ranks are started, and before torch starts its threads.
    os.environ["OMP_NUM_THREADS"] = str(CASES[layout].threads)
    # Threads that spin while they wait would count as work, and take the cores from each other.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(TOP), os.environ.get("PYTHONPATH")]))}
    world_size = Layout.parse(layout).world_size
    with tempfile.TemporaryDirectory(prefix="step-time-") as folder:
        command = [sys.executable, "-m", "benchmarks.rank", contender, layout, str(steps), str(batch), str(timeout)]
        code = start_ranks([*command, folder], world_size=world_size, env=env).exit_code
        if code:
            raise SystemExit(f"{contender} in layout {layout} failed with exit code {code}.")
        files = [Path(folder, f"rank-{rank}.json") for rank in range(world_size)]
        return [RankResult(**json.loads(file.read_text())) for file in files]


def summarize(rounds: list[list[RankResult]], *, skip: int) -> Summary:
    """The figures of one contender in one layout; the first `skip` steps of each round do not count."""
    walls = [statistics.median(_step_walls(ranks, skip=skip)) for ranks in rounds]
    cpus = [statistics.median(_step_cpus(ranks, skip=skip)) for ranks in rounds]
    losses = [rank.losses[-1] for rank in rounds[-1]]
    return Summary(
        wall_seconds=statistics.median(walls),
        cpu_seconds=statistics.median(cpus),
        spread=max(walls) / min(walls) - 1,
        memory_bytes=max(rank.peak_bytes - rank.imported_bytes for ranks in rounds for rank in ranks),
        loss=statistics.fmean(loss for loss in losses if loss is not None),
    )


def print_table(summaries: dict[str, dict[str, Summary]], *, limit: float) -> list[str]:
    """Print all figures with the ratios of ours to the fastest peer; returns what fails."""
    failures = []
    columns = ("step s", 8), ("ratio", 6), ("spread", 7), ("CPU s", 8), ("ratio", 6), ("MiB", 6), ("loss", 9)
    heading = " ".join([f"{'layout':20}", *(f"{name:>{width}}" for name, width in columns)])
    print(heading, "-" * len(heading), sep="\n")
    for layout, all_found in summaries.items():
        peers = {name: found for name, found in all_found.items() if name != "ours"}
        ours = all_found.get("ours")
        ratios: dict[str, float] = {}
        if ours is not None and peers:
            ratios["wall"] = ours.wall_seconds / min(peer.wall_seconds for peer in peers.values())
            ratios["CPU"] = ours.cpu_seconds / min(peer.cpu_seconds for peer in peers.values())
        for contender, found in all_found.items():
            shown = {kind: f"{ratio:.2f}" for kind, ratio in ratios.items()} if contender == "ours" else {}
            print(
                f"{layout:14} {contender:5} {found.wall_seconds:8.4f} {shown.get('wall', ''):>6} {found.spread:7.0%} "
                f"{found.cpu_seconds:8.4f} {shown.get('CPU', ''):>6} {found.memory_bytes / 2**20:6.0f} "
                f"{found.loss:9.5f}"
            )
        failures += [f"{layout}: {k} ratio {r:.3f} is above {limit}" for k, r in ratios.items() if r > limit]
        if ours is not None:
            failures += [
                f"{layout}: last losses of ours, {ours.loss:.6f}, and {name}, {peer.loss:.6f}, differ"
                for name, peer in peers.items()
                # `not <=`: a loss that is no number fails too.
                if not abs(ours.loss / peer.loss - 1) <= LOSS_TOLERANCE
            ]
    print(
        "step s, CPU s: of a step; MiB: the largest rank's peak over its imports; ratio: ours / the fastest peer",
        *failures,
        sep="\n",
    )
    return failures


def _step_walls(ranks: list[RankResult], *, skip: int) -> list[float]:
    return [max(step) for step in zip(*(rank.wall_seconds for rank in ranks), strict=True)][skip:]


def _step_cpus(ranks: list[RankResult], *, skip: int) -> list[float]:
    return [sum(step) for step in zip(*(rank.cpu_seconds for rank in ranks), strict=True)][skip:]


def _write(
    options: argparse.Namespace,
    summaries: dict[str, dict[str, Summary]],
    results: dict[str, dict[str, list[list[RankResult]]]],
) -> None:
    document = {
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "summaries": {name: {who: asdict(found) for who, found in both.items()} for name, both in summaries.items()},
        "runs": {
            name: {who: [[asdict(rank) for rank in ranks] for ranks in rounds] for who, rounds in both.items()}
            for name, both in results.items()
        },
    }
    options.out.write_text(json.dumps(document, indent=1))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__.split("\n")[0])
    parser.add_argument("--layouts", default=",".join(CASES), help="comma-separated; default all: %(default)s")
    parser.add_argument("--only", help="comma-separated contenders; default all")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender in each layout")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--skip", type=int, default=2, help="first steps of each run that do not count")
    parser.add_argument("--batch", type=int, default=32, help="samples in a step, over all ranks")
    parser.add_argument("--limit", type=float, default=1.10, help="the largest ratio ours/hand, of wall or CPU seconds")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one run may take")
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    options = parser.parse_args(arguments)
    options.layouts = options.layouts.split(",")
    options.only = options.only.split(",") if options.only else []
    for name in options.layouts:
        if name not in CASES:
            parser.error(f"layout {name!r} has no peer to be timed beside. Choose of {', '.join(CASES)}.")
        layout = Layout.parse(name)
        parts = layout.data * (2 * layout.pipeline if layout.pipeline > 1 else 1)
        if options.batch % parts:
            parser.error(
                f"--batch {options.batch} makes no {parts} equal parts for {name}. Give a multiple of {parts}."
            )
    if options.rounds < 1 or not 0 <= options.skip < options.steps:
        parser.error("give --rounds of at least 1 and more --steps than --skip")
    return options


if __name__ == "__main__":
    sys.exit(main())
