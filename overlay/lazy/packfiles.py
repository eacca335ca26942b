"""Packs as files whose every byte is right or an error: what the FUSE server serves, without FUSE."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count

from layerstore.cache.framemap import FrameMap
from layerstore.errors import MalformedError
from overlay.lazy.wants import Wants

_HEX = re.compile(r"[0-9a-f]{64}")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Without them its maker could cut the frame map, and reading it would end this process (SIGBUS)."""


class _Source:
    """Where a pack's bytes are and which are there; its descriptors are closed with the last reader that uses it."""

    def __init__(self, frames: FrameMap, data: int) -> None:
        self.frames = frames
        self.data = data
        weakref.finalize(self, _close, frames, data)


def _close(frames: FrameMap, data: int) -> None:
    frames.close()
    os.close(data)


class _Pack:
    """One file. ``guarded``: can be opened, and what is missing is asked for."""

    def __init__(self, hex: str, source: _Source) -> None:
        self.hex = hex
        self.source = source
        self.guarded = True
        self.handles = 0


class PackFiles:
    """The packs that are guarded, and those that were and are still open. Any thread may call.

    ``reads``, ``waits`` and ``errors`` count roughly: threads may count over each other.
    """

    def __init__(self, wants: Wants) -> None:
        self._wants = wants
        self._lock = threading.Lock()
        self._packs: dict[str, _Pack] = {}
        self._open: dict[int, _Pack] = {}
        self._handles = count(1)
        self.reads = 0
        self.waits = 0
        self.errors = 0

    def __len__(self) -> int:
        return len(self._packs)

    def guard(self, hex: object, fds: Sequence[int]) -> str:
        """Make ``hex`` a file of the data and with the frame map in ``fds``, which are this object's from now on.

        Where it is one already, all of its readers go on with the new descriptors.

        Raises:
            MalformedError: they are not what they should be. They are closed.
        """
        source = _adopted(hex, fds)
        hex = source.frames.hex
        with self._lock:
            pack = self._packs.get(hex)
            if pack is None:
                self._packs[hex] = _Pack(hex, source)
            else:
                pack.source = source
                pack.guarded = True
        return hex

    def release(self, hex: str) -> None:
        """Take the file away. Those who have it open can go on reading what is there. Repeating it is harmless."""
        with self._lock:
            pack = self._packs.get(hex)
            if pack is not None:
                pack.guarded = False
                self._forget_unused(pack)

    def _forget_unused(self, pack: _Pack) -> None:
        if not pack.guarded and not pack.handles and self._packs.get(pack.hex) is pack:
            del self._packs[pack.hex]

    def guarded(self) -> list[tuple[str, int, int]]:
        """Those that can be opened: hex, and the descriptors of data and frame map, which stay ours."""
        with self._lock:
            packs = [(pack.hex, pack.source) for pack in self._packs.values() if pack.guarded]
        return [(hex, source.data, source.frames.fd) for hex, source in packs]

    def names(self) -> list[str]:
        with self._lock:
            return [hex for hex, pack in self._packs.items() if pack.guarded]

    def size(self, name: str) -> int:
        """Raises OSError: ENOENT."""
        return self._named(name).source.frames.header.raw_size

    def open(self, name: str) -> int:
        """A handle for :meth:`read`, to be given to :meth:`close`. Raises OSError: ENOENT."""
        with self._lock:
            pack = self._named(name)
            pack.handles += 1
            handle = next(self._handles)
            self._open[handle] = pack
        return handle

    def size_of(self, handle: int) -> int:
        return self._open[handle].source.frames.header.raw_size

    def _named(self, name: str) -> _Pack:
        pack = self._packs.get(name)
        if pack is None or not pack.guarded:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return pack

    def close(self, handle: int) -> None:
        with self._lock:
            pack = self._open.pop(handle)
            pack.handles -= 1
            self._forget_unused(pack)

    def read(self, handle: int, offset: int, length: int, pid: Callable[[], int]) -> bytes:
        """The bytes from ``offset``: all of ``length``, fewer only where the pack ends. May wait for the worker.

        ``pid`` is asked who the reader is, if there is something to wait for.

        Raises:
            OSError: EIO, whatever the reason; never anything else.
        """
        self.reads += 1
        try:
            data = self._read(self._open[handle], offset, length, pid)
        except Exception as error:
            self.errors += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
        return data

    def _read(self, pack: _Pack, offset: int, length: int, pid: Callable[[], int]) -> bytes:
        source = pack.source
        length = min(length, source.frames.header.raw_size - offset)
        if length <= 0:
            return b""
        needed = source.frames.covering(offset, length)
        source.frames.touch(needed)
        if not source.frames.is_ready(needed):
            if not pack.guarded:
                raise ValueError("a frame is missing, and nobody is asked for it any more")
            self.waits += 1
            self._wants.wait(pack.hex, source.frames.unready(needed), pid())
            source = pack.source  # a new worker may have brought new descriptors
            needed = source.frames.covering(offset, length)
            if not source.frames.is_ready(needed):
                raise ValueError("a frame did not come")
        data = os.pread(source.data, length, offset)
        # A frame that is thrown away is marked first: what was read is good only if it is still marked as there.
        if len(data) != length or not needed or not source.frames.is_ready(needed):
            raise ValueError("the data file is cut, or was thrown away meanwhile")
        return data


def _adopted(hex: object, fds: Sequence[int]) -> _Source:
    with ExitStack() as undo:
        for fd in fds:
            undo.callback(os.close, fd)
        if not isinstance(hex, str) or not _HEX.fullmatch(hex):
            raise MalformedError("a pack is named by 64 hexadecimal digits")
        if len(fds) != 2:
            raise MalformedError(f"a pack comes with data and frame map, not with {len(fds)} descriptors")
        data, map_fd = fds
        try:
            if fcntl.fcntl(map_fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise MalformedError("its frame map can be cut")
            status = os.fstat(data)
            os.pread(data, 1, 0)
            frames = FrameMap(map_fd)
        except (OSError, ValueError) as error:
            raise MalformedError(f"its descriptors can't be used: {error}") from error
        undo.pop_all()
        undo.callback(_close, frames, data)
        size = frames.header.raw_size
        if frames.hex != hex:
            raise MalformedError(f"its frame map is that of {frames.hex}")
        if not size or frames.covering(0, size) != range(len(frames)):
            raise MalformedError("its frames don't make up the pack")
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise MalformedError(f"its data is not a file of {size} bytes")
        undo.pop_all()
        return _Source(frames, data)
