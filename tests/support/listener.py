"""HTTP by hand on the loopback interface: a thread for each connection, requests as they came, an end without rests.

What is answered is a subclass's :meth:`Listener.exchange`, byte by byte if it likes.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from typing import Self, cast
from urllib.parse import unquote

Wrap = Callable[[socket.socket], socket.socket]
_LINE = 65_537


@dataclass
class Request:
    """As it came. ``target`` is path and query, decoded in ``shown``; names of headers are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    times: int = 1
    """How often a proxy sends it on."""

    @property
    def shown(self) -> str:
        return unquote(self.target)


class Listener:
    """A server; a context manager. A subclass calls :meth:`listen` when it is ready.

    Attributes:
        port: that it listens on.
        connections: how many were made.
        stalled: released once by each request that a fault holds.
        closing: set when the server is about to close.
    """

    def listen(self, name: str, *, host: str = "127.0.0.1", port: int = 0, tls: Wrap | None = None) -> None:
        """Begin; port 0 takes a free one."""
        self.stalled = threading.Semaphore(0)
        self.closing = threading.Event()
        self.connections = 0
        self._lock = threading.RLock()
        self._open: set[socket.socket] = set()
        self._server = _Server(self, host, port, tls)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.01), name=name)
        self._thread.start()

    def exchange(self, connection: socket.socket, request: Request) -> bool:
        """Answer a request; whether the connection stays open."""
        raise NotImplementedError

    def count(self, path: str, sent: int) -> None:
        """Bytes of an answer have been sent."""

    def drop_connections(self) -> None:
        """End all idle connections, as servers do after a while."""
        with self._lock:
            for connection in self._open:
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.closing.is_set():
            return
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the client was faster
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # For the connections' threads

    def serve(self, connection: socket.socket) -> None:
        with self._lock:
            self.connections += 1
            self._open.add(connection)
        try:
            with connection.makefile("rb") as file:
                while (request := _read(connection, file)) is not None:
                    if not self.exchange(connection, request) or self.closing.is_set():
                        break
        except OSError:
            pass  # the client has gone
        finally:
            with self._lock:
                self._open.discard(connection)


def _read(connection: socket.socket, file: BufferedReader) -> Request | None:
    """The next request; None at the end, or where what comes is no HTTP."""
    parts = file.readline(_LINE).decode("latin-1").split()
    if len(parts) != 3:
        return None
    headers: dict[str, str] = {}
    while (line := file.readline(_LINE).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int(file.readline().partition(b";")[0], 16):
            body += file.read(size)
            file.readline()
        while file.readline().strip():
            pass
    else:
        body = file.read(int(headers.get("content-length", "0")))
    return Request(parts[0], parts[1], headers, body)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = False
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, owner: Listener, host: str, port: int, tls: Wrap | None) -> None:
        self.owner = owner
        self.tls = tls
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, address

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        request.close()  # without the FIN that the method of the library sends: a reset has to be one

    def handle_error(self, request: object, client_address: object) -> None:
        raise  # from the thread, where it fails the test


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server = cast(_Server, self.server)
        connection: socket.socket = self.request
        try:
            if server.tls is not None:
                connection = server.tls(connection)
        except OSError:
            return  # the client doesn't trust us
        try:
            server.owner.serve(connection)
        finally:
            if connection is not self.request:
                connection.close()
