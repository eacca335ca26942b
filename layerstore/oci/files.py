"""Where the files of a layout or archive lie: a directory, or ranges of one archive file that is never unpacked.

::

    LayoutSource, DockerArchiveSource ──find(name)──▶ Files ──▶ FileRange ──▶ RangeReader, BlobReader
                                                      ├── DirectoryFiles
                                                      └── ArchiveFiles (archive.py)
"""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from layerstore.errors import CorruptError, LimitError, MalformedError, NotFoundError, os_errors, printable

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class FileRange:
    """``size`` bytes at ``offset`` of the file at ``path``."""

    path: str
    offset: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the file at ``path``; members of an archive are behind a header, so never at 0."""
        return self.offset == 0

    def open(self) -> int:
        """A descriptor of the file, to be read with pread; the caller closes it.

        Raises:
            NotFoundError: it is gone.
            MalformedError: it isn't a regular file; a FIFO would never answer.
        """
        with os_errors(f"open {printable(self.path)}"):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise MalformedError(f"{printable(self.path)} is not a regular file")
        return descriptor

    def peek(self, what: str, length: int) -> bytes:
        """The first bytes, fewer if there are no more."""
        descriptor = self.open()
        try:
            with os_errors(f"read {what}"):
                return os.pread(descriptor, min(length, self.size), self.offset)
        finally:
            os.close(descriptor)

    def read(self, what: str, limit: int) -> bytes:
        """All of it, unverified.

        Raises:
            LimitError: more than ``limit`` bytes.
            CorruptError: the file has become shorter.
        """
        if self.size > limit:
            raise LimitError(f"{what} has {self.size} bytes, more than the limit of {limit}")
        data = bytearray(self.size)
        view = memoryview(data)
        done = 0
        with RangeReader(self, what) as reader:
            while done < self.size:
                done += reader.readinto(view[done:])
        return bytes(data)


class RangeReader(io.RawIOBase):
    """The bytes of a range, in order and unverified; raises CorruptError where the file has become shorter.

    Attributes:
        file: the range.
    """

    def __init__(self, file: FileRange, what: str) -> None:
        super().__init__()
        self.file = file
        self._what = what
        self._position = 0
        self._descriptor = -1
        self._descriptor = file.open()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")[: self.file.size - self._position]
        if not view:
            return 0
        with os_errors(f"read {self._what}"):
            count = os.preadv(self._descriptor, [view], self.file.offset + self._position)
        if not count:
            size = f"{self.file.size} bytes"
            raise CorruptError(f"{self._what} ends early", expected=size, actual=str(self._position))
        self._position += count
        return count

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        super().close()


class Files(Protocol):
    """Read-only files by relative name; a context manager that gives back what it holds."""

    @property
    def location(self) -> str:
        """For messages; already printable."""
        ...

    def find(self, name: str) -> FileRange | None:
        """The regular file of that name, links followed; None if there is none.

        Raises:
            MalformedError: the name is something that can't be read as a file.
        """
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Files: ...
    def __exit__(self, *exc: object) -> None: ...


class DirectoryFiles:
    """The files below a directory."""

    def __init__(self, path: str) -> None:
        if not os.path.isdir(path):
            problem = "is not a directory" if os.path.lexists(path) else "does not exist"
            raise NotFoundError(f"{printable(path)} {problem}")
        self._path = path

    @property
    def location(self) -> str:
        return printable(self._path)

    def find(self, name: str) -> FileRange | None:
        path = os.path.join(self._path, name)
        try:
            with os_errors(f"look for {printable(path)}"):
                status = os.stat(path)
        except NotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise MalformedError(f"{printable(path)} is not a regular file")
        return FileRange(path, 0, status.st_size)

    def close(self) -> None:
        pass

    def __enter__(self) -> DirectoryFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
