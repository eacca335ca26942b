"""CernVM-FS: the log of its tracer, and the specification that shrinkwrap takes.

The log is a CSV file, all fields quoted: seconds since the epoch with milliseconds, the code of the event, the path in
the repository, and its name. Only files that are opened have data to fetch; what reads metadata is counted as skipped.

A specification has an absolute path a line. ``/dir/*`` is all below a directory, ``^/dir/*`` its own entries only,
``!/path`` leaves out that path and what is below it. It has no order: at = position.
"""

from __future__ import annotations

import re

from layerstore.errors import MalformedError
from prefetch.trace.exchange.listing import (
    TOO_LONG,
    Kind,
    Listing,
    Wanted,
    fits,
    lines,
    microseconds,
    rows,
    since_first,
)
from prefetch.trace.exchange.parts import NEWLINE, Exported, Parts, PathLines, by_path

OPEN = 1
EVENTS = {
    2: "list directory",
    3: "read link",
    4: "lookup",
    5: "stat file system",
    6: "stat",
    7: "list xattrs",
    8: "get xattr",
}
"""Codes of events of cvmfs/tracer.h that read no file."""
DEPTH = 255
"""Components of a path that shrinkwrap looks at."""
_FIRST = re.compile(rb'"[0-9]+\.[0-9]+","-?[0-9]+","')


def is_trace(data: bytes) -> bool:
    return bool(_FIRST.match(data))


def read_trace(data: bytes, what: str) -> Listing:
    """Raises LimitError or MalformedError."""
    listing = Listing()
    for record in rows(data, what):
        if not record:
            continue
        if len(record) != 4:
            listing.skip("not four fields")
            continue
        time, code, path, _ = record
        at = microseconds(time)
        if at is None or not re.fullmatch(rb"-?[0-9]{1,9}", code):
            listing.skip("no time or no code")
        elif (event := int(code)) != OPEN:
            listing.skip("internal" if event < 0 else EVENTS.get(event, "unknown event"))
        elif not fits(path):
            listing.skip(TOO_LONG)
        else:
            listing.add(Wanted(path.lstrip(b"/"), Kind.FILE, at=at))
    listing.wanted = since_first(listing.wanted)
    return listing


def is_spec(data: bytes) -> bool:
    """Lines of the specification's kinds alone, at least one of which no list of plain paths has."""
    found = False
    for line in data[: 64 << 10].splitlines():
        if line and not line.startswith((b"/", b"^/", b"!/")):
            return False
        found = found or line.startswith((b"^", b"!")) or line.endswith(b"/*")
    return found


def read_spec(data: bytes, what: str) -> Listing:
    """Raises LimitError, or MalformedError: a path that isn't absolute, which ends shrinkwrap."""
    listing = Listing()
    for count, line in enumerate(lines(data, what), 1):
        if not line:
            continue
        mark = line[:1] if line.startswith((b"^", b"!")) else b""
        path = line[len(mark) :]
        if not path.startswith(b"/"):
            raise MalformedError(f"{what}, line {count}: the path isn't absolute")
        below = path.endswith(b"*")
        path = path[:-1] if below else path
        if mark == b"!":
            kind = Kind.EXCLUDED
        elif not below:
            kind = Kind.FILE
        else:
            kind = Kind.LEVEL if mark else Kind.TREE
        listing.add_path(path, kind)
    return listing


def write_spec(parts: Parts) -> Exported:
    """Each path once, in the order of its first part."""
    out = PathLines.of(parts)
    for path in by_path(parts.parts):
        if b"\n" in path:
            out.skip(path, NEWLINE)
        elif path.endswith(b"*"):
            out.skip(path, "ends with a star")
        elif path.count(b"/") >= DEPTH:
            out.skip(path, "too many components")
        else:
            out.lines.append(b"/" + path + b"\n")
    return out.exported()
