"""Traces and plans as parts of files, which is all that other tools' formats take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from layerstore.errors import printable
from prefetch.plans.format import Plan
from prefetch.trace.format import Trace
from prefetch.trace.naming import raw_path

NAMELESS = "without a path"


class Part(NamedTuple):
    """``length`` bytes at ``offset`` of the file at ``path``: raw, without a leading slash. Whole blocks."""

    path: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Parts:
    """In order; ``skipped`` counts what has no path."""

    parts: tuple[Part, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exported:
    """A file for another tool.

    Attributes:
        data: its bytes.
        entries: how many paths it names.
        skipped: what the format can't express, by reason: paths, but for accesses and planned ranges without a path.
        sample: some of those paths.
    """

    data: bytes
    entries: int
    skipped: Mapping[str, int]
    sample: tuple[str, ...] = ()


SAMPLE = 5
"""How many paths are named of those that are counted."""


def parts_of_trace(trace: Trace) -> Parts:
    """The accesses, by time.

    Raises:
        MalformedError: a path isn't as :func:`layerstore.errors.printable` shows one.
    """
    return _parts((access.path, access.file_offset, access.length) for access in trace.accesses)


def parts_of_plan(plan: Plan) -> Parts:
    """The planned ranges of all layers, by due.

    Raises:
        MalformedError: a path isn't as :func:`layerstore.errors.printable` shows one.
    """
    ranges = sorted((planned for part in plan.parts for planned in part.ranges), key=lambda planned: planned.due)
    return _parts((planned.path, planned.file_offset, planned.length) for planned in ranges)


def _parts(ranges: Iterable[tuple[str | None, int, int]]) -> Parts:
    named: list[Part] = []
    nameless = 0
    for path, offset, length in ranges:
        if path is None:
            nameless += 1
        else:
            named.append(Part(raw_path(path), offset, length))
    return Parts(tuple(named), {NAMELESS: nameless} if nameless else {})


def by_path(parts: Iterable[Part]) -> dict[bytes, list[tuple[int, int]]]:
    """(offset, length) of each path, paths and ranges in the order of their first part; joined where one follows on."""
    found: dict[bytes, list[tuple[int, int]]] = {}
    seen: set[Part] = set()
    for part in parts:
        if part in seen:
            continue
        seen.add(part)
        ranges = found.setdefault(part.path, [])
        if ranges and sum(ranges[-1]) == part.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + part.length)
        else:
            ranges.append((part.offset, part.length))
    return found


@dataclass(slots=True)
class PathLines:
    """Gathers the lines of a list, and what can't be in it."""

    skipped: dict[str, int]
    lines: list[bytes] = field(default_factory=list)
    sample: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Parts) -> PathLines:
        return cls(dict(parts.skipped))

    def skip(self, path: bytes, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.sample) < SAMPLE:
            self.sample.append(printable(path))

    def exported(self, data: bytes | None = None) -> Exported:
        return Exported(
            b"".join(self.lines) if data is None else data, len(self.lines), self.skipped, tuple(self.sample)
        )


def utf8(path: bytes) -> str | None:
    """The path as text; None if it is none."""
    try:
        return path.decode("utf-8")
    except UnicodeDecodeError:
        return None


NOT_UTF8 = "not UTF-8"
NEWLINE = "with a line end in the path"
