"""How large frames are: from the indexes of packs where a store is at hand, else by a ratio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing

from layerstore.digest import Digest
from layerstore.errors import LimitError
from layerstore.image import Image
from layerstore.pack.format import FRAME_SIZE
from layerstore.pack.reader import FrameIndex
from layerstore.store.protocol import Store

RATIO = 0.37
"""Compressed bytes of a raw one: debian:full, 233.8 MB of 634 MB (docs/measurements.md)."""

MOST_FRAMES = 1 << 21
"""Frames of a plan or a run, each as often as it is named: half a TiB. More is no start, and would take all memory."""


def check_frames(count: int, what: str) -> None:
    """Raises LimitError if ``what`` comes to more frames than are simulated."""
    if count > MOST_FRAMES:
        raise LimitError(f"{what} comes to more than {MOST_FRAMES} frames of packs, which no start reads")


class Sizes:
    """The frames of packs. Without its index a pack has frames of FRAME_SIZE raw bytes, as many as anybody asks for."""

    def __init__(self, indexes: Iterable[FrameIndex] = (), *, ratio: float = RATIO) -> None:
        self._indexes: Mapping[Digest, FrameIndex] = {index.digest: index for index in indexes}
        self._guess = max(1, round(FRAME_SIZE * ratio))

    def count(self, pack: Digest) -> int | None:
        """How many frames a pack has; None if that isn't known."""
        index = self._indexes.get(pack)
        return None if index is None else len(index)

    def frames(self, pack: Digest, offset: int, length: int) -> range:
        """The frames that hold a range of a raw pack; what lies behind its end has none."""
        index = self._indexes.get(pack)
        if index is None:
            return range(offset // FRAME_SIZE, (offset + length - 1) // FRAME_SIZE + 1)
        return index.covering(offset, min(length, index.raw_size - offset))

    def bounds(self, pack: Digest, number: int) -> tuple[int, int]:
        """Where a frame begins in the raw pack, and where it ends."""
        index = self._indexes.get(pack)
        if index is None:
            return number * FRAME_SIZE, (number + 1) * FRAME_SIZE
        start, length = index.raw_range(number)
        return start, start + length

    def compressed(self, pack: Digest, number: int) -> int:
        """Bytes of a frame as it is fetched."""
        index = self._indexes.get(pack)
        return self._guess if index is None else index.blob_range(range(number, number + 1))[1]


GUESSED = Sizes()


def open_sizes(store: Store, image: Image) -> Sizes:
    """The sizes of an image's packs: one read of each pack's index.

    Raises:
        ImgtoolError: as the store does, and CorruptError where an index isn't what the manifest says.
    """
    indexes = []
    for pack in dict.fromkeys(pack for layer in image.layers for pack in layer.packs):
        with closing(store.open(pack.blob)) as blob:
            indexes.append(FrameIndex.read(pack, blob))
    return Sizes(indexes)
