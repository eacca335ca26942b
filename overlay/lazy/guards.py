"""Guards: which packs are watched for reads of what isn't there, on whose behalf, and until when.

A pack has to be guarded before the kernel opens it as a device: an EROFS mount that was made earlier raises no events
(measured on 6.18). It may be let go when it is complete, or when nothing has it open, which the kernel is asked: a
mount that was detached lives on as long as somebody stands in it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Protocol

from layerstore.cache.packs import CachedPack
from layerstore.errors import UnavailableError, os_errors
from overlay.lazy.custody import Custody
from overlay.lazy.holder import FUSE, KEEPER
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

    def guard(self, pack: CachedPack) -> str:
        """Watch the pack; the path to give to the kernel. Repeating it changes nothing."""
        ...

    def release(self, pack: CachedPack) -> None: ...
    def lost(self) -> None:
        """Its server ended, and all of its mounts with it."""
        ...


class FanotifyBackend:
    """Sparse pack files under pre-content marks."""

    name = "fanotify"
    variant = ""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody

    def guard(self, pack: CachedPack) -> str:
        self._custody.hold(pack.hex, KEEPER, pack.data_fd, pack.frames.fd)
        return pack.data_path

    def release(self, pack: CachedPack) -> None:
        self._custody.drop(pack.hex, KEEPER)

    def lost(self) -> None:
        """Doesn't happen: a keeper's successor takes its events over."""


class FuseBackend:
    """Packs as files of a FUSE mount. When its server ends, so do its mounts: the next one has its own directory."""

    name = "fuse"

    def __init__(self, custody: Custody, directory: str) -> None:
        """``directory`` is where mount points are made, with numbers as names; the newest may be served already."""
        self._custody = custody
        self._directory = directory
        self._lock = threading.Lock()
        numbers = [0, *_numbers(directory)]
        self._running = _is_served(f"{directory}/{max(numbers)}")
        self._generation = max(numbers) if self._running else max(numbers) + 1

    @property
    def variant(self) -> str:
        return f"fuse{self._generation}"

    @property
    def mount_point(self) -> str:
        return f"{self._directory}/{self._generation}"

    def lost(self) -> None:
        """The server ended."""
        with self._lock:
            dead = self.mount_point
            self._running = False
            self._generation += 1
        _remove(dead)

    def guard(self, pack: CachedPack) -> str:
        with self._lock:
            if not self._running:
                for number in _numbers(self._directory):
                    _remove(f"{self._directory}/{number}")
                with os_errors("make a mount point for packs"):
                    os.makedirs(self.mount_point, 0o700, exist_ok=True)
                self._custody.start_fuse(self.mount_point)
                self._running = True
            mount_point = self.mount_point
        self._custody.hold(pack.hex, FUSE, pack.data_fd, pack.frames.fd)
        return f"{mount_point}/{pack.hex}"

    def release(self, pack: CachedPack) -> None:
        self._custody.drop(pack.hex, FUSE)


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


class Guards:
    """The packs that one backend watches. Any thread may call."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._users: dict[str, set[str]] = {}
        self._packs: dict[str, CachedPack] = {}

    def adopt(self, packs: Sequence[CachedPack]) -> None:
        """These were guarded when this process began."""
        with self._lock:
            for pack in packs:
                self._packs[pack.hex] = pack
                self._users.setdefault(pack.hex, set())

    def guards(self, pack: CachedPack) -> bool:
        with self._lock:
            return pack.hex in self._packs

    def count(self) -> int:
        with self._lock:
            return len(self._packs)

    def device(self, pack: CachedPack, user: str) -> str:
        """The path to mount ``pack`` by, guarded on behalf of ``user`` unless it is complete.

        Raises:
            UnavailableError: it can't be guarded.
        """
        with self._lock:
            self._users.setdefault(pack.hex, set()).add(user)
            if pack.complete:
                return pack.data_path
            try:
                path = self.backend.guard(pack)
            except UnavailableError:
                self._users[pack.hex].discard(user)
                raise
            self._packs[pack.hex] = pack
            return path

    def release(self, packs: Sequence[CachedPack], user: str) -> None:
        """``user`` has no mount over them any more."""
        with self._lock:
            for pack in packs:
                self._users.get(pack.hex, set()).discard(user)
        self.sweep()

    def sweep(self) -> list[str]:
        """Let go of what needs no guard any more; their digests, hex."""
        gone = []
        with self._lock:
            for hex, pack in list(self._packs.items()):
                if pack.complete or (not self._users.get(hex) and not pack.is_open_elsewhere()):
                    self.backend.release(pack)
                    del self._packs[hex]
                    gone.append(hex)
            for hex in [hex for hex, users in self._users.items() if not users and hex not in self._packs]:
                del self._users[hex]
        return gone

    def incomplete(self) -> int:
        """The number of packs that the kernel has open and that lack data: somebody has to answer for them."""
        return sum(pack.is_open_elsewhere() for pack in self.packs() if not pack.complete)

    def packs(self) -> list[CachedPack]:
        with self._lock:
            return list(self._packs.values())

    def lost(self) -> None:
        """Nobody guards them any more, and what was mounted over them gives errors."""
        self.backend.lost()
        with self._lock:
            self._packs.clear()
            self._users.clear()
