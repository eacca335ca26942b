"""Links between the processes of a node: messages of JSON, each with descriptors, over Unix sockets that keep messages.

``SOCK_SEQPACKET``: a message arrives whole or not at all, and the end of the other process ends the link.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from layerstore.errors import MalformedError

MAX_MESSAGE = 64 << 10
MAX_DESCRIPTORS = 16

Message = dict[str, Any]

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Link:
    """One end. Several threads may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    @classmethod
    def adopt(cls, fd: int) -> Link:
        """Take over a descriptor that came with a message."""
        return cls(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, flag: bool) -> None:
        self._socket.setblocking(flag)

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message, with copies of ``fds``.

        Raises:
            OSError: the other end is gone (BrokenPipeError, ConnectionResetError), or BlockingIOError when it doesn't
                read and this end doesn't wait.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([_encode(message).encode()], ancillary, socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, which are the caller's to close; None when the other end is gone.

        Raises:
            MalformedError: not a message; its descriptors are closed.
            OSError: BlockingIOError, TimeoutError.
        """
        size = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(MAX_MESSAGE, size, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if not data:
            for fd in fds:
                os.close(fd)
            return None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise MalformedError("message between processes of the node was cut")
            message = json.loads(data)
            if not isinstance(message, dict):
                raise MalformedError("message between processes of the node is no object")
        except (ValueError, RecursionError, MalformedError) as error:
            for fd in fds:
                os.close(fd)
            raise MalformedError(f"message between processes of the node: {error}") from None
        return message, list(fds)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
