"""What has been read, each block once: when first, by whom, and how often again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

BLOCK = 4096
"""Bytes; ranges of a trace are of whole blocks, those of a pack."""
MOST = 1 << 19
"""Ranges that are kept: what fits into a trace with paths, and the memory of a recorder (some 150 bytes each)."""


class Seen:
    """A range that was read in one piece when it was read first. Offsets and lengths are bytes of a raw pack.

    Attributes:
        at: microseconds since the recording began.
        times: how many reads had a part of it.
    """

    __slots__ = ("at", "comm", "device", "layer", "length", "offset", "times")

    def __init__(self, at: int, layer: int, device: int, offset: int, length: int, comm: str) -> None:
        self.at = at
        self.layer = layer
        self.device = device
        self.offset = offset
        self.length = length
        self.times = 1
        self.comm = comm


class _Device:
    """The ranges of one device, disjoint, by their offsets."""

    __slots__ = ("seen", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.seen: list[Seen] = []


class Accesses:
    """A recording in memory. ``dropped`` counts the new ranges beyond MOST."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._devices: dict[tuple[int, int], _Device] = {}
        self._count = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._count

    def add(self, at: int, layer: int, device: int, offset: int, length: int, comm: str) -> list[Seen]:
        """Note a read. What is new in it is returned, in pieces between what had been read before."""
        here = self._devices.get((layer, device))
        if here is None:
            here = self._devices[layer, device] = _Device()
        starts, seen = here.starts, here.seen
        start = offset - offset % BLOCK
        end = -(-(offset + length) // BLOCK) * BLOCK
        number = bisect_right(starts, start)
        if number and seen[number - 1].offset + seen[number - 1].length > start:
            number -= 1
        new: list[Seen] = []
        while start < end:
            if number < len(seen) and starts[number] <= start:
                seen[number].times += 1
                start = starts[number] + seen[number].length
                number += 1
                continue
            stop = min(end, starts[number]) if number < len(seen) else end
            if self._count >= self._most:
                self.dropped += 1
            else:
                piece = Seen(at, layer, device, start, stop - start, comm)
                starts.insert(number, start)
                seen.insert(number, piece)
                new.append(piece)
                self._count += 1
                number += 1
            start = stop
        return new

    def __iter__(self) -> Iterator[Seen]:
        """By their times; of what one read brought, by offset."""
        found = [piece for device in self._devices.values() for piece in device.seen]
        found.sort(key=lambda piece: (piece.at, piece.layer, piece.device, piece.offset))
        return iter(found)
