"""Numbers of descriptors: the low ones are for events, what the keeper keeps is above them.

The kernel gives an event the lowest number that is free, below the soft limit on open files. So that limit is what a
journal has room for, and what lives longer than an event is moved beyond it, where it takes no number away.
"""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self


class LowNumbers:
    """The numbers below ``floor``, for as long as the ``with`` runs."""

    def __init__(self, capacity: int) -> None:
        """``floor`` is ``capacity``, or half of the limit on open files where that can't be raised enough."""
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with open("/proc/sys/fs/nr_open", encoding="ascii") as stream:
            most = int(stream.read())
        if self._hard < most:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (self._soft, most))
                self._hard = most
            except ValueError:
                pass  # CAP_SYS_RESOURCE is missing
        self.floor = min(capacity, self._hard // 2)

    def __enter__(self) -> Self:
        self._limit(self.floor)
        for fd in range(3):  # a standard one that is closed must not become an event's
            self.occupy(fd)
        return self

    def __exit__(self, *exc: object) -> None:
        self._limit(self._soft)

    def _limit(self, soft: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, self._hard))

    @contextmanager
    def exceeded(self) -> Iterator[None]:
        """New descriptors may have any number: what a message brings when events have taken all the low ones."""
        self._limit(self._hard)
        try:
            yield
        finally:
            self._limit(self.floor)

    def lift(self, fd: int) -> int:
        """Move ``fd`` above: its new number. The old one is closed, and other owners of it are not told.

        Raises:
            OSError: EMFILE; ``fd`` stays as it is.
        """
        if fd >= self.floor:
            return fd
        lifted = self.lifted_copy(fd)
        os.close(fd)
        return lifted

    def lift_if_possible(self, fd: int) -> int:
        """As :meth:`lift`, or ``fd`` itself where there is no room above."""
        try:
            return self.lift(fd)
        except OSError:
            return fd

    def lifted_copy(self, fd: int) -> int:
        """A duplicate of ``fd`` above; raises OSError: EMFILE."""
        with self.exceeded():
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, self.floor)

    def copy(self, fd: int) -> int:
        """A duplicate of ``fd`` above, or below where there is no room; raises OSError: EMFILE."""
        try:
            return self.lifted_copy(fd)
        except OSError:
            with self.exceeded():
                return os.dup(fd)

    def count(self) -> int:
        """How many low numbers are taken, or one more."""
        with self.exceeded():
            return sum(int(name) < self.floor for name in os.listdir("/proc/self/fd"))

    def occupy(self, number: int) -> bool:
        """Have ``number`` open, on /dev/null if it is free; whether it was, and is the caller's to close."""
        try:
            os.fstat(number)
            return False
        except OSError:
            pass
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if null != number:
            os.dup2(null, number, inheritable=False)
            os.close(null)
        return True

    def occupy_all(self, numbers: Iterable[int]) -> set[int]:
        """Those of ``numbers`` that were free, and are taken now."""
        return {number for number in numbers if self.occupy(number)}
