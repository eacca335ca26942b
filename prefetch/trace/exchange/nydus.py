"""Nydus v2: the list that ``nydus-image create`` reads from standard input, and the JSON of ``optimize``.

The list has an absolute path a line, white space around it doesn't count, and a directory stands for all below it. As
nydus does, a line below an earlier one is dropped, and so is one that isn't absolute; here both are counted. Nydus
refuses a list that isn't UTF-8.

The JSON has ``version`` "v1" and ``files``, each with ``path`` and maybe ``ranges``, arrays of [offset, size]; a file
without ``ranges`` is wanted whole. Neither has times: the order is what they say.
"""

from __future__ import annotations

from layerstore.errors import MalformedError, UnsupportedError
from layerstore.oci.document import dump, kind_of, parse, shown
from prefetch.trace.exchange.listing import LIST_BYTES, TOO_LONG, Kind, Listing, Prefixes, Wanted, fits, lines
from prefetch.trace.exchange.parts import NEWLINE, NOT_UTF8, Exported, Parts, PathLines, by_path, utf8
from prefetch.trace.format import MAX_TIME

OPTIMIZE_VERSION = "v1"


def read_list(data: bytes, what: str) -> Listing:
    """Raises LimitError."""
    listing = Listing()
    covered = Prefixes()
    for line in lines(data, what):
        path = line.strip()
        if not path:
            continue
        if not path.startswith(b"/"):
            listing.skip("not an absolute path")
            continue
        if not fits(path):
            listing.skip(TOO_LONG)
            continue
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        if covered.cover(parts):
            listing.skip("covered by an earlier line")
            continue
        covered.add(parts)
        listing.add(Wanted(b"/".join(parts), Kind.TREE))
    return listing


def write_list(parts: Parts) -> Exported:
    """Each path once, in the order of its first part."""
    out = PathLines.of(parts)
    for path in by_path(parts.parts):
        text = utf8(path)
        if text is None:
            out.skip(path, NOT_UTF8)
        elif "\n" in text:
            out.skip(path, NEWLINE)
        elif text != text.rstrip():
            out.skip(path, "ends with white space")
        else:
            out.lines.append(b"/" + path + b"\n")
    return out.exported()


def is_optimize(data: bytes) -> bool:
    head = data[:4096].lstrip()
    return head.startswith(b"{") and b'"files"' in head and b'"version"' in head


def read_optimize(data: bytes, what: str) -> Listing:
    """Raises LimitError, MalformedError, and UnsupportedError for another version."""
    document = parse(data, what, limit=LIST_BYTES)
    version, files = document.get("version"), document.get("files")
    if version != OPTIMIZE_VERSION:
        raise UnsupportedError(f"{what} has version {version!r}, and only {OPTIMIZE_VERSION!r} is known")
    if not isinstance(files, list):
        raise MalformedError(f"{what}: files is {kind_of(files)} where an array belongs")
    listing = Listing()
    for number, file in enumerate(files):
        if not isinstance(file, dict) or not isinstance(path := file.get("path"), str):
            raise MalformedError(f"{what}: entry {number} of files has no path")
        ranges = _ranges(file.get("ranges"), f"{what}: {shown(path)}")
        if ranges == ():
            listing.skip("no range")
        elif not fits(raw := path.encode("utf-8")):
            listing.skip(TOO_LONG)
        else:
            listing.add(Wanted(raw.lstrip(b"/"), Kind.FILE, ranges))
    return listing


def _ranges(value: object, what: str) -> tuple[tuple[int, int], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise MalformedError(f"{what}: ranges is {kind_of(value)} where an array belongs")
    ranges = []
    for item in value:
        if not isinstance(item, list) or len(item) != 2 or not all(_is_size(part) for part in item):
            raise MalformedError(f"{what}: a range has to be [offset, size], in bytes")
        if item[1]:
            ranges.append((item[0], item[1]))
    return tuple(ranges)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_TIME // 2


def write_optimize(parts: Parts) -> Exported:
    """Each path once with all its ranges: nothing is lost but the order between ranges of different files."""
    out = PathLines.of(parts)
    files = []
    for path, ranges in by_path(parts.parts).items():
        text = utf8(path)
        if text is None:
            out.skip(path, NOT_UTF8)
        else:
            files.append({"path": "/" + text, "ranges": [list(part) for part in ranges]})
    data = dump({"version": OPTIMIZE_VERSION, "files": files}) + b"\n"
    return Exported(data, len(files), out.skipped, tuple(out.sample))
