"""Fetch plans: ordered ranges of frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerstore.cache.cache import Cache
from layerstore.cache.metadata import PackUse
from layerstore.cache.packs import CachedPack
from layerstore.image import Layer
from layerstore.pack.format import BLOCK_SIZE
from layerstore.pack.reader import FrameIndex
from layerstore.store.protocol import Store

FRAMES_PER_READ = 16
"""4 MiB of raw data: long reads for disks and links, short enough to keep two cores busy with a few under way."""


@dataclass(frozen=True, slots=True)
class FrameRange:
    """``count`` neighbouring frames of one pack."""

    first: int
    count: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


def frames_used(use: PackUse, index: FrameIndex) -> list[int]:
    """The frames of a pack that hold data which a layer refers to, in order."""
    needed: dict[int, None] = {}
    for first, count in use.runs:
        needed.update(dict.fromkeys(index.covering(first * BLOCK_SIZE, count * BLOCK_SIZE)))
    return sorted(needed)


def ranges(numbers: Iterable[int], *, most: int) -> list[FrameRange]:
    """Join neighbouring frames, in the order given, to ranges of ``most`` frames at the most."""
    joined: list[FrameRange] = []
    for number in numbers:
        last = joined[-1] if joined else None
        if last is not None and number == last.first + last.count and last.count < most:
            joined[-1] = FrameRange(last.first, last.count + 1)
        else:
            joined.append(FrameRange(number, 1))
    return joined


@dataclass(frozen=True, slots=True)
class PackFetch:
    """What is to be fetched of one pack of the cache, in order."""

    pack: CachedPack
    ranges: tuple[FrameRange, ...]


def plan_eager(layers: Sequence[Layer], cache: Cache, store: Store) -> list[PackFetch]:
    """Everything that the layers refer to and the cache lacks, pack by pack. Their metadata has to be there.

    ``store`` is asked for the frame index of packs that the node has not seen yet, and becomes an origin of all.
    """
    needed: dict[CachedPack, set[int]] = {}
    for layer in layers:
        for pack, use in zip(layer.packs, cache.metadata.uses(layer), strict=True):
            cached = cache.pack(pack, store)
            needed.setdefault(cached, set()).update(cached.unready(frames_used(use, cached.index)))
    return [
        PackFetch(pack, tuple(ranges(sorted(numbers), most=FRAMES_PER_READ)))
        for pack, numbers in needed.items()
        if numbers
    ]
