"""Learners compared on given traces: what each makes of some runs is scored on the others, over several links.

::

    python -m benchmarks.learners TRACE… [--holdout K] [--budget BYTES] [--all]

Traces are files of ``imgtool run --record``; those of one command line are one workload. Simulated: how far that is
from real starts is another benchmark's business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import parser, save, table
from prefetch.learn.runs import runs_of
from prefetch.learn.simulate import Link
from prefetch.learn.train import train
from prefetch.plans.format import Plan
from prefetch.trace.format import Trace, parse_trace

LINKS = {
    "20 ms": Link(0.020),
    "5 ms, 200 Mbit/s": Link(0.005, 25e6),
    "1 ms": Link(0.001),
}
SHOWN = 10
HEADINGS = ("learner", "merit", "gap closed", "recall", "precision", "wasted", "demand", "requests", "MB")


def main() -> None:
    made = parser(__doc__ or "", images=False, rounds=1)
    made.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    made.add_argument("--holdout", type=int, default=1, metavar="K", help="runs held out at a time")
    made.add_argument("--budget", type=int, metavar="BYTES", help="that a plan may fetch")
    made.add_argument("--all", action="store_true", help=f"list all learners, not the best {SHOWN} and the simple ones")
    arguments = made.parse_args()
    traces = [parse_trace(path.read_bytes(), str(path)) for path in arguments.traces]
    results = {}
    for workload, of in {"all together": traces, **by_command(traces)}.items():
        if len(runs_of(of)) < 2:
            print(f"\n{workload}: a single run, none to hold out")
            continue
        for link, what in LINKS.items():
            start = time.perf_counter()
            plan = train(workload, of, link=what, holdout=arguments.holdout, budget=arguments.budget)
            seconds = time.perf_counter() - start
            results[f"{workload}, {link}"] = {"score": plan.score, "learned": plan.learned, "seconds": seconds}
            print(f"\n{workload}, {len(of)} runs, {link}: {summary(plan)}; trained in {seconds:.1f} s\n")
            table(HEADINGS, rows(plan, everything=arguments.all))
    save(arguments.json, {"learners": results})


def by_command(traces: Sequence[Trace]) -> dict[str, list[Trace]]:
    """Workloads by command line, if there are several."""
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        found.setdefault(" ".join(trace.header.command) or "unknown command", []).append(trace)
    return found if len(found) > 1 else {}


def summary(plan: Plan) -> str:
    score = plan.score
    return (
        f"{plan.learned['learner']}, gap closed {number(score['gap_closed'], 100):.1f} % "
        f"(worst run {number(score['worst_gap_closed'], 100):.1f} %), cold {number(score['cold_seconds']):.2f} s, "
        f"planned {number(score['seconds']):.2f} s, warm {number(score['warm_seconds']):.2f} s"
    )


def rows(plan: Plan, *, everything: bool) -> list[tuple[str, ...]]:
    tried = plan.learned["tried"]
    assert isinstance(tried, list)
    return [
        (
            str(row["learner"]),
            f"{row['merit']:.3f}",
            *(f"{100 * row[name]:.1f} %" for name in ("gap_closed", "recall", "precision", "wasted", "demand_share")),
            f"{row['requests']:.0f}",
            f"{row['bytes'] / 1e6:.1f}",
        )
        for place, row in enumerate(tried)
        if everything or place < SHOWN or row["learner"] in ("union", "intersection", "frequency-50")
    ]


def number(value: object, factor: float = 1.0) -> float:
    return value * factor if isinstance(value, int | float) else math.nan


if __name__ == "__main__":
    main()
