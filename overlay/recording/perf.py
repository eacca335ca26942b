"""The kernel's perf interface as far as recording needs it: tracepoints of all processors, read from rings.

Constants carry the names of ``<linux/perf_event.h>``. Events are lost, and counted, when a ring is full; nobody ever
waits for whoever reads it. All of it ends with its descriptors.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from ctypes import c_char_p, c_int, c_long, c_ulong
from struct import Struct
from typing import NamedTuple

from layerstore.errors import UnsupportedError
from overlay.mountapi import MOUNT_ATTR_RDONLY, FsContext

PERF_TYPE_TRACEPOINT = 2
PERF_SAMPLE_TID = 0x2
PERF_SAMPLE_TIME = 0x4
PERF_SAMPLE_RAW = 0x400
_COMM, _TASK, _WATERMARK, _SAMPLE_ID_ALL, _USE_CLOCKID = 1 << 9, 1 << 13, 1 << 14, 1 << 18, 1 << 25
"""Bits of ``struct perf_event_attr``, from ``disabled``."""
_CLOCK_MONOTONIC = 1
PERF_FLAG_FD_CLOEXEC = 0x8
PERF_EVENT_IOC_SET_OUTPUT = 0x2405
PERF_EVENT_IOC_SET_FILTER = 0x4008_2406

PERF_RECORD_LOST = 2
PERF_RECORD_COMM = 3
PERF_RECORD_EXIT = 4
PERF_RECORD_FORK = 7
PERF_RECORD_SAMPLE = 9

perf_event_attr = Struct("=IIQQQQQI28xQIi24x")
"""type, size, config, sample_period, sample_type, read_format, the bits, wakeup_watermark, sample_regs_user,
sample_stack_user, clockid; nothing of the rest is used. PERF_ATTR_SIZE_VER6."""
perf_event_header = Struct("=IHH")
"""type, misc, size (of the whole record)."""
_SAMPLE = Struct("=IHHIIQI")
"""The header, pid, tid, time, size of the raw data behind it."""
_HEAD = Struct("=Q")
_HEAD_AT, _TAIL_AT = 1024, 1032
"""``data_head`` and ``data_tail`` in ``struct perf_event_mmap_page``."""

_NR_perf_event_open = {"x86_64": 298}.get(os.uname().machine, 241)
"""241 in <asm-generic/unistd.h>."""
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = ctypes.CFUNCTYPE(c_long, c_long, c_char_p, c_int, c_int, c_int, c_ulong, use_errno=True)(("syscall", _libc))

RING = 64
"""Pages of a processor's ring: some 3,500 events. A power of two."""
_FEW_PROCESSORS = 32
_FIELD = re.compile(rb"\bfield:[^;]*?(\w+);\s*offset:(\d+);\s*size:(\d+);")


class Tracepoint(NamedTuple):
    """One of the kernel's: its number, and where its fields are, offset and size in bytes."""

    id: int
    fields: dict[str, tuple[int, int]]


class Record(NamedTuple):
    """What a ring had. ``time`` is the monotonic clock's, in nanoseconds; 0 where it isn't known."""

    time: int
    type: int
    pid: int
    body: bytes


def tracepoints(names: Sequence[Sequence[str]]) -> list[Tracepoint]:
    """Tracepoints, each by the first of its names that this kernel has (``erofs/erofs_readahead``).

    tracefs is mounted for that, where nobody sees it.

    Raises:
        UnsupportedError: this kernel has none of that name.
        OSError: no tracefs, not root, or the kernel is locked down.
    """
    with FsContext("tracefs") as context:
        context.create()
        mount = context.detached(MOUNT_ATTR_RDONLY)
    try:
        return [_tracepoint(mount, each) for each in names]
    finally:
        os.close(mount)


def _tracepoint(mount: int, names: Sequence[str]) -> Tracepoint:
    for name in names:
        try:
            number = int(_read(mount, f"events/{name}/id"))
        except FileNotFoundError:
            continue
        found = _FIELD.findall(_read(mount, f"events/{name}/format"))
        return Tracepoint(number, {field.decode(): (int(offset), int(size)) for field, offset, size in found})
    raise UnsupportedError(f"this kernel ({os.uname().release}) has no tracepoint {names[0]}")


def _read(mount: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=mount)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def processors() -> list[int]:
    """Those that are online."""
    with open("/sys/devices/system/cpu/online", encoding="ascii") as stream:
        text = stream.read()
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


class Rings:
    """Some tracepoints on all processors, with names of programs and their beginnings and ends. They are on at once."""

    def __init__(self, wanted: Sequence[Tracepoint]) -> None:
        """Raises OSError: not root; no memory for rings."""
        self._fds: list[int] = []
        self.leaders: list[int] = []
        """Readable when a ring is half full."""
        self._rings: list[mmap.mmap] = []
        numbers = processors()
        pages = RING if len(numbers) <= _FEW_PROCESSORS else RING // 4
        self._size = pages * mmap.PAGESIZE
        try:
            for processor in numbers:
                self._open(processor, wanted)
        except BaseException:
            self.close()
            raise

    def _open(self, processor: int, wanted: Sequence[Tracepoint]) -> None:
        for number, tracepoint in enumerate(wanted):
            bits = _WATERMARK | _SAMPLE_ID_ALL | _USE_CLOCKID | (0 if number else _COMM | _TASK)
            sample = PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_RAW
            attr = perf_event_attr.pack(
                PERF_TYPE_TRACEPOINT,
                perf_event_attr.size,
                tracepoint.id,
                1,
                sample,
                0,
                bits,
                self._size // 2,
                0,
                0,
                _CLOCK_MONOTONIC,
            )
            fd = int(_syscall(_NR_perf_event_open, attr, -1, processor, -1, PERF_FLAG_FD_CLOEXEC))
            if fd < 0:
                raise OSError(ctypes.get_errno(), f"perf_event_open: {os.strerror(ctypes.get_errno())}")
            self._fds.append(fd)
            if number:
                fcntl.ioctl(fd, PERF_EVENT_IOC_SET_OUTPUT, self.leaders[-1])
            else:
                self.leaders.append(fd)
                self._rings.append(mmap.mmap(fd, mmap.PAGESIZE + self._size))

    def filter(self, expression: str) -> None:
        """See only samples for which this holds, such as ``dev == 44 || dev == 45``. Raises OSError."""
        text = bytearray(expression.encode() + b"\0")
        for fd in self._fds:
            fcntl.ioctl(fd, PERF_EVENT_IOC_SET_FILTER, text)

    def read(self) -> list[Record]:
        """What has come since the last time, in the order of time."""
        found: list[Record] = []
        for ring in self._rings:
            (head,) = _HEAD.unpack_from(ring, _HEAD_AT)
            (tail,) = _HEAD.unpack_from(ring, _TAIL_AT)
            if head == tail:
                continue
            first, last = tail % self._size, head % self._size
            base = mmap.PAGESIZE
            if first < last:
                data = ring[base + first : base + last]
            else:
                data = ring[base + first : base + self._size] + ring[base : base + last]
            _HEAD.pack_into(ring, _TAIL_AT, head)
            found += _records(data)
        found.sort(key=lambda record: record.time)
        return found

    def close(self) -> None:
        while self._rings:
            self._rings.pop().close()
        while self._fds:
            os.close(self._fds.pop())
        self.leaders.clear()


_IDENTITY = Struct("=IIQ")
"""pid, tid and time: of ``struct sample_id``, which ends every record but samples."""


def _records(data: bytes) -> Iterator[Record]:
    at = 0
    while at + perf_event_header.size <= len(data):
        kind, _, size = perf_event_header.unpack_from(data, at)
        if size < perf_event_header.size:
            return  # can't be: the kernel wrote it
        if kind == PERF_RECORD_SAMPLE:
            *_, pid, _, time, length = _SAMPLE.unpack_from(data, at)
            start = at + _SAMPLE.size
            yield Record(time, kind, pid, data[start : start + length])
        elif size >= perf_event_header.size + _IDENTITY.size:
            end = at + size - _IDENTITY.size
            pid, _, time = _IDENTITY.unpack_from(data, end)
            yield Record(time, kind, pid, data[at + perf_event_header.size : end])
        at += size
