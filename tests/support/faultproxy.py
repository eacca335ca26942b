"""A reverse proxy with scripted faults, in front of any HTTP server.

::

    with FaultProxy("http://127.0.0.1:9000") as proxy:
        proxy.misbehave(status(503), "blobs/", method="GET", times=1, reach=False)
        proxy.alter(without("if-match", "if-none-match"))
        ... proxy.url ...
        assert proxy.requests(method="PUT") == 1

Faults are those of ``support.httpstore``, and those below. A fault is called with the answer that the server gave, or,
where it is not to be ``reach``-ed, with an empty one. What is altered is the request, before it is sent on.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote, urlsplit

from support.httpstore import Exchange, Fault
from support.listener import Listener, Request

_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection", "expect"}
)


@dataclass
class Seen:
    """A request that came, and the bytes of its body and, as they are sent, of its answer, headers included."""

    method: str
    target: str
    headers: Mapping[str, str]
    received: int
    sent: int = 0


Change = Callable[[Request], None]


def without(*names: str) -> Change:
    """These headers don't come through."""

    def change(request: Request) -> None:
        for name in names:
            request.headers.pop(name, None)

    return change


def twice(request: Request) -> None:
    """The server gets it two times; the second answer is passed on."""
    request.times = 2


def answer(code: int, body: bytes = b"", **headers: str) -> Fault:
    """That status and body, whatever the server said."""

    def fault(exchange: Exchange) -> None:
        exchange.set_body(body, status=code, **headers)
        if exchange.headers[":method"] == "HEAD":
            exchange.body = b""
        exchange.answer()

    return fault


def s3_error(code: int, name: str, message: str = "as was scripted", **headers: str) -> Fault:
    """An error as S3 words it."""
    body = f'<?xml version="1.0"?><Error><Code>{name}</Code><Message>{message}</Message></Error>'.encode()
    return answer(code, body, Content_Type="application/xml", **headers)


def hang_up(exchange: Exchange) -> None:
    """The connection ends without an answer."""
    exchange.keep = False


def then(*steps: Fault) -> Fault:
    """One fault after the other, each for one request; then the right answers."""
    left = list(steps)

    def fault(exchange: Exchange) -> None:
        (left.pop(0) if left else Exchange.answer)(exchange)

    return fault


@dataclass
class _Order:
    act: Fault | Change
    path: str
    method: str
    left: int | None
    skip: int
    reach: bool = True

    def matches(self, request: Request) -> bool:
        if self.path not in request.shown or self.method not in ("", request.method) or self.left == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.left is not None:
            self.left -= 1
        return True


@dataclass
class FaultProxy(Listener):
    """On a free port of the loopback interface; a thread for each connection. A context manager.

    Attributes:
        upstream: ``http://HOST:PORT`` of the server.
    """

    upstream: str

    def __post_init__(self) -> None:
        parts = urlsplit(self.upstream)
        assert parts.hostname is not None and parts.port is not None
        self._address = parts.hostname, parts.port
        self._faults: list[_Order] = []
        self._changes: list[_Order] = []
        self._seen: list[Seen] = []
        self._current: dict[int, Seen] = {}
        self.listen("fault proxy")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def misbehave(
        self,
        fault: Fault,
        path: str = "",
        *,
        method: str = "",
        times: int | None = None,
        skip: int = 0,
        reach: bool = True,
    ) -> None:
        """Answer requests whose target contains ``path`` by ``fault``: so many, or all, after ``skip`` others."""
        with self._lock:
            self._faults.append(_Order(fault, path, method, times, skip, reach))

    def alter(
        self, change: Change, path: str = "", *, method: str = "", times: int | None = None, skip: int = 0
    ) -> None:
        """Change requests whose target contains ``path`` before they are sent on."""
        with self._lock:
            self._changes.append(_Order(change, path, method, times, skip))

    def behave(self) -> None:
        """Forget all faults and changes."""
        with self._lock:
            self._faults.clear()
            self._changes.clear()

    def forget(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._seen.clear()

    def seen(self, path: str = "", *, method: str = "") -> list[Seen]:
        with self._lock:
            return [each for each in self._seen if path in unquote(each.target) and method in ("", each.method)]

    def requests(self, path: str = "", *, method: str = "") -> int:
        return len(self.seen(path, method=method))

    def sent(self, path: str = "") -> int:
        """Bytes of answers, headers included."""
        return sum(each.sent for each in self.seen(path))

    # For the connections' threads

    def count(self, path: str, sent: int) -> None:
        """As exchanges tell it."""
        with self._lock:
            self._current[threading.get_ident()].sent += sent

    def exchange(self, connection: socket.socket, request: Request) -> bool:
        """Do one; whether the connection stays open."""
        original = dict(request.headers)
        seen = Seen(request.method, request.target, original, len(request.body))
        with self._lock:
            self._seen.append(seen)
            self._current[threading.get_ident()] = seen
            for each in self._changes:
                if each.matches(request):
                    cast(Change, each.act)(request)
            order = next((each for each in self._faults if each.matches(request)), None)
        headers = {**original, ":method": request.method}
        exchange = Exchange(self, connection, request.shown.lstrip("/"), headers, b"", 200, {}, b"")
        if order is None or order.reach:
            self._forward(request, exchange)
        if order is None:
            exchange.answer()
        else:
            cast(Fault, order.act)(exchange)
        return exchange.keep

    def _forward(self, request: Request, exchange: Exchange) -> None:
        for _ in range(request.times):
            upstream = http.client.HTTPConnection(*self._address, timeout=60)
            try:
                upstream.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
                for name, value in request.headers.items():
                    if name not in _HOP and name != "content-length":
                        upstream.putheader(name, value)
                if request.body or "content-length" in request.headers:
                    upstream.putheader("content-length", str(len(request.body)))
                upstream.putheader("connection", "close")
                upstream.endheaders(request.body or None)
                got = upstream.getresponse()
                body = got.read()
                exchange.status = got.status
                exchange.answer_headers = {name: value for name, value in got.getheaders() if name.lower() not in _HOP}
                if request.method != "HEAD":
                    exchange.answer_headers["Content-Length"] = str(len(body))
                exchange.body = body
            finally:
                upstream.close()
