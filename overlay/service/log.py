"""The log of the node: what happened, one line each, from all its processes into one file.

With format json a line is an object::

    {"ts": "2026-11-30T11:29:21.250Z", "level": "info", "process": "worker", "event": "sandbox made", "id": "a", …}

``event`` is a fixed text; what differs from one time to the next is in the other keys, which are the event's own. With
format text it is ``2026-11-30T11:29:21.250Z info    worker  sandbox made id=a``.

To log must not hurt: nothing is raised, a line is one write of at most PIPE_BUF bytes, and where nobody takes it (a
full disk, a pipe or terminal that isn't read) it is dropped and counted; the next line that is taken says how many.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Literal

from layerstore.errors import os_errors, printable
from overlay.service.messages import one_line

Format = Literal["json", "text"]
STANDARD_ERROR = "-"
LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
MAX_LINE = 4096
"""PIPE_BUF of Linux: a write of so much is not mixed with others', and a pipe that polls as writable takes it whole."""
MAX_TEXT = 500
"""Characters of a field."""
MAX_TRACEBACK = 2000
"""Characters of a traceback, the last ones."""
MAX_FIELDS = 32
MAX_ITEMS = 16
"""Items of an array or object that is a field."""
PATIENCE_MS = 100
"""How long a line waits for a pipe with nobody at its other end; once, until a line is taken again."""

_RESERVED = frozenset(("ts", "level", "process", "event"))
_logger = logging.getLogger("imgtool.node")
_logger.addHandler(logging.NullHandler())  # until configured, warnings don't go to standard error


def log(event: str, /, *, level: str = "info", exception: BaseException | None = None, **fields: object) -> None:
    """Log ``event``. Any value will do for a field; ``exception`` adds its message and traceback. Never raises."""
    try:
        number = LEVELS.get(level, logging.ERROR)
        if _logger.isEnabledFor(number):
            _logger.log(number, event, extra={"of_node": _prepared(exception, fields)})
    except Exception:
        pass  # such as RecursionError, or a field whose repr raises


def configure(process: str, *, to: str = STANDARD_ERROR, format: Format = "json", level: str = "info") -> None:
    """Log this process's events as those of ``process``; after a fork, call it again in the child.

    Args:
        process: holder, keeper, worker or fuse.
        to: a file to append to, or "-" for standard error.
        format: json or text.
        level: the least that is logged.

    Raises:
        UnavailableError, NotFoundError, PermissionError_: the file can't be opened.
    """
    if to == STANDARD_ERROR:
        fd, owned = sys.stderr.fileno(), False
    else:
        with os_errors(f"open log {printable(to)}"):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
            fd, owned = os.open(to, flags, 0o600), True
    send_to(LineHandler(fd, owned=owned, render=_as_text if format == "text" else _as_json, process=process), level)


def send_to(handler: logging.Handler, level: str = "info") -> None:
    """Log by ``handler`` alone."""
    for old in _logger.handlers[:]:
        _logger.removeHandler(old)
        old.close()
    _logger.addHandler(handler)
    _logger.setLevel(LEVELS[level])
    _logger.propagate = False


def descriptors() -> tuple[int, ...]:
    """What the log writes to: not to be closed by those who close all they don't know."""
    return tuple(handler.fileno() for handler in _logger.handlers if isinstance(handler, LineHandler))


class LineHandler(logging.Handler):
    """Writes each record as a line of at most :data:`MAX_LINE` bytes to ``fd``, or drops it."""

    def __init__(self, fd: int, *, owned: bool, render: Callable[[dict[str, object]], str], process: str) -> None:
        super().__init__()
        self._fd = fd
        self._owned = owned
        self._render = render
        self._process = process
        self._dropped = 0
        self._torn = False

    def fileno(self) -> int:
        return self._fd

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        try:
            if self._dropped and self._write(self._line(record, "log lines dropped", {"count": self._dropped})):
                self._dropped = 0
            if self._dropped or not self._write(self._line(record, record.getMessage(), _fields_of(record))):
                self._dropped += 1
        except Exception:
            self._dropped += 1

    def close(self) -> None:
        if self._owned and self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        super().close()

    def _line(self, record: logging.LogRecord, event: str, fields: Mapping[str, object]) -> bytes:
        document: dict[str, object] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "event": one_line(event, MAX_TEXT),
        }
        line = self._render({**document, **fields}).encode("utf-8", "replace") + b"\n"
        while len(line) > MAX_LINE and fields:
            fields = dict(fields)
            del fields[max(fields, key=lambda key: len(str(fields[key])))]
            line = self._render({**document, **fields, "cut": True}).encode("utf-8", "replace") + b"\n"
        return line[:MAX_LINE]

    def _write(self, line: bytes) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        ready = poll.poll(0 if self._dropped else PATIENCE_MS)
        if not ready or not ready[0][1] & select.POLLOUT:
            return False
        if self._torn:
            line = b"\n" + line
        written = os.write(self._fd, line)
        self._torn = 0 < written < len(line) or (self._torn and not written)
        return written == len(line)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "of_node", {})
    return fields


def _prepared(exception: BaseException | None, fields: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in list(fields.items())[:MAX_FIELDS]:
        found[key + "_" if key in _RESERVED else key] = _plain(value, 2)
    if exception is not None:
        found["error"] = _plain(exception, 0)
        lines = "".join(traceback.format_exception(exception))[-MAX_TRACEBACK:]
        found["traceback"] = "\n".join(one_line(line, MAX_TEXT) for line in lines.splitlines())
    return found


def _plain(value: object, depth: int) -> object:
    """``value`` as JSON: bounded, printable, finite."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 64 else "an integer out of range"
    if isinstance(value, float):
        return round(value, 6) if -1e300 < value < 1e300 else str(value)
    if isinstance(value, bytes):
        return one_line(printable(value[: 4 * MAX_TEXT]), MAX_TEXT)
    if depth and isinstance(value, Mapping):
        return {one_line(str(key), MAX_TEXT): _plain(item, depth - 1) for key, item in list(value.items())[:MAX_ITEMS]}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth - 1) for item in list(value)[:MAX_ITEMS]]
    if isinstance(value, BaseException):
        value = f"{type(value).__name__}: {value}"
    return one_line(str(value), MAX_TEXT)


_as_json = json.JSONEncoder(separators=(", ", ": "), check_circular=False, ensure_ascii=False).encode


def _as_text(document: dict[str, object]) -> str:
    fixed = f"{document['ts']} {document['level']:<7} {document['process']:<6} {document['event']}"
    rest = (f"{key}={_word(value)}" for key, value in document.items() if key not in _RESERVED)
    return " ".join((fixed, *rest))


def _word(value: object) -> str:
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(' "=\\'):
        return value
    return _as_json(value)
