"""stargz-snapshotter: the record of ``ctr-remote image optimize``, and the list of ``--prefetch-list``.

The record has an object a line, in the order of first access; ``path`` has no leading slash, and may come again.
``manifestDigest`` and ``layerIndex`` say where the other tool found it, which means nothing here. at = position.

The list has a glob a line: ``*``, ``?`` and ``[…]`` inside a component, ``**`` as a component for any number of them;
``#`` begins a comment.
"""

from __future__ import annotations

from layerstore.errors import MalformedError
from layerstore.oci.document import dump, parse
from prefetch.trace.exchange.listing import TOO_LONG, Kind, Listing, fits, lines
from prefetch.trace.exchange.parts import NOT_UTF8, Exported, Parts, PathLines, by_path, utf8

LINE_BYTES = 64 << 10


def is_record(data: bytes) -> bool:
    line = data[:LINE_BYTES].lstrip().partition(b"\n")[0]
    return line.startswith(b"{") and line.rstrip().endswith(b"}") and b'"path"' in line and b'"magic"' not in line


def read_record(data: bytes, what: str) -> Listing:
    """A last line that was cut is skipped.

    Raises:
        LimitError: too large, or a line of more than 64 KiB.
        MalformedError: another line is no such object.
    """
    listing = Listing()
    cut = not data.endswith(b"\n")
    every = list(lines(data, what))
    for number, line in enumerate(every, 1):
        if not line.strip():
            continue
        try:
            path = parse(line, f"{what}, line {number}", limit=LINE_BYTES).get("path")
        except MalformedError:
            if cut and number == len(every):
                listing.skip("cut line")
                continue
            raise
        if not isinstance(path, str):
            raise MalformedError(f"{what}, line {number}: path is no text")
        raw = path.encode("utf-8")
        if fits(raw):
            listing.add_path(raw)
        else:
            listing.skip(TOO_LONG)
    return listing


def write_record(parts: Parts) -> Exported:
    """Each path once, in the order of its first part."""
    out = PathLines.of(parts)
    for path in by_path(parts.parts):
        text = utf8(path)
        if text is None:
            out.skip(path, NOT_UTF8)
        else:
            out.lines.append(dump({"path": text}) + b"\n")
    return out.exported()


def is_globs(data: bytes) -> bool:
    """Patterns and comments; a list of plain paths is taken for one of paths."""
    found = False
    for line in data[:LINE_BYTES].split(b"\n"):
        if any(mark in line for mark in b'\0"=('):
            return False
        found = found or (b"*" in line and not line.startswith((b"^", b"!", b"#")))
    return found


def read_globs(data: bytes, what: str) -> Listing:
    """Raises LimitError."""
    listing = Listing()
    for line in lines(data, what):
        pattern = line.strip()
        if not pattern or pattern.startswith(b"#"):
            continue
        if fits(pattern):
            listing.add_path(pattern, Kind.GLOB)
        else:
            listing.skip(TOO_LONG)
    return listing
