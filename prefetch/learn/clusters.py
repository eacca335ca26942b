"""Workloads of one image told apart: which runs read alike, or ran the same command."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from prefetch.learn.evidence import Evidence

ALIKE = 0.7
"""Runs belong together that share at least so much of what either reads (Jaccard index over frames).

Runs of one command, in a world where a third of what it may read is read in some runs alone, share 0.8 to 0.95; two
programs of the same interpreter 0.3 to 0.6.
"""
MOST_COMPARED = 200
"""Runs that are compared with each other, which takes time for each pair; more are grouped by command."""

Cluster = tuple[int, ...]
"""Numbers of runs in the corpus, sorted."""


def alike(evidence: Evidence) -> list[Cluster]:
    """Runs that read alike, directly or through others, the largest group first; all runs, those alone at the end.

    What a single run read is noise, and makes no run less like another.
    """
    read: dict[int, set[int]] = {number: set() for number in evidence.runs}
    for frame, runs in evidence.frame_runs.items():
        for number in runs if len(runs) > 1 else ():
            read[number].add(frame)
    leader = {number: number for number in evidence.runs}

    def find(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for place, one in enumerate(evidence.runs):
        for other in evidence.runs[place + 1 :]:
            shared = len(read[one] & read[other])
            if shared and shared >= ALIKE * (len(read[one]) + len(read[other]) - shared):
                first, second = sorted((find(one), find(other)))
                leader[second] = first
    return _grouped({number: find(number) for number in evidence.runs})


def by_content(evidence: Evidence) -> list[Cluster]:
    """Groups of runs that read alike; by command, where there are too many to compare."""
    return by_command(evidence) if len(evidence.runs) > MOST_COMPARED else _without_noise(evidence, alike(evidence))


def by_command(evidence: Evidence) -> list[Cluster]:
    """Groups of runs of the same command line."""
    groups = _grouped({number: evidence.corpus.runs[number].command for number in evidence.runs})
    return _without_noise(evidence, groups)


def _grouped(keys: Mapping[int, Hashable]) -> list[Cluster]:
    """Groups of runs with the same key, the largest first."""
    groups: dict[Hashable, list[int]] = {}
    for number in sorted(keys):
        groups.setdefault(keys[number], []).append(number)
    return sorted((tuple(group) for group in groups.values()), key=lambda group: (-len(group), group))


def _without_noise(evidence: Evidence, groups: list[Cluster]) -> list[Cluster]:
    """Without groups of one run; unless there are no others: then all runs are one group."""
    return [group for group in groups if len(group) > 1] or [evidence.runs]
