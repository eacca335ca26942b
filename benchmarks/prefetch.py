"""Plans that are learned from some runs, and what real starts of other runs gain by them.

::

    python -m benchmarks.images /var/tmp/imgtool-images workloads django
    python -m benchmarks.prefetch /var/tmp/imgtool-images [--workload W …] [--train 5] [--held-out 3] [--link 20ms]
        [--part starts|overhead|drift …] [--arm A …] [--rounds 1] [--json FILE]

The workloads are those of :mod:`benchmarks.workloads`; their image is a base (Debian with compilers, numpy, git, pip)
and a workspace (libraries, sources with a history, wheels), 860 MB raw. Seeds to learn from and seeds to be held out
have nothing in common. A run is what :mod:`benchmarks.prefetch_node` says: the clock runs from ``POST /sandboxes`` to
the last line of the program.

*starts*: per workload a plan is learned, scored by simulation on the held-out runs, and the image is laid out by it.
Then each held-out run starts for real, in turn

* **cold**: lazily, without a plan. The node has metadata images and no data, as in all that follow but the last ones.
* **planned**: with the workload's plan; **waited for**: the plan's data come before the sandbox; **for all
  workloads**: with one plan that was learned from the runs of all of them.
* **re-laid**: of the image laid out by the plan, without and with the plan that goes with it.
* **warm**: the node has everything, in its page cache; **from disk**: and an empty page cache.
* **eager**: everything is fetched before the sandbox is there.
* **from nothing**: the node doesn't have the metadata either; *planned*, the plan is found in the store.

*Gap closed* is (cold - arm) / (cold - warm) of sums over runs. *Wasted* is what came from the store and isn't used by
that run, by its trace, of the bytes that came until the sandbox was removed. *Demand* is frames that came because a
reader asked for them, *late* those that the plan brought while a reader was waiting already, both by frames used.

*overhead*: what recording adds to the time of the program. *drift*: a plan of Django 4.2.1 used for the releases after
it as it is, re-mapped by path, and beside one of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.coldstart import LINKS, LinkKind
from benchmarks.harness import need_root, parser, save, spread, table
from benchmarks.images.recipes import DJANGO_RELEASES
from benchmarks.prefetch_drift import HEADINGS as DRIFT_HEADINGS
from benchmarks.prefetch_drift import drift
from benchmarks.prefetch_drift import rows as drift_rows
from benchmarks.prefetch_learning import Overhead, Recorded, Seeds, learn, overhead, record, simulated, used
from benchmarks.prefetch_node import Rig
from benchmarks.prefetch_starts import (
    COLD,
    HEADINGS,
    MIXED,
    NOTHING,
    NOTHING_PLANNED,
    PLANNED,
    RELAID,
    RELAID_PLANNED,
    WARM,
    Case,
    Laid,
    Starts,
    cases,
    row,
    start_all,
    together,
)
from benchmarks.workloads import WORKLOADS, Workload
from layerstore.relay import RelayReport
from prefetch.learn.remap import remap_trace
from prefetch.learn.score import Score
from prefetch.plans.format import Plan
from prefetch.trace.format import Trace

PARTS = ("overhead", "starts", "drift")
IMAGE = "stack"


@dataclass(frozen=True, slots=True)
class Measured:
    """A workload.

    Attributes:
        plan: that was learned.
        scores: simulated, on the held-out runs, by arm.
        relaid: what laying the image out by the plan came to.
        starts: real ones of the held-out runs.
    """

    plan: Plan
    scores: Mapping[str, Score]
    relaid: RelayReport
    starts: Starts


def measure(
    rig: Rig, workloads: Sequence[Workload], recorded: Mapping[str, Recorded], only: Sequence[str], rounds: int
) -> dict[str, Measured]:
    """The part *starts*."""
    sizes = rig.sizes(IMAGE)
    everything = [trace for each in recorded.values() for trace in each.train.values()]
    mixed = learn("all", everything, sizes, rig.kind)
    found = {}
    for workload in workloads:
        traces = recorded[workload.name]
        held_out = list(traces.held_out.values())
        plan = learn(workload.name, list(traces.train.values()), sizes, rig.kind)
        scores = {name: simulated(each, held_out, sizes, rig.kind) for name, each in ((PLANNED, plan), (MIXED, mixed))}
        plain = Laid(IMAGE, plan, {seed: used(trace, sizes) for seed, trace in traces.held_out.items()})
        relaid, report = lay_anew(rig, plain, f"{IMAGE}-{workload.name}", traces.held_out)
        arms = wanted(cases(plain, relaid, mixed), only)
        if len(workloads) == 1:
            arms.pop(MIXED, None)
        starts = start_all(rig, workload, arms, rounds)
        found[workload.name] = Measured(plan, scores, report, starts)
    return found


def lay_anew(rig: Rig, plain: Laid, image: str, traces: Mapping[int, Trace]) -> tuple[Laid, RelayReport]:
    """The image laid out by its plan, and what runs of it use then."""
    optimized = rig.optimize(plain.image, plain.plan, image)
    sizes = rig.sizes(image)
    with rig.places(image) as places:
        reads = {seed: used(remap_trace(trace, places)[0], sizes) for seed, trace in traces.items()}
    return Laid(image, optimized.plan, reads), optimized.report


def wanted(arms: Mapping[str, Case], only: Sequence[str]) -> dict[str, Case]:
    """The arms that were asked for, and those that they are compared with."""
    names = {*only, COLD, WARM} | ({NOTHING} if NOTHING_PLANNED in only else set()) if only else set(arms)
    return {name: case for name, case in arms.items() if name in names}


def report_starts(measured: Mapping[str, Measured]) -> None:
    everything = together([each.starts for each in measured.values()])
    by_workload = {workload: each.starts for workload, each in measured.items()} | {"all": everything}
    table(
        ("workload", *HEADINGS),
        [(workload, *row(starts, name)) for workload, starts in by_workload.items() for name in starts.arms],
    )
    print()
    table(
        ("workload", "plan", "learner", "recall", "gap simulated", "real", "points off", "wasted", "demand"),
        [
            (
                *(workload, name, str(each.plan.learned["learner"]) if name == PLANNED else "-"),
                *(f"{score.recall:.1%}", f"{score.gap_closed:.1%}", f"{each.starts.gap_closed(name):.1%}"),
                f"{100 * (score.gap_closed - each.starts.gap_closed(name)):+.1f}",
                *(f"{score.wasted:.1%}", f"{score.demand_share:.1%}"),
            )
            for workload, each in measured.items()
            for name, score in each.scores.items()
            if name in each.starts.arms
        ],
    )
    print()
    table(
        ("re-laid", "hot MB", "copied MB", "stored MB more", "reads before", "after", "MB before", "MB after"),
        [
            (
                *(workload, f"{each.relaid.hot_size / 1e6:.1f}", f"{each.relaid.copied_size / 1e6:.1f}"),
                *(f"{each.relaid.stored_size / 1e6:.1f}", f"{each.relaid.before.reads}", f"{each.relaid.after.reads}"),
                *(f"{each.relaid.before.size / 1e6:.1f}", f"{each.relaid.after.size / 1e6:.1f}"),
            )
            for workload, each in measured.items()
        ],
    )
    print()
    for slow, fast in ((COLD, RELAID), (PLANNED, RELAID_PLANNED)):
        if slow in everything.arms and fast in everything.arms:
            turns = everything.mean(slow, "turns") / everything.mean(fast, "turns")
            ratio = everything.ratio(fast, slow)
            print(f"{fast} against {slow}: {ratio:.2f} times as fast, turns divided by {turns:.1f}")


def report_overhead(measured: Mapping[str, Overhead]) -> None:
    body = []
    for workload, each in measured.items():
        plain = spread([run.wall for run in each.unrecorded])
        body.append((workload, *plain, *spread([run.wall for run in each.recorded]), f"{each.median():+.1%}"))
    table(("workload", "unrecorded", "spread", "recorded", "spread", "program takes more"), body)


def main() -> None:
    need_root()
    options = parser(__doc__ or "", rounds=1)
    options.add_argument("--workload", choices=WORKLOADS, action="append", help="only this one")
    options.add_argument("--train", type=int, default=5, metavar="N", help="runs to learn from")
    options.add_argument("--held-out", type=int, default=3, metavar="N", help="runs to start")
    options.add_argument("--link", choices=LINKS, default="20ms")
    options.add_argument("--part", choices=PARTS, action="append", help="only this one")
    options.add_argument("--arm", action="append", default=[], metavar="ARM", help="of starts, only this one")
    options.add_argument("--pairs", type=int, default=5, metavar="N", help="of recorded and unrecorded runs")
    options.add_argument("--releases", type=int, default=len(DJANGO_RELEASES), metavar="N", help="of Django")
    arguments = options.parse_args()
    kind: LinkKind = LINKS[arguments.link]
    parts = arguments.part or PARTS
    workloads = [WORKLOADS[name] for name in arguments.workload or WORKLOADS]
    seeds = Seeds.numbered(arguments.train, arguments.held_out)
    result: dict[str, object] = {"link": arguments.link, "train": arguments.train, "held_out": arguments.held_out}
    with Rig(arguments.images, arguments.work, kind) as rig:
        if parts != ["drift"]:
            rig.convert("debian:tools", "tools")
            rig.convert("debian:workloads", "workloads", base="tools")
            rig.compose("tools", "workloads", IMAGE)
        if "overhead" in parts:
            cost = overhead(rig, IMAGE, workloads, arguments.pairs)
            report_overhead(cost)
            result["overhead"] = {name: each.to_json() for name, each in cost.items()}
        if "starts" in parts:
            recorded = record(rig, IMAGE, workloads, seeds)
            measured = measure(rig, workloads, recorded, arguments.arm, arguments.rounds)
            report_starts(measured)
            result["starts"] = {name: _document(each) for name, each in measured.items()}
        if "drift" in parts:
            found = drift(rig, seeds, arguments.rounds, DJANGO_RELEASES[: arguments.releases])
            table(DRIFT_HEADINGS, drift_rows(found))
            result["drift"] = [
                {
                    "release": each.release,
                    "match": each.match.to_json(),
                    "scores": {name: score.to_json() for name, score in each.scores.items()},
                    "starts": each.starts.to_json(),
                }
                for each in found
            ]
    save(arguments.json, result)


def _document(measured: Measured) -> dict[str, object]:
    report = measured.relaid
    return {
        "learned": measured.plan.learned,
        "score": measured.plan.score,
        "simulated": {name: score.to_json() for name, score in measured.scores.items()},
        "starts": measured.starts.to_json(),
        "relaid": {
            "hot_size": report.hot_size,
            "copied_size": report.copied_size,
            "stored_size": report.stored_size,
            "before": asdict(report.before),
            "after": asdict(report.after),
        },
    }


if __name__ == "__main__":
    main()
