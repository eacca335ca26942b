"""Waiting for a child while passing on the signals that are meant for it.

Signals are blocked and taken with sigwaitinfo, so none is lost between two steps and no handler runs. Those that a
terminal makes (Ctrl-C) have reached the child already, which is in the same process group, and aren't sent twice.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FORWARDED = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
    }
)
SI_KERNEL = 0x80
"""``si_code`` of a signal that the kernel made, such as a terminal's; <asm-generic/siginfo.h>."""


@contextmanager
def held() -> Iterator[frozenset[int]]:
    """Block what :func:`wait` passes on; yields the mask that a child has to be started with.

    Outside the main thread nothing is blocked: signals of the process are the main thread's business there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return
    previous = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD}))
    try:
        yield previous
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def wait(pid: int) -> int:
    """Wait for the child ``pid`` inside :func:`held`; its exit status, 128+n when signal n ended it."""
    if threading.current_thread() is not threading.main_thread():
        return _exit_code(os.waitpid(pid, 0)[1])
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return _exit_code(status)
        received = signal.sigwaitinfo(FORWARDED | {signal.SIGCHLD})
        if received.si_signo != signal.SIGCHLD and received.si_code != SI_KERNEL:
            try:
                os.kill(pid, received.si_signo)
            except ProcessLookupError:
                pass


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
