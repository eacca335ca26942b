"""Which frames of a pack may be read now: shared memory between those who fill packs and those who answer readers.

One memfd for each open pack, little-endian::

    FrameMapHeader | raw offset of each frame, then the raw size: u64 each | states: u8 each | touched: u8 each

It lasts as long as a process holds its descriptor, so it tells what the page cache has, which may be more than what
``frames`` of the cache promises after a crash of the machine. There is one writer of states at a time; readers need no
lock, since a state is one byte and is set after the data are written. A frame is touched once a reader has asked for
it, whether or not it was there: those who answer readers write that, and only ever 1.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import ClassVar

from layerstore.errors import MalformedError

MAGIC = b"imgfrmap"
VERSION = 2
UNTOUCHED_VERSION = 1
"""Without what is touched. A service that is upgraded while it runs hands such maps over: they are read, not made."""
MAX_FRAMES = 1 << 26
"""16 TiB of raw pack at 256 KiB a frame."""

MISSING = 0
"""Its place in the data file holds nothing that may be read."""
UNVERIFIED = 1
"""Recorded as present before an unclean stop: to be hashed before it is read."""
READY = 2
"""Verified, and in the data file: reading it gives the right bytes."""


@dataclass(frozen=True, slots=True)
class FrameMapHeader:
    """``frames`` frames of a pack of ``raw_size`` bytes, named by the sha256 of its raw bytes."""

    frames: int
    raw_size: int
    pack_sha256: bytes
    version: int = VERSION

    STRUCT: ClassVar[Struct] = Struct("<8sHxxIQ32s8x")

    def pack(self) -> bytes:
        return self.STRUCT.pack(MAGIC, self.version, self.frames, self.raw_size, self.pack_sha256)

    @classmethod
    def unpack(cls, data: bytes) -> FrameMapHeader:
        if len(data) < cls.STRUCT.size:
            raise MalformedError(f"frame map of {len(data)} bytes is shorter than its header")
        magic, version, frames, raw_size, sha256 = cls.STRUCT.unpack_from(data)
        if magic != MAGIC or version not in (UNTOUCHED_VERSION, VERSION) or frames > MAX_FRAMES:
            raise MalformedError(f"not a frame map of version {VERSION}: {data[:16].hex()}")
        return cls(frames, raw_size, sha256, version)


class FrameMap:
    """The states of one pack's frames. Close it when nobody reads through it any more."""

    def __init__(self, fd: int) -> None:
        """Take over ``fd``, a descriptor that :meth:`create` made in this process or another.

        Raises:
            MalformedError: it isn't one.
        """
        self.fd = fd
        size = os.fstat(fd).st_size
        self.header = FrameMapHeader.unpack(os.pread(fd, FrameMapHeader.STRUCT.size, 0))
        at = FrameMapHeader.STRUCT.size
        self._states_at = at + 8 * (self.header.frames + 1)
        self._touched_at = self._states_at + self.header.frames
        self._keeps_touches = self.header.version != UNTOUCHED_VERSION
        if size != self._touched_at + self._keeps_touches * self.header.frames:
            raise MalformedError(f"frame map of {size} bytes does not hold {self.header.frames} frames")
        self._memory = mmap.mmap(fd, size)
        offsets = array("Q")
        offsets.frombytes(self._memory[at : self._states_at])
        self._offsets = offsets

    @classmethod
    def create(cls, pack_sha256: bytes, raw_size: int, raw_offsets: Sequence[int], states: bytes) -> FrameMap:
        """A new map in memory of its own; ``states`` has one of the states above for each frame."""
        header = FrameMapHeader(len(raw_offsets), raw_size, pack_sha256)
        content = header.pack() + array("Q", [*raw_offsets, raw_size]).tobytes() + states + bytes(len(states))
        fd = os.memfd_create("imgtool-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, content)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def __len__(self) -> int:
        return self.header.frames

    @property
    def hex(self) -> str:
        return self.header.pack_sha256.hex()

    def describes(self, raw_offsets: Sequence[int], raw_size: int) -> bool:
        """Whether it is of frames that begin there."""
        return self.header.raw_size == raw_size and self._offsets == array("Q", [*raw_offsets, raw_size])

    def covering(self, offset: int, length: int) -> range:
        """The frames that hold these raw bytes; what lies behind the end of the pack has none."""
        length = min(length, self.header.raw_size - offset)
        if length <= 0 or offset < 0:
            return range(0)
        first = bisect_right(self._offsets, offset) - 1
        return range(first, min(bisect_right(self._offsets, offset + length - 1), self.header.frames))

    def is_ready(self, numbers: range) -> bool:
        """Whether all these neighbouring frames may be read."""
        start = self._states_at + numbers.start
        return self._memory[start : start + len(numbers)] == b"\2" * len(numbers)

    def state(self, number: int) -> int:
        return self._memory[self._states_at + number]

    def set(self, number: int, state: int) -> None:
        self._memory[self._states_at + number] = state

    def states(self) -> bytes:
        """A copy of all states."""
        return self._memory[self._states_at : self._touched_at]

    def touch(self, numbers: range) -> None:
        """A reader has asked for these neighbouring frames. Nothing, for a map that doesn't keep it."""
        if self._keeps_touches:
            start = self._touched_at + numbers.start
            self._memory[start : start + len(numbers)] = b"\1" * len(numbers)

    def touched(self) -> bytes:
        """A copy: of each frame, 1 if a reader has asked for it since the map was made, else 0."""
        return self._memory[self._touched_at :] if self._keeps_touches else bytes(self.header.frames)

    def unready(self, numbers: Iterable[int]) -> list[int]:
        """Those that may not be read yet."""
        states = self.states()
        return [number for number in numbers if states[number] != READY]

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)
