"""Learners: rules that say, from the evidence of some runs, which frames to fetch and in which order.

==============  =================================================================================================
family          what it is for
==============  =================================================================================================
union           everything that any run read. What replaying a single trace does; wastes most where runs differ
intersection    what every run read. Wastes least; misses what nearly all need
frequency       what at least a share of the runs read, due when the first of them needs it
quantile        the same, due at a low quantile of the times: one hasty run doesn't bring all forward
rank            the same, in the order of the median place in a run, for machines whose speeds differ
early           what is needed at once is taken at a low share, since no demand could be in time; later a high one
cluster         runs are grouped by what they read, and what most of a group read is taken: workloads that few runs are
                of aren't noise. True times, or the common core first and then group by group, largest first
command         as cluster, grouped by command line
==============  =================================================================================================

Members of a family differ in their numbers, which are in the name: ``quantile-50-10`` takes what half of the runs read,
due at the tenth percentile. Which member is right depends on how much runs vary, so it is left to scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from prefetch.learn.clusters import Cluster, by_command, by_content
from prefetch.learn.evidence import Evidence, quantile

EPSILON = 1e-9
"""Shares are compared with this to spare, so that two of three are two thirds."""


class Chosen(NamedTuple):
    """A frame that a learner picked.

    Attributes:
        frame: number in the corpus.
        due: microseconds from the start. Order is told by it alone.
        least: segments that a smaller share of ``among`` read are not needed for it.
        among: the runs that it was picked for.
    """

    frame: int
    due: int
    least: float
    among: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a learner picked; ``share`` is the quantile of times at which it sets deadlines."""

    frames: tuple[Chosen, ...]
    share: float = 0.0


Learner = Callable[[Evidence], Choice]


def union(evidence: Evidence) -> Choice:
    return frequency(evidence, least=0.0)


def intersection(evidence: Evidence) -> Choice:
    return frequency(evidence, least=1.0)


def frequency(evidence: Evidence, *, least: float, share: float = 0.0) -> Choice:
    """Frames that at least this share of the runs read, due at the quantile ``share`` of their times."""
    return Choice(_chosen(evidence, _frequent(evidence, least), least, share), share)


def rank(evidence: Evidence, *, least: float, share: float = 0.1) -> Choice:
    """As :func:`frequency`, in the order of the frames' median places; a frame is due no later than those behind it."""
    places: dict[int, list[float]] = {}
    for number in evidence.runs:
        times: dict[int, int] = {}
        for index, at in evidence.corpus.firsts[number].items():
            frame = evidence.corpus.segments[index].frame
            times[frame] = min(at, times.get(frame, at))
        for place, frame in enumerate(sorted(times, key=lambda frame: (times[frame], frame))):
            places.setdefault(frame, []).append(place / len(times))
    for values in places.values():
        values.sort()
    ordered = sorted(
        _chosen(evidence, _frequent(evidence, least), least, share),
        key=lambda chosen: (places[chosen.frame][(len(places[chosen.frame]) - 1) // 2], chosen.due, chosen.frame),
    )
    latest = ordered[-1].due if ordered else 0
    dated = []
    for chosen in reversed(ordered):
        latest = min(latest, chosen.due)
        dated.append(chosen._replace(due=latest))
    return Choice(tuple(reversed(dated)), share)


def early(evidence: Evidence, *, first: float, later: float, seconds: float) -> Choice:
    """Frames due within ``seconds`` if a share of ``first`` of the runs read them, others at ``later``."""
    share = 0.1
    chosen = _chosen(evidence, _frequent(evidence, first), first, share)
    kept = (each for each in chosen if each.due < seconds * 1e6 or evidence.frame_chance(each.frame) >= later - EPSILON)
    return Choice(tuple(kept), share)


def cluster(
    evidence: Evidence, *, least: float, group: Callable[[Evidence], list[Cluster]], core_first: bool = False
) -> Choice:
    """What at least this share of some group of runs read.

    Args:
        evidence: of the runs.
        least: share of a group.
        group: how runs are grouped.
        core_first: what all groups read is due before what only some read, and a larger group's before a smaller's.
    """
    share = 0.1
    groups = group(evidence)
    of: dict[int, list[Cluster]] = {}
    for runs in groups:
        members = set(runs)
        for frame, readers in evidence.frame_runs.items():
            pack = evidence.corpus.frames[frame].pack
            over = sum(1 for number in runs if evidence.corpus.has_pack(number, pack))
            if over and len(members.intersection(readers)) >= least * over - EPSILON:
                of.setdefault(frame, []).append(runs)
    stages: list[list[Chosen]] = [[] for _ in range(len(groups) + 1)]
    for frame, picking in sorted(of.items()):
        stage = 0 if len(picking) == len(groups) else 1 + groups.index(picking[0])
        due = quantile(evidence.frame_times[frame], share)
        among = tuple(sorted(number for runs in picking for number in runs))
        stages[stage].append(Chosen(frame, due, least, among))
    if core_first:
        latest = -1
        for number, members_of in enumerate(stages):
            stages[number] = [each._replace(due=max(latest + 1, each.due)) for each in members_of]
            latest = max((each.due for each in stages[number]), default=latest)
    return Choice(tuple(each for stage in stages for each in stage), share)


def _frequent(evidence: Evidence, least: float) -> list[int]:
    return [frame for frame in evidence.frame_times if evidence.frame_chance(frame) >= least - EPSILON]


def _chosen(evidence: Evidence, frames: Iterable[int], least: float, share: float) -> tuple[Chosen, ...]:
    times = evidence.frame_times
    return tuple(Chosen(frame, quantile(times[frame], share), least, evidence.runs) for frame in frames)


def _learners() -> Mapping[str, Learner]:
    found: dict[str, Learner] = {"union": union, "intersection": intersection}
    for least in (15, 25, 34, 50, 67, 80, 90):
        found[f"frequency-{least}"] = partial(frequency, least=least / 100)
    for least in (15, 25, 34, 50, 67, 80):
        for share in (10, 25, 50):
            found[f"quantile-{least}-{share}"] = partial(frequency, least=least / 100, share=share / 100)
        found[f"rank-{least}"] = partial(rank, least=least / 100)
    for first, later in ((15, 50), (25, 80), (34, 67), (50, 90)):
        for seconds in (0.5, 2.0):
            found[f"early-{first}-{later}-{seconds:g}s"] = partial(
                early, first=first / 100, later=later / 100, seconds=seconds
            )
    for name, group in (("cluster", by_content), ("command", by_command)):
        for least in (34, 50, 75):
            found[f"{name}-{least}"] = partial(cluster, least=least / 100, group=group)
            found[f"{name}-{least}-core"] = partial(cluster, least=least / 100, group=group, core_first=True)
    return found


LEARNERS: Mapping[str, Learner] = _learners()
"""By name, the simplest of those that do the same first."""


def named(name: str) -> Sequence[str]:
    """The learners that a name stands for: itself, all of a family, or all there are with ``auto``; none if unknown."""
    if name == "auto":
        return tuple(LEARNERS)
    if name in LEARNERS:
        return (name,)
    return tuple(each for each in LEARNERS if each.partition("-")[0] == name)
