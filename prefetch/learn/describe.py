"""Plans as plain values, for tables: what a plan has, and how two differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from layerstore.digest import Digest
from prefetch.learn.frames import planned_frames
from prefetch.learn.sizes import GUESSED, Sizes
from prefetch.plans.format import CERTAIN, Plan

LIKELY = CERTAIN * 9 // 10


@dataclass(frozen=True, slots=True)
class PartRow:
    """What is planned of one layer.

    Attributes:
        layer: identity.
        packs: that something is planned of.
        ranges: planned ones.
        bytes: of these, raw.
        frames: that they lie in.
        frame_bytes: of these, compressed.
        likely_bytes: raw bytes that at least nine of ten runs read.
        first_due: microseconds; of the first range.
        last_due: of the last.
    """

    layer: Digest
    packs: int
    ranges: int
    bytes: int
    frames: int
    frame_bytes: int
    likely_bytes: int
    first_due: int
    last_due: int


@dataclass(frozen=True, slots=True)
class DueRow:
    """What is due within a time: from the end of the row before to ``until`` (microseconds; None: all that is left)."""

    until: int | None
    frames: int
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file that is planned: raw bytes, when the first of them is due, and how likely its likeliest range is."""

    path: str | None
    bytes: int
    due: int
    chance: int


@dataclass(frozen=True, slots=True)
class PlanDescription:
    """A plan in rows: by layer, by time, and by file, those that are due first first."""

    parts: tuple[PartRow, ...]
    dues: tuple[DueRow, ...]
    files: tuple[FileRow, ...]


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """How two plans differ in a layer: raw bytes that both plan, and that only one does."""

    layer: Digest
    both: int
    only_first: int
    only_second: int


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """How two plans differ.

    Attributes:
        layers: of either plan, those of the first first.
        frames: that both plan, and that only one does.
        only_first: files of which only the first plans something, with bytes, the largest first.
        only_second: the same of the second.
        moved: frames of both that are due more than twice as late in one as in the other, and by over 10 ms.
    """

    layers: tuple[LayerDifference, ...]
    frames: tuple[int, int, int]
    only_first: tuple[FileRow, ...]
    only_second: tuple[FileRow, ...]
    moved: int

    @property
    def same(self) -> bool:
        """Whether both fetch the same frames at about the same times."""
        return not (self.frames[1] or self.frames[2] or self.moved)


UNTIL = (50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000)
"""Where rows of dues end, microseconds."""
APART = 10_000
"""Microseconds by which times differ for no reason."""


def describe_plan(plan: Plan, sizes: Sizes = GUESSED) -> PlanDescription:
    """A plan in rows.

    Raises:
        LimitError: it comes to more frames than any start reads.
    """
    frames = planned_frames([plan], sizes)
    rows = []
    for part in plan.parts:
        of_part = planned_frames([Plan((part,))], sizes)
        rows.append(
            PartRow(
                part.metadata,
                len({planned.device for planned in part.ranges}),
                len(part.ranges),
                part.bytes,
                len(of_part),
                sum(sizes.compressed(frame.pack, frame.number) for frame in of_part),
                sum(planned.length for planned in part.ranges if planned.chance >= LIKELY),
                min((planned.due for planned in part.ranges), default=0),
                max((planned.due for planned in part.ranges), default=0),
            )
        )
    dues = []
    for until in (*UNTIL, None):
        last = UNTIL[-1] if until is None else max((each for each in UNTIL if each < until), default=-1)
        within = [frame for frame in frames if last < frame.due and (until is None or frame.due <= until)]
        if within:
            size = sum(sizes.compressed(frame.pack, frame.number) for frame in within)
            dues.append(DueRow(until, len(within), size))
    return PlanDescription(tuple(rows), tuple(dues), tuple(_files(plan).values()))


def _files(plan: Plan) -> dict[str | None, FileRow]:
    """By path, in the order in which they are due."""
    files: dict[str | None, FileRow] = {}
    for part in plan.parts:
        for planned in part.ranges:
            row = files.get(planned.path) or FileRow(planned.path, 0, planned.due, planned.chance)
            files[planned.path] = FileRow(
                planned.path,
                row.bytes + planned.length,
                min(row.due, planned.due),
                max(row.chance, planned.chance),
            )
    ordered = sorted(files.values(), key=lambda row: (row.due, row.path is None, row.path or ""))
    return {row.path: row for row in ordered}


def compare_plans(first: Plan, second: Plan, sizes: Sizes = GUESSED) -> PlanDifference:
    """How two plans differ. Raises LimitError as :func:`describe_plan`."""
    layers = []
    for layer in dict.fromkeys(part.metadata for plan in (first, second) for part in plan.parts):
        one, other = _covered(first, layer), _covered(second, layer)
        both = sum(_overlap(spans, other[device]) for device, spans in one.items() if device in other)
        layers.append(LayerDifference(layer, both, _length(one) - both, _length(other) - both))
    dues = [
        {(frame.pack, frame.number): frame.due for frame in planned_frames([plan], sizes)} for plan in (first, second)
    ]
    shared = dues[0].keys() & dues[1].keys()
    moved = 0
    for key in shared:
        early, late = sorted((dues[0][key], dues[1][key]))
        moved += late > 2 * early and late - early > APART
    files = [_files(first), _files(second)]
    return PlanDifference(
        tuple(layers),
        (len(shared), len(dues[0]) - len(shared), len(dues[1]) - len(shared)),
        _largest(row for path, row in files[0].items() if path not in files[1]),
        _largest(row for path, row in files[1].items() if path not in files[0]),
        moved,
    )


_Spans = dict[tuple[Digest, int], list[tuple[int, int]]]
"""Of each pack and device, disjoint spans of bytes, by offset."""


def _covered(plan: Plan, layer: Digest) -> _Spans:
    spans: _Spans = {}
    for part in plan.parts:
        if part.metadata == layer:
            for planned in sorted(part.ranges, key=lambda planned: (planned.device, planned.offset)):
                of = spans.setdefault((part.packs[planned.device - 1], planned.device), [])
                if of and planned.offset <= of[-1][1]:
                    of[-1] = of[-1][0], max(of[-1][1], planned.end)
                else:
                    of.append((planned.offset, planned.end))
    return spans


def _overlap(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> int:
    """Bytes that two lists of disjoint spans share."""
    total = place = 0
    for start, end in one:
        while place < len(other) and other[place][1] <= start:
            place += 1
        for near, far in other[place:]:
            if near >= end:
                break
            total += min(end, far) - max(start, near)
    return total


def _length(spans: _Spans) -> int:
    return sum(end - start for of in spans.values() for start, end in of)


def _largest(rows: Iterable[FileRow]) -> tuple[FileRow, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.path is None, row.path or "")))
