"""Where the processes of a node meet: the socket of the run directory, at which a holder listens, and its locks."""

from __future__ import annotations

import fcntl
import os
import socket
import time

from layerstore.errors import ConflictError
from overlay.lazy.link import Link

HOLDER, KEEPER, WORKER, FUSE = "holder", "keeper", "worker", "fuse"
SOCKET = "holder.sock"
LOCK_OF = "{}.lock"
"""There is one holder at a time, and one keeper."""
SOON = 2.0
"""Seconds in which processes that are alive have to say hello to a new holder."""


def connect(run_directory: str, role: str, *, patience: float = SOON) -> Link | None:
    """Say hello to the holder; None if nobody listens in ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)  # not even for a holder that hangs, with a full backlog
            connection.connect(f"{run_directory}/{SOCKET}")
            link = Link(connection)
            link.setblocking(True)
            link.send({"hello": role, "pid": os.getpid()})
            return link
        except (ConnectionError, FileNotFoundError, BlockingIOError):
            connection.close()
        if time.monotonic() >= until:
            return None
        time.sleep(0.02)


class Entrance:
    """Where a holder listens, in place of whoever did before: from now on everybody comes here."""

    def __init__(self, run_directory: str) -> None:
        self._path = f"{run_directory}/{SOCKET}"
        new = f"{self._path}.{os.getpid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(new)
            os.chmod(new, 0o600)
            self._socket.listen(16)
            self._socket.setblocking(False)
            self._file = os.stat(new)
            os.rename(new, self._path)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Link | None:
        """Who has come; None if he has gone again."""
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return None
        connection.setblocking(False)
        return Link(connection)

    def is_found(self) -> bool:
        """Whether nobody else has taken the name since."""
        try:
            return os.path.samestat(os.stat(self._path), self._file)
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._socket.close()


def alone(run_directory: str, role: str, *, patience: float = 0.0) -> int:
    """Take the lock that holders, or keepers, have one after the other; one that is ending gets ``patience`` seconds.

    It is a lock of the process (POSIX), which children and heirs of its descriptors don't share, and is lost when the
    process closes any descriptor of the file.

    Raises:
        ConflictError: another process has it.
    """
    fd = os.open(f"{run_directory}/{LOCK_OF.format(role)}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= until:
                os.close(fd)
                raise ConflictError(f"another process is the {role} already") from None
            time.sleep(0.02)
