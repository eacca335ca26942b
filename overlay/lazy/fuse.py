"""The FUSE server: packs as files that EROFS takes as devices, for kernels without pre-content events.

::

    reader ─▶ EROFS ─▶ <directory>/<hex> (kernel's FUSE, page cache) ─▶ this process: packfiles ─▶ data file
                                                                                 │ wants ─▶ worker

Threads of libfuse read and wait, one for each request that the kernel has sent; the thread of :func:`run` talks to
holder and worker. When this process dies, what is not in the page cache can't be read any more (EIO) through mounts
over its files, for good: they have to be made again over those of a new server.

The library is mfusepy, ctypes over libfuse 3: pure Python where pyfuse3 has to be compiled on every node, threads where
pyfuse3 has one event loop that a slow disk would stop, and the kernel's limit of requests (``max_background``) can be
set. It is imported in the server process alone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from layerstore.errors import (
    MalformedError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    os_errors,
    printable,
)
from overlay.lazy.link import Link, Message
from overlay.lazy.packfiles import PackFiles
from overlay.lazy.wants import Log, Wants
from overlay.mountapi import MNT_DETACH, MNT_FORCE, umount

LIBRARIES = ("libfuse3.so.4", "libfuse3.so.3")
"""Since libfuse 3.17 and before; both have what is used here. Never libfuse 2, which mfusepy would take first."""
MIN_LIBFUSE = (3, 12)
"""The first with ``max_threads``; before, ten blocked reads would block all others."""

MAX_THREADS = 2048
"""Requests in work. Each that waits for its frames keeps a thread (27 KiB); beyond it requests wait for a thread."""
_MAX_IDLE_THREADS = 32
_MAX_BACKGROUND = 65_535
"""Readaheads that the kernel sends before it makes the others wait, 16 bits of ``struct fuse_init_out``. Its default is
12: a dozen blocked reads would block all others."""
_FOREVER = 1e8
"""Seconds for which the kernel may believe size and times of a file: a pack never changes."""
_PATIENCE = 2.0
"""Seconds for libfuse to begin, and to end when its connection has: it takes milliseconds. The holder waits for 5."""


def find_library() -> tuple[str, tuple[int, int]]:
    """The name of libfuse 3 for the dynamic loader, and its version.

    Raises:
        UnsupportedError: there is none, or it is too old.
    """
    for name in LIBRARIES:
        try:
            number = int(ctypes.CDLL(name).fuse_version())
        except (OSError, AttributeError):
            continue
        version = divmod(number, 100 if number >= 100 else 10)
        if version < MIN_LIBFUSE:
            raise UnsupportedError(f"{name} is of release {version[0]}.{version[1]}; lazy loading by FUSE needs 3.12")
        return name, version
    raise UnsupportedError("lazy loading by FUSE needs libfuse 3: install Debian's fuse3")


def load_binding() -> Any:
    """Import mfusepy over libfuse 3.

    Raises:
        UnsupportedError: it or the library is missing.
    """
    name, _ = find_library()
    variable = "FUSE_LIBRARY_PATH"  # mfusepy's only way to be told; it is read at import, in this process alone
    before = os.environ.get(variable)  # noqa: TID251
    os.environ[variable] = name  # noqa: TID251
    try:
        import mfusepy
    except (ImportError, OSError, AttributeError) as error:
        raise UnsupportedError(f"lazy loading by FUSE needs mfusepy: {error}; `pip install mfusepy`") from error
    finally:
        if before is None:
            del os.environ[variable]  # noqa: TID251
        else:
            os.environ[variable] = before  # noqa: TID251
    return mfusepy


def run(
    directory: str,
    holder: Link,
    *,
    deadline: float,
    log: Log,
    successor: Callable[[], Link | None] = lambda: None,
) -> None:
    """Serve packs in ``directory``, made if it is missing, until the holder says ``end`` or is gone for good.

    ``successor`` is asked for a link to a holder's successor; None: there is none.

    Reads fail ``deadline`` seconds after they began; so does what still waits, and all that comes later through EROFS
    mounts over these files, when this returns. Nothing is left mounted.

    Raises:
        UnsupportedError: no FUSE in the kernel, no libfuse 3, no mfusepy.
        PermissionError_: not root.
        NotFoundError: the directory's parent is missing.
        UnavailableError: it can't be mounted there, as over a dead mount, or was unmounted by somebody else.
    """
    binding = load_binding()
    directory = os.path.abspath(directory)  # libfuse changes to /
    if os.geteuid() != 0:
        raise PermissionError_("the FUSE server needs root: other users read through it")
    if not os.path.exists("/dev/fuse"):
        raise UnsupportedError("this kernel has no FUSE (/dev/fuse): `modprobe fuse`")
    with (
        _directory(directory),
        _signals_ignored(),
        _Server(binding, directory, holder, deadline, log, successor) as server,
    ):
        server.serve()


@contextmanager
def _directory(path: str) -> Iterator[None]:
    with os_errors(f"serve packs in {printable(path)}"):
        try:
            os.mkdir(path, 0o700)
            made = True
        except FileExistsError:
            made = False
            os.listdir(path)  # says so if a dead FUSE mount lies there
    try:
        yield
    finally:
        if made:
            try:
                os.rmdir(path)
            except OSError:  # something else is mounted there now
                pass


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """The holder decides when the mounts may end; libfuse would end them at a signal to the whole process group."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Operations:
    """What mfusepy calls, in threads of libfuse. Paths are ``/`` and ``/<hex>``; an OSError is the answer's errno."""

    use_ns = True
    flag_nopath = flag_nullpath_ok = True
    """Requests for an open file come with its handle, whether or not its name is still there."""

    def __init__(self, binding: Any, files: PackFiles, serving: threading.Event, wake: _Bell) -> None:
        self._binding = binding
        self._files = files
        self._serving = serving
        self._wake = wake

    def init_with_config(self, connection: Any, config: Any) -> None:
        connection.max_background = connection.congestion_threshold = _MAX_BACKGROUND
        self._serving.set()
        self._wake.ring()

    def getattr(self, path: str | None, handle: int | None = None) -> dict[str, int]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o500, "st_nlink": 2}
        size = self._files.size(path[1:]) if handle is None and path else self._files.size_of(handle or 0)
        blocks = -(-size // 512)
        return {"st_mode": stat.S_IFREG | 0o400, "st_nlink": 1, "st_size": size, "st_blocks": blocks}

    def readdir(self, path: str | None, handle: int) -> list[str]:
        return [".", "..", *self._files.names()]

    def open(self, path: str, flags: int) -> int:
        return self._files.open(path[1:])

    def read(self, path: str | None, length: int, offset: int, handle: int) -> bytes:
        return self._files.read(handle, offset, length, self._pid)

    def _pid(self) -> int:
        return int(self._binding.fuse_get_context()[2])

    def release(self, path: str | None, handle: int) -> int:
        self._files.close(handle)
        return 0


class _Bell:
    """Wakes the thread that polls it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class _Server:
    """One mount, from the first request of the kernel to the last."""

    def __init__(
        self,
        binding: Any,
        directory: str,
        holder: Link,
        deadline: float,
        log: Log,
        successor: Callable[[], Link | None],
    ) -> None:
        self._binding = binding
        self._directory = directory
        self._holder = holder
        self._successor = successor
        self._log = log
        self._worker: Link | None = None
        self._bell = _Bell()
        self._wants = Wants(deadline, self._bell.ring, log)
        self._files = PackFiles(self._wants)
        self._serving = threading.Event()
        self._told = False
        self._ended = False
        self._failure = "unmounted by somebody else"
        self._thread = threading.Thread(target=self._serve_kernel, name="fuse", daemon=True)

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self._wants.close()
        if self._worker is not None:
            self._worker.close()
        self._serving.wait(_PATIENCE)  # what is not yet mounted can't be unmounted
        if not self._ended:
            self._unmount()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._log("the FUSE connection lives on until this process ends", level="warning")
        else:
            self._bell.close()

    def _unmount(self) -> None:
        """Also where files are open, as those of EROFS mounts: requests fail from now on, as they would without us."""
        try:
            umount(self._directory, MNT_FORCE | MNT_DETACH)
        except OSError as error:
            self._log("unmounting failed", level="warning", directory=printable(self._directory), error=str(error))

    def _serve_kernel(self) -> None:
        """The loop of libfuse: returns when the kernel ends the connection."""
        options: dict[str, object] = {"max_threads": MAX_THREADS, "max_idle_threads": _MAX_IDLE_THREADS}
        options |= {"allow_other": True, "default_permissions": True, "ro": True, "nosuid": True, "nodev": True}
        # Names are looked up once for each mount, so asking every time costs nothing, and what was released is gone.
        options |= {"attr_timeout": _FOREVER, "entry_timeout": 0, "negative_timeout": 0, "kernel_cache": True}
        operations = _Operations(self._binding, self._files, self._serving, self._bell)
        try:
            self._binding.FUSE(
                operations, self._directory, foreground=True, fsname="imgtool-packs", subtype="imgtool", **options
            )
        except RuntimeError as error:
            self._failure = f"libfuse gave up ({error}); it has said why on standard error"
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._ended = True
            self._serving.set()
            self._bell.ring()

    def serve(self) -> None:
        """Until the holder ends it or is gone. Raises UnavailableError when the kernel does."""
        self._thread.start()
        while not self._ended:
            if self._serving.is_set() and not self._told:
                self._told = True
                self._log("FUSE mounted", directory=printable(self._directory))
                if not self._say({"mounted": True, "directory": self._directory}):
                    return
            if not self._listen():
                return
        raise UnavailableError(f"FUSE mount {printable(self._directory)}: {self._failure}")

    def _listen(self) -> bool:
        """Wait for something to do and do it; False when it is time to end."""
        poll = select.poll()
        poll.register(self._bell.fd, select.POLLIN)
        poll.register(self._holder, select.POLLIN)
        if self._worker is not None:
            poll.register(self._worker, select.POLLIN | (0 if self._wants.flush() else select.POLLOUT))
        ready = {fd for fd, _ in poll.poll()}
        if self._bell.fd in ready:
            self._bell.hush()
        if self._worker is not None and self._worker.fileno() in ready:
            self._hear_worker(self._worker)
        return self._holder.fileno() not in ready or self._hear_holder()

    def _hear_worker(self, worker: Link) -> None:
        try:
            received = worker.receive()
        except BlockingIOError:  # it takes wants again
            return
        except MalformedError as error:
            self._log("unreadable message of the worker", level="error", error=str(error))
            return
        except OSError:
            received = None
        if received is None:
            self._log("the worker is gone", level="warning", outstanding=len(self._wants))
            self._take_worker(None)
            return
        message, fds = received
        for fd in fds:
            os.close(fd)
        try:
            if "stats" in message:
                worker.send(self._stats() | {"stats": message["stats"]})
            else:
                self._wants.answer(message)
        except (MalformedError, OSError) as error:
            self._log("wrong message of the worker", level="error", error=str(error))

    def _stats(self) -> Message:
        files, wants = self._files, self._wants
        message = {"packs": len(files), "reads": files.reads, "waits": files.waits, "errors": files.errors}
        return message | {"wants": wants.asked, "failed": wants.failed, "outstanding": len(wants)}

    def _take_worker(self, link: Link | None) -> None:
        before, self._worker = self._worker, link
        self._wants.attach(link)
        if before is not None:
            before.close()

    def _hear_holder(self) -> bool:
        try:
            received = self._holder.receive()
        except MalformedError as error:
            self._log("unreadable message of the holder", level="error", error=str(error))
            return True
        except OSError:
            received = None
        if received is None:
            return self._meet_successor()
        message, fds = received
        hex = message.get("guard", message.get("release"))
        if "guard" in message:
            try:
                return self._say({"guarded": self._files.guard(hex, fds)})
            except MalformedError as error:
                self._log("not guarded", level="error", pack=printable(str(hex)[:64]), why=str(error))
                return self._say({"unguarded": hex, "why": str(error)})
        if message.get("peer") == "worker" and len(fds) == 1 and stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
            self._take_worker(Link.adopt(fds[0]))
            return True
        for fd in fds:
            os.close(fd)
        if "release" in message:
            self._files.release(str(hex))
            return self._say({"released": hex})
        if message.get("end") is True:
            return False
        self._log("wrong message of the holder", level="error", message=printable(str(message)[:200]))
        return True

    def _say(self, message: Message) -> bool:
        """Whether the holder is there to hear it."""
        try:
            self._holder.send(message)
        except OSError:
            return self._meet_successor()
        return True

    def _meet_successor(self) -> bool:
        """The holder is gone: go on with its successor, which doesn't know of us."""
        self._log("the holder is gone", level="warning")
        link = self._successor()
        if link is None:
            return False
        self._holder.close()
        self._holder = link
        if not self._told:
            return True
        return self._say({"mounted": True, "directory": self._directory}) and self._say_what_is_guarded()

    def _say_what_is_guarded(self) -> bool:
        """A successor that was a keeper, or a worker, doesn't know: it has to hold what we read from."""
        for hex, data, frames in self._files.guarded():
            try:
                self._holder.send({"has": hex}, [data, frames])
            except OSError:
                return self._meet_successor()
        return True
