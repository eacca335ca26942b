"""OverlayBD's list of files ("dynamic prefetch"): an absolute path a line; a directory ends with ``/`` or ``*``.

OverlayBD takes only ``[A-Za-z0-9_.-]`` in components, skips other lines without a word, and refuses a file of more
than 64 KiB. Here a skipped line is counted, and a path that it would skip is not written, but counted. at = position.
"""

from __future__ import annotations

import re

from layerstore.errors import LimitError
from prefetch.trace.exchange.listing import TOO_LONG, Kind, Listing, fits, lines
from prefetch.trace.exchange.parts import Exported, Parts, PathLines, by_path

MAX_BYTES = 64 << 10
_COMPONENT = rb"[A-Za-z0-9_.-]+"
_PATH = re.compile(rb"/*%b(?:/%b)*" % (_COMPONENT, _COMPONENT))
OTHER_CHARACTERS = "characters that overlaybd doesn't take"


def read_list(data: bytes, what: str) -> Listing:
    """Raises LimitError."""
    if len(data) > MAX_BYTES:
        raise LimitError(f"{what} has {len(data)} bytes; overlaybd takes at most {MAX_BYTES}")
    listing = Listing()
    for line in lines(data, what):
        path = line.lstrip(b" ")
        if not path:
            continue
        directory = path.endswith((b"/", b"*"))
        path = path.rstrip(b"*").rstrip(b"/") if directory else path
        if path and not _PATH.fullmatch(path):
            listing.skip(OTHER_CHARACTERS)
        elif not fits(path):
            listing.skip(TOO_LONG)
        else:
            listing.add_path(path, Kind.TREE if directory else Kind.FILE)
    return listing


def write_list(parts: Parts) -> Exported:
    """Each path once, in the order of its first part, as many as fit."""
    out = PathLines.of(parts)
    size = 0
    for path in by_path(parts.parts):
        line = b"/" + path + b"\n"
        if not _PATH.fullmatch(path):
            out.skip(path, OTHER_CHARACTERS)
        elif size + len(line) > MAX_BYTES:
            out.skip(path, f"beyond the {MAX_BYTES >> 10} KiB that overlaybd takes")
        else:
            size += len(line)
            out.lines.append(line)
    return out.exported()
