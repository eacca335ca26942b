"""Bounded flock(2): advisory locks that end with their holder.

A lock belongs to an open file description, so it excludes threads as well as processes, and the kernel drops it when
the last descriptor is closed, however the process ends. On NFS, Linux turns it into a lock of the whole file on the
server (since 2.6.12), which excludes other hosts and needs the file open for writing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from layerstore.errors import CorruptError, UnavailableError, UnsupportedError, printable
from layerstore.store.failures import disk_errors

LOCK_SECONDS = 60.0
"""How long to wait for a lock; collectors hold theirs for a few seconds at a time."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class FileLock:
    """A lock file that exists already; it is never created here, since whoever deleted it may have had holders."""

    def __init__(self, path: str, *, seconds: float = LOCK_SECONDS) -> None:
        self._path = path
        self._shown = printable(path)
        self._seconds = seconds

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Excludes :meth:`exclusive`.

        Raises:
            UnavailableError: somebody holds it for too long.
        """
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Excludes everybody.

        Raises:
            UnavailableError: somebody holds it for too long.
        """
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, operation: int) -> Iterator[None]:
        file = self._acquire(operation)
        try:
            yield
        finally:
            try:
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may share the description, so close isn't enough
            finally:
                os.close(file)

    def _acquire(self, operation: int) -> int:
        deadline = time.monotonic() + self._seconds
        pause = _FIRST_PAUSE
        while True:
            with disk_errors("open lock"):
                try:
                    file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
                except FileNotFoundError as error:
                    raise CorruptError(
                        f"lock file {self._shown} is missing: is the store mounted? If nobody uses it, create the file"
                    ) from error
            try:
                if self._try(file, operation) and self._current(file):
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"{self._shown} has been locked for {self._seconds:.0f} s (fuser shows by whom): try again"
                )
            # Random, or several waiters would keep meeting.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _try(self, file: int, operation: int) -> bool:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise UnsupportedError(
                    f"the file system of {self._shown} has no locks: mount it with locks, or use another for the store"
                ) from error
            with disk_errors(f"lock {self._shown}"):
                raise
        return True

    def _current(self, file: int) -> bool:
        """Whether the path still leads to the file that was locked."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False
