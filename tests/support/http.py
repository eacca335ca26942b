"""HTTP by hand: exact bytes to a Unix socket, and what comes back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay.service import place


@dataclass(frozen=True)
class Answer:
    """One answer of HTTP/1.1."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def kind(self) -> str:
        return str(self.json["error"]["kind"])

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


class Talk:
    """A connection that sends what it is told to."""

    def __init__(self, path: Path) -> None:
        self.socket = place.connect(str(path), 20)
        self._stream = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> Answer:
        """The next answer; AssertionError if what comes is none."""
        line = self._stream.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers = {}
        while (header := self._stream.readline()) != b"\r\n":
            assert header.endswith(b"\r\n"), header
            name, _, value = header.decode("ascii").partition(":")
            headers[name] = value.strip()
        if headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self._stream.readline(), 16):
                body += self._stream.read(size)
                assert self._stream.readline() == b"\r\n"
            assert self._stream.readline() == b"\r\n"
        else:
            body = self._stream.read(int(headers["Content-Length"]))
        return Answer(int(line.split()[1]), headers, body)

    def ask(self, method: str, target: str, body: object = None, **headers: str) -> Answer:
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        if content:
            headers = {"Content_Type": "application/json", "Content_Length": str(len(content)), **headers}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.send(f"{method} {target} HTTP/1.1\r\nHost: node\r\n{lines}\r\n".encode() + content)
        return self.answer()

    def has_ended(self) -> bool:
        """Whether the other end closes the connection without sending anything more."""
        try:
            return self._stream.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._stream.close()
        self.socket.close()


@contextlib.contextmanager
def talking(directory: Path) -> Iterator[Talk]:
    talk = Talk(directory / place.SOCKET)
    try:
        yield talk
    finally:
        talk.close()
