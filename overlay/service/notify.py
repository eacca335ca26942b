"""Talking to the service manager: sd_notify(3), and its file descriptor store.

What is stored survives the service, so the manager is one more holder of the fanotify group; after a restart it is
passed on as systemd passes sockets, with names. The manager keeps no order among descriptors of one name, so each has a
name of its own: the second of ``group`` is stored as ``group.1``.
"""

from __future__ import annotations

import array
import fcntl
import os
import re
import socket
from collections.abc import Sequence

from layerstore.errors import UsageError, printable

FIRST_DESCRIPTOR = 3
"""SD_LISTEN_FDS_START, <systemd/sd-daemon.h>."""
MAX_DESCRIPTORS = 1 << 20
MAX_OF_NAME = 4
"""Descriptors stored under one name."""
PATIENCE = 5.0
"""Seconds that a message may wait for a manager that is busy."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")
"""Names that can be stored; systemd takes printable ASCII but for colons, up to 255 bytes."""
_STORED = re.compile(r"([A-Za-z0-9_-]{1,200})\.([0-9])")


class ServiceManager:
    """Who started the service and wants to hear of it. Any thread or forked child may tell it something.

    A manager that doesn't listen is no reason to fail: then nothing is raised, and the answer is False.
    """

    def __init__(self, notify_socket: str) -> None:
        """``notify_socket`` is what NOTIFY_SOCKET says: an absolute path, or ``@`` and an abstract name.

        Raises:
            UsageError: it is neither.
        """
        if notify_socket[:1] not in ("/", "@") or len(notify_socket) < 2:
            raise UsageError(f"NOTIFY_SOCKET is {printable(notify_socket)!r}: neither a path nor an abstract socket")
        self._address = "\0" + notify_socket[1:] if notify_socket[0] == "@" else notify_socket

    def tell(self, **fields: str) -> bool:
        """Send assignments, such as ``tell(READY="1", STATUS="…", MAINPID="123")``; line feeds become spaces."""
        return self._send(fields, ())

    def store(self, name: str, fds: Sequence[int]) -> bool:
        """Give copies of up to :data:`MAX_OF_NAME` descriptors into the store; the same ones again change nothing."""
        if not _NAME.fullmatch(name) or len(fds) > MAX_OF_NAME:
            raise ValueError(f"{len(fds)} descriptors can't be stored as {name!r}")
        # FDPOLL=0: without it the manager drops what polls as hung up.
        return all(
            [
                self._send({"FDSTORE": "1", "FDNAME": f"{name}.{number}", "FDPOLL": "0"}, [fd])
                for number, fd in enumerate(fds)
            ]
        )

    def remove(self, name: str) -> bool:
        """Take all descriptors of this name out of the store; it needn't have any."""
        return all(
            [self._send({"FDSTOREREMOVE": "1", "FDNAME": f"{name}.{number}"}, ()) for number in range(MAX_OF_NAME)]
        )

    def _send(self, fields: dict[str, str], fds: Sequence[int]) -> bool:
        text = "\n".join(f"{key}={' '.join(value.splitlines())}" for key, value in fields.items())
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
                connection.settimeout(PATIENCE)
                connection.sendmsg([text.encode("utf-8", "replace")], ancillary, socket.MSG_NOSIGNAL, self._address)
        except OSError:
            return False
        return True


def stored(listen_pid: str | None, listen_fds: str | None, listen_fdnames: str | None) -> tuple[tuple[str, int], ...]:
    """What the manager kept: names and descriptors, those of one name in the order in which they were stored.

    They are closed on exec from now on, and are the caller's. The arguments are the values of LISTEN_PID, LISTEN_FDS
    and LISTEN_FDNAMES; whoever reads these from the environment takes them out of it, so that no child believes them.

    Raises:
        UsageError: they contradict each other, or a descriptor isn't open.
    """
    if not listen_fds or not listen_pid or listen_pid != str(os.getpid()):
        return ()  # nothing, or meant for a process before us
    if not (
        listen_fds.isascii() and listen_fds.isdigit() and len(listen_fds) < 8 and int(listen_fds) < MAX_DESCRIPTORS
    ):
        raise UsageError(f"LISTEN_FDS is {printable(listen_fds)!r} where a number belongs")
    count = int(listen_fds)
    names = listen_fdnames.split(":") if listen_fdnames else ["unknown"] * count  # as systemd calls unnamed ones
    if len(names) != count:
        raise UsageError(f"LISTEN_FDNAMES has {len(names)} names for {count} descriptors")
    found = []
    for fd, name in enumerate(names, FIRST_DESCRIPTOR):
        try:
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        except OSError:
            raise UsageError(f"LISTEN_FDS promises descriptor {fd} ({printable(name)}), which isn't open") from None
        found.append((*_parsed(name), fd))
    return tuple((name, fd) for name, _, fd in sorted(found, key=lambda item: item[:2]))


def _parsed(name: str) -> tuple[str, int]:
    match = _STORED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 0)
