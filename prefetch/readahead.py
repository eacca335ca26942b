"""Reading ahead of readers that go through a pack in order: a large file, a library that is mapped and touched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from layerstore.cache.packs import CachedPack
from prefetch.plan import FRAMES_PER_READ

STREAMS = 64
"""Readers that are followed at a time. Others take the place of the one that was heard of least recently."""


@dataclass(slots=True)
class _Stream:
    """A reader: the frame after the last one that it demanded, the one after what was read ahead, and how far."""

    after: int
    end: int
    length: int


class ReadAhead:
    """A policy: what to read besides what is demanded. For one thread at a time.

    Nothing for those who jump about; twice as much each time, up to ``most`` frames, for those who go on where they, or
    what was read ahead of them, ended.
    """

    def __init__(self, most: int = FRAMES_PER_READ) -> None:
        self._most = most
        self._streams: OrderedDict[tuple[CachedPack, int], _Stream] = OrderedDict()
        """By pack and by ``end``: what is there already raises no demand, so a reader is heard of again at its end."""

    def following(self, pack: CachedPack, demanded: Sequence[int]) -> range:
        """The frames to read after those ``demanded``, which are in order."""
        first, after = demanded[0], demanded[-1] + 1
        key, stream = self._find(pack, first)
        if stream is None:
            stream = _Stream(after, after, 1)
        else:
            del self._streams[key]
            stream.length = min(2 * stream.length, self._most)
        begin = max(stream.end, after)
        end = max(begin, min(after + stream.length, len(pack.index))) if stream.length > 1 else begin
        stream.after, stream.end = after, end
        self._streams[pack, end] = stream
        if len(self._streams) > STREAMS:
            self._streams.popitem(last=False)
        return range(begin, end)

    def _find(self, pack: CachedPack, first: int) -> tuple[tuple[CachedPack, int], _Stream | None]:
        """The stream that goes on with ``first``: at its end, or among what is being read ahead."""
        for end in range(first, first + self._most + 1):
            stream = self._streams.get((pack, end))
            if stream is not None and stream.after <= first:
                return (pack, end), stream
        return (pack, first), None
