"""The API: HTTP/1.1 and JSON over a Unix socket, for root.

One thread for each connection, which is kept alive between requests. Nobody can take more than his own thread: what is
sent by halves, or not taken, is given up after a time; headers and bodies are bounded; when all threads are taken, the
connection that has been idle for longest makes room. The listening socket is the caller's and stays open, so that
connections wait there while one worker replaces another.
"""

from __future__ import annotations

import io
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler
from struct import Struct
from typing import TYPE_CHECKING, Any, cast

from layerstore.errors import ImgtoolError, LimitError, PermissionError_, UsageError
from layerstore.oci.document import parse
from layerstore.progress import SILENT
from overlay.service.lines import ProgressLines, encode
from overlay.service.log import log
from overlay.service.messages import INTERNAL, JSON, LINES, MAX_BODY, error_document, kind_of_error, one_line
from overlay.service.routes import Call, Document, Refusal, Route, Service, find

if TYPE_CHECKING:
    from socketserver import BaseServer

    from typing_extensions import Buffer

REQUEST_TIMEOUT = 10.0
"""Seconds in which a request has to arrive whole, once it has begun."""
SEND_TIMEOUT = 30.0
"""Seconds in which an answer has to be taken."""
IDLE_TIMEOUT = 120.0
"""Seconds until a connection without requests is closed."""
DRAIN_TIMEOUT = 60.0
"""Seconds that requests in flight have to end when the server shuts down."""
MAX_CONNECTIONS = 512
MAX_LINE = 8 << 10
"""Bytes of a request line."""
MAX_HEADERS = 32 << 10
"""Bytes of request line and headers; http.server takes at most 100 of them."""
_BUFFER = 16 << 10
_DISCARDED = 8 << 20
"""Bytes of a refused body that are read and thrown away, so that its sender gets to read why."""
_UCRED = Struct("@iII")
"""struct ucred, <sys/socket.h>: pid, uid, gid."""

Observe = Callable[[str, str, int, float], None]
"""Told method, route, HTTP status and seconds of each request; the route is "other" where there is none."""


class ApiServer:
    """Serves ``service`` to those who connect to ``listening``."""

    def __init__(
        self,
        service: Service,
        listening: socket.socket,
        *,
        users: Collection[int] | None = None,
        observe: Observe | None = None,
        request_timeout: float = REQUEST_TIMEOUT,
        send_timeout: float = SEND_TIMEOUT,
        idle_timeout: float = IDLE_TIMEOUT,
        drain_timeout: float = DRAIN_TIMEOUT,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """``users`` are the user ids that may talk; None: root, and whom this process runs as."""
        self.service = service
        self.users = frozenset((0, os.geteuid()) if users is None else users)
        self.observe: Observe = observe or (lambda method, route, status, seconds: None)
        self.request_timeout = request_timeout
        self.send_timeout = send_timeout
        self.idle_timeout = idle_timeout
        self.stopping = False
        self._listening = listening
        self._drain_timeout = drain_timeout
        self._max_connections = max_connections
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._idle: dict[socket.socket, bool] = {}  # idle for longest first; False: no request yet

    def serve(self) -> None:
        """Answer requests until :meth:`shutdown`, then return when those in flight have been answered."""
        self._listening.setblocking(False)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                accepting = False
                while not self.stopping:
                    room = self._has_room()
                    if room != accepting:
                        if room:
                            selector.register(self._listening, selectors.EVENT_READ)
                        else:
                            selector.unregister(self._listening)
                        accepting = room
                    ready = [key.fileobj for key, _ in selector.select()]
                    if self._woken in ready:
                        self._woken.recv(4096)
                    if self._listening in ready and not self.stopping:
                        self._accept()
            self._drain()
        finally:
            self._waker.close()
            self._woken.close()

    def shutdown(self) -> None:
        """Have :meth:`serve` end. It returns at once; from any thread, a request's own and signal handlers too."""
        self.stopping = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._waker.send(b"w")
        except OSError:
            pass  # awake already, or ended

    def _has_room(self) -> bool:
        with self._changed:
            return len(self._connections) < self._max_connections

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:
            return  # it has gone, or another process was faster
        except OSError as error:
            log("no connection", level="error", error=error)
            time.sleep(0.1)  # out of descriptors: that passes, or not
            return
        with self._changed:
            self._connections.add(connection)
            if len(self._connections) >= self._max_connections:
                used = next((other for other, was_used in self._idle.items() if was_used), None)
                if used is not None:
                    _hang_up(used)
        try:
            threading.Thread(target=self._talk, args=(connection,), name="api", daemon=True).start()
        except RuntimeError as error:
            log("no thread for a connection", level="error", error=error)
            self._forget(connection)

    def _talk(self, connection: socket.socket) -> None:
        try:
            Conversation(connection, self)
        except OSError:
            pass  # they have gone
        except Exception as error:
            log("connection failed", level="error", exception=error)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        connection.close()
        with self._changed:
            self._connections.discard(connection)
            self._idle.pop(connection, None)
            self._changed.notify_all()
        self._wake()

    def rest(self, connection: socket.socket, *, first: bool) -> bool:
        """The connection waits for a request, its first one or another; False: it shall end."""
        with self._changed:
            if self.stopping or (not first and len(self._connections) >= self._max_connections):
                return False
            self._idle[connection] = not first
        return True

    def resume(self, connection: socket.socket) -> None:
        """A request has begun."""
        with self._changed:
            self._idle.pop(connection, None)

    def count(self, method: str, route: Route | None, status: int, seconds: float) -> None:
        """A request has been answered."""
        path = route.path if route is not None else "other"
        log("request", level="debug", method=one_line(method, 16), route=path, status=status, seconds=seconds)
        self.observe(method if route is not None else "other", path, status, seconds)

    def _drain(self) -> None:
        until = time.monotonic() + self._drain_timeout
        with self._changed:
            for connection in self._idle:
                _hang_up(connection)
            while self._connections:
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    log("requests not ended", level="warning", count=len(self._connections))
                    return


class Conversation(BaseHTTPRequestHandler):
    """One connection, from its first request to its last."""

    protocol_version = "HTTP/1.1"

    def __init__(self, connection: socket.socket, api: ApiServer) -> None:
        self._api = api
        self._stream = _Stream(connection, api.send_timeout)
        self._allowed = user_of(connection) in api.users
        self._first = True
        self._route: Route | None = None
        self._refused = 400
        self._unread = 0
        super().__init__(connection, "", cast("BaseServer", api))

    def setup(self) -> None:
        self.connection = self.request
        self._incoming = io.BufferedReader(self._stream, _BUFFER)
        self.rfile = self._incoming
        self.wfile = cast(io.BufferedIOBase, self._stream)

    def finish(self) -> None:
        pass  # the server closes the connection

    def log_message(self, format: str, *args: Any) -> None:
        pass  # http.server's own words

    def handle_one_request(self) -> None:
        """Read a request and answer it."""
        self.close_connection = True  # unless a whole request says otherwise
        self._route = None
        self._refused = 400
        self._unread = 0
        if not self._begins():
            return
        began = time.monotonic()
        try:
            call = self._read()
        except Refusal as refusal:
            status = self._refuse(refusal)
        except ImgtoolError as error:
            status = self._refuse(Refusal(kind_of_error(error).status, error))
        else:
            status = self._answer(self._route, call) if self._route and call else self._refused
        if self._unread:
            self._discard()
        self._api.count(self.command or "", self._route, status, time.monotonic() - began)

    def _read(self) -> Call | None:
        """The next request, its route in ``_route``; None when http.server has refused it.

        Raises:
            Refusal, ImgtoolError: it is refused.
            OSError: they have gone.
        """
        self.command = ""
        self._stream.expect(self._api.request_timeout, MAX_HEADERS)
        try:
            self.raw_requestline = self.rfile.readline(MAX_LINE + 1)
            if len(self.raw_requestline) > MAX_LINE:
                raise Refusal(414, UsageError(f"a request line of more than {MAX_LINE} bytes"))
            if not self.parse_request():
                return None
            content = self._content()
        except TimeoutError:
            self.close_connection = True
            raise Refusal(408, UsageError("the request didn't arrive whole in time")) from None
        if not self._allowed:
            raise PermissionError_("the node service is root's alone")
        self._route, name = find(self.command, self.path)
        return Call(name, self._body(self._route, content), SILENT)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses."""
        self.close_connection = True
        self._refused = code
        text = f"not a request of HTTP/1.1: {message or explain or HTTPStatus(code).phrase}"
        self._refuse(Refusal(code, UsageError(text)))

    def _begins(self) -> bool:
        """Wait for the first byte of a request; False when there will be none."""
        first, self._first = self._first, False
        if not self._api.rest(self.connection, first=first):
            return False
        self._stream.expect(self._api.request_timeout if first else self._api.idle_timeout, MAX_HEADERS)
        try:
            return bool(self._incoming.peek(1))
        except TimeoutError:
            return False
        finally:
            self._api.resume(self.connection)

    def _content(self) -> bytes:
        """The request's body, read whole, so that the next request begins where it ends.

        Raises:
            Refusal: its size isn't said, or too large.
        """
        self.close_connection = self.close_connection or self._api.stopping
        headers: Message = self.headers
        if "Transfer-Encoding" in headers:
            self.close_connection = True
            raise Refusal(411, UsageError("send the body whole, with Content-Length"))
        lengths = headers.get_all("Content-Length", ["0"])
        length = lengths[0].strip()
        if len(lengths) != 1 or not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise Refusal(400, UsageError("Content-Length is not one number"))
        if len(length) > 18 or int(length) > MAX_BODY:
            self.close_connection = True
            self._unread = _DISCARDED if len(length) > 18 else min(int(length), _DISCARDED)
            raise LimitError(f"a body of more than {MAX_BODY} bytes; ask for less at once")
        self._stream.expect(None, MAX_BODY)
        content = self.rfile.read(int(length))
        if len(content) < int(length):
            raise ConnectionResetError("they have gone")
        return content

    def _discard(self) -> None:
        """Read on, so that whoever still sends gets to read the answer before the connection ends."""
        self._stream.expect(None, self._unread)
        try:
            while self._unread > 0 and (data := self._incoming.read1(1 << 16)):
                self._unread -= len(data)
        except (OSError, HTTPException):
            pass

    def _body(self, route: Route, content: bytes) -> Document:
        if not content:
            return {}
        if not route.body:
            raise UsageError(f"{route.method} {route.path} takes no body")
        media_type = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if media_type != JSON:
            raise Refusal(415, UsageError(f"the body's Content-Type has to be {JSON}"))
        try:
            return parse(content, "the body", limit=MAX_BODY)
        except ImgtoolError as error:
            raise UsageError(str(error)) from None

    def _answer(self, route: Route, call: Call) -> int:
        """Have the service answer, and send it; the status."""
        in_lines = route.body and LINES in self.headers.get("Accept", "") and self.request_version == "HTTP/1.1"
        if in_lines:
            self._chunked = False
            with ProgressLines(self._send_line) as lines:
                status, answer, content = self._ask(route, replace(call, progress=lines))
        else:
            status, answer, content = self._ask(route, call)
        try:
            if not in_lines:
                self._send(status, route.media_type if status == 200 else JSON, content)
                return status
            if lines.failure is not None:
                raise lines.failure
            line = b'{"result":%s}\n' % content if status == 200 else content + b"\n"
            if self._chunked:
                self._stream.write(_chunk(line) + _chunk(b""))
            else:
                self._send(status, LINES, line)
        except OSError:
            if status == 200:
                self._undo(route, answer)
            raise
        return status

    def _ask(self, route: Route, call: Call) -> tuple[int, Document | bytes, bytes]:
        """Status, answer, and the answer as it is sent."""
        try:
            answer = route.answer(self._api.service, call)
            return 200, answer, answer if isinstance(answer, bytes) else encode(answer)
        except ImgtoolError as error:
            status, answer = kind_of_error(error).status, error_document(error)
        except Exception as error:
            log("request failed", level="error", method=route.method, route=route.path, exception=error)
            text = f"a fault of the node service itself, {type(error).__name__}; its log has more"
            status, answer = 500, {"error": {"kind": INTERNAL, "message": text}}
        return status, answer, encode(answer)

    def _undo(self, route: Route, answer: Document | bytes) -> None:
        """Whoever asked has gone without the answer: nothing stays behind that nobody knows of."""
        if route.undo is None or isinstance(answer, bytes):
            return
        try:
            route.undo(self._api.service, answer)
            log("answer not taken, so undone", level="warning", method=route.method, route=route.path)
        except Exception as error:
            log("answer not taken, and not undone", level="error", route=route.path, exception=error)

    def _refuse(self, refusal: Refusal) -> int:
        self._send(refusal.status, JSON, encode(error_document(refusal.error)), allow=refusal.allow)
        return refusal.status

    def _send(self, status: int, media_type: str, content: bytes, *, allow: str = "") -> None:
        head = self._head(status, media_type, f"Content-Length: {len(content)}")
        if allow:
            head += f"Allow: {allow}\r\n"
        self._stream.write(f"{head}\r\n".encode("latin-1") + content)

    def _send_line(self, document: Document) -> None:
        """Send one line as a chunk, the first one behind the head."""
        chunk = _chunk(encode(document) + b"\n")
        if not self._chunked:
            self._chunked = True
            chunk = f"{self._head(200, LINES, 'Transfer-Encoding: chunked')}\r\n".encode() + chunk
        self._stream.write(chunk)

    def _head(self, status: int, media_type: str, length: str) -> str:
        end = "Connection: close\r\n" if self.close_connection else ""
        return f"HTTP/1.1 {status} {_PHRASES[status]}\r\nContent-Type: {media_type}\r\n{length}\r\n{end}"


class _Stream(io.RawIOBase):
    """A connection whose other end gets so many seconds and bytes."""

    def __init__(self, connection: socket.socket, send_timeout: float) -> None:
        self._connection = connection
        self._send_timeout = send_timeout
        self._until = 0.0
        self._left = 0

    def expect(self, seconds: float | None, size: int) -> None:
        """What is read from now on takes at most ``seconds`` (None: as was said before) and about ``size`` bytes."""
        if seconds is not None:
            self._until = time.monotonic() + seconds
        self._left = size + _BUFFER

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        self._left -= count
        if self._left < 0:
            raise HTTPException("more than is taken")  # parse_request makes 431 of it
        return count

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        """All of it, or an error."""
        self._connection.settimeout(self._send_timeout)
        self._connection.sendall(data)
        return len(memoryview(data))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_PHRASES = {int(status): status.phrase for status in HTTPStatus}


def user_of(connection: socket.socket) -> int:
    """Who connected, by user id: SO_PEERCRED, socket(7)."""
    _, user, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(user)


def _hang_up(connection: socket.socket) -> None:
    """End the wait for a request, for the thread that reads."""
    try:
        connection.shutdown(socket.SHUT_RD)
    except OSError:
        pass
