"""Guards: which packs are watched for reads of what isn't there, on whose behalf, and until when.

A pack has to be guarded before the kernel opens it as a device: an EROFS mount that was made earlier raises no events
(measured on 6.18). It may be let go when it is complete and its reads don't go through a server, or when nothing has
it open, which the kernel is asked: a mount that was detached lives on as long as somebody stands in it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from layerstore.cache.packs import CachedPack
from layerstore.errors import UnavailableError, os_errors
from overlay.lazy.custody import Custody
from overlay.lazy.rendezvous import FUSE, KEEPER
from overlay.mountapi import MNT_DETACH, umount


class Backend(Protocol):
    """A way to have the kernel wait for data."""

    @property
    def name(self) -> str:
        """Either fanotify or fuse."""
        ...

    @property
    def variant(self) -> str:
        """Of the mounts that are made over its devices, see :class:`overlay.layers.MountableLayer`."""
        ...

    @property
    def in_path(self) -> bool:
        """Whether its mounts need it for as long as they live, even for packs that are complete."""
        ...

    def guard(self, pack: CachedPack) -> str:
        """Watch the pack; the path to give to the kernel. Repeating it changes nothing."""
        ...

    def release(self, pack: CachedPack) -> None: ...
    def is_lost(self) -> bool:
        """Whether its server has ended, and all of its mounts with it, since anybody was told of that."""
        ...

    def lost(self) -> None:
        """So it has: from now on it is another one."""
        ...


class FanotifyBackend:
    """Sparse pack files under pre-content marks."""

    name = "fanotify"
    variant = ""
    in_path = False

    def __init__(self, custody: Custody) -> None:
        self._custody = custody

    def guard(self, pack: CachedPack) -> str:
        self._custody.hold(pack.hex, KEEPER, pack.data_fd, pack.frames.fd)
        return pack.data_path

    def release(self, pack: CachedPack) -> None:
        self._custody.drop(pack.hex, KEEPER)

    def is_lost(self) -> bool:
        return False  # a keeper's successor takes its events over

    def lost(self) -> None: ...


class FuseBackend:
    """Packs as files of a FUSE mount. When its server ends, so do its mounts: the next one has its own directory.

    A directory is called by the time at which it was chosen, so that no mount of a layer, which bears that name too,
    is ever taken for one of another server.
    """

    name = "fuse"
    in_path = True

    def __init__(self, custody: Custody, directory: str) -> None:
        """``directory`` is where mount points are made; the newest may be served already, others there are dead."""
        self._custody = custody
        self._directory = directory
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        numbers = _numbers(directory)
        self._running = bool(numbers) and _is_served(f"{directory}/{max(numbers)}")
        self._generation = max(numbers) if self._running else _next_generation(max(numbers, default=0))
        for number in numbers:
            if number != self._generation:
                _remove(f"{directory}/{number}")

    @property
    def variant(self) -> str:
        return f"fuse{self._generation}"

    @property
    def mount_point(self) -> str:
        return f"{self._directory}/{self._generation}"

    def is_lost(self) -> bool:
        with self._lock:
            mount_point = self.mount_point if self._running else None
        return mount_point is not None and not _is_served(mount_point)

    def lost(self) -> None:
        with self._lock:
            dead = self.mount_point
            self._running = False
            self._generation = _next_generation(self._generation)
        _remove(dead)

    def guard(self, pack: CachedPack) -> str:
        mount_point = self._serving()
        self._custody.hold(pack.hex, FUSE, pack.data_fd, pack.frames.fd)
        return f"{mount_point}/{pack.hex}"

    def _serving(self) -> str:
        """The mount point of the server, which is started if there is none."""
        with self._starting:  # one does that, and others wait for it
            with self._lock:
                mount_point = self.mount_point
                if self._running:
                    return mount_point
            with os_errors("make a directory for mount points of packs"):
                os.makedirs(self._directory, 0o700, exist_ok=True)
            try:
                served = self._custody.start_fuse(mount_point)
            except UnavailableError:
                self.lost()  # so that the next one doesn't find what this one may have left
                raise
            with self._lock:
                self._running = True
                self._generation = int(os.path.basename(served))  # a worker before us may have started one
            return served

    def release(self, pack: CachedPack) -> None:
        self._custody.drop(pack.hex, FUSE)


class Guards:
    """The packs that one backend watches. Any thread may call.

    Nobody waits for the backend under the lock; changes to the guard of one pack are made one after the other.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._changed = threading.Condition()
        self._changing: set[str] = set()
        self._users: dict[str, set[str]] = {}
        self._packs: dict[str, CachedPack] = {}
        """Those that are guarded, or may be: the backend didn't say."""

    def adopt(self, packs: Sequence[CachedPack]) -> None:
        """These were guarded when this process began."""
        with self._changed:
            self._packs.update((pack.hex, pack) for pack in packs)

    def count(self) -> int:
        with self._changed:
            return len(self._packs)

    def packs(self) -> list[CachedPack]:
        """Those that are guarded, and haven't been evicted a moment ago."""
        with self._changed:
            return [pack for pack in self._packs.values() if pack.data_fd >= 0]

    def needs(self, packs: Sequence[CachedPack]) -> bool:
        """Whether a mount over these needs somebody to answer."""
        return bool(packs) and (self.backend.in_path or not all(pack.complete for pack in packs))

    def device(self, pack: CachedPack, user: str) -> str:
        """The path to mount ``pack`` by, guarded on behalf of ``user`` unless it is complete.

        The pack has to be in use, so that it isn't evicted.

        Raises:
            UnavailableError: it can't be guarded.
        """
        with self._alone_with(pack.hex):
            path = pack.data_path if pack.complete else self._guarded(pack)
            with self._changed:
                self._users.setdefault(pack.hex, set()).add(user)
            return path

    def _guarded(self, pack: CachedPack) -> str:
        with self._changed:
            self._packs[pack.hex] = pack  # whatever comes of this, sweep lets go of it
        path = self.backend.guard(pack)
        with self._changed:
            self._packs[pack.hex] = pack  # should all have been lost meanwhile, to the server before
        return path

    def release(self, packs: Sequence[CachedPack], user: str) -> None:
        """``user`` has no mount over them any more. What can't be let go at once is left to :meth:`sweep`."""
        with self._changed:
            for pack in packs:
                users = self._users.get(pack.hex, set())
                users.discard(user)
                if not users:
                    self._users.pop(pack.hex, None)
        self._let_go([pack.hex for pack in packs])

    def sweep(self) -> list[str]:
        """Let go of what needs no guard any more; their digests, hex."""
        with self._changed:
            hexes = list(self._packs)
        return self._let_go(hexes)

    def incomplete(self) -> int:
        """The number of packs that the kernel has open and that lack data: somebody has to answer for them."""
        return sum(not pack.complete and _is_open(pack) for pack in self.packs())

    def lost(self) -> bool:
        """The server seems to have ended. Whether it has: nobody guards them any more, and mounts give errors."""
        if not self.backend.is_lost():
            return False
        with self._changed:  # before another server may be started, whose packs are not to be forgotten
            self._packs.clear()
            self._users.clear()
        self.backend.lost()
        return True

    def _let_go(self, hexes: Sequence[str]) -> list[str]:
        gone = []
        for hex in hexes:
            with self._alone_with(hex):
                with self._changed:
                    pack, used = self._packs.get(hex), hex in self._users
                if pack is None or not self._is_needless(pack, used):
                    continue
                try:
                    self.backend.release(pack)
                except UnavailableError:
                    break  # nor would the others be: next time
                with self._changed:
                    self._packs.pop(hex, None)
                gone.append(hex)
        return gone

    def _is_needless(self, pack: CachedPack, used: bool) -> bool:
        if not self.backend.in_path and pack.complete:
            return True
        return not used and not _is_open(pack)

    @contextmanager
    def _alone_with(self, hex: str) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: hex not in self._changing)
            self._changing.add(hex)
        try:
            yield
        finally:
            with self._changed:
                self._changing.discard(hex)
                self._changed.notify_all()


def _is_open(pack: CachedPack) -> bool:
    try:
        return pack.is_open_elsewhere()
    except UnavailableError:
        return False  # it has been evicted, so it wasn't


def _next_generation(last: int) -> int:
    return max(last + 1, time.time_ns() // 1_000_000)


def _numbers(directory: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(directory) if name.isdecimal()]
    except FileNotFoundError:
        return []


def _is_served(mount_point: str) -> bool:
    """Whether a FUSE server answers there. stat doesn't tell: the kernel remembers the root of a dead one."""
    try:
        os.listdir(mount_point)
        return os.stat(mount_point).st_dev != os.stat(os.path.dirname(mount_point)).st_dev
    except OSError:
        return False


def _remove(mount_point: str) -> None:
    """Unmount what a dead server has left."""
    try:
        umount(mount_point, MNT_DETACH)
    except OSError:
        pass  # it isn't mounted
    try:
        os.rmdir(mount_point)
    except OSError:
        pass  # somebody has been faster
