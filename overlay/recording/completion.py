"""The trace at its end: paths from the metadata images, waits by access, and its final name.

Loading the trees of a large image takes seconds and some hundred MB, which is why it is done in the recorder, when
readers don't need it any more. As a program (``python -m overlay.recording.completion DIRECTORY LINK``) it completes
what a recorder left that was killed.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from layerstore.erofs.reader import Image
from layerstore.erofs.tree import load_tree
from layerstore.errors import ConflictError, ImgtoolError, os_errors, printable
from layerstore.opened import FileSource
from layerstore.staging import StagedFile
from overlay.lazy.link import Link, Message
from overlay.recording.spec import RecordingSpec, clear, load_spec
from prefetch.trace.format import (
    HEADER_BYTES,
    TRACE_BYTES,
    Access,
    Trace,
    TraceHeader,
    Wait,
    parse_trace,
)
from prefetch.trace.naming import named
from prefetch.trace.places import ImagePlaces

NEAR = 5_000
"""Microseconds. A reader whose data are missing waits for two parties, whose order is the kernel's choice: the recorder
sees it just before it waits, or just after."""
_STEP = 1 << 20


class Completed(NamedTuple):
    """What a trace has. ``note`` says what is missing in it, and why; empty if nothing is."""

    accesses: int
    bytes: int
    complete: bool
    note: str

    def message(self) -> Message:
        return {"stopped": self._asdict()}


def complete(
    spec: RecordingSpec, accesses: Sequence[Access], waits: Sequence[Wait], ended: int | None, note: str = ""
) -> Completed:
    """Publish a trace, and remove what it was while it grew.

    Args:
        spec: whose.
        accesses: in the order of their times, no block twice.
        waits: of readers.
        ended: microseconds that the run took; None if that isn't known, since the recorder was killed.
        note: what is known to be missing.

    Raises:
        ConflictError: there is a trace of this name.
        MalformedError: the part's header is damaged.
        NoSpaceError, NotFoundError, PermissionError_, UnavailableError: the operating system refuses.
    """
    with os_errors(f"trace {printable(spec.part)}"), open(spec.part, "rb") as stream:
        header = TraceHeader.parse(stream.readline(HEADER_BYTES).rstrip(b"\n"), printable(spec.part))
    waited = with_waits(accesses, waits)
    try:
        places = places_of(spec, header)
        waited = [piece for access in waited for piece in named(access, places)]
    except ImgtoolError as error:
        note = "; ".join(filter(None, (note, f"its paths are missing: {error}")))
    published(spec, Trace(header, tuple(waited), tuple(waits), ended))
    return Completed(len(waited), sum(access.length for access in waited), ended is not None, note)


def with_waits(accesses: Sequence[Access], waits: Iterable[Wait]) -> list[Access]:
    """Accesses with ``waited``: each wait counts for the access that came nearest to one of its ends."""
    times = [access.at for access in accesses]
    found: dict[int, int] = {}
    for wait in waits:
        nearest = None
        for moment in wait:
            number = bisect_left(times, moment)
            for candidate in (number - 1, number):
                if 0 <= candidate < len(times):
                    distance = abs(times[candidate] - moment)
                    if distance <= NEAR and (nearest is None or distance < nearest[0]):
                        nearest = (distance, candidate)
        if nearest is not None:
            found[nearest[1]] = found.get(nearest[1], 0) + wait.end - wait.start
    return [
        access._replace(waited=found[number]) if number in found else access for number, access in enumerate(accesses)
    ]


def places_of(spec: RecordingSpec, header: TraceHeader) -> ImagePlaces:
    """Raises ImgtoolError: a metadata image is gone, or isn't sound."""
    with ExitStack() as stack:
        trees = []
        for layer in spec.layers:
            what = f"metadata image {printable(layer.image)}"
            with os_errors(f"open {what}"):
                stream = stack.enter_context(open(layer.image, "rb", buffering=0))
            trees.append(load_tree(Image(FileSource(stream.fileno(), what))))
        return ImagePlaces(header.layers, trees)


def published(spec: RecordingSpec, trace: Trace) -> None:
    """Give a trace its name, and remove the part. Raises ImgtoolError."""
    with os_errors(f"write trace {printable(spec.target)}"):
        staged = StagedFile(spec.traces)
        try:
            pending: list[bytes] = []
            size = 0
            for line in trace.lines():
                pending.append(line)
                size += len(line)
                if size >= _STEP:
                    staged.write(b"".join(pending))
                    pending, size = [], 0
            staged.write(b"".join(pending))
            staged.seal()
            if os.path.lexists(spec.target):
                raise ConflictError(
                    f"trace {spec.name} has appeared meanwhile; what was recorded stays in {printable(spec.part)}"
                )
            staged.publish(spec.target)
        finally:
            staged.discard()
        os.unlink(spec.part)


def complete_part(spec: RecordingSpec) -> Completed:
    """Publish what a recorder left that was killed. Raises as :func:`complete`."""
    with os_errors(f"trace {printable(spec.part)}"), open(spec.part, "rb") as stream:
        trace = parse_trace(stream.read(TRACE_BYTES + 1), printable(spec.part))
    return complete(spec, trace.accesses, trace.waits, None, "its recorder ended before it was stopped")


def answer(error: ImgtoolError) -> Message:
    """An error as the other end of a link takes it."""
    return {"failed": str(error), "kind": type(error).__name__}


def main(arguments: Sequence[str]) -> None:
    directory, fd = arguments
    with Link.adopt(int(fd)) as link:
        try:
            with os_errors(f"recording {printable(directory)}"):
                spec = load_spec(directory)
                message = complete_part(spec).message()
                clear(directory)
        except ImgtoolError as error:
            message = answer(error)
        link.send(message)


if __name__ == "__main__":
    main(sys.argv[1:])
