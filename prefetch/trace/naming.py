"""Paths of accesses: back to bytes, and filled in where a recording was cut off before it had them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import chain

from layerstore.errors import ConflictError, MalformedError, printable
from prefetch.trace.format import Access, Trace
from prefetch.trace.places import ImagePlaces, Range

_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(\\)|)")


def raw_path(text: str) -> bytes:
    r"""The bytes that :func:`layerstore.errors.printable` shows as ``text``.

    Raises:
        MalformedError: a backslash that begins neither ``\\`` nor ``\xNN``, or half of a surrogate pair.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedError(f"{printable(text)}: half of a surrogate pair, which no path has") from error
    if b"\\" not in data:
        return data

    def original(match: re.Match[bytes]) -> bytes:
        if match[1]:
            return bytes.fromhex(match[1].decode())
        if match[2]:
            return b"\\"
        raise MalformedError(f"{printable(text)}: a backslash that begins no escape")

    return _ESCAPE.sub(original, data)


def name_accesses(trace: Trace, places: ImagePlaces) -> Trace:
    """The trace with the paths that accesses lack, each as :func:`named` gives it.

    Raises:
        ConflictError: the image has other layers than the trace.
    """
    if trace.header.layers != places.layers:
        raise ConflictError("the image has other layers than the trace: name the one that it was recorded of")
    if all(access.path is not None for access in trace.accesses):
        return trace
    parts = ([access] if access.path is not None else named(access, places) for access in trace.accesses)
    return dataclasses.replace(trace, accesses=tuple(chain.from_iterable(parts)))


def named(access: Access, places: ImagePlaces) -> Iterator[Access]:
    """An access cut where another file begins. Of one that is cut, the first piece has all of the wait.

    What no file has, padding or data of files that another layer hides, stays without a path.
    """
    at, waited = access.offset, access.waited
    for path, file_offset, start, end in _pieces(access, places):
        if start > at:
            yield access._replace(offset=at, length=start - at, waited=waited)
            waited = 0
        yield access._replace(
            offset=start, length=end - start, waited=waited, path=printable(path), file_offset=file_offset
        )
        at, waited = end, 0
    if at < access.end:
        yield access._replace(offset=at, length=access.end - at, waited=waited)


def _pieces(access: Access, places: ImagePlaces) -> Iterator[tuple[bytes, int, int, int]]:
    """Path, offset in the file, and where in the pack it begins and ends; what adjoins in both is one piece."""
    last: tuple[bytes, int, int, int] | None = None
    for place in places.at(Range(access.layer, access.device, access.offset, access.length)):
        start, end = place.range.offset, place.range.offset + place.range.length
        if last is not None:
            path, offset, before, there = last
            if path == place.path and there == start and offset + there - before == place.file_offset:
                last = (path, offset, before, end)
                continue
            yield last
        last = (place.path, place.file_offset, start, end)
    if last is not None:
        yield last
