"""The errors of imgtool, by what the caller does next.

::

    ImgtoolError
    ├── UsageError         the request is wrong: say it differently
    ├── NotFoundError      it isn't there: try the next store, or give up
    ├── MalformedError     input breaks its format: mend the source
    ├── CorruptError       bytes differ from their digest or record: fetch again, repair, quarantine
    ├── UnsupportedError   valid, but not handled here (feature, media type, kernel)
    ├── ConflictError      the world changed, or parts do not fit together: look again, then decide
    ├── UnavailableError   a passing failure: try again
    ├── LimitError         larger than a limit that can be raised
    ├── NoSpaceError       disk or quota is full: free space, then repeat
    └── PermissionError_   needs root or a capability

Messages are one line: what, where, and what to do. Names from images are shown with :func:`printable`, so a
message never holds a newline or an undecodable byte. ``imgtool/exitcodes.py`` gives each class its exit code.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager


class ImgtoolError(Exception):
    """Base of every error that this project raises on purpose."""


class UsageError(ImgtoolError):
    """The request itself is wrong."""


class NotFoundError(ImgtoolError):
    """The named thing does not exist. No other failure ever looks like this one."""


class MalformedError(ImgtoolError):
    """Input violates its format.

    Attributes:
        offset: byte position in the decoded input where it was noticed, or None.
    """

    def __init__(self, message: str, *, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"{message} (at byte {offset})")
        self.offset = offset


class CorruptError(ImgtoolError):
    """Bytes are not what their digest, size or record promises."""

    def __init__(self, message: str, *, expected: str | None = None, actual: str | None = None) -> None:
        if expected is not None:
            message = f"{message}: expected {expected}, got {actual}"
        super().__init__(message)
        self.expected = expected
        self.actual = actual


class UnsupportedError(ImgtoolError):
    """Valid input or a request that this release or this kernel does not handle."""


class ConflictError(ImgtoolError):
    """Parts do not fit together, or somebody else changed the thing meanwhile."""


class UnavailableError(ImgtoolError):
    """A passing failure; the same call may succeed later."""


class LimitError(ImgtoolError):
    """Input exceeds a configurable limit."""


class NoSpaceError(ImgtoolError):
    """The disk, or the quota, is full."""


class PermissionError_(ImgtoolError):
    """The operation needs root or a capability that this process lacks."""


_LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that stand for no byte: JSON may hold them, file names can't."""


def printable(name: bytes | str) -> str:
    r"""A name from an image, for people and JSON: reversible, one line, what isn't printable UTF-8 as ``\xNN``."""
    if isinstance(name, str):
        name = name.encode("utf-8", "surrogatepass" if _LONE.search(name) else "surrogateescape")
    text = name.decode("utf-8", "surrogateescape")
    return "".join(_escape(c) for c in text)


def _escape(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if char == "\\":
        return "\\\\"
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02x}"
    if 0x80 <= code < 0xA0 or code in (
        0x2028,
        0x2029,
    ):  # C1 controls and line separators, as their UTF-8 bytes
        return "".join(f"\\x{b:02x}" for b in char.encode())
    return char


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Map OSError at the boundary, for as long as the block runs; ``what`` begins the message.

    Raises:
        NoSpaceError: ENOSPC or EDQUOT, whether at write, fsync or close.
        NotFoundError: ENOENT, ENOTDIR.
        PermissionError_: EPERM, EACCES, EROFS.
        UnavailableError: anything else of the operating system.
    """
    try:
        yield
    except OSError as error:
        raise from_os_error(error, what) from error


@contextmanager
def about(what: str) -> Iterator[None]:
    """Begin the messages of errors from the block with ``what``, which only the caller knows."""
    try:
        yield
    except ImgtoolError as error:
        error.args = (f"{what}: {error}", *error.args[1:])
        raise


def from_os_error(error: OSError, what: str) -> ImgtoolError:
    text = f"{what}: {error.strerror or error}"
    if error.filename is not None:
        name = error.filename
        text += f" ({printable(name if isinstance(name, bytes) else str(name))})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"{text}; free space and run it again")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFoundError(text)
    if error.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
        return PermissionError_(text)
    return UnavailableError(text)
