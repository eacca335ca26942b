"""Where the data of an image lies: files by pack ranges, and pack ranges by path.

What is small lies in the metadata images, which are on the node before anything is mounted: it has a path and no range.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from layerstore.erofs.layout import HOLE, Chunked
from layerstore.image import Image
from layerstore.opened import open_layer
from layerstore.pack.format import BLOCK_SIZE
from layerstore.store.protocol import Store
from layerstore.tree.inode import Directory, File, walk
from layerstore.tree.path import steps
from layerstore.tree.resolve import trace
from layerstore.tree.union import merge_overlay
from prefetch.trace.format import TracedLayer


class Range(NamedTuple):
    """``length`` bytes at ``offset`` of device ``device`` (from 1) of layer ``layer`` (from 0); whole blocks."""

    layer: int
    device: int
    offset: int
    length: int


class Place(NamedTuple):
    """A range, and the part of a file that it holds. ``path`` is raw, without a leading slash."""

    range: Range
    path: bytes
    file_offset: int


class Found(NamedTuple):
    """A file by its path with all symbolic links followed, and the layer that it is in."""

    path: bytes
    layer: int
    file: File


@dataclass(frozen=True, slots=True)
class _Starts:
    """The places of one device, disjoint, by where they begin."""

    offsets: list[int]
    places: list[Place]


class ImagePlaces:
    """The files of a stack of layers, and where their data lie.

    Attributes:
        layers: identities, bottom first.
        root: what a sandbox sees.
    """

    def __init__(self, layers: Sequence[TracedLayer], trees: Sequence[Directory]) -> None:
        """``trees`` are what the layers hold, with chunk addresses; bottom first, as ``layers``."""
        self.layers = tuple(layers)
        self.root = trees[0] if len(trees) == 1 else merge_overlay(trees)
        self._layer_of: dict[int, int] = {}
        self._starts: dict[tuple[int, int], _Starts] = {}
        for number, tree in enumerate(trees):
            self._index(number, tree)

    def _index(self, layer: int, tree: Directory) -> None:
        by_device: dict[int, list[Place]] = {}
        for path, inode in walk(tree):
            if isinstance(inode, File) and id(inode) not in self._layer_of:
                self._layer_of[id(inode)] = layer
                for place in _places(layer, path, inode):
                    by_device.setdefault(place.range.device, []).append(place)
        for device, places in by_device.items():
            places.sort(key=lambda place: place.range.offset)  # stable: of files that share a chunk, the first by path
            disjoint = list(_disjoint(places))
            self._starts[layer, device] = _Starts([place.range.offset for place in disjoint], disjoint)

    def at(self, range: Range) -> list[Place]:
        """What a range of a pack holds, in its order; of files that share data, one. What no file has is left out."""
        starts = self._starts.get((range.layer, range.device))
        if starts is None:
            return []
        found = []
        end = range.offset + range.length
        number = max(0, bisect_right(starts.offsets, range.offset) - 1)
        while number < len(starts.places):
            place = starts.places[number]
            if place.range.offset >= end:
                break
            number += 1
            first = max(place.range.offset, range.offset)
            last = min(place.range.offset + place.range.length, end)
            if first < last:
                part = place.range._replace(offset=first, length=last - first)
                found.append(Place(part, place.path, place.file_offset + first - place.range.offset))
        return found

    def find(self, path: bytes) -> Found | None:
        """The regular file that ``path`` leads to, links followed; None if there is none.

        Raises:
            MalformedError: a loop of symbolic links.
        """
        trail = trace(self.root, steps(path))
        if not trail or not isinstance(trail[-1][1], File):
            return None
        file = trail[-1][1]
        return Found(b"/".join(name for name, _ in trail), self._layer_of[id(file)], file)

    def files(self) -> Iterator[Found]:
        """All regular files that a sandbox sees, by path; hard links under each of their names."""
        for path, inode in walk(self.root):
            if isinstance(inode, File):
                yield Found(path, self._layer_of[id(inode)], inode)

    def ranges(self, found: Found, offset: int = 0, length: int | None = None) -> list[Place]:
        """Where these bytes of a file lie, in blocks; nothing for holes, and for what is in the metadata image."""
        end = found.file.size if length is None else min(found.file.size, offset + length)
        parts: list[Place] = []
        if offset >= end:
            return parts  # nothing, though rounded to blocks it would be one
        for place in _places(found.layer, found.path, found.file):
            first = max(place.file_offset, offset - offset % BLOCK_SIZE)
            last = min(place.file_offset + place.range.length, -(-end // BLOCK_SIZE) * BLOCK_SIZE)
            if first < last:
                at = place.range.offset + first - place.file_offset
                parts.append(Place(place.range._replace(offset=at, length=last - first), place.path, first))
        return parts


def _places(layer: int, path: bytes, file: File) -> Iterator[Place]:
    """Of one file, by its offsets, joined."""
    chunks = file.chunks
    if not isinstance(chunks, Chunked):
        return
    step = BLOCK_SIZE << chunks.bits
    whole: Place | None = None
    for number, where in enumerate(chunks.addresses):
        if where == HOLE:
            continue
        at = number * step
        size = -(-min(step, file.size - at) // BLOCK_SIZE) * BLOCK_SIZE
        device, start = where >> 32, (where & 0xFFFF_FFFF) * BLOCK_SIZE
        if whole is not None:
            before = whole.range
            if (
                before.device == device
                and before.offset + before.length == start
                and whole.file_offset + before.length == at
            ):
                whole = whole._replace(range=before._replace(length=before.length + size))
                continue
            yield whole
        whole = Place(Range(layer, device, start, size), path, at)
    if whole is not None:
        yield whole


def _disjoint(places: Sequence[Place]) -> Iterator[Place]:
    """Places sorted by offset, each cut at the end of those before it."""
    end = 0
    for place in places:
        start, stop = place.range.offset, place.range.offset + place.range.length
        if stop <= end:
            continue
        if start < end:
            moved = place.range._replace(offset=end, length=stop - end)
            place = Place(moved, place.path, place.file_offset + end - start)
        yield place
        end = stop


def traced_layers(image: Image) -> tuple[TracedLayer, ...]:
    """The identities of an image's layers."""
    return tuple(TracedLayer(layer.metadata, tuple(pack.digest for pack in layer.packs)) for layer in image.layers)


@contextmanager
def open_places(store: Store, image: Image) -> Iterator[ImagePlaces]:
    """The places of a published image: reads its metadata images and none of its data.

    Raises:
        CorruptError, MalformedError: a metadata image isn't what the manifest says, or isn't sound.
    """
    with ExitStack() as stack:
        trees = [stack.enter_context(open_layer(store, layer)).tree() for layer in image.layers]
        yield ImagePlaces(traced_layers(image), trees)
