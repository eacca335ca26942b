"""Reads seen by EROFS's own tracepoints: the kernel says which pages of which file it is about to read.

Nobody waits for whoever hears it. Events are those of all EROFS mounts of the machine, told apart by the device number
of the mount, so only a mount that no other sandbox uses can be recorded. What is mounted as which layer is known when
it is mounted; what came before is kept until then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING

from layerstore.errors import ImgtoolError, UnsupportedError, printable
from overlay.mountapi import FsContext
from overlay.recording import perf
from overlay.recording.programs import Programs
from overlay.recording.spec import RecordedLayer
from overlay.recording.way import TRACEPOINTS, Mounted, Note, NotHereError

if TYPE_CHECKING:
    from overlay.recording.pages import PageRanges

_READAHEAD = ("erofs/erofs_readahead", "erofs/erofs_readpages")
_READ_FOLIO = ("erofs/erofs_read_folio", "erofs/erofs_readpage")
"""Each with its name before it was renamed."""
_SOON, _LATE = 0.25, 1.0
"""Seconds between looks into the rings: while something comes, and when nothing has come for long. A ring that is half
full is looked into at once. To look less often takes less from those who read, and loses more when we are killed."""
_MOST_EARLY = 1 << 16
"""Events of anybody's that are kept until it is known which are ours."""
_PID_AND_PARENT = Struct("=II")
_TASK = Struct("=IIII")
"""pid, ppid, tid, ptid: how records of forks and exits begin."""

Early = tuple[float, int, int, int, int, str]
"""When, device number, inode, first page, pages, program."""


class _Fields:
    """Where a tracepoint has what is wanted of it."""

    def __init__(self, tracepoint: perf.Tracepoint, first: str, count: str | None) -> None:
        fields = tracepoint.fields
        try:
            self._places = [fields["dev"], fields["nid"], fields[first], *([fields[count]] if count else [])]
            offset, size = fields["common_type"]
        except KeyError as error:
            raise NotHereError(f"a tracepoint of EROFS lacks the field {error}") from error
        self._type = (slice(offset, offset + size), tracepoint.id)

    def is_in(self, data: bytes) -> bool:
        where, number = self._type
        return int.from_bytes(data[where], "little") == number

    def of(self, data: bytes) -> tuple[int, int, int, int]:
        """Device number, inode, first page, pages."""
        dev, nid, first, *count = (int.from_bytes(data[at : at + size], "little") for at, size in self._places)
        return dev, nid, first, count[0] if count else 1


class Tracepoints:
    """The rings. One thread."""

    name = TRACEPOINTS

    def __init__(self, layers: Sequence[RecordedLayer], note: Note) -> None:
        """Begin to listen, to all that is read through EROFS.

        Raises:
            NotHereError: there are no such tracepoints, or they can't be had.
        """
        self._layers = layers
        self._note = note
        self._programs = Programs()
        try:
            FsContext("erofs").close()  # where it is a module, its tracepoints come with it
            readahead, folio = perf.tracepoints([_READAHEAD, _READ_FOLIO])
            self._kinds = (_Fields(readahead, "start", "nrpage"), _Fields(folio, "index", None))
            self._rings = perf.Rings([readahead, folio])
        except (OSError, ValueError, UnsupportedError) as error:
            raise NotHereError(str(error)) from error
        self._early: list[Early] | None = []
        self._mounts: dict[int, tuple[int, str]] = {}
        self._copies: list[int] = []
        self._pages: PageRanges | None = None
        self._pause = _SOON
        self.due = time.monotonic() + _SOON
        self.lost = 0

    def filenos(self) -> list[int]:
        return self._rings.leaders

    def mounted(self, mounts: Sequence[Mounted]) -> None:
        """The layers are mounted.

        As long as the copies are open the file systems live, whoever unmounts them: no other gets their numbers.
        """
        for layer, path, copy in mounts:
            self._copies.append(copy)
            self._mounts[_kernel_number(os.fstat(copy).st_dev)] = (layer, path)
        if self._mounts:
            try:
                self._rings.filter(" || ".join(f"dev == {dev}" for dev in self._mounts))
            except OSError:
                pass  # then others' reads are sorted out here
        early, self._early = self._early or [], None
        for event in early:
            self._see(*event)

    def hear(self) -> None:
        """Note what has come."""
        records = self._rings.read()
        for record in records:
            self._take(record)
        self._pause = _SOON if records else min(self._pause * 2, _LATE)
        self.due = time.monotonic() + self._pause

    def _take(self, record: perf.Record) -> None:
        body = record.body
        if record.type == perf.PERF_RECORD_SAMPLE:
            for kind in self._kinds:
                if kind.is_in(body):
                    moment = record.time / 1e9
                    self._see(moment, *kind.of(body), self._programs.name(record.pid, moment))
                    return
        elif record.type == perf.PERF_RECORD_COMM:
            pid, tid = _PID_AND_PARENT.unpack_from(body)
            if pid == tid:
                self._programs.executes(pid, printable(body[8:].split(b"\0", 1)[0]))
        elif record.type == perf.PERF_RECORD_FORK:
            pid, parent, *_ = _TASK.unpack_from(body)
            if pid != parent:
                self._programs.forks(parent, pid)
        elif record.type == perf.PERF_RECORD_EXIT:
            pid, _, tid, _ = _TASK.unpack_from(body)
            if pid == tid:
                self._programs.ends(pid)
        elif record.type == perf.PERF_RECORD_LOST:
            self.lost += int.from_bytes(body[8:16], "little")

    def _see(self, moment: float, dev: int, nid: int, first: int, count: int, comm: str) -> None:
        if self._early is not None:
            if len(self._early) < _MOST_EARLY:
                self._early.append((moment, dev, nid, first, count, comm))
            else:
                self.lost += 1
            return
        mount = self._mounts.get(dev)
        if mount is None:
            return
        if self._pages is None:
            # 80 ms of modules, for which neither who starts us should wait, nor share its processors with.
            from overlay.recording.pages import PageRanges

            self._pages = PageRanges([each.image for each in self._layers])
        layer = mount[0]
        try:
            ranges = self._pages.of(layer, nid, first, count)
        except ImgtoolError:  # not what the kernel has mounted: nothing can be said about it
            self.lost += 1
            return
        for device, offset, length in ranges:
            self._note(moment, layer, device, offset, length, comm)

    def in_use(self) -> bool:
        """Whether one of the layers is still mounted where it was."""
        return any(_device_number(path) == dev for dev, (_, path) in self._mounts.items())

    def stop(self) -> None:
        """Note the rest, and hear no more."""
        if self.filenos():
            self.hear()
            self._rings.close()
        if self._pages is not None:
            self._pages.close()
        while self._copies:
            os.close(self._copies.pop())
        self._mounts = {}

    close = stop


def _device_number(path: str) -> int:
    try:
        return _kernel_number(os.stat(path).st_dev)
    except OSError:
        return -1


def _kernel_number(dev: int) -> int:
    """``dev_t`` as the kernel has it inside: 12 bits of major number, 20 of minor."""
    return os.major(dev) << 20 | os.minor(dev)
