"""Ranges of plans made disjoint and few."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

from prefetch.plans.format import PlannedRange, order

TOGETHER = 10_000
"""Microseconds. What is due so close together is as good as due at once: a turn of a fast link takes half of it."""


def joined(ranges: Iterable[PlannedRange]) -> tuple[PlannedRange, ...]:
    """Disjoint ranges with neighbours joined that are alike: parts of one file in its order, as likely, due together.

    Returns:
        as a part of a plan has them.
    """
    found: list[PlannedRange] = []
    for planned in sorted(ranges, key=lambda planned: (planned.device, planned.offset)):
        last = found[-1] if found else None
        if last is not None and _alike(last, planned):
            found[-1] = last._replace(length=last.length + planned.length, due=min(last.due, planned.due))
        else:
            found.append(planned)
    return order(found)


def _alike(last: PlannedRange, planned: PlannedRange) -> bool:
    return (
        last.device == planned.device
        and last.end == planned.offset
        and last.chance == planned.chance
        and abs(last.due - planned.due) <= TOGETHER
        and last.path == planned.path
        and (planned.path is None or last.file_offset + last.length == planned.file_offset)
    )


def disjoint(ranges: Iterable[PlannedRange]) -> Iterator[PlannedRange]:
    """Ranges cut where they overlap: what several hold is as likely as the likeliest, due as the first, named as it."""
    by_device: dict[int, list[PlannedRange]] = {}
    for planned in ranges:
        by_device.setdefault(planned.device, []).append(planned)
    for device in sorted(by_device):
        pending = sorted(by_device[device], key=lambda planned: (planned.offset, *_urgency(planned)), reverse=True)
        cuts = sorted({edge for planned in pending for edge in (planned.offset, planned.end)})
        # Heaps of those that began, with those that have ended still in them until they come to the top.
        urgent: list[tuple[tuple[int, bool, str, int], PlannedRange]] = []
        likely: list[tuple[int, int]] = []
        for start, end in itertools.pairwise(cuts):
            while pending and pending[-1].offset == start:
                planned = pending.pop()
                heapq.heappush(urgent, (_urgency(planned), planned))
                heapq.heappush(likely, (-planned.chance, planned.end))
            while urgent and urgent[0][1].end <= start:
                heapq.heappop(urgent)
            while likely and likely[0][1] <= start:
                heapq.heappop(likely)
            if urgent:
                first = urgent[0][1]
                at = first.file_offset + start - first.offset if first.path is not None else 0
                yield PlannedRange(device, start, end - start, first.due, -likely[0][0], first.path, at)


def _urgency(planned: PlannedRange) -> tuple[int, bool, str, int]:
    return planned.due, planned.path is None, planned.path or "", planned.file_offset
