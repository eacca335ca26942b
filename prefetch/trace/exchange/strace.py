"""The output of strace, such as of ``strace -f -y -ttt -e trace=execve,open,openat,read,pread64,mmap -o FILE PROGRAM``.

Where the log has calls that read, ranges are what they read: ``read`` and its like at the position that opening,
reading and ``lseek`` have led to, ``pread64`` and its like at theirs, and of ``mmap`` all that is mapped, though a
program may look at a part of it. A program that ``execve`` starts counts whole, for the kernel maps it unseen. A log
without any such call counts each file that is opened, whole.

``-y`` or ``-yy`` says in the log which file a descriptor is; without it, descriptors are followed through ``open``,
``dup``, ``close``, ``clone`` and ``execve``, as far as these calls are in the log. Times are those of ``-ttt``,
``-tt``, ``-t`` or ``-r``; without them, at = position. Calls that failed, and what isn't a file, are counted as
skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from prefetch.trace.exchange.listing import TOO_LONG, Kind, Listing, Wanted, fits, lines, microseconds, since_first
from prefetch.trace.format import MAX_TIME

LOG_BYTES = 256 << 20
"""Largest log that is read: about two million calls."""
LINE_BYTES = 64 << 10

_LEADER = re.compile(
    rb"\s*(?:\[pid\s+(\d{1,10})(?:<[^>]{0,64}>)?\]\s+|(\d{1,10})(?:<[^>]{0,64}>)?\s+)?"
    rb"(?:(\d{2}):(\d{2}):(\d{2}(?:\.\d{1,9})?)\s+|(\d{1,12}\.\d{1,9})\s+)?(?:\(\+\s*[\d.]+\)\s+)?"
)
_NOTE = rb"<((?:[^<>]|->)*(?:<[^<>]*>)?)>(?:\(deleted\))?"
_CALL = re.compile(rb"([a-z_0-9]+)\((.*)\)\s+= (-?\d+|0x[0-9a-f]+|\?)(?:%b)?(?: .*)?" % _NOTE, re.DOTALL)
_BEGUN = re.compile(rb"([a-z_0-9]+)\(")
_UNFINISHED = b"<unfinished ...>"
_RESUMED = re.compile(rb"<\.\.\. ([a-z_0-9]+) resumed>\s?(.*)", re.DOTALL)
_OTHER = re.compile(rb"(?:\+\+\+|---|strace: )")
_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"(\.\.\.)?', re.DOTALL)
_FD = re.compile(rb"(-?\d{1,10}|AT_FDCWD)(?:%b)?(?=[,)\s]|$)" % _NOTE)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-f]{2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f", b"a": b"\a", b"b": b"\b"}
_LAST_NUMBER = re.compile(rb", (\d{1,19})$")
_MMAP = re.compile(rb"[^,]*, (\d{1,19}), ([A-Z_|0-9]+), [^,]*, (.*), (0x[0-9a-f]{1,16}|\d{1,19})$", re.DOTALL)

_EPOCH = 100_000_000
"""Seconds: what is more is a time since 1970, what is less one since the line before."""
_DAY = 86_400 * 1_000_000
_AT_FDCWD = b"AT_FDCWD"


@dataclass(slots=True)
class _Open:
    """An open file: shared by the descriptors that were made of one another."""

    path: bytes
    position: int = 0


@dataclass(slots=True)
class _Process:
    files: dict[int, _Open] = field(default_factory=dict)
    on_exec: set[int] = field(default_factory=set)
    """Descriptors that end with the program."""
    directory: bytes | None = None
    comm: str = ""
    begun: tuple[bytes, bytes, int | None] | None = None
    """Name, arguments so far and time of a call whose end comes on a later line."""


@dataclass(slots=True)
class _Clock:
    """Time of each line in microseconds, whichever form it has."""

    now: int = 0
    day: int = 0

    def read(self, match: re.Match[bytes]) -> int | None:
        if match[3] is not None:
            seconds = microseconds(match[5]) or 0
            at = (int(match[3]) * 60 + int(match[4])) * 60_000_000 + seconds + self.day
            if at + _DAY // 2 < self.now:  # past midnight
                at, self.day = at + _DAY, self.day + _DAY
        elif match[6] is not None:
            at = microseconds(match[6]) or 0
            if at < _EPOCH * 1_000_000:
                at = min(at + self.now, MAX_TIME)
        else:
            return None
        self.now = at
        return at


class _Log:
    """Follows the processes of a log."""

    def __init__(self) -> None:
        self.listing = Listing()
        self.opened: list[Wanted] = []
        self.read: list[Wanted] = []
        self.reads_traced = False
        self._processes: dict[int, _Process] = {}
        self._clock = _Clock()
        self._calls: dict[bytes, Callable[[_Process, bytes, int, bytes | None, int | None], None]] = {
            b"open": self._open,
            b"openat": self._openat,
            b"openat2": self._openat,
            b"execve": self._execve,
            b"execveat": self._execveat,
            b"read": self._read,
            b"readv": self._read,
            b"pread64": self._pread,
            b"pread": self._pread,
            b"preadv": self._pread,
            b"mmap": self._mmap,
            b"mmap2": self._mmap,
            b"lseek": self._lseek,
            b"close": self._close,
            b"dup": self._dup,
            b"dup2": self._dup,
            b"dup3": self._dup,
            b"fcntl": self._fcntl,
            b"chdir": self._chdir,
            b"fchdir": self._fchdir,
            b"clone": self._clone,
            b"clone3": self._clone,
            b"fork": self._clone,
            b"vfork": self._clone,
        }
        self._readers = {b"read", b"readv", b"pread64", b"pread", b"preadv", b"mmap", b"mmap2"}

    def line(self, line: bytes) -> None:
        if not line.strip():
            return
        leader = _LEADER.match(line) if len(line) <= LINE_BYTES else None
        if leader is None:
            self.listing.skip("a line that is too long")
            return
        process = self._processes.setdefault(int(leader[1] or leader[2] or 0), _Process())
        at = self._clock.read(leader)
        text = line[leader.end() :]
        if resumed := _RESUMED.match(text):
            begun, process.begun = process.begun, None
            if begun is None or begun[0] != resumed[1]:
                self.listing.skip("the end of a call without its beginning")
                return
            text, at = begun[0] + b"(" + begun[1] + resumed[2], begun[2]
        elif text.endswith(_UNFINISHED) and (call := _BEGUN.match(text)):
            process.begun = (call[1], text[call.end() : -len(_UNFINISHED)].rstrip(), at)
            return
        call = _CALL.fullmatch(text)
        if call is None:
            if not _OTHER.match(text):
                self.listing.skip("not a call")
            return
        name, arguments, result, note = call.groups()
        handler = self._calls.get(name)
        if handler is None:
            return
        self.reads_traced = self.reads_traced or name in self._readers
        if result.startswith(b"-") or result == b"?":
            if name in (b"open", b"openat", b"openat2", b"execve", b"execveat"):
                self.listing.skip("a call that failed")
            return
        handler(process, arguments, _integer(result), note, at)

    # -- files that are opened

    def _open(self, process: _Process, arguments: bytes, fd: int, note: bytes | None, at: int | None) -> None:
        self._opened(process, None, arguments, fd, note, at)

    def _openat(self, process: _Process, arguments: bytes, fd: int, note: bytes | None, at: int | None) -> None:
        below = _FD.match(arguments)
        if below is None:
            self.listing.skip("not understood")
            return
        self._opened(process, below, arguments[below.end() :].lstrip(b", "), fd, note, at)

    def _opened(
        self,
        process: _Process,
        below: re.Match[bytes] | None,
        arguments: bytes,
        fd: int,
        note: bytes | None,
        at: int | None,
    ) -> None:
        named = self._named(process, below, arguments)
        flags = arguments.rpartition(b'"')[2]
        path = _file(note) if note is not None else named
        process.files.pop(fd, None)
        process.on_exec.discard(fd)
        if b"O_DIRECTORY" in flags:
            if path is not None:  # others may be opened relative to it
                process.files[fd] = _Open(path)
            self.listing.skip("a directory")
        elif path is None:
            self.listing.skip("no path that is known" if note is None else "not a file")
        else:
            process.files[fd] = _Open(path)
            if b"O_CLOEXEC" in flags:
                process.on_exec.add(fd)
            if b"O_WRONLY" in flags or b"O_TRUNC" in flags:
                self.listing.skip("a file that is written")
            else:
                self._want(self.opened, process, path, None, at)

    def _named(self, process: _Process, below: re.Match[bytes] | None, arguments: bytes) -> bytes | None:
        """The absolute path that a call names; None if it isn't known."""
        string = _STRING.match(arguments)
        if string is None or string[2]:
            return None
        path = _unescaped(string[1])
        if path.startswith(b"/"):
            return path
        directory = process.directory
        if below is not None and below[2] is not None:
            directory = _file(below[2])
        elif below is not None and below[1] != _AT_FDCWD:
            known = process.files.get(int(below[1]))
            directory = known.path if known else None
        return None if directory is None else directory + b"/" + path

    def _execve(self, process: _Process, arguments: bytes, result: int, note: bytes | None, at: int | None) -> None:
        self._executed(process, self._named(process, None, arguments), at)

    def _execveat(self, process: _Process, arguments: bytes, result: int, note: bytes | None, at: int | None) -> None:
        below = _FD.match(arguments)
        rest = arguments[below.end() :].lstrip(b", ") if below else b""
        self._executed(process, self._named(process, below, rest), at)

    def _executed(self, process: _Process, path: bytes | None, at: int | None) -> None:
        for fd in process.on_exec:
            process.files.pop(fd, None)
        process.on_exec.clear()
        if path is None:
            self.listing.skip("no path that is known")
            return
        process.comm = path.rpartition(b"/")[2][:15].decode("utf-8", "replace")
        self._want(self.opened, process, path, None, at)
        self._want(self.read, process, path, None, at)

    # -- what is read of them

    def _read(self, process: _Process, arguments: bytes, count: int, note: bytes | None, at: int | None) -> None:
        file = self._descriptor(process, arguments)
        if file is not None and count:
            self._want(self.read, process, file.path, (file.position, count), at)
            file.position += count

    def _pread(self, process: _Process, arguments: bytes, count: int, note: bytes | None, at: int | None) -> None:
        file = self._descriptor(process, arguments)
        offset = _LAST_NUMBER.search(arguments)
        if file is not None and count and offset is not None:
            self._want(self.read, process, file.path, (int(offset[1]), count), at)

    def _mmap(self, process: _Process, arguments: bytes, result: int, note: bytes | None, at: int | None) -> None:
        match = _MMAP.match(arguments)
        if match is None or match[3].startswith(b"-1") or match[2] == b"PROT_NONE":
            return  # memory of no file
        file = self._descriptor(process, match[3])
        if file is not None:
            self._want(self.read, process, file.path, (_integer(match[4]), _integer(match[1])), at)

    def _lseek(self, process: _Process, arguments: bytes, position: int, note: bytes | None, at: int | None) -> None:
        file = self._descriptor(process, arguments, quietly=True)
        if file is not None:
            file.position = position

    def _descriptor(self, process: _Process, text: bytes, *, quietly: bool = False) -> _Open | None:
        """The file of the descriptor at the start of ``text``; None if it isn't one, or isn't known."""
        match = _FD.match(text)
        if match is None or match[1] == _AT_FDCWD:
            return None
        fd, note = int(match[1]), match[2]
        known = process.files.get(fd)
        if note is None:
            if known is None and not quietly:
                self.listing.skip("a read of a descriptor that isn't known; trace with -y")
            return known
        path = _file(note)
        if path is None:
            if not quietly:
                self.listing.skip("a read of what is no file")
            return None
        if known is None or known.path != path:
            known = process.files[fd] = _Open(path)  # opened out of our sight: read from its start, as most are
        return known

    # -- descriptors and processes

    def _close(self, process: _Process, arguments: bytes, result: int, note: bytes | None, at: int | None) -> None:
        match = _FD.match(arguments)
        if match is not None and match[1] != _AT_FDCWD:
            process.files.pop(int(match[1]), None)
            process.on_exec.discard(int(match[1]))

    def _dup(self, process: _Process, arguments: bytes, fd: int, note: bytes | None, at: int | None) -> None:
        file = self._descriptor(process, arguments, quietly=True)
        process.on_exec.discard(fd)
        if file is None:
            process.files.pop(fd, None)
        else:
            process.files[fd] = file

    def _fcntl(self, process: _Process, arguments: bytes, fd: int, note: bytes | None, at: int | None) -> None:
        if b"F_DUPFD" in arguments:
            self._dup(process, arguments, fd, note, at)

    def _chdir(self, process: _Process, arguments: bytes, result: int, note: bytes | None, at: int | None) -> None:
        process.directory = self._named(process, None, arguments)

    def _fchdir(self, process: _Process, arguments: bytes, result: int, note: bytes | None, at: int | None) -> None:
        file = self._descriptor(process, arguments, quietly=True)
        process.directory = None if file is None else file.path

    def _clone(self, process: _Process, arguments: bytes, pid: int, note: bytes | None, at: int | None) -> None:
        shared = b"CLONE_FILES" in arguments
        child = self._processes.get(pid)
        begun = child.begun if child else None  # it may be ahead of its parent's line
        self._processes[pid] = _Process(
            process.files if shared else dict(process.files),
            process.on_exec if shared else set(process.on_exec),
            process.directory,
            process.comm,
            begun,
        )

    def _want(
        self, where: list[Wanted], process: _Process, path: bytes, part: tuple[int, int] | None, at: int | None
    ) -> None:
        if not fits(path):
            self.listing.skip(TOO_LONG)
        elif part is None or (part[1] and sum(part) <= MAX_TIME):
            ranges = None if part is None else (part,)
            where.append(Wanted(path.lstrip(b"/"), Kind.FILE, ranges, at, comm=process.comm))


def is_log(data: bytes) -> bool:
    """Whether most of the first lines are those of calls."""
    head = [line for line in data[: 64 << 10].split(b"\n")[:50] if line.strip()][: -1 if len(data) > 64 << 10 else None]
    good = 0
    for line in head:
        leader = _LEADER.match(line)
        text = line[leader.end() :] if leader else line
        good += any(form.match(text) for form in (_CALL, _RESUMED, _OTHER)) or text.endswith(_UNFINISHED)
    return bool(head) and good * 2 > len(head)


def read_log(data: bytes, what: str) -> Listing:
    """Raises LimitError."""
    log = _Log()
    for line in lines(data, what, limit=LOG_BYTES):
        log.line(line)
    listing = log.listing
    for wanted in log.read if log.reads_traced else log.opened:
        listing.add(wanted)
    listing.wanted = since_first(listing.wanted)
    return listing


def _integer(text: bytes) -> int:
    """A number as C writes it; 0 for one that is larger than any that counts."""
    if len(text) > 19:
        return 0
    return int(text, 16) if text.startswith(b"0x") else int(text)


def _file(note: bytes) -> bytes | None:
    """The path that ``-y`` gives a descriptor; None if it is a pipe, a socket or a device."""
    path = _unescaped(note)
    return path if path.startswith(b"/") and b"<" not in note else None


def _unescaped(text: bytes) -> bytes:
    def original(match: re.Match[bytes]) -> bytes:
        if match[1]:
            return bytes([int(match[1], 8) & 0xFF])
        if match[2]:
            return bytes([int(match[2], 16)])
        return _LETTERS.get(match[3], match[3])

    return _ESCAPE.sub(original, text) if b"\\" in text else text
