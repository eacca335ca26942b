"""Plain lists: a path a line, as ``find`` and shell scripts write them; and ranges of files as CSV.

A path of a list may be absolute or from the root (``./usr/bin/env``), its bytes count as they are, and where the list
has a NUL byte, NULs separate instead of line ends (``find -print0``). A directory stands for all below it if it ends
with a slash, and else for itself, which is nothing to fetch. ``#`` at the beginning of a line begins a comment.

The CSV begins with the line ``path,offset,length``; the last two are bytes. Neither has times: at = position.
"""

from __future__ import annotations

from layerstore.errors import LimitError
from prefetch.trace.exchange.listing import (
    LIST_BYTES,
    TOO_LONG,
    Kind,
    Listing,
    Wanted,
    fits,
    lines,
    number,
    records,
    row,
)
from prefetch.trace.exchange.parts import NEWLINE, Exported, Parts, PathLines, by_path

HEADER = [b"path", b"offset", b"length"]


def is_list(data: bytes) -> bool:
    """Paths that look like some: nothing that other formats have."""
    head = [line for line in data[: 64 << 10].replace(b"\0", b"\n").split(b"\n")[:200] if line.strip()]
    return bool(head) and all(line.startswith((b"/", b"./", b"#")) for line in head)


def read_list(data: bytes, what: str) -> Listing:
    """Raises LimitError."""
    listing = Listing()
    if b"\0" in data:
        if len(data) > LIST_BYTES:
            raise LimitError(f"{what} has {len(data)} bytes, more than the limit of {LIST_BYTES}")
        entries = iter(data.split(b"\0"))
    else:
        entries = (line for line in lines(data, what) if not line.startswith(b"#"))
    for entry in entries:
        if entry:
            listing.add_path(entry, Kind.TREE if entry.endswith(b"/") else Kind.FILE)
    return listing


def write_list(parts: Parts) -> Exported:
    """Each path once, in the order of its first part."""
    out = PathLines.of(parts)
    for path in by_path(parts.parts):
        if b"\n" in path or path.endswith(b"\r"):
            out.skip(path, NEWLINE)
        else:
            out.lines.append(b"/" + path + b"\n")
    return out.exported()


def is_ranges(data: bytes) -> bool:
    return data.partition(b"\n")[0].strip() == b",".join(HEADER)


def read_ranges(data: bytes, what: str) -> Listing:
    """Raises LimitError or MalformedError."""
    listing = Listing()
    for record in records(data, HEADER, listing, what):
        path, offset, length = record[0], number(record[1]), number(record[2])
        if not fits(path):
            listing.skip(TOO_LONG)
        elif offset is None or not length:
            listing.skip("no range")
        else:
            listing.add(Wanted(path.lstrip(b"/"), Kind.FILE, ((offset, length),)))
    return listing


def write_ranges(parts: Parts) -> Exported:
    """Every part, in order; nothing is lost."""
    out = PathLines.of(parts)
    out.lines += [row((b"/" + part.path, b"%d" % part.offset, b"%d" % part.length)) for part in parts.parts]
    paths = len({part.path for part in parts.parts})
    return Exported(row(HEADER) + b"".join(out.lines), paths, out.skipped)
