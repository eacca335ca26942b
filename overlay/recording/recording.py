"""A recording as the worker has it, until and after its layers are mounted."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from layerstore.errors import os_errors, printable
from overlay.lazy.link import MAX_DESCRIPTORS, Link
from overlay.mountapi import (
    AT_FDCWD,
    EROFS_SUPER_MAGIC_V1,
    OPEN_TREE_CLOEXEC,
    OPEN_TREE_CLONE,
    filesystem_magic,
    open_tree,
)
from overlay.recording.spec import RecordedLayer
from overlay.recording.way import TRACEPOINTS
from prefetch.trace.format import TraceHeader


class Held:
    """What a recording needs until it is mounted: descriptors of mounts, and a link by which the recorder knows."""

    def __init__(self, link: Link | None = None) -> None:
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._link = link
        if link is not None:
            self._stack.callback(link.close)

    def say(self, mounts: Sequence[tuple[int, str]]) -> None:
        """What is mounted where, once, and before it is closed. Raises OSError: nothing is mounted there."""
        with self._lock, ExitStack() as copies:
            if self._link is None:
                return
            fds = []
            for _, path in mounts:
                fds.append(open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC))
                copies.callback(os.close, fds[-1])
                if filesystem_magic(f"/proc/self/fd/{fds[-1]}") != EROFS_SUPER_MAGIC_V1:
                    raise FileNotFoundError(errno.ENOENT, "no layer is mounted there", path)
            link, self._link = self._link, None
            try:
                for at in range(0, len(fds), MAX_DESCRIPTORS):
                    link.send({"mounted": mounts[at : at + MAX_DESCRIPTORS]}, fds[at : at + MAX_DESCRIPTORS])
            except OSError:
                pass  # the recorder has just died

    @property
    def waits(self) -> bool:
        """Whether the recorder hasn't been told yet."""
        return self._link is not None

    def keep(self, close: Callable[[], object]) -> None:
        self._stack.callback(close)

    def close(self) -> None:
        with self._lock:
            self._link = None
            self._stack.close()


@dataclass(frozen=True, slots=True)
class Recording:
    """One that goes on.

    Attributes:
        id: of the sandbox.
        name: of the trace.
        way: how reads are seen, one of :data:`overlay.recording.way.WAYS`.
        variant: for the names of its mounts, which are no other sandbox's.
        devices: by which paths this process is to mount the layers so that reads are seen, for each layer in the order
            of its packs; good until :meth:`mounted`. Empty for one that was found.
    """

    id: str
    name: str
    way: str
    variant: str
    devices: tuple[tuple[str, ...], ...] = ()
    _places: Places | None = field(default=None, repr=False, compare=False)
    _held: Held = field(default_factory=Held, repr=False, compare=False)

    def mounted(self, mounts: Sequence[str] = ()) -> None:
        """The caller has mounted the layers. From now on the recording ends when the last mount does. Repeatable.

        ``mounts`` are where, of each layer, in order. By default that is where :mod:`overlay.layers` mounts this
        recording's variant of them.

        Raises:
            NotFoundError: nothing is mounted there.
        """
        if self._places is not None and self.way == TRACEPOINTS and self._held.waits:
            with os_errors(f"find the mounts of recorded sandbox {printable(self.id)}"):
                self._held.say(self._places.of(mounts, self.variant))
        self._held.close()

    def let_go(self) -> None:
        """Nothing will be mounted any more."""
        self._held.close()


class Places:
    """Where the layers of a recording are mounted."""

    def __init__(self, root: str, header: TraceHeader, layers: Sequence[RecordedLayer]) -> None:
        self._directory = f"{root}/layers"
        self._layers = layers
        self._hexes = [layer.metadata.hex for layer in header.layers]

    def of(self, mounts: Sequence[str], variant: str) -> list[tuple[int, str]]:
        """Layers with packs, and their places: by default those of what is mounted as ``variant``. Raises OSError."""
        if not mounts:
            keys = {key[:64]: key for key in os.listdir(self._directory) if key.endswith(f".{variant}")}
            mounts = [f"{self._directory}/{keys.get(hex, f'{hex}.{variant}')}/mnt" for hex in self._hexes]
        return [(number, path) for number, path in enumerate(mounts) if self._layers[number].devices]


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A trace that is there.

    Attributes:
        name: of the trace.
        path: of its file.
        accesses: how many it has.
        bytes: distinct ones of raw packs that were read.
        complete: False if its recorder was killed: then it ends where that was.
    """

    name: str
    path: str
    accesses: int
    bytes: int
    complete: bool
