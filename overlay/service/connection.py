"""HTTP over the service's socket, for :mod:`overlay.service.client`; apart from it, since http.client takes 25 ms."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from layerstore.errors import ImgtoolError, MalformedError, UnavailableError, printable
from overlay.service.messages import JSON, LINES, error_of, one_line
from overlay.service.place import connect

MAX_ANSWER = 256 << 20
"""Bytes of an answer, or of one line: 10,000 sandboxes with large receipts are some 100 MB."""
_LOST = (HTTPException, ConnectionError, BlockingIOError)


class Lost(Exception):
    """The connection ended before an answer came."""


class NobodyListens(Exception):
    """There is no service at the socket."""


class Connection(HTTPConnection):
    """To the service that listens at ``path``; connected with the first request, and again when it has been closed."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path
        self._patience = timeout
        self._unsent = bytearray()

    def connect(self) -> None:
        try:
            self.sock = connect(self._path, self._patience)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            raise NobodyListens from None
        except OSError as error:
            raise UnavailableError(
                f"node service at {printable(self._path)}: {error.strerror or error}; try again"
            ) from error

    def is_stale(self) -> bool:
        """Whether the other end has closed it: then nothing that is sent now is answered."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def ask(self, method: str, path: str, body: bytes | None, *, in_lines: bool, timeout: float | None) -> HTTPResponse:
        """Send a request and read the answer's head.

        Raises:
            NobodyListens: nothing was sent.
            Lost: it may or may not have been done.
            UnavailableError: no answer in ``timeout`` seconds.
        """
        if self.is_stale():
            self.close()
        if self.sock is None:
            self.connect()
        self.sock.settimeout(timeout)
        try:
            self._send(method, path, body, in_lines)
            return self.getresponse()
        except TimeoutError as error:
            raise self._timed_out(timeout) from error
        except _LOST as error:
            raise self._lost(error) from error

    def send(self, data: Any) -> None:
        """What http.client sends, head and body apart."""
        self._unsent += data

    def _send(self, method: str, path: str, body: bytes | None, in_lines: bool) -> None:
        """All at once, so that the service is woken once; and no header that it doesn't need."""
        self._unsent.clear()
        self.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        self.putheader("Host", "node")
        if in_lines:
            self.putheader("Accept", LINES)
        if body is not None:
            self.putheader("Content-Type", JSON)
            self.putheader("Content-Length", str(len(body)))
        self.endheaders(body)
        self.sock.sendall(self._unsent)

    def read(self, response: HTTPResponse) -> bytes:
        """The rest of an answer.

        Raises:
            Lost, UnavailableError: as above.
            MalformedError: it is larger than any answer is, or doesn't say its size.
        """
        if response.length is None or response.length > MAX_ANSWER:
            self.close()
            raise MalformedError("answer of the node service has no proper size")
        try:
            return response.read()
        except TimeoutError as error:
            raise self._timed_out(self._patience) from error
        except _LOST as error:
            raise self._lost(error) from error

    def lines(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        """The lines of an answer as they come. Raises as :meth:`read` does."""
        while True:
            try:
                line = response.readline(MAX_ANSWER)
            except TimeoutError as error:
                raise self._timed_out(self._patience) from error
            except _LOST as error:
                raise self._lost(error) from error
            if not line:
                response.close()
                return
            yield document_of(line)

    def _lost(self, error: Exception) -> Lost:
        self.close()
        return Lost(one_line(str(error) or type(error).__name__, 200))

    def _timed_out(self, timeout: float | None) -> UnavailableError:
        self.close()
        return UnavailableError(f"node service at {printable(self._path)} did not answer in {timeout:.0f} seconds")


def document_of(content: bytes) -> dict[str, Any]:
    """The JSON object of an answer.

    Raises:
        MalformedError: it is none.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise MalformedError("answer of the node service is no JSON object")
    return document


def refusal_of(response: HTTPResponse, content: bytes) -> ImgtoolError:
    """The error that an answer with a status from 400 stands for."""
    try:
        return error_of(document_of(content))
    except MalformedError:
        return ImgtoolError(f"the node service answers {response.status} without a reason")
