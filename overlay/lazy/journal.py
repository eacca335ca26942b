"""The journal: which readers wait for an answer, in memory that outlives the keeper.

A memfd, little-endian::

    JournalHeader | Record and its state byte, 64 bytes for each number that an event can have

A record stands at its event's number. It is whole before its state says so, thus a keeper can be killed at any moment.
Numbers from :attr:`Journal.high` on have never been given to an event.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from struct import Struct
from typing import ClassVar

from layerstore.errors import LimitError, MalformedError, UnsupportedError

MAGIC = b"imgjournl"[:8]
VERSION = 1
CAPACITY = 1 << 16
"""Events that can wait at the same time: 4 MiB of journal, of which only what was used takes memory."""

_FREE, _USED = 0, 1


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """``capacity`` records follow; no event has had a number of ``high`` or above."""

    capacity: int
    high: int = 0

    STRUCT: ClassVar[Struct] = Struct("<8sHxxII44x")

    def pack(self) -> bytes:
        return self.STRUCT.pack(MAGIC, VERSION, self.capacity, self.high)

    @classmethod
    def unpack(cls, data: bytes) -> JournalHeader:
        if len(data) < cls.STRUCT.size:
            raise MalformedError(f"journal of {len(data)} bytes is shorter than its header")
        magic, version, capacity, high = cls.STRUCT.unpack_from(data)
        if magic != MAGIC:
            raise MalformedError(f"not a journal of events: {data[:8].hex()}")
        if version != VERSION:
            raise UnsupportedError(f"journal of events of version {version}; this release knows {VERSION}")
        if high > capacity:
            raise MalformedError(f"journal of {capacity} events has used {high} numbers")
        return cls(capacity, high)


_HIGH_AT = Struct("<8sHxxI").size
_HIGH = Struct("<I")


@dataclass(frozen=True, slots=True)
class Record:
    """A reader that waits: ``pid`` wants ``length`` bytes at ``offset`` of a pack, until ``deadline``.

    ``deadline`` is CLOCK_MONOTONIC, in seconds.
    """

    pid: int
    offset: int
    length: int
    deadline: float
    pack_sha256: bytes

    STRUCT: ClassVar[Struct] = Struct("<iQQd32s")

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        return cls(*cls.STRUCT.unpack(data))


_SLOT = Record.STRUCT.size + 4
"""Bytes from record to record: the state byte comes after each, then three of padding."""
_FIRST = JournalHeader.STRUCT.size


class Journal:
    """The unanswered events of one group. One process at a time writes; nobody needs a lock."""

    def __init__(self, fd: int) -> None:
        """Take over ``fd``, a descriptor that :meth:`create` made in this process or another.

        Raises:
            MalformedError: it isn't one.
            UnsupportedError: another release made it.
        """
        self.fd = fd
        size = os.fstat(fd).st_size
        header = JournalHeader.unpack(os.pread(fd, _FIRST, 0))
        if size != _FIRST + _SLOT * header.capacity:
            raise MalformedError(f"journal of {size} bytes does not hold {header.capacity} events")
        self.capacity = header.capacity
        self._memory = mmap.mmap(fd, size)

    @classmethod
    def create(cls, capacity: int = CAPACITY) -> Journal:
        fd = os.memfd_create("imgtool-journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _FIRST + _SLOT * capacity)
            os.pwrite(fd, JournalHeader(capacity).pack(), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def high(self) -> int:
        """No event that this journal was kept for can have had this number or one above."""
        return int(_HIGH.unpack_from(self._memory, _HIGH_AT)[0])

    @high.setter
    def high(self, number: int) -> None:
        _HIGH.pack_into(self._memory, _HIGH_AT, min(number, self.capacity))

    def put(self, number: int, record: Record) -> None:
        """Remember an event until :meth:`clear`.

        Raises:
            LimitError: there is no place for this number.
        """
        if not 0 <= number < self.capacity:
            raise LimitError(f"event {number} has no place in a journal of {self.capacity}")
        at = _FIRST + _SLOT * number
        self._memory[at + Record.STRUCT.size] = _FREE
        Record.STRUCT.pack_into(
            self._memory, at, record.pid, record.offset, record.length, record.deadline, record.pack_sha256
        )
        self._memory[at + Record.STRUCT.size] = _USED
        if number >= self.high:
            self.high = number + 1

    def clear(self, number: int) -> None:
        self._memory[_FIRST + _SLOT * number + Record.STRUCT.size] = _FREE

    def records(self) -> dict[int, Record]:
        """What is remembered, by number, those first whose deadline comes first."""
        states = self._memory[_FIRST + Record.STRUCT.size : _FIRST + _SLOT * self.high : _SLOT]
        found = {}
        for number, state in enumerate(states):
            if state == _USED:
                at = _FIRST + _SLOT * number
                found[number] = Record.unpack(self._memory[at : at + Record.STRUCT.size])
        return dict(sorted(found.items(), key=lambda item: item[1].deadline))

    def close(self) -> None:
        """Let go of it here; what it holds stays for others that have it."""
        self._memory.close()
        os.close(self.fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
