"""The tar around an image: its members are found by one pass over the headers and read where they lie.

A compressed archive is decompressed to scratch space first, for its members have to be read in another order than
theirs. Of two members with one name the last counts, as if the archive were unpacked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from layerstore.errors import (
    LimitError,
    MalformedError,
    NotFoundError,
    UnsupportedError,
    os_errors,
    printable,
)
from layerstore.limits import Limits
from layerstore.oci.document import shown
from layerstore.oci.files import FileRange
from layerstore.oci.source import Warn
from layerstore.tar.compression import SNIFFED, Compression, decompress, sniff
from layerstore.tar.format import BLOCK
from layerstore.tar.member import Member
from layerstore.tar.reader import MemberReader

ENTRIES = 1_000_000
"""Most members; a layout has one for each blob, and the index of them is held in memory."""

PIECE = 1 << 20
"""Bytes read at once from a compressed archive."""

LINKS = 32
"""Most links followed for one name; the kernel stops at 40."""


NAME_LIMIT = 4096
"""Characters of a name that is looked for: PATH_MAX (linux/limits.h)."""


class _Entry(NamedTuple):
    """What is kept of a member: the place of a file's bytes, or where a link leads; neither for anything else."""

    file: FileRange | None = None
    symlink: bytes | None = None
    hardlink: bytes | None = None


class ArchiveFiles:
    """The members of a tar, by normalised name; links are followed inside the archive and never out of it."""

    def __init__(self, path: str, *, scratch: str, limits: Limits, warn: Warn) -> None:
        self._location = printable(path)
        self._scratch_path: str | None = None
        with os_errors(f"open {self._location}"):
            status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise MalformedError(f"{self._location} is not a regular file")
        file = FileRange(path, 0, status.st_size)
        try:
            with self._named_errors():
                compression = sniff(file.peek(self._location, SNIFFED))
                if compression is not Compression.NONE:
                    file = self._decompress(file, compression, scratch, limits)
                self._entries = self._index(file, limits, warn)
        except BaseException:
            self.close()
            raise

    @property
    def location(self) -> str:
        return self._location

    def find(self, name: str) -> FileRange | None:
        if len(name) > NAME_LIMIT:
            raise MalformedError(f"a name of {len(name)} characters in {self._location}: {shown(name)}")
        entry = self._follow(name)
        if entry is None:
            return None
        if entry.file is None:
            raise MalformedError(f"{shown(name)} in {self._location} is not a plain regular file")
        return entry.file

    def close(self) -> None:
        path, self._scratch_path = self._scratch_path, None
        if path is not None:
            with contextlib.suppress(NotFoundError), os_errors(f"remove {printable(path)}"):
                os.unlink(path)

    def __enter__(self) -> ArchiveFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _follow(self, name: str) -> _Entry | None:
        """The member behind a name, as a kernel would resolve it with the archive as its root directory."""
        ahead = name.encode("utf-8", "surrogateescape").split(b"/")[::-1]
        path: list[bytes] = []
        links = 0
        entry: _Entry | None = None
        while ahead:
            part = ahead.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if not path:
                    raise MalformedError(f"{shown(name)} leads out of {self._location}")
                path.pop()
                continue
            entry = self._entries.get(b"/".join((*path, part)))
            target = None if entry is None else entry.symlink or entry.hardlink
            if entry is None or target is None:
                path.append(part)
                continue
            links += 1
            if links > LINKS:
                raise MalformedError(f"{shown(name)} in {self._location} is behind more than {LINKS} links")
            if entry.hardlink is not None:
                path.clear()
            elif target.startswith(b"/"):
                raise MalformedError(f"{shown(name)} leads out of {self._location}, to '{printable(target)}'")
            ahead.extend(reversed(target.split(b"/")))
        return self._entries.get(b"/".join(path))

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """The tar package doesn't know which file it reads."""
        try:
            yield
        except (MalformedError, UnsupportedError, LimitError) as error:
            raise type(error)(f"{self._location}: {error}") from error

    def _decompress(self, file: FileRange, compression: Compression, scratch: str, limits: Limits) -> FileRange:
        with (
            os_errors(f"decompress {self._location} into {printable(scratch)}"),
            open(file.open(), "rb", buffering=0) as stored,
            contextlib.ExitStack() as stack,
        ):
            target, path = tempfile.mkstemp(prefix="archive-", dir=scratch)
            self._scratch_path = path
            output = stack.enter_context(open(target, "wb"))
            size = 0
            for piece in decompress(lambda: stored.read(PIECE), compression, memory=limits.decoder_memory):
                size += len(piece)
                if size > limits.layer_bytes:
                    raise LimitError(f"more than the limit of {limits.layer_bytes} bytes when decompressed")
                output.write(piece)
        return FileRange(path, 0, size)

    def _index(self, file: FileRange, limits: Limits, warn: Warn) -> dict[bytes, _Entry]:
        descriptor = file.open()

        def read(offset: int, length: int) -> bytes:
            with os_errors(f"read {self._location}"):
                return os.pread(descriptor, length, offset)

        limits = dataclasses.replace(limits, entries=min(limits.entries, ENTRIES))
        reader = MemberReader(read, limits=limits, warn=lambda line: warn(f"{self._location}: {line}"))
        try:
            return {_normal(member.path): _entry(file.path, member) for member in reader}
        finally:
            os.close(descriptor)


def _normal(path: bytes) -> bytes:
    return b"/".join(part for part in path.split(b"/") if part not in (b"", b"."))


def _entry(path: str, member: Member) -> _Entry:
    if member.hardlink is not None:
        return _Entry(hardlink=member.hardlink)
    if member.kind == stat.S_IFLNK:
        return _Entry(symlink=member.target)
    if member.kind != stat.S_IFREG:
        return _Entry()
    if not member.size:
        return _Entry(file=FileRange(path, member.offset + BLOCK, 0))
    if len(member.data) == 1 and member.data[0].length == member.size:
        return _Entry(file=FileRange(path, member.data[0].at, member.size))
    return _Entry()  # sparse: no writer of images makes these
