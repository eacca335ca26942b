"""Paths as values of fsconfig: any bytes, any length.

overlayfs takes backslashes in ``upperdir`` and ``workdir`` for escapes, old kernels split at commas and colons, and
every value ends at 255 bytes. A path that could meet any of that is handed over as ``/proc/self/fd/N``, optionally
with a plain rest, so that thousands of paths below one long directory need one descriptor.
"""

from __future__ import annotations

import os
import re
from types import TracebackType

from overlay.mountapi import FSCONFIG_VALUE_MAX, AnyPath

_PLAIN = re.compile(rb"[A-Za-z0-9_/.@+=~-]+")
_ROOM = FSCONFIG_VALUE_MAX - len(b"/proc/self/fd/2147483647/")


class FsPaths:
    """Turns paths into values that are good until it is closed."""

    __slots__ = ("_fds",)

    def __init__(self) -> None:
        self._fds: dict[bytes, int] = {}

    def __enter__(self) -> FsPaths:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def value(self, path: AnyPath) -> bytes:
        """``path`` itself when it is short and plain, else one through a descriptor.

        Raises:
            OSError: the path, or the directory it shares with others, can't be opened.
        """
        path = os.fsencode(path)
        if len(path) <= FSCONFIG_VALUE_MAX and _PLAIN.fullmatch(path):
            return path
        head, rest = path, b""
        while True:
            parent, _, name = head.rpartition(b"/")
            longer = name + b"/" + rest if rest else name
            if not parent or not name or len(longer) > _ROOM or not _PLAIN.fullmatch(longer):
                break
            if name in (b".", b".."):
                break
            head, rest = parent, longer
        fd = self._fds.get(head)
        if fd is None:
            fd = self._fds[head] = os.open(head, os.O_PATH | os.O_CLOEXEC)
        value = b"/proc/self/fd/%d" % fd
        return value + b"/" + rest if rest else value
