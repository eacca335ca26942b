"""The traces of a node: ``<root>/traces/NAME.jsonl``, or ``NAME.jsonl.part`` while it is recorded or if that was cut.

Names are those of references, without a slash. A recorder writes its ``.part`` itself, and holds a lock on it (flock),
so that nobody removes it meanwhile; all else is published whole.
"""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass

from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    LimitError,
    NotFoundError,
    UsageError,
    os_errors,
    printable,
)
from layerstore.staging import StagedFile, make_directory, read_file, sync_directory
from layerstore.store.names import check_name
from prefetch.trace.format import HEADER_BYTES, TRACE_BYTES, Trace, TraceHeader, parse_trace

SUFFIX = ".jsonl"
CUT = ".part"
NAME_BYTES = 255 - len(SUFFIX + CUT)
"""Longest name, which is a file's with both suffixes (NAME_MAX of Linux file systems)."""
_STEP = 1 << 20
_ACCESS = re.compile(rb'^\{"at":', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """What a listing says of a trace.

    Attributes:
        name: of the trace.
        path: of its file.
        size: of the file, bytes.
        complete: False while it is recorded, and where that was cut.
        recording: a recorder holds it.
        header: None where it can't be read.
        accesses: how many lines are accesses.
        error: why it can't be read; None if it can.
    """

    name: str
    path: str
    size: int
    complete: bool
    recording: bool = False
    header: TraceHeader | None = None
    accesses: int = 0
    error: str | None = None


def check_trace_name(name: str) -> str:
    """The name itself. Raises UsageError."""
    if "/" in check_name(name):
        raise UsageError(f"{name!r} is no name of a trace: it has a slash")
    if len(name) > NAME_BYTES:
        raise UsageError(f"{name[:40]!r}… is longer than the {NAME_BYTES} bytes that the name of a trace can have")
    return name


class Traces:
    """The traces below a root directory; it need not exist."""

    def __init__(self, root: str) -> None:
        self.directory = os.path.join(root, "traces")

    def names(self) -> list[str]:
        """Of all traces, those that were cut and those being recorded as well; sorted."""
        return sorted(self._files())

    def list(self) -> list[TraceFile]:
        """All traces by name; what can't be read is listed with its error."""
        return [self._describe(name, *found) for name, found in sorted(self._files().items())]

    def load(self, name: str) -> Trace:
        """Read one.

        Raises:
            NotFoundError: there is none of this name.
            LimitError, MalformedError, UnsupportedError: see :func:`prefetch.trace.format.parse_trace`.
        """
        return read_trace(self.path(name), f"trace {name!r}")

    def path(self, name: str) -> str:
        """Of its file. Raises NotFoundError."""
        found = self._files().get(check_trace_name(name))
        if found is None:
            raise NotFoundError(f"there is no trace {name!r} in {printable(self.directory)}")
        return found[0]

    def save(self, name: str, trace: Trace) -> str:
        """Publish a trace; the path of its file.

        Raises:
            ConflictError: there is one of this name, be it cut or being recorded.
            NoSpaceError, PermissionError_, UnavailableError: as the file system says.
        """
        check_trace_name(name)
        with os_errors(f"save trace {name!r}"):
            os.makedirs(os.path.dirname(self.directory), exist_ok=True)
            make_directory(self.directory)
            if name in self._files():
                raise ConflictError(f"there is a trace {name!r} already: remove it, or choose another name")
            target = os.path.join(self.directory, name + SUFFIX)
            staged = StagedFile(self.directory)
            try:
                waiting = bytearray()
                for line in trace.lines():
                    waiting += line
                    if len(waiting) >= _STEP:
                        staged.write(waiting)
                        waiting = bytearray()
                staged.write(waiting)
                staged.seal()
                staged.publish(target)
            finally:
                staged.discard()
        return target

    def remove(self, name: str) -> None:
        """Remove one.

        Raises:
            NotFoundError: there is none of this name.
            ConflictError: it is being recorded.
        """
        path = self.path(name)
        with os_errors(f"remove trace {name!r}"):
            if _locked(path):
                raise ConflictError(f"trace {name!r} is being recorded: stop that first")
            os.unlink(path)
            sync_directory(self.directory)

    def _files(self) -> dict[str, tuple[str, bool]]:
        """(path, whether it is complete) by name; a complete one comes before what is left of its recording."""
        found: dict[str, tuple[str, bool]] = {}
        with os_errors("list traces"):
            try:
                names = os.listdir(self.directory)
            except FileNotFoundError:
                return found
        for file in names:
            complete = file.endswith(SUFFIX)
            name = file.removesuffix(CUT).removesuffix(SUFFIX)
            if file != name + SUFFIX + ("" if complete else CUT) or (not complete and name in found):
                continue
            try:
                check_trace_name(name)
            except UsageError:
                continue  # not ours
            found[name] = os.path.join(self.directory, file), complete
        return found

    def _describe(self, name: str, path: str, complete: bool) -> TraceFile:
        size = 0
        try:
            with os_errors(f"trace {name!r}"):
                size = os.stat(path).st_size
                recording = not complete and _locked(path)
            data = _read(path, f"trace {name!r}")
            header = TraceHeader.parse(data[: data.find(b"\n") + 1 or HEADER_BYTES + 1], f"trace {name!r}")
        except ImgtoolError as error:
            return TraceFile(name, path, size, complete, error=str(error))
        accesses = sum(1 for _ in _ACCESS.finditer(data))
        return TraceFile(name, path, size, complete, recording, header, accesses)


def read_trace(path: str, what: str | None = None) -> Trace:
    """Read the trace in a file; ``what`` names it in messages.

    Raises:
        NotFoundError: there is no such file.
        LimitError, MalformedError, UnsupportedError: see :func:`prefetch.trace.format.parse_trace`.
    """
    what = what or printable(path)
    return parse_trace(_read(path, what), what)


def _read(path: str, what: str) -> bytes:
    with os_errors(what):
        data = read_file(path, TRACE_BYTES)
    if len(data) > TRACE_BYTES:
        raise LimitError(f"{what} has more than the limit of {TRACE_BYTES} bytes")
    return data


def _locked(path: str) -> bool:
    """Whether a process holds a lock on the file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
