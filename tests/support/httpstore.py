"""A web server for stores that misbehaves when told: every fault that a link, a proxy or a server may have.

::

    with StoreServer(store.root) as server:
        server.misbehave(cut_short(100), "blobs/", times=1)
        HttpStore(server.url)...
        assert server.requests("blobs/") == 1

A fault is a function of an :class:`Exchange`, which has the answer that would have been right.
"""

from __future__ import annotations

import gzip
import http
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote

from layerstore.store.directory import DirectoryStore
from layerstore.store.http import HttpStore
from layerstore.store.protocol import PruneStore
from support.listener import Listener, Request
from support.stores import DirectoryBench

PAGE = b"<!DOCTYPE html><html><body><h1>Please log in</h1></body></html>"


@dataclass
class Exchange:
    """One request, and the answer that is right.

    Attributes:
        path: as in the URL, decoded, without its first slash.
        headers: of the request, names in lower case.
        whole: all bytes of the file; empty where there is none.
        status: of the right answer.
        answer_headers: of the right answer.
        body: of the right answer.
        keep: whether the connection stays open afterwards.
    """

    server: Listener
    connection: socket.socket
    path: str
    headers: Mapping[str, str]
    whole: bytes
    status: int
    answer_headers: dict[str, str]
    body: bytes
    keep: bool = True

    def answer(self) -> None:
        """Send it, as it stands now."""
        self.send(self.head() + self.body)

    def head(self) -> bytes:
        phrase = http.HTTPStatus(self.status).phrase
        lines = [f"HTTP/1.1 {self.status} {phrase}", *(f"{name}: {each}" for name, each in self.answer_headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def send(self, data: bytes) -> None:
        self.server.count(self.path, len(data))  # first: the client may look at the count as soon as it has all
        self.connection.sendall(data)

    def set_body(self, body: bytes, *, status: int = 200, **headers: str) -> None:
        """Another answer; names of headers with ``_`` for ``-``."""
        self.status = status
        self.body = body
        self.answer_headers = {"Content-Length": str(len(body))}
        self.answer_headers.update({name.replace("_", "-"): value for name, value in headers.items()})


Fault = Callable[[Exchange], None]


def stall(until: threading.Event) -> Fault:
    """Nothing comes until the event is set, or the server closed; then the right answer."""

    def fault(exchange: Exchange) -> None:
        exchange.server.stalled.release()
        while not until.wait(0.01):
            if exchange.server.closing.is_set():
                raise ConnectionAbortedError
        exchange.answer()

    return fault


def cut_short(length: int) -> Fault:
    """The connection ends after so many bytes of the body."""

    def fault(exchange: Exchange) -> None:
        exchange.send(exchange.head() + exchange.body[:length])
        exchange.keep = False

    return fault


def reset(after: int | None = None) -> Fault:
    """The connection is reset: before any answer, or after so many bytes of the body."""

    def fault(exchange: Exchange) -> None:
        if after is not None:
            exchange.send(exchange.head() + exchange.body[:after])
        exchange.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        exchange.keep = False

    return fault


def ignore_ranges(exchange: Exchange) -> None:
    exchange.set_body(exchange.whole)
    exchange.answer()


def wrong_bytes(exchange: Exchange) -> None:
    """All of the answer is as it has to be, but for what it brings."""
    exchange.body = bytes(byte ^ 0x55 for byte in exchange.body)
    exchange.answer()


def another_range(shift: int = 1) -> Fault:
    """A range of the same length further on, and said so."""

    def fault(exchange: Exchange) -> None:
        first, last = requested_range(exchange.headers, len(exchange.whole))
        first, last = first + shift, last + shift
        exchange.set_body(
            exchange.whole[first : last + 1],
            status=206,
            Content_Range=f"bytes {first}-{last}/{len(exchange.whole)}",
        )
        exchange.answer()

    return fault


def page(*, like: bool = False, typed: bool = True) -> Fault:
    """A web page with status 200; ``like``: as long as the file, else its own length; ``typed``: says what it is."""

    def fault(exchange: Exchange) -> None:
        body = PAGE.ljust(len(exchange.whole))[: len(exchange.whole)] if like else PAGE
        exchange.set_body(body, Content_Type="text/html; charset=utf-8" if typed else "application/octet-stream")
        exchange.answer()

    return fault


def gzipped(exchange: Exchange) -> None:
    """A proxy compresses the answer."""
    body = gzip.compress(exchange.body, mtime=0)
    exchange.answer_headers |= {"Content-Encoding": "gzip", "Content-Length": str(len(body))}
    exchange.body = body
    exchange.answer()


def status(code: int, **headers: str) -> Fault:
    """That status, with a page as servers send."""

    def fault(exchange: Exchange) -> None:
        exchange.set_body(PAGE, status=code, Content_Type="text/html", **headers)
        exchange.answer()

    return fault


def redirect(location: str | Callable[[str], str], code: int = 302) -> Fault:
    """To a URL, or to what a function makes of the path."""

    def fault(exchange: Exchange) -> None:
        to = location if isinstance(location, str) else location(exchange.path)
        status(code, Location=to)(exchange)

    return fault


def drip(exchange: Exchange, *, headers: bool = False) -> None:
    """A byte at a time, ten times a second, until the client gives up; ``headers``: none but the first is whole."""
    data = b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 10_000 if headers else exchange.head()
    split = 20 if headers else len(data)
    exchange.send(data[:split])
    for byte in data[split:] + exchange.body:
        if exchange.server.closing.wait(0.1):
            raise ConnectionAbortedError
        exchange.send(bytes([byte]))


def drip_headers(exchange: Exchange) -> None:
    drip(exchange, headers=True)


def chunked(exchange: Exchange) -> None:
    """The right answer without a length."""
    del exchange.answer_headers["Content-Length"]
    exchange.answer_headers["Transfer-Encoding"] = "chunked"
    pieces = [exchange.body[start : start + 1000] for start in range(0, len(exchange.body), 1000)]
    exchange.body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    exchange.answer()


def raw(data: bytes, *, keep: bool = False) -> Fault:
    """These bytes, whatever they are."""

    def fault(exchange: Exchange) -> None:
        exchange.send(data)
        exchange.keep = keep

    return fault


@dataclass
class _Order:
    fault: Fault
    path: str
    left: int | None


@dataclass
class StoreServer(Listener):
    """Serves a directory on the loopback interface, from a thread for each connection; a context manager.

    Attributes:
        root: what is served.
        listing: whether directories are listed, as nginx does in JSON.
        port: of 127.0.0.1; 0 takes a free one.
    """

    root: str
    listing: bool = False
    port: int = 0

    def __post_init__(self) -> None:
        self._orders: list[_Order] = []
        self._requests: list[tuple[str, Mapping[str, str]]] = []
        self._sent: list[tuple[str, int]] = []
        self.listen("store server", port=self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def misbehave(self, fault: Fault, path: str = "", *, times: int | None = None) -> None:
        """Answer requests for paths that contain ``path`` by ``fault``: so many of them, or all."""
        with self._lock:
            self._orders.append(_Order(fault, path, times))

    def behave(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._orders.clear()

    def requests(self, path: str = "") -> int:
        """How many there were for paths that contain ``path``."""
        with self._lock:
            return sum(path in each for each, _ in self._requests)

    def headers(self, path: str = "") -> list[Mapping[str, str]]:
        """Of these requests, names in lower case."""
        with self._lock:
            return [headers for each, headers in self._requests if path in each]

    def sent(self, path: str = "") -> int:
        """Bytes of answers, headers included."""
        with self._lock:
            return sum(count for each, count in self._sent if path in each)

    def forget(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._requests.clear()
            self._sent.clear()
            self.connections = 0

    # For the connections' threads

    def count(self, path: str, sent: int) -> None:
        with self._lock:
            self._sent.append((path, sent))

    def exchange(self, connection: socket.socket, request: Request) -> bool:
        exchange = self.right_answer(connection, request.target, request.headers)
        fault = self.fault_for(exchange.path, request.headers)
        if fault is None:
            exchange.answer()
        else:
            fault(exchange)
        return exchange.keep

    def fault_for(self, path: str, headers: Mapping[str, str]) -> Fault | None:
        """Counts the request, too."""
        with self._lock:
            self._requests.append((path, headers))
            for order in self._orders:
                if order.path in path and order.left != 0:
                    if order.left is not None:
                        order.left -= 1
                    return order.fault
        return None

    def right_answer(self, connection: socket.socket, target: str, headers: Mapping[str, str]) -> Exchange:
        path = unquote(target.partition("?")[0]).lstrip("/")
        exchange = Exchange(self, connection, path, headers, b"", 404, {}, b"")
        full = os.path.join(self.root, path)
        if ".." in path.split("/"):
            exchange.set_body(PAGE, status=400)
        elif os.path.isdir(full):
            if self.listing:
                names = [{"name": name, "type": "file"} for name in sorted(os.listdir(full))]
                exchange.set_body(json.dumps(names).encode(), Content_Type="application/json")
            else:
                exchange.set_body(PAGE, status=403, Content_Type="text/html")
        elif os.path.exists(full):
            with open(full, "rb") as file:
                exchange.whole = file.read()
            _serve(exchange)
        else:
            exchange.set_body(PAGE, status=404, Content_Type="text/html")
        return exchange


def requested_range(headers: Mapping[str, str], size: int) -> tuple[int, int]:
    """First and last byte that a request asks for, within the file."""
    first, _, last = headers["range"].removeprefix("bytes=").partition("-")
    return int(first), min(int(last), size - 1)


def _serve(exchange: Exchange) -> None:
    size = len(exchange.whole)
    if "range" not in exchange.headers:
        exchange.set_body(exchange.whole, Content_Type="application/octet-stream")
        return
    first, last = requested_range(exchange.headers, size)
    if first >= size:
        exchange.set_body(PAGE, status=416, Content_Type="text/html", Content_Range=f"bytes */{size}")
        return
    exchange.set_body(
        exchange.whole[first : last + 1],
        status=206,
        Content_Type="application/octet-stream",
        Content_Range=f"bytes {first}-{last}/{size}",
    )


class _Served:
    """Written as a directory, read over HTTP."""

    def __init__(self, directory: DirectoryStore, url: str) -> None:
        self._directory = directory
        self.reader = HttpStore(url)
        self.location = self.reader.location
        self.stat = self.reader.stat
        self.open = self.reader.open
        self.names = self.reader.names
        self.resolve = self.reader.resolve
        self.references = self.reader.references

    def __getattr__(self, name: str) -> object:
        return getattr(self._directory, name)


class HttpBench:
    """A directory store behind a server that lists it, on a bench."""

    def __init__(self, path: str, lock_seconds: float = 60.0) -> None:
        below = DirectoryBench(path, lock_seconds)
        self.clock = below.clock
        self.damage = below.damage
        self.stamp = below.stamp
        self._server = StoreServer(path, listing=True)
        self._served = _Served(below.store, self._server.url)
        self.store = cast(PruneStore, self._served)

    def close(self) -> None:
        self._served.reader.close()
        self._server.close()
