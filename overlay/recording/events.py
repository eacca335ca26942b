"""Reads seen by fanotify: a group whose marks are on mounts that one sandbox alone reads through."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Sequence

from layerstore.errors import ConflictError, printable
from overlay.lazy import fanotify
from overlay.mountapi import AT_FDCWD, OPEN_TREE_CLOEXEC, OPEN_TREE_CLONE, mount_id, open_tree
from overlay.recording.programs import Programs
from overlay.recording.spec import RecordedLayer
from overlay.recording.way import EVENTS, Mounted, Note, NotHereError, close_copies

_NOT_HERE = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.EMFILE, errno.ENOSPC, errno.ENODEV))
"""From the kernel: this file system, or this kernel, has no such events, or no more groups and marks."""


class Events:
    """The group. One thread.

    The same pack may be a device of several layers, so an event is told by its mount: each device has its own.
    """

    name = EVENTS
    due = math.inf
    lost = 0

    def __init__(self, layers: Sequence[RecordedLayer], give: Callable[[list[int]], None], note: Note) -> None:
        """Mark the devices. ``give`` gets descriptors of the mounts to open them through, in order, some at a time.

        Raises:
            NotHereError: pre-content events can't be had for one of them.
            OSError: a device is missing, or this isn't root.
        """
        self._note = note
        self._programs = Programs()
        self._places: dict[int, tuple[int, int]] = {}
        try:
            self._group = fanotify.init()
        except OSError as error:
            if error.errno in _NOT_HERE:
                raise NotHereError(error.strerror) from error
            raise
        try:
            self._mark(layers, give)
        except BaseException:
            os.close(self._group)
            raise

    def _mark(self, layers: Sequence[RecordedLayer], give: Callable[[list[int]], None]) -> None:
        devices = [
            (layer, device, path)
            for layer, recorded in enumerate(layers)
            for device, path in enumerate(recorded.devices, 1)
        ]
        for first in range(0, len(devices), 16):
            clones: list[int] = []
            try:
                for layer, device, path in devices[first : first + 16]:
                    clone = self._clone(path)
                    clones.append(clone)
                    self._places[mount_id(clone)] = (layer, device)
                give(clones)
            finally:
                for clone in clones:
                    os.close(clone)

    def _clone(self, path: str) -> int:
        there = os.stat(path)
        try:
            clone = open_tree(AT_FDCWD, os.path.realpath(path), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)
        except OSError as error:
            if error.errno in _NOT_HERE:
                raise NotHereError(f"{printable(path)}: {error.strerror}") from error
            raise
        try:
            if not os.path.samestat(there, os.fstat(clone)):
                raise ConflictError(f"{printable(path)} was replaced meanwhile")
            fanotify.mark_mount(self._group, clone)
        except OSError as error:
            os.close(clone)
            if error.errno in _NOT_HERE:
                raise NotHereError(f"{printable(path)}: {error.strerror}") from error
            raise
        except BaseException:
            os.close(clone)
            raise
        return clone

    def filenos(self) -> list[int]:
        return [self._group]

    def hear(self) -> None:
        """Let readers go on, and note what they read.

        Raises:
            MalformedError: of the kernel's words; readers wait until this is closed.
        """
        group = self._group
        try:
            events = list(fanotify.read(group))
        except BlockingIOError:
            return
        now = time.monotonic()
        for event in events:
            if event.number >= 0:
                fanotify.respond(group, event.number, True)
        for number, pid, offset, length in events:
            if number < 0:
                continue
            place = self._places.get(mount_id(number))
            os.close(number)
            if place is not None and length > 0:
                self._note(now, *place, offset, length, self._programs.name(pid, now))

    def in_use(self) -> bool:
        """Whether anything is left that could raise an event."""
        return self._group >= 0 and fanotify.marked_mounts(self._group) > 0

    def mounted(self, mounts: Sequence[Mounted]) -> None:
        """Marks say which mounts are ours."""
        close_copies(mounts)

    def stop(self) -> None:
        """Hear no more: the kernel lets go on whoever waits."""
        if self._group >= 0:
            os.close(self._group)
            self._group = -1

    close = stop
