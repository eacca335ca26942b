"""Who else has a file open: asked of the kernel with a lease (``fcntl(2)``, F_SETLEASE)."""

from __future__ import annotations

import fcntl
import os
import signal


def is_open_elsewhere(file: int) -> bool:
    """Whether anybody has the file of ``file``, a descriptor for writing, open in another way than by a copy of it.

    Mounts count, detached ones too: the kernel opens their devices as any program does. A write lease is granted only
    to the one who has the file open; it is given back at once. Where there are no leases (file systems without them,
    files of others) the answer is yes.
    """
    # Whoever opens the file in between waits until it is given back, and we are told by a signal: SIGIO would kill.
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def is_path_open(path: str) -> bool:
    """The same for a file that the caller has not open; no if it is gone."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return is_open_elsewhere(file)
    finally:
        os.close(file)
