"""Forked children that are killed, stopped and waited for."""

from __future__ import annotations

import fcntl
import os
import signal
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

CALLS = ("open", "write", "fsync", "close", "rename", "unlink", "utime", "mkdir", "rmdir", "listdir", "pread", "fchmod")
"""The functions of ``os`` that :func:`die_at_call` counts, besides flock."""


class Child:
    """A fork that runs ``work`` and exits; killed and reaped when its ``with`` ends.

    An exception of ``work`` is the child's report: :meth:`wait` raises AssertionError with its traceback. The pipe
    ``report`` is at its end when the child is.
    """

    def __init__(self, work: Callable[[Child], object]) -> None:
        self._status: int | None = None
        self.report, report = os.pipe()
        self._messages, messages = os.pipe()
        self._orders, orders = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(report)
            os.close(messages)
            os.close(self._orders)
            self._send = orders
            return
        code = 1
        try:
            os.close(orders)
            os.close(self.report)
            os.close(self._messages)
            self._send = messages
            work(self)
            code = 0
        except BaseException:
            os.write(report, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(code)

    def tell(self) -> None:
        """In the child: tell the parent that a point is reached. In the parent: let the child go on."""
        os.write(self._send, b".")

    def hear(self) -> None:
        """In the child, wait for the parent's :meth:`tell`; in the parent, for the child's, or for its end."""
        os.read(self._messages if self.pid else self._orders, 1)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, if it still lives."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()

    def wait(self) -> int:
        """Its end: 0 if ``work`` returned, -9 if it was killed."""
        if self._status is None:
            self._reap()
        report = b""
        while part := os.read(self.report, 65_536):
            report += part
        assert not report, report.decode(errors="replace")
        assert self._status is not None
        return os.waitstatus_to_exitcode(self._status)

    def _reap(self) -> None:
        _, self._status = os.waitpid(self.pid, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for file in (self.report, self._messages, self._send):
            os.close(file)


def die_at_call(count: int) -> None:
    """In a child: SIGKILL itself just before the ``count``th system call that matters to a store."""
    left = count

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **keywords)

        return call

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))
    fcntl.flock = counting(fcntl.flock)
