"""From what a learner picked to a plan: the budget, and the ranges of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefetch.learn.evidence import Evidence, quantile
from prefetch.learn.frames import FrameDue
from prefetch.learn.learners import EPSILON, Choice, Chosen
from prefetch.learn.ranges import joined
from prefetch.learn.simulate import Costs, Link
from prefetch.learn.sizes import Sizes
from prefetch.plans.format import CERTAIN, PlannedRange, PlanPart
from prefetch.trace.format import MAX_TIME


def within(
    budget: int, chosen: Iterable[Chosen], evidence: Evidence, *, sizes: Sizes, link: Link, costs: Costs
) -> tuple[Chosen, ...]:
    """The frames that save most time for each byte, as far as ``budget`` bytes go, as they are fetched.

    What a frame saves is the wait of a run that would demand it, times the chance that one does.
    """

    def size(each: Chosen) -> int:
        return sizes.compressed(*evidence.corpus.frames[each.frame])

    def value(each: Chosen) -> float:
        wait = link.latency + costs.want + costs.frame + costs.answer + size(each) / link.bandwidth
        return evidence.frame_chance(each.frame) * wait / size(each)

    kept = []
    for each in sorted(chosen, key=lambda each: (-value(each), each.due, each.frame)):
        if size(each) <= budget:
            budget -= size(each)
            kept.append(each)
    return tuple(kept)


def frames(choice: Choice, evidence: Evidence) -> list[FrameDue]:
    """The frames of a choice in the order of its plan, but for what :data:`~prefetch.learn.ranges.TOGETHER` changes."""
    found = (
        FrameDue(
            *evidence.corpus.frames[chosen.frame], chosen.due, round(CERTAIN * evidence.frame_chance(chosen.frame))
        )
        for chosen in choice.frames
    )
    return sorted(found, key=lambda frame: (frame.due, frame.pack, frame.number))


def parts(choice: Choice, evidence: Evidence) -> tuple[PlanPart, ...]:
    """The parts of a plan, of the layers that something is planned of."""
    corpus = evidence.corpus
    by_layer: dict[int, list[PlannedRange]] = {}
    for chosen in choice.frames:
        kept = _segments(chosen, evidence)
        times = [quantile(evidence.segment_times[index], choice.share) for index in kept]
        first = min(times)
        for index, time in zip(kept, times, strict=True):
            segment = corpus.segments[index]
            # The learner has moved the frame to its place; within it, segments keep their distances.
            due = min(MAX_TIME, chosen.due + time - first)
            chance = max(1, round(CERTAIN * evidence.segment_chance(index)))
            by_layer.setdefault(segment.layer, []).append(
                PlannedRange(
                    segment.device, segment.offset, segment.length, due, chance, segment.path, segment.file_offset
                )
            )
    return tuple(
        PlanPart(corpus.layers[layer].metadata, corpus.layers[layer].packs, joined(by_layer[layer]))
        for layer in sorted(by_layer)
    )


def _segments(chosen: Chosen, evidence: Evidence) -> Sequence[int]:
    """What is to be planned of a frame: what is likely enough alone, and as much else as makes the frame so.

    A frame may be needed by all runs, each of which needs another piece of it. What few runs read of a frame that is
    fetched anyway costs nothing to replay, but when hot data are laid together it would be among them.
    """
    corpus = evidence.corpus
    readers = {
        index: {number for number in chosen.among if index in corpus.firsts[number]}
        for index in corpus.segments_of[chosen.frame]
        if index in evidence.segment_times
    }
    pack = corpus.frames[chosen.frame].pack
    over = sum(corpus.has_pack(number, pack) for number in chosen.among)
    least = chosen.least * over - EPSILON
    kept: list[int] = []
    covered: set[int] = set()
    for index in sorted(readers, key=lambda index: (-len(readers[index]), index)):
        likely = bool(readers[index]) and len(readers[index]) >= least
        if likely or (len(covered) < max(least, 1) and readers[index] - covered):
            kept.append(index)
            covered |= readers[index]
    return sorted(kept)
