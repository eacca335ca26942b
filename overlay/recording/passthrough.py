"""Reads seen by FUSE: each device is a file of a mount of the recorder's, and reading it reads the device.

Files are opened with FOPEN_DIRECT_IO: requests are what EROFS asked for, and nothing is cached twice.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from layerstore.errors import UnavailableError, UnsupportedError, printable
from overlay.lazy.fuse import MAX_THREADS, load_binding
from overlay.mountapi import MNT_DETACH, MNT_FORCE, umount
from overlay.recording.programs import Programs
from overlay.recording.spec import RecordedLayer, device_file
from overlay.recording.way import PASSTHROUGH, Mounted, Note, close_copies

_MAX_IDLE_THREADS = 16
_MAX_BACKGROUND = 65_535
_FOREVER = 1e8
"""Seconds for which the kernel may believe size and times of a file: a pack never changes."""
_PATIENCE = 5.0
"""Seconds for libfuse to begin, and to end: it takes milliseconds."""


class _File(NamedTuple):
    layer: int
    device: int
    fd: int
    size: int


class Passthrough:
    """The mount, from the constructor to :meth:`close`."""

    name = PASSTHROUGH
    due = math.inf
    lost = 0

    def __init__(self, directory: str, layers: Sequence[RecordedLayer], note: Note) -> None:
        """Mount at ``directory``, which is made.

        Raises:
            UnsupportedError: no FUSE in the kernel, no libfuse 3, no mfusepy.
            UnavailableError: it can't be mounted.
            OSError: a device can't be opened.
        """
        binding = load_binding()
        if not os.path.exists("/dev/fuse"):
            raise UnsupportedError("this kernel has no FUSE (/dev/fuse): `modprobe fuse`")
        self._directory = directory
        self._binding = binding
        self._note: Note | None = note
        self._programs = Programs()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._serving = threading.Event()
        self._ended = False
        self._failure = "unmounted by somebody else"
        self._lock = threading.Lock()
        self.files: list[_File] = []
        self._numbers: dict[str, int] = {}
        self.handles = 0
        with ExitStack() as undo:
            undo.callback(self._close_files)
            for layer, recorded in enumerate(layers):
                for device, path in enumerate(recorded.devices, 1):
                    self._open(layer, device, path)
            os.mkdir(directory, 0o700)
            undo.callback(os.rmdir, directory)
            self._thread = threading.Thread(target=self._serve, name="fuse", daemon=True)
            self._thread.start()
            if not self._serving.wait(_PATIENCE) or self._ended:
                raise UnavailableError(f"FUSE mount {printable(directory)}: {self._failure}")
            undo.pop_all()

    def _open(self, layer: int, device: int, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._numbers[device_file(layer, device)] = len(self.files)
        self.files.append(_File(layer, device, fd, os.fstat(fd).st_size))

    def _close_files(self) -> None:
        while self.files:
            os.close(self.files.pop().fd)

    def _serve(self) -> None:
        options: dict[str, object] = {"max_threads": MAX_THREADS, "max_idle_threads": _MAX_IDLE_THREADS}
        options |= {"allow_other": True, "default_permissions": True, "ro": True, "nosuid": True, "nodev": True}
        options |= {"attr_timeout": _FOREVER, "entry_timeout": _FOREVER}
        try:
            self._binding.FUSE(
                _Operations(self, self._binding),
                self._directory,
                foreground=True,
                raw_fi=True,
                fsname="imgtool-recording",
                subtype="imgtool",
                **options,
            )
        except RuntimeError as error:
            self._failure = f"libfuse gave up ({error}); it has said why in the log"
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._ended = True
            self._serving.set()
            self._ring()

    def begun(self) -> None:
        """Called by the first request, that of the kernel for the connection."""
        self._serving.set()

    def number(self, name: str) -> int:
        """Raises OSError: ENOENT."""
        number = self._numbers.get(name)
        if number is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return number

    def names(self) -> list[str]:
        return list(self._numbers)

    def opened(self, change: int) -> None:
        with self._lock:
            self.handles += change
            if not self.handles:
                self._ring()

    def read(self, number: int, offset: int, length: int, pid: int) -> bytes:
        """The bytes of a device: all of them, but behind its end.

        Raises:
            OSError: the device's file system fails, or the file was cut.
        """
        now = time.monotonic()
        layer, device, fd, size = self.files[number]
        length = min(length, size - offset)
        if length <= 0:
            return b""
        data = os.pread(fd, length, offset)
        while len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            data += more
        note = self._note
        if note is not None and note(now, layer, device, offset, length, self._programs.name(pid, now)):
            self._ring()
        return data

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def filenos(self) -> list[int]:
        return [self._bell]

    def hear(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            pass

    def in_use(self) -> bool:
        """Whether a file of the mount is open, as those of an EROFS mount are."""
        return not self._ended and self.handles > 0

    def mounted(self, mounts: Sequence[Mounted]) -> None:
        """Our files are open in them, which is all that has to be known."""
        close_copies(mounts)

    def stop(self) -> None:
        """Note no more, and serve on."""
        self._note = None

    def close(self) -> None:
        """Unmount; whoever has a file open gets EIO from now on."""
        if not self._ended:
            try:
                umount(self._directory, MNT_FORCE | MNT_DETACH)
            except OSError:
                pass  # somebody else has unmounted it
        self._thread.join(_PATIENCE)
        if not self._thread.is_alive():
            self._close_files()
            os.close(self._bell)
        try:
            os.rmdir(self._directory)
        except OSError:
            pass


class _Operations:
    """What mfusepy calls, in threads of libfuse. Paths are ``/`` and ``/<layer>-<device>``."""

    use_ns = True
    flag_nopath = flag_nullpath_ok = True
    """Requests for an open file come with its handle alone, which is the file's number."""

    def __init__(self, served: Passthrough, binding: Any) -> None:
        self._served = served
        self._binding = binding

    def init_with_config(self, connection: Any, config: Any) -> None:
        connection.max_background = connection.congestion_threshold = _MAX_BACKGROUND
        self._served.begun()

    def getattr(self, path: str | None, info: Any = None) -> dict[str, int]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o500, "st_nlink": 2}
        number = self._served.number(path[1:]) if path else int(info.fh)
        size = self._served.files[number].size
        return {"st_mode": stat.S_IFREG | 0o400, "st_nlink": 1, "st_size": size, "st_blocks": -(-size // 512)}

    def readdir(self, path: str | None, handle: int) -> list[str]:
        return [".", "..", *self._served.names()]

    def open(self, path: str, info: Any) -> int:
        info.fh = self._served.number(path[1:])
        info.direct_io = 1
        self._served.opened(1)
        return 0

    def read(self, path: str | None, length: int, offset: int, info: Any) -> bytes:
        return self._served.read(int(info.fh), offset, length, int(self._binding.fuse_get_context()[2]))

    def release(self, path: str | None, info: Any) -> int:
        self._served.opened(-1)
        return 0
