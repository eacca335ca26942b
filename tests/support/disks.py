"""A disk that forgets: what is written is there until the machine stops, and after that only what was made durable.

It stands between the cache and the kernel: ``pwrite``, ``fsync``, ``fdatasync`` and the punching of holes are followed
page by page, and :meth:`Disk.crash` takes back what the disk never got. A page that was not written back when the
machine stops may be on the disk or not. After a failed ``fdatasync`` the kernel calls pages clean that it could not
write, so a later one that succeeds says nothing of them (Linux since 4.13: the error is told once for a descriptor).
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from layerstore.cache import packs as packs_module
from layerstore.cache.holes import punch

PAGE = 4096
_Inode = tuple[int, int]


class Disk:
    """The files of a cache on it; ``rng`` decides what is luck."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._durable: dict[_Inode, bytearray] = {}
        self._dirty: dict[_Inode, set[int]] = {}
        self._failing: int | None = None
        self._pwrite = os.pwrite

    def fail_next_sync(self, code: int = errno.EIO) -> None:
        """The next fdatasync of a data file that has something to write fails; 0: it doesn't after all."""
        self._failing = code or None

    def settle(self, path: str | os.PathLike[str]) -> None:
        """What is in a file now is what the disk has."""
        with open(path, "rb") as file:
            key = _key(file.fileno())
            self._durable[key] = bytearray(file.read())
            self._dirty.pop(key, None)

    def durable(self, path: str | os.PathLike[str]) -> bytes:
        """What the disk has of a file for certain."""
        status = os.stat(path)
        return bytes(self._of((status.st_dev, status.st_ino), status.st_size))

    def crash(self, root: str, *, luck: float = 0.5) -> None:
        """The machine stopped, and starts again: the files below ``root`` have what was durable, and what luck left."""
        for directory, _, names in os.walk(root):
            for name in names:
                path = os.path.join(directory, name)
                status = os.stat(path)
                key = (status.st_dev, status.st_ino)
                if key not in self._durable:
                    continue
                with open(path, "rb") as file:
                    current = file.read()
                durable = self._of(key, len(current))
                dirty = self._dirty.get(key, set())
                for at in range(0, len(current), PAGE):
                    old, new = bytes(durable[at : at + PAGE]), current[at : at + PAGE]
                    if old != new and at // PAGE in dirty and self._rng.random() < luck:
                        durable[at : at + PAGE] = new
                _rewrite(path, bytes(durable))
                self._dirty.pop(key, None)
        self._failing = None

    @contextmanager
    def mounted(self) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", self._write)
            patch.setattr(os, "fsync", self._fsync)
            patch.setattr(os, "fdatasync", self._fdatasync)
            patch.setattr(packs_module, "punch", self._punch)
            yield self

    def _write(self, file: int, data: Any, offset: int) -> int:
        written = self._pwrite(file, data, offset)
        self._touch(file, offset, written)
        return written

    def _punch(self, file: int, offset: int, length: int) -> None:
        punch(file, offset, length)
        self._touch(file, offset, length)

    def _touch(self, file: int, offset: int, length: int) -> None:
        pages = range(offset // PAGE, -(-(offset + length) // PAGE))
        self._dirty.setdefault(_key(file), set()).update(pages)

    def _fsync(self, file: int) -> None:
        """New files are written by other calls than pwrite, all of them before their fsync."""
        if stat.S_ISREG(os.fstat(file).st_mode):
            self._dirty.pop(_key(file), None)
            self._durable[_key(file)] = bytearray(_content(file))

    def _fdatasync(self, file: int) -> None:
        key, content = _key(file), _content(file)
        durable = self._of(key, len(content))
        dirty = self._dirty.pop(key, set())
        failing = self._failing
        if dirty and os.readlink(f"/proc/self/fd/{file}").endswith("/data"):
            self._failing = None
        else:
            failing = None
        for page in dirty:
            if failing is None or self._rng.random() < 0.5:
                durable[page * PAGE : (page + 1) * PAGE] = content[page * PAGE : (page + 1) * PAGE]
        if failing is not None:
            raise OSError(failing, os.strerror(failing))

    def _of(self, key: _Inode, size: int) -> bytearray:
        durable = self._durable.setdefault(key, bytearray(size))
        assert len(durable) == size
        return durable


def _key(file: int) -> _Inode:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _content(file: int) -> bytes:
    with open(f"/proc/self/fd/{file}", "rb") as again:  # this one may be for writing only
        return again.read()


def _rewrite(path: str, content: bytes) -> None:
    """Give a file this content; pages of zeros become holes. Its inode stays."""
    with open(path, "r+b", buffering=0) as file:
        file.truncate(0)
        file.truncate(len(content))
        for at in range(0, len(content), PAGE):
            page = content[at : at + PAGE]
            if any(page):
                file.seek(at)
                file.write(page)
