"""Where a node's sockets are: a directory below /run that is root's alone, one for each root."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct

from layerstore.errors import PermissionError_, os_errors, printable

RUN = "/run/imgtool"
DEFAULT_ROOT = "/var/lib/imgtool"
SOCKET = "node.sock"
BACKLOG = 1024
"""Connections that wait while a worker starts; the kernel lowers it to net.core.somaxconn, 4096 since Linux 5.4."""
SUN_PATH = 108
"""sizeof(sockaddr_un.sun_path), <linux/un.h>, with the NUL that ends it."""
_TIMEVAL = Struct("@ll")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def run_directory(root: str, *, run: str = RUN) -> str:
    """The run directory of the node with this root. It needn't exist."""
    root = os.path.realpath(root)
    if root == os.path.realpath(DEFAULT_ROOT):
        return run
    import hashlib  # 3 ms, which the usual root doesn't need to take

    return f"{run}/{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}"


def socket_path(root: str, *, run: str = RUN) -> str:
    """The API's socket of the node with this root."""
    return f"{run_directory(root, run=run)}/{SOCKET}"


def make_run_directory(root: str, *, run: str = RUN) -> str:
    """Make the run directory, with mode 0700, and return it. One that exists is checked, and its mode set.

    Raises:
        PermissionError_: it, or the directory of all nodes, is a symlink, no directory, or another user's.
        NotFoundError, NoSpaceError, UnavailableError: the operating system refuses.
    """
    directory = run_directory(root, run=run)
    with os_errors(f"make run directory {printable(directory)}"):
        _make(run)
        if directory != run:
            _make(directory)
    return directory


def listen(directory: str) -> socket.socket:
    """The API's socket, listening, with mode 0600. The caller has locked the node, so what is there is stale.

    Raises:
        UnavailableError, PermissionError_, NoSpaceError: the operating system refuses.
    """
    path = f"{directory}/{SOCKET}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with os_errors(f"listen at {printable(path)}"), address(path) as short:
            try:
                os.unlink(short)
            except FileNotFoundError:
                pass
            os.fchmod(listening.fileno(), 0o600)  # bind gives the file this mode, so that it never has another
            listening.bind(short)
            listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def connect(path: str, timeout: float) -> socket.socket:
    """A connection to the service that listens at ``path``; its calls time out after as many seconds.

    Raises:
        OSError: FileNotFoundError and ConnectionRefusedError where nobody listens; TimeoutError when the connection
            found no place in the backlog for ``timeout`` seconds.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Where the backlog is full, a socket that doesn't block fails at once: this one has to wait in the kernel.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(timeout), 0))
        with address(path) as short:
            try:
                connection.connect(short)
            except BlockingIOError:
                raise TimeoutError(f"no connection for {timeout:.0f} seconds") from None
        connection.settimeout(timeout)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def address(path: str) -> Iterator[str]:
    """``path`` as an address of a Unix socket, however long it is, while the block runs."""
    if len(os.fsencode(path)) < SUN_PATH:
        yield path
        return
    parent = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{parent}/{os.path.basename(path)}"
    finally:
        os.close(parent)


def _make(directory: str) -> None:
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    try:
        fd = os.open(directory, _DIRECTORY)
    except OSError:
        if os.path.islink(directory) or not os.path.isdir(directory):
            raise PermissionError_(f"run directory {printable(directory)} is no directory; remove it") from None
        raise
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise PermissionError_(
                f"run directory {printable(directory)} belongs to user {status.st_uid}, not to {os.geteuid()}; "
                "remove it"
            )
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
