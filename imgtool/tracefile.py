"""Traces that arguments name: files, and those of the node; and the images that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from imgtool.options import open_store, root_path
from layerstore.errors import ConflictError, ImgtoolError
from layerstore.image import Image, find_target, load_image, parse_image, read_document
from prefetch.trace.format import Trace
from prefetch.trace.naming import name_accesses
from prefetch.trace.places import ImagePlaces, open_places
from prefetch.trace.summary import is_of
from prefetch.trace.traces import CUT, SUFFIX, Traces, read_trace


def trace_path(given: str, root: str | None) -> str:
    """The path of a trace: of a file (with a slash, or ending in .jsonl, .part or .json), or by its name on this node.

    Raises:
        NotFoundError: there is none of this name.
    """
    if "/" in given or given.endswith((SUFFIX, CUT, ".json")):
        return given
    return Traces(root_path(root)).path(given)


def load_trace(given: str, root: str | None) -> Trace:
    """Read the trace that an argument names.

    Raises:
        NotFoundError: neither a name nor a file.
        LimitError, MalformedError, UnsupportedError: the file.
    """
    return read_trace(trace_path(given, root))


def image_of(trace: Trace, name: str | None, store: str | None, root: str | None) -> Image | None:
    """The image that a trace is of.

    Args:
        trace: whose.
        name: of the image; None looks for what the trace itself names, and finds nothing where that isn't here.
        store: see :mod:`imgtool.options`.
        root: likewise.

    Raises:
        ConflictError: the image that was named has other layers.
        NotFoundError: it doesn't exist.
    """
    if name is not None:
        image = load_image(open_store(store, root), name)
        if not is_of(trace, image):
            raise ConflictError(f"image {name!r} has other layers than the trace: name the one that it is of")
        return image
    for own in (trace.header.manifest, trace.header.image):
        try:
            if own and is_of(trace, image := load_image(open_store(store, root), own)):
                return image
        except ImgtoolError:
            continue  # what can't be read is as good as not there: only the share of the image isn't shown
    return None


def with_paths(trace: Trace, image: Image, store: str | None, root: str | None) -> Trace:
    """The trace with the paths that it lacks. Reads metadata images, unless it lacks none."""
    if all(access.path is not None for access in trace.accesses):
        return trace
    with open_places(open_store(store, root), image) as places:
        return name_accesses(trace, places)


class Target(NamedTuple):
    """An image that a list is looked up in."""

    manifest: str
    places: ImagePlaces


@contextmanager
def target_of(name: str, store: str | None, root: str | None) -> Iterator[Target]:
    """Image ``name`` with its places. Raises NotFoundError, and as :func:`prefetch.trace.places.open_places`."""
    source = open_store(store, root)
    target = find_target(source, name)
    image = parse_image(read_document(source, target, f"manifest of {name!r}"))
    with open_places(source, image) as places:
        yield Target(str(target.digest), places)
