"""Traces and plans of one build, told in the places of another.

::

    range of a pack ─┬─ the new build reads these bytes, too ──▶ the same range, by pack
                     ├─ else, by the path of the file ─────────▶ where the file's bytes are now, by path
                     └─ neither ───────────────────────────────▶ lost, and counted

Of a file that is still there the same part is taken, whatever has become of its content: a program that read the first
half of a library will read the first half of the next version of it, roughly. What lies behind the new file's end is
lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from layerstore.digest import Digest
from layerstore.errors import MalformedError, printable
from prefetch.learn.ranges import disjoint, joined
from prefetch.plans.format import Plan, PlannedRange, PlanPart
from prefetch.trace.format import Trace, TracedLayer
from prefetch.trace.naming import raw_path
from prefetch.trace.places import Found, ImagePlaces, Range

SAMPLE = 20
"""Paths of a report that are named as unknown."""


@dataclass(frozen=True, slots=True)
class MatchReport:
    """What became of a re-mapped trace or plan.

    Attributes:
        ranges: that it had.
        bytes: of these, raw.
        by_pack: bytes that lie where they did.
        by_path: bytes that were found by the file that they are of.
        lost: bytes that the other build doesn't have.
        unknown: files that it doesn't have, by name, a sample of them; printable.
    """

    ranges: int = 0
    bytes: int = 0
    by_pack: int = 0
    by_path: int = 0
    lost: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """The share of bytes that were found; 1 of nothing."""
        return (self.by_pack + self.by_path) / self.bytes if self.bytes else 1.0

    def to_json(self) -> dict[str, object]:
        return {
            "ranges": self.ranges,
            "bytes": self.bytes,
            "by_pack": self.by_pack,
            "by_path": self.by_path,
            "lost": self.lost,
            "rate": round(self.rate, 4),
            "unknown": list(self.unknown),
        }


class _Old(NamedTuple):
    """A range as the old build has it."""

    layer: TracedLayer
    device: int
    offset: int
    length: int
    path: str | None
    file_offset: int


class _New(NamedTuple):
    """A range of the new build, and what it is of."""

    range: Range
    path: str | None
    file_offset: int


class _Remap:
    """Looks up ranges of an old build in a new one, and counts."""

    def __init__(self, places: ImagePlaces) -> None:
        self._places = places
        self._layers = {layer: number for number, layer in enumerate(places.layers)}
        self._packs: dict[Digest, list[tuple[int, int]]] = {}
        for number, layer in enumerate(places.layers):
            for device, pack in enumerate(layer.packs, 1):
                self._packs.setdefault(pack, []).append((number, device))
        self._found: dict[str, Found | None] = {}
        self._unknown: set[str] = set()
        self._ranges = self._bytes = self._by_pack = self._by_path = 0

    def report(self) -> MatchReport:
        lost = self._bytes - self._by_pack - self._by_path
        unknown = tuple(sorted(self._unknown)[:SAMPLE])
        return MatchReport(self._ranges, self._bytes, self._by_pack, self._by_path, lost, unknown)

    def find(self, old: _Old) -> Iterator[_New]:
        """Where the bytes of a range are now, in pieces."""
        self._ranges += 1
        self._bytes += old.length
        for piece in self._same_bytes(old):
            if isinstance(piece, _New):
                self._by_pack += piece.range.length
                yield piece
            else:
                yield from self._same_file(piece)

    def _same_bytes(self, old: _Old) -> Iterator[_New | _Old]:
        """The pieces of a range that files of the new build have in the same pack; and what is left of it."""
        number = self._layers.get(old.layer)
        if number is not None:  # the same layer: padding, and what another layer hides, is where it was as well
            yield _New(Range(number, old.device, old.offset, old.length), old.path, old.file_offset)
            return
        at = old.offset
        for layer, device in self._packs.get(old.layer.packs[old.device - 1], ()):
            for place in self._places.at(Range(layer, device, old.offset, old.length)):
                start, length = place.range.offset, place.range.length
                if start > at:
                    yield _part(old, at, start - at)
                yield _New(place.range, printable(place.path), place.file_offset)
                at = start + length
            if at > old.offset:
                break  # another layer that lists the pack has the rest, if at all, under another name
        if at < old.offset + old.length:
            yield _part(old, at, old.offset + old.length - at)

    def _same_file(self, old: _Old) -> Iterator[_New]:
        if old.path is None:
            return
        found = self._file(old.path)
        if found is None:
            self._unknown.add(old.path)
            return
        places = self._places.ranges(found, old.file_offset, old.length)
        # Whole blocks are found, which are more than a range that begins within one.
        self._by_path += min(old.length, sum(place.range.length for place in places))
        for place in places:
            yield _New(place.range, printable(place.path), place.file_offset)

    def _file(self, path: str) -> Found | None:
        if path not in self._found:
            try:
                self._found[path] = self._places.find(raw_path(path))
            except MalformedError:  # a path that no file has, or a loop of links
                self._found[path] = None
        return self._found[path]


def remap_trace(trace: Trace, places: ImagePlaces) -> tuple[Trace, MatchReport]:
    """A trace of another build as one of the build whose places are given. Times and waits stay as they were."""
    remap = _Remap(places)
    accesses = []
    for access in trace.accesses:
        layer = trace.header.layers[access.layer]
        waited = access.waited
        old = _Old(layer, access.device, access.offset, access.length, access.path, access.file_offset)
        for new in remap.find(old):
            accesses.append(
                access._replace(
                    layer=new.range.layer,
                    device=new.range.device,
                    offset=new.range.offset,
                    length=new.range.length,
                    waited=waited,
                    path=new.path,
                    file_offset=new.file_offset,
                )
            )
            waited = 0
    header = replace(trace.header, layers=places.layers, manifest=None)
    return replace(trace, header=header, accesses=tuple(accesses)), remap.report()


def remap_plan(plan: Plan, old: ImagePlaces | None, new: ImagePlaces) -> tuple[Plan, MatchReport]:
    """A plan of another build as one of the build whose places are ``new``.

    Args:
        plan: to be re-mapped.
        old: the places of the build that it was learned from, where they are at hand: ranges without a path get one.
        new: of the build that it is to serve.

    Returns:
        the plan, without a score: none was measured on that build. ``learned`` says what was lost, as ``remapped``.
    """
    remap = _Remap(new)
    numbers: Mapping[Digest, int] = {layer.metadata: number for number, layer in enumerate(old.layers)} if old else {}
    by_layer: dict[int, list[PlannedRange]] = {}
    for part in plan.parts:
        layer = TracedLayer(part.metadata, part.packs)
        for planned in part.ranges:
            for each in _named(planned, layer, old, numbers.get(part.metadata)):
                for found in remap.find(each):
                    where = found.range
                    by_layer.setdefault(where.layer, []).append(
                        planned._replace(
                            device=where.device,
                            offset=where.offset,
                            length=where.length,
                            path=found.path,
                            file_offset=found.file_offset,
                        )
                    )
    parts = tuple(
        PlanPart(new.layers[layer].metadata, new.layers[layer].packs, joined(disjoint(by_layer[layer])))
        for layer in sorted(by_layer)
    )
    report = remap.report()
    learned = {**plan.learned, "remapped": report.to_json()}
    return Plan(parts, plan.name, plan.image, None, learned), report


def _named(planned: PlannedRange, layer: TracedLayer, old: ImagePlaces | None, number: int | None) -> Iterator[_Old]:
    """A planned range, in pieces of one file each where their names have to be looked up."""
    whole = _Old(layer, planned.device, planned.offset, planned.length, planned.path, planned.file_offset)
    if planned.path is not None or old is None or number is None:
        yield whole
        return
    at = planned.offset
    for place in old.at(Range(number, planned.device, planned.offset, planned.length)):
        start, length = place.range.offset, place.range.length
        if start > at:
            yield _part(whole, at, start - at)
        yield _part(whole, start, length)._replace(path=printable(place.path), file_offset=place.file_offset)
        at = start + length
    if at < planned.end:
        yield _part(whole, at, planned.end - at)


def _part(old: _Old, offset: int, length: int) -> _Old:
    moved = old.file_offset + offset - old.offset if old.path is not None else 0
    return old._replace(offset=offset, length=length, file_offset=moved)
