"""What of plans a node can fetch: ranges of packs that it has open, as frames. The rest is counted.

A pack is found by its digest alone, so it doesn't matter which layer of which build refers to it, nor in which order.
Of a pack only what the image refers to is worth fetching: another build has some of its files elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from layerstore.cache.metadata import PackUse
from layerstore.cache.packs import CachedPack
from layerstore.pack.format import BLOCK_SIZE
from prefetch.plans.format import Plan, PlannedRange

NO_PACK = "pack not in this image"
BEYOND = "beyond the pack"
UNUSED = "not of this image"


class PlannedFrame(NamedTuple):
    """One frame that is worth fetching.

    Attributes:
        pack: of the cache, open.
        number: of the frame.
        due: microseconds from the start after which the first runs need it.
        chance: that a run reads something of it, in ten-thousandths.
    """

    pack: CachedPack
    number: int
    due: int
    chance: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of plans was matched: ranges, and their bytes in raw packs.

    Attributes:
        unmatched: ranges by the reason why there is nothing to fetch for them. One that lies partly beyond its pack is
            matched, with the bytes that the pack has.
    """

    ranges: int = 0
    bytes: int = 0
    matched_ranges: int = 0
    matched_bytes: int = 0
    unmatched: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Matched:
    """What to fetch: each frame once, by when it is due, then by pack and number."""

    fetches: tuple[PlannedFrame, ...]
    coverage: Coverage


def match(plans: Sequence[Plan], packs: Sequence[CachedPack], uses: Iterable[PackUse] | None = None) -> Matched:
    """The frames of ``packs`` that ``plans`` are about: due when the first of them says so, as likely as the likeliest.

    ``uses`` says what the image refers to; None: that isn't known, and all counts. A range of which it refers to any
    block is matched.

    Takes time for each range and for each frame, however often they overlap.
    """
    known = {pack.hex: pack for pack in packs}
    referred: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for use in uses or ():
        referred.setdefault(use.pack, []).append(use.runs)
    wanted: dict[str, list[tuple[PlannedRange, range]]] = {hex: [] for hex in known}
    ranges = raw = matched = matched_raw = 0
    unmatched: dict[str, int] = {}
    for part in (part for plan in plans for part in plan.parts):
        for planned in part.ranges:
            ranges += 1
            raw += planned.length
            pack = known.get(part.packs[planned.device - 1].hex)
            if pack is None:
                reason = NO_PACK
            elif planned.offset >= pack.index.raw_size:
                reason = BEYOND
            elif uses is not None and not any(_touches(runs, planned) for runs in referred.get(pack.hex, ())):
                reason = UNUSED
            else:
                reason = ""
            if pack is None or reason:
                unmatched[reason] = unmatched.get(reason, 0) + 1
                continue
            length = min(planned.length, pack.index.raw_size - planned.offset)
            matched += 1
            matched_raw += length
            wanted[pack.hex].append((planned, pack.index.covering(planned.offset, length)))
    fetches = [
        (due, order, number, chance)
        for order, hex in enumerate(known)
        for number, due, chance in _frames(wanted[hex], len(known[hex].index))
    ]
    fetches.sort()
    ordered = list(known.values())
    return Matched(
        tuple(PlannedFrame(ordered[order], number, due, chance) for due, order, number, chance in fetches),
        Coverage(ranges, raw, matched, matched_raw, unmatched),
    )


def _touches(runs: Sequence[tuple[int, int]], planned: PlannedRange) -> bool:
    """Whether sorted, disjoint runs of blocks (first, count) have any of the range's."""
    last = (planned.end - 1) // BLOCK_SIZE
    at = bisect_right(runs, (last, 1 << 62)) - 1
    return at >= 0 and sum(runs[at]) * BLOCK_SIZE > planned.offset


def _frames(wanted: Sequence[tuple[PlannedRange, range]], count: int) -> Iterator[tuple[int, int, int]]:
    """Number, due and chance of each frame in these ranges, of a pack of ``count`` frames."""
    due, chance = {}, {}
    for planned, numbers in _once(sorted(wanted, key=lambda each: each[0].due), count):
        due.update(dict.fromkeys(numbers, planned.due))
    for planned, numbers in _once(sorted(wanted, key=lambda each: -each[0].chance), count):
        chance.update(dict.fromkeys(numbers, planned.chance))
    for number in due:
        yield number, due[number], chance[number]


def _once(wanted: Iterable[tuple[PlannedRange, range]], count: int) -> Iterator[tuple[PlannedRange, list[int]]]:
    """The ranges, each with those of its frames that no range before it had."""
    after: dict[int, int] = {}
    """Of a frame that was had, one behind it from where to look on."""
    for planned, covers in wanted:
        fresh = []
        number = covers.start
        while number < covers.stop:
            passed = []
            while number in after:
                passed.append(number)
                number = after[number]
            for each in passed:
                after[each] = number
            if number < covers.stop:
                fresh.append(number)
                after[number] = number + 1
        yield planned, fresh
