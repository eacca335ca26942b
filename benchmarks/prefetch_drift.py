"""A plan that was learned on one release, used for the next ones: by what it says, and re-mapped by paths."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from benchmarks.prefetch_learning import Seeds, learn, record, simulated, used
from benchmarks.prefetch_node import Arm, Rig
from benchmarks.prefetch_starts import COLD, PLANNED, WARM, Case, Starts, start_all
from benchmarks.workloads import DJANGO
from layerstore.digest import Digest
from prefetch.learn.remap import MatchReport, remap_plan
from prefetch.learn.score import Score
from prefetch.plans.format import Plan

REMAPPED, OWN = "planned, re-mapped", "planned, of its own"


@dataclass(frozen=True, slots=True)
class Drifted:
    """One release.

    Attributes:
        match: what of the plan was found in it.
        scores: simulated, on runs of the release, by arm.
        starts: real ones.
    """

    release: str
    match: MatchReport
    scores: Mapping[str, Score]
    starts: Starts


def drift(rig: Rig, seeds: Seeds, rounds: int, releases: Sequence[str]) -> list[Drifted]:
    """Learn on the first of the releases, and start all of them: with that plan, re-mapped, and with one of their own.

    Runs of a release are recorded with the same seeds, so the plans differ by the release alone.
    """
    rig.convert("django:base", "python")
    for release in releases:
        rig.convert(f"django:{release}", f"django-{release}", base="python")
        rig.compose("python", f"django-{release}", release)
    found = []
    plan = None
    for release in releases:
        traces = record(rig, release, [DJANGO], seeds)[DJANGO.name]
        sizes = rig.sizes(release)
        own = learn("django", list(traces.train.values()), sizes, rig.kind)
        plan = plan or own
        with rig.places(release) as places:
            remapped, match = remap_plan(plan, None, places)
        plans = {PLANNED: plan, REMAPPED: remapped, OWN: own}
        held_out = list(traces.held_out.values())
        packs = {pack.digest for layer in rig.image(release).layers for pack in layer.packs}
        scores = {name: simulated(_within(each, packs), held_out, sizes, rig.kind) for name, each in plans.items()}
        reads = {seed: used(trace, sizes) for seed, trace in traces.held_out.items()}
        arms = {COLD: Case(release, Arm(), reads), WARM: Case(release, Arm(has="all", hot=True), reads)}
        arms |= {name: Case(release, Arm(planned=True), reads, each) for name, each in plans.items()}
        found.append(Drifted(release, match, scores, start_all(rig, DJANGO, arms, rounds)))
        print(f"  django {release}: {match.rate:.1%} of the plan found", file=sys.stderr)
    return found


def _within(plan: Plan, packs: Set[Digest]) -> Plan:
    """What a node with these packs takes of a plan."""
    parts = (
        replace(part, ranges=tuple(each for each in part.ranges if part.packs[each.device - 1] in packs))
        for part in plan.parts
    )
    return replace(plan, parts=tuple(parts))


HEADINGS = (
    "release",
    "plan",
    "found",
    "recall",
    "gap closed, simulated",
    "gap closed",
    "times as fast",
    "wasted",
    "demand",
)


def rows(found: Sequence[Drifted]) -> list[tuple[str, ...]]:
    """For a table: what each plan came to with each release."""
    return [
        (
            *(each.release, name, f"{each.match.rate:.1%}" if name == REMAPPED else "-"),
            *(f"{score.recall:.1%}", f"{score.gap_closed:.1%}", f"{each.starts.gap_closed(name):.1%}"),
            *(f"{each.starts.ratio(name):.2f}", f"{each.starts.wasted(name):.1%}"),
            f"{each.starts.demand_share(name):.1%}",
        )
        for each in found
        for name, score in each.scores.items()
    ]
