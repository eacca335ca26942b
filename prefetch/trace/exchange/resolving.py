"""What a list asks for, looked up in an image: the accesses of a run that read it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from layerstore.errors import LimitError, MalformedError, printable
from layerstore.pack.format import BLOCK_SIZE
from layerstore.tree.inode import Directory, File, Inode, walk
from layerstore.tree.path import shortened, steps
from layerstore.tree.resolve import trace as follow
from prefetch.trace.exchange.globbing import Glob
from prefetch.trace.exchange.listing import Kind, Listing, Prefixes, Wanted
from prefetch.trace.exchange.parts import SAMPLE
from prefetch.trace.format import Access, Trace, TraceHeader
from prefetch.trace.places import Found, ImagePlaces, Place

MAX_ACCESSES = 2_000_000
"""Most accesses of an imported trace: what a trace that is read may have."""
MAX_GLOB_STEPS = 20_000_000
"""Most names that are compared with patterns, which takes about a minute."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """How much of a list is in the image.

    Attributes:
        format: that it was read as.
        skipped: lines that were not taken, by reason.
        entries: that were looked up; those that only exclude are not counted.
        matched: entries that lead to something in the image.
        missing: entries that lead to nothing.
        missing_sample: some of them.
        directories: matched entries that are directories, of which the format doesn't ask what is below.
        files: regular files that are wanted, each once.
        inline: of those, which lie in the metadata image or are all holes: nothing to fetch.
        excluded: files that the list itself leaves out.
        repeated: ranges that were wanted before, whole.
        accesses: of the trace.
        bytes: that they read, whole blocks.
        bytes_wanted: of entries whose size is known: their ranges, or the file's size here, or where it is missing as
            the other tool saw it.
        bytes_matched: of those, what the image has.
        unsized: missing entries of unknown size.
    """

    format: str
    skipped: Mapping[str, int]
    entries: int
    matched: int
    missing: int
    missing_sample: tuple[str, ...]
    directories: int
    files: int
    inline: int
    excluded: int
    repeated: int
    accesses: int
    bytes: int
    bytes_wanted: int
    bytes_matched: int
    unsized: int

    @property
    def path_rate(self) -> float:
        """Share of the entries that are in the image."""
        return self.matched / self.entries if self.entries else 1.0

    @property
    def byte_rate(self) -> float:
        """Share of the bytes that are in the image, as far as sizes are known."""
        return self.bytes_matched / self.bytes_wanted if self.bytes_wanted else self.path_rate


def resolve(
    listing: Listing,
    places: ImagePlaces,
    *,
    format: str,
    image: str = "",
    manifest: str | None = None,
) -> tuple[Trace, ImportReport]:
    """The trace of a run of this image that reads what the list asks for, in its order.

    Symbolic links are followed inside the image. A block counts once, when it is first wanted; a range that comes again
    whole adds to ``times``. Where the list has no times, ``at`` counts the accesses. The trace has its end.

    Raises:
        LimitError: more accesses than a trace may have, or patterns that take too long.
    """
    resolution = _Resolution(places, timed=any(wanted.at is not None for wanted in listing.wanted))
    wanted = listing.wanted
    if resolution.timed:
        wanted = sorted(_with_times(wanted), key=lambda entry: entry.at or 0)
    for entry in wanted:
        if entry.kind is Kind.EXCLUDED:
            resolution.exclude(entry)
    for entry in wanted:
        if entry.kind is not Kind.EXCLUDED:
            resolution.take(entry)
    header = TraceHeader(places.layers, image=image, manifest=manifest, origin=format)
    accesses = tuple(resolution.accesses)
    ended = accesses[-1].at if accesses else 0
    return Trace(header, accesses, ended=ended), resolution.report(format, listing)


def _with_times(wanted: list[Wanted]) -> Iterator[Wanted]:
    """An entry without a time has that of the one before it."""
    at = 0
    for entry in wanted:
        at = entry.at if entry.at is not None else at
        yield entry._replace(at=at)


@dataclass(slots=True)
class _File:
    """A file and where its data lie, by offset."""

    found: Found
    places: list[Place]
    ends: list[int]

    def parts(self, offset: int, length: int | None) -> Iterator[Place]:
        """Whole blocks that hold these bytes."""
        size = self.found.file.size
        end = size if length is None else min(size, offset + length)
        if offset >= end:
            return
        first, last = offset - offset % BLOCK_SIZE, -(-end // BLOCK_SIZE) * BLOCK_SIZE
        for number in range(bisect_right(self.ends, first), len(self.places)):
            place = self.places[number]
            if place.file_offset >= last:
                break
            start = max(place.file_offset, first)
            stop = min(place.file_offset + place.range.length, last)
            part = place.range._replace(
                offset=place.range.offset + start - place.file_offset,
                length=stop - start,
            )
            yield Place(part, place.path, start)


class _Covered:
    """Ranges of one device that have been wanted: disjoint and sorted."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> list[tuple[int, int]]:
        """Cover a range; the parts of it that were not covered."""
        first = bisect_left(self._ends, start)  # those that end before it are left alone; what touches is joined
        last = bisect_right(self._starts, end)
        fresh = []
        position = start
        for number in range(first, last):
            if self._starts[number] > position:
                fresh.append((position, self._starts[number]))
            position = max(position, self._ends[number])
        if position < end:
            fresh.append((position, end))
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        return fresh


@dataclass(slots=True)
class _Resolution:
    places: ImagePlaces
    timed: bool
    accesses: list[Access] = field(default_factory=list)
    _number_of: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    _covered: dict[tuple[int, int], _Covered] = field(default_factory=dict)
    _excluded: Prefixes = field(default_factory=Prefixes)
    _files: dict[bytes, _File | None] = field(default_factory=dict)
    _walked: set[tuple[int, Kind]] = field(default_factory=set)
    _glob_steps: int = 0
    _entries: int = 0
    _matched: int = 0
    _missing: int = 0
    _sample: list[str] = field(default_factory=list)
    _directories: int = 0
    _seen: set[bytes] = field(default_factory=set)
    _inline: int = 0
    _left_out: set[bytes] = field(default_factory=set)
    _repeated: int = 0
    _bytes: int = 0
    _bytes_wanted: int = 0
    _bytes_matched: int = 0
    _unsized: int = 0

    def exclude(self, wanted: Wanted) -> None:
        self._excluded.add(steps(wanted.path))
        trail = self._follow(wanted.path)
        if trail is not None:
            self._excluded.add(trail[0])

    def take(self, wanted: Wanted) -> None:
        self._entries += 1
        if wanted.kind is Kind.GLOB:
            self._glob(wanted)
            return
        trail = self._follow(wanted.path)
        if trail is None:
            self._miss(wanted)
            return
        self._matched += 1
        path, inode = b"/".join(trail[0]), trail[1]
        if isinstance(inode, File):
            if self._excluded.cover(steps(wanted.path)):
                self._left_out.add(path)
            else:
                self._want(wanted, path)
        elif isinstance(inode, Directory) and wanted.kind in (Kind.TREE, Kind.LEVEL):
            self._below(wanted, path, inode)
        else:
            self._directories += 1

    def report(self, format: str, listing: Listing) -> ImportReport:
        return ImportReport(
            format,
            dict(listing.skipped),
            self._entries,
            self._matched,
            self._missing,
            tuple(self._sample),
            self._directories,
            len(self._seen),
            self._inline,
            len(self._left_out),
            self._repeated,
            len(self.accesses),
            self._bytes,
            self._bytes_wanted,
            self._bytes_matched,
            self._unsized,
        )

    def _follow(self, path: bytes) -> tuple[list[bytes], Inode] | None:
        """The components of ``path`` without links, and what is there; None if nothing is."""
        try:
            trail = follow(self.places.root, steps(path))
        except MalformedError:  # links in a circle, which no program can open
            return None
        if not trail:
            return [], self.places.root
        inode = trail[-1][1]
        return None if inode is None else ([name for name, _ in trail], inode)

    def _miss(self, wanted: Wanted) -> None:
        self._missing += 1
        if len(self._sample) < SAMPLE:
            self._sample.append(shortened(wanted.path))
        if wanted.ranges is not None:
            self._bytes_wanted += sum(length for _, length in wanted.ranges)
        elif wanted.size is not None:
            self._bytes_wanted += wanted.size
        else:
            self._unsized += 1

    def _below(self, wanted: Wanted, path: bytes, directory: Directory) -> None:
        """All files of a directory, each directory once however many entries cover it."""
        prefix = path + b"/" if path else b""
        if (id(directory), wanted.kind) in self._walked:
            self._repeated += 1
            return
        self._walked.add((id(directory), wanted.kind))
        if wanted.kind is Kind.LEVEL:
            for name in sorted(directory.entries):
                if isinstance(directory.entries[name], File):
                    self._want(wanted, prefix + name)
            return
        for below, inode in walk(directory):
            if isinstance(inode, Directory):
                self._walked.add((id(inode), Kind.TREE))
            elif isinstance(inode, File):
                self._want(wanted, prefix + below)

    def _glob(self, wanted: Wanted) -> None:
        glob = Glob(wanted.path)
        found = False
        for path, inode in glob.matches(self.places.root):
            self._glob_steps = glob.steps + self._glob_steps
            glob.steps = 0
            if self._glob_steps > MAX_GLOB_STEPS:
                raise LimitError("the patterns take too long on this image: name directories instead of **")
            if inode is None:
                continue
            found = True
            trail = self._follow(path)
            if trail is not None and isinstance(trail[1], File):
                self._want(wanted, b"/".join(trail[0]))
        if found:
            self._matched += 1
        else:
            self._miss(wanted)

    def _want(self, wanted: Wanted, path: bytes) -> None:
        """The file at ``path``, which has no links in it."""
        if self._excluded.cover(steps(path)):
            self._left_out.add(path)
            return
        file = self._known(path)
        if file is None:
            return
        size = file.found.file.size
        if path not in self._seen:
            self._seen.add(path)
            self._inline += not file.places
        waited = wanted.waited
        for offset, length in wanted.ranges if wanted.ranges is not None else ((0, None),):
            if length is None:
                self._bytes_wanted += size
                self._bytes_matched += size
            else:
                self._bytes_wanted += length
                # Formats that round to blocks, as ours does, go beyond the end of a file.
                self._bytes_matched += max(0, min(offset + length, -(-size // BLOCK_SIZE) * BLOCK_SIZE) - offset)
            fresh = False
            for place in file.parts(offset, length):
                if self._access(wanted, place, waited):
                    fresh, waited = True, 0
            self._repeated += bool(file.places) and not fresh

    def _known(self, path: bytes) -> _File | None:
        if path not in self._files:
            found = self.places.find(path)
            if found is None:
                self._files[path] = None
            else:
                where = self.places.ranges(found)
                self._files[path] = _File(found, where, [place.file_offset + place.range.length for place in where])
        return self._files[path]

    def _access(self, wanted: Wanted, place: Place, waited: int) -> bool:
        """Add what is new of a place; whether anything is."""
        layer, device, offset, length = place.range
        number = self._number_of.get(place.range)
        if number is not None:
            access = self.accesses[number]
            self.accesses[number] = access._replace(times=access.times + 1, waited=access.waited + waited)
            return False
        covered = self._covered.setdefault((layer, device), _Covered())
        fresh = covered.add(offset, offset + length)
        for start, end in fresh:
            if len(self.accesses) >= MAX_ACCESSES:
                raise LimitError(f"the list comes to more than the limit of {MAX_ACCESSES} accesses")
            self._number_of[layer, device, start, end - start] = len(self.accesses)
            self._bytes += end - start
            self.accesses.append(
                Access(
                    (wanted.at or 0) if self.timed else len(self.accesses),
                    layer,
                    device,
                    start,
                    end - start,
                    waited,
                    1,
                    wanted.comm,
                    printable(place.path),
                    place.file_offset + start - offset,
                )
            )
            waited = 0
        return bool(fresh)
