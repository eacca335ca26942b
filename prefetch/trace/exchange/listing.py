"""What a list of another tool asks for, before it is looked up in an image."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from layerstore.errors import LimitError, MalformedError
from layerstore.tree.path import PATH_MAX
from prefetch.trace.format import MAX_TIME

LIST_BYTES = 64 << 20
"""Largest list that is read: half a million paths of a hundred bytes are 50 MiB."""
MAX_WANTED = 2_000_000
"""Most entries of a list."""


class Kind(StrEnum):
    """What a path of a list stands for."""

    FILE = "file"
    """A regular file; a directory has nothing to fetch."""
    TREE = "tree"
    """A regular file, or a directory and all files below it, in path order."""
    LEVEL = "level"
    """A directory's own files, not those in directories below it."""
    GLOB = "glob"
    """Every regular file that the pattern matches: ``*``, ``?``, ``[…]`` in a component, ``**`` for any components."""
    EXCLUDED = "excluded"
    """Not this path and what is below it, whatever else the list says."""


class Wanted(NamedTuple):
    """An entry of a list.

    Attributes:
        path: raw, from the root of the image; without a leading slash. A pattern where ``kind`` says so.
        kind: what it stands for.
        ranges: (offset, length) in bytes, in order; None for all of it.
        at: when, microseconds since the first; None where the format has no times.
        waited: microseconds that a reader waited for it.
        size: of the file, as the other tool saw it, bytes; None if it didn't say.
        comm: name of the program; empty if unknown.
    """

    path: bytes
    kind: Kind = Kind.FILE
    ranges: tuple[tuple[int, int], ...] | None = None
    at: int | None = None
    waited: int = 0
    size: int | None = None
    comm: str = ""


@dataclass(slots=True)
class Listing:
    """The entries of a list, in its order, and what was skipped, by reason."""

    wanted: list[Wanted] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    def add(self, wanted: Wanted) -> None:
        """Raises LimitError."""
        if len(self.wanted) >= MAX_WANTED:
            raise LimitError(f"a list of more than the limit of {MAX_WANTED} entries")
        self.wanted.append(wanted)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def add_path(self, path: bytes, kind: Kind = Kind.FILE) -> None:
        """Add ``path`` alone, or skip it if no system call can name it."""
        if fits(path):
            self.add(Wanted(path.lstrip(b"/"), kind))
        else:
            self.skip(TOO_LONG)


TOO_LONG = "longer than a path can be, or with a NUL"


def fits(path: bytes) -> bool:
    """Whether a system call can name it."""
    return len(path) < PATH_MAX and b"\0" not in path


class Prefixes:
    """Paths that stand for all that is below them, too."""

    def __init__(self) -> None:
        self._top: dict[bytes, object] = {}
        self._whole = False

    def add(self, parts: Iterable[bytes]) -> None:
        here, parts = self._top, list(parts)
        if not parts:
            self._whole = True
        for number, part in enumerate(parts, 1):
            below = here.get(part)
            if below is None and part in here:
                return  # covered already
            if number == len(parts):
                here[part] = None  # a leaf: what was below it is covered
            elif isinstance(below, dict):
                here = below
            else:
                below = here[part] = {}
                here = below

    def cover(self, parts: Iterable[bytes]) -> bool:
        """Whether this path or one above it was added."""
        if self._whole:
            return True
        here: object = self._top
        for part in parts:
            assert isinstance(here, dict)
            if part not in here:
                return False
            here = here[part]
            if here is None:
                return True
        return False


def lines(data: bytes, what: str, *, limit: int = LIST_BYTES) -> Iterator[bytes]:
    r"""Each line without its end, which is ``\n`` or ``\r\n``; the last may have none.

    Raises:
        LimitError: larger than ``limit``.
    """
    if len(data) > limit:
        raise LimitError(f"{what} has {len(data)} bytes, more than the limit of {limit}")
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        if end < 0:
            end = len(data)
        line = data[start:end]
        yield line[:-1] if line.endswith(b"\r") else line
        start = end + 1


def rows(data: bytes, what: str) -> Iterator[list[bytes]]:
    """The records of a CSV file (RFC 4180); fields keep their bytes.

    Raises:
        LimitError: larger than LIST_BYTES.
        MalformedError: a field without an end, or one of more than 128 KiB.
    """
    if len(data) > LIST_BYTES:
        raise LimitError(f"{what} has {len(data)} bytes, more than the limit of {LIST_BYTES}")
    reader = csv.reader(io.StringIO(data.decode("utf-8", "surrogateescape"), newline=""), strict=True)
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise MalformedError(f"{what}, line {reader.line_num}: {error}") from error
        yield [text.encode("utf-8", "surrogateescape") for text in record]


def records(data: bytes, header: Sequence[bytes], listing: Listing, what: str) -> Iterator[list[bytes]]:
    """The records below a line of headings; empty ones are passed over, those of another length counted as skipped.

    Raises:
        LimitError: see :func:`rows`.
        MalformedError: see there, or it begins with something else.
    """
    found = rows(data, what)
    if next(found, None) != list(header):
        raise MalformedError(f"{what} doesn't begin with the line {b','.join(header).decode()}")
    for record in found:
        if len(record) == len(header):
            yield record
        elif record:
            listing.skip(f"not {len(header)} fields")


def row(fields: Iterable[bytes]) -> bytes:
    """A record of a CSV file; fields are quoted where they have to be."""
    special = (b",", b'"', b"\n", b"\r")
    return (
        b",".join(
            b'"%b"' % text.replace(b'"', b'""') if any(mark in text for mark in special) else text for text in fields
        )
        + b"\n"
    )


def number(text: bytes) -> int | None:
    """A decimal number of bytes or microseconds; None if it is none, or beyond all that there can be."""
    if not text.isdigit() or len(text) > 16:
        return None
    value = int(text)
    return value if value <= MAX_TIME else None


def microseconds(text: bytes) -> int | None:
    """Seconds with an optional fraction, as microseconds; None if it is no such number."""
    whole, dot, fraction = text.partition(b".")
    if (dot and not fraction.isdigit()) or len(fraction) > 20:
        return None
    seconds = number(whole)
    if seconds is None or seconds > MAX_TIME // 1_000_000:
        return None
    return seconds * 1_000_000 + int(fraction[:6].ljust(6, b"0"))


def since_first(wanted: list[Wanted]) -> list[Wanted]:
    """The same entries, with times that count from the earliest."""
    first = min((entry.at for entry in wanted if entry.at is not None), default=0)
    return [entry if entry.at is None else entry._replace(at=entry.at - first) for entry in wanted]
