"""Carrying out one read: from a store into a pack of the cache, through verification."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from layerstore.cache.format import Origin
from layerstore.cache.framemap import READY
from layerstore.cache.packs import CachedPack
from layerstore.errors import CorruptError, ImgtoolError, NoSpaceError, NotFoundError, UnavailableError
from layerstore.store.failures import disk_errors
from prefetch.backlog import Frame, Read, Verify
from prefetch.origins import OpenBlob, Origins
from prefetch.turns import Turns

ROOM_TRIES = 3
"""How often room is made for one frame before the disk counts as full: others may take what was freed."""


class Outcome(Protocol):
    """Told what comes of a read, by the thread that carries it out."""

    def arrived(self, read: Read, size: int) -> bool:
        """The store has answered with ``size`` bytes; returns whether they are still of use."""
        ...

    def there(self, read: Read, number: int, raw: int, compressed: int) -> None:
        """A frame may be read. ``raw`` bytes of it were written; none if it was there before."""
        ...

    def brought(self, read: Read, numbers: Sequence[int], size: int) -> None:
        """A read of ``size`` bytes is over, and these frames were written."""
        ...

    def unfit(self, read: Read, frame: Frame) -> None:
        """What was recorded as present is not the frame: it has to be fetched."""
        ...

    def refused(self, read: Read, frames: Sequence[Frame], error: ImgtoolError) -> None:
        """The place that was asked did not give these frames."""
        ...

    def lost(self, read: Read, frames: Sequence[Frame], error: ImgtoolError) -> None:
        """These frames can't be put into the cache."""
        ...


class Reader:
    """Carries out reads; for any thread."""

    def __init__(self, origins: Origins, room: Callable[[int, str], int], outcome: Outcome) -> None:
        self._origins = origins
        self._room = room
        self._outcome = outcome
        self._turns = Turns()
        self._making_room = threading.Lock()

    def carry_out(self, read: Read) -> None:
        """Bring what ``read`` asks for. All of its frames are reported, except if the pack was evicted meanwhile."""
        if isinstance(read.way, Verify):
            self._verify(read)
        elif read.way is None:
            error = NotFoundError(f"pack {read.pack.digest}: no store is known that has it")
            self._outcome.refused(read, read.frames, error)
        else:
            self._fetch(read, read.way)

    def _verify(self, read: Read) -> None:
        if not self._outcome.arrived(read, 0):
            return
        try:
            with read.pack.busy():
                for frame in self._in_turn(read):
                    if read.pack.verify(frame.number):
                        compressed = read.pack.index.compressed_size(frame.number)
                        self._outcome.there(read, frame.number, 0, compressed)
                    else:
                        self._outcome.unfit(read, frame)
        except ImgtoolError as error:
            self._outcome.refused(read, read.frames, error)

    def _fetch(self, read: Read, origin: Origin) -> None:
        try:
            opened = self._origins.acquire(read.pack, origin)
        except ImgtoolError as error:
            self._refused(read, origin, error)
            return
        try:
            start, length = opened.index.blob_range(read.numbers)
            try:
                with disk_errors(f"read blob {origin.pack.blob}"):
                    data = opened.blob.read_at(start, length)
            except ImgtoolError as error:
                self._origins.spoil(opened)
                self._refused(read, origin, error)
                return
            if not self._outcome.arrived(read, len(data)):
                self._origins.spoil(opened)
                return
            try:
                with read.pack.busy():
                    self._put(read, opened, start, length, data)
            except UnavailableError as error:
                self._outcome.lost(read, read.frames, error)  # evicted, when nobody waited for it any more
        finally:
            self._origins.release(opened)

    def _refused(self, read: Read, origin: Origin, error: ImgtoolError) -> None:
        if isinstance(error, UnavailableError):
            self._origins.avoid(origin.location)
        self._outcome.refused(read, read.frames, error)

    def _put(self, read: Read, opened: OpenBlob, start: int, length: int, data: bytes) -> None:
        """Verify and write what came."""
        pack, index, view = read.pack, opened.index, memoryview(data)
        left = {frame.number for frame in read.frames}
        written = []
        for frame in self._in_turn(read):
            number = frame.number
            at, size = index.blob_range(range(number, number + 1))
            if pack.frames.state(number) == READY:
                self._outcome.there(read, number, 0, size)
                left.discard(number)
                continue
            part = view[at - start : at - start + size]
            try:
                if len(part) != size:
                    what = f"frame {number} of pack {pack.digest}"
                    raise CorruptError(f"{what}: the store answered with {len(data)} bytes, not {length}")
                raw = index.decode(number, part)
            except ImgtoolError as error:
                self._origins.spoil(opened)  # before somebody else tries the frame again
                self._outcome.refused(read, [frame], error)
                left.discard(number)
                continue
            try:
                self._write(pack, number, raw, left)
            except NoSpaceError as error:
                self._outcome.lost(read, [each for each in read.frames if each.number in left], error)
                break
            except ImgtoolError as error:
                self._outcome.lost(read, [frame], error)
                left.discard(number)
                continue
            written.append(number)
            left.discard(number)
            self._outcome.there(read, number, len(raw), size)
        if written:
            self._outcome.brought(read, sorted(written), len(data))

    def _in_turn(self, read: Read) -> Iterator[Frame]:
        """The frames of a read, each when its turn has come: what a reader waits for first, then what is due first."""
        left = list(read.frames)
        with self._turns.take(lambda: read.urgency) as turn:
            while left:
                frame = min(left, key=lambda frame: (frame.priority, frame.due))
                left.remove(frame)
                yield frame
                if left:
                    turn.give_way()

    def _write(self, pack: CachedPack, number: int, raw: bytes, left: Collection[int]) -> None:
        """Write a frame; if the disk is full, make room for all that are ``left`` of the read."""
        try:
            pack.write(number, raw)
            return
        except NoSpaceError as error:
            full = error
        with self._making_room:  # one at a time: what one makes may be enough for the others
            for _ in range(ROOM_TRIES):
                try:
                    pack.write(number, raw)
                    return
                except NoSpaceError as error:
                    full = error
                if not self._room(sum(pack.index.raw_range(each)[1] for each in left), pack.hex):
                    break
        raise full
