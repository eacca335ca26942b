"""Paths of accesses: back to bytes, and filled in where a recording was cut off before it had them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

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
    """The trace with the paths that accesses lack; one that holds parts of several files is taken apart.

    What no file of the image has stays without a path. The wait goes to the first of the parts, the count to each.

    Raises:
        ConflictError: the image has other layers than the trace.
    """
    if trace.header.layers != places.layers:
        raise ConflictError("the image has other layers than the trace: name the one that it was recorded of")
    if all(access.path is not None for access in trace.accesses):
        return trace
    return dataclasses.replace(
        trace, accesses=tuple(part for access in trace.accesses for part in _named(access, places))
    )


def _named(access: Access, places: ImagePlaces) -> Iterator[Access]:
    if access.path is not None:
        yield access
        return
    waited, position = access.waited, access.offset
    for place in places.at(Range(access.layer, access.device, access.offset, access.length)):
        start, length = place.range.offset, place.range.length
        if start > position:  # what no file has: padding, or data of files that another layer hides
            yield access._replace(offset=position, length=start - position, waited=waited)
            waited = 0
        yield access._replace(
            offset=start,
            length=length,
            waited=waited,
            path=printable(place.path),
            file_offset=place.file_offset,
        )
        waited, position = 0, start + length
    if position < access.end:
        yield access._replace(offset=position, length=access.end - position, waited=waited)
