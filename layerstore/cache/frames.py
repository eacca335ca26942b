"""The file ``frames`` of a cached pack: its frame index, and which frames are recorded as present."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from layerstore.cache.format import FramesHeader
from layerstore.digest import Digest
from layerstore.errors import CorruptError, ImgtoolError, os_errors
from layerstore.pack.format import MAX_FRAMES, FrameIndexHeader, FrameRecord
from layerstore.pack.reader import FrameIndex
from layerstore.pack.stored import StoredPack

UNREADABLE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA})
"""What reading damaged media or a damaged file system gives."""
_LARGEST = FramesHeader.STRUCT.size + MAX_FRAMES * (FrameRecord.STRUCT.size + 1)


class FramesFile:
    """One such file, open. One thread at a time may record; others may take back what is not in the same group.

    Attributes:
        index: the frame index.
        index_digest: of the index as a blob has it.
        blob: the compressed blob that its offsets are for.
        recorded: 1 for each frame that is recorded as present, else 0.
        stale: frames whose record was taken back since the last :meth:`record`.
    """

    def __init__(self, path: str, hex: str) -> None:
        """Open the file of pack ``hex``.

        Raises:
            CorruptError: it isn't there, damaged, of another version, or another pack's.
        """
        self._what = f"record frames of cached pack sha256:{hex}"
        self.stale: set[int] = set()
        with os_errors(f"open cached pack sha256:{hex}"):
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                raise CorruptError("its frames file is gone") from error
            try:
                self._load(hex)
            except BaseException:
                os.close(self._file)
                raise

    def _load(self, hex: str) -> None:
        size = os.fstat(self._file).st_size
        if size > _LARGEST:
            raise CorruptError(f"its frames file has {size} bytes")
        try:
            content = _read(self._file, 0, size)
        except OSError as error:
            if error.errno in UNREADABLE:
                raise CorruptError(f"its frames file can't be read: {error.strerror}") from error
            raise
        try:
            header = FramesHeader.unpack(content)
            self._presence_at = _presence_at(header)
            if size != self._presence_at + header.frames or header.pack_sha256.hex() != hex:
                raise CorruptError("its frames file is not that pack's")
            index = FrameIndexHeader(header.raw_size, header.frames).pack()
            index += content[FramesHeader.STRUCT.size : self._presence_at]
            self.index = FrameIndex(Digest("sha256", hex), header.raw_size, header.data_end, index)
        except ImgtoolError as error:
            raise CorruptError(str(error)) from error
        self.index_digest = Digest.of(index)
        self.blob = Digest.from_raw(header.blob_sha256)
        self.recorded = bytearray(byte == 1 for byte in content[self._presence_at :])

    @staticmethod
    def count_recorded(path: str) -> int:
        """How many frames are recorded in the file of a pack that isn't open; 0 if that can't be told."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                header = FramesHeader.unpack(_read(file, 0, FramesHeader.STRUCT.size))
                return _read(file, _presence_at(header), min(header.frames, MAX_FRAMES)).count(1)
            finally:
                os.close(file)
        except (OSError, ImgtoolError):
            return 0

    @staticmethod
    def content(index: FrameIndex, pack: StoredPack) -> bytes:
        """A new file, for a pack of which nothing is present."""
        header = FramesHeader(len(index), pack.raw_size, pack.data_end, pack.digest.raw, pack.blob.raw)
        return header.pack() + index.records + bytes(len(index))

    def record(self, numbers: Iterable[int]) -> None:
        """Record frames, whose data are durable, as present, and take back what is stale; durable on return.

        Raises:
            NoSpaceError, UnavailableError: some of it may have happened. Repeating it is right.
        """
        stale, present = set(self.stale), set(numbers)
        with os_errors(self._what):
            for first, count in _runs(stale - present):
                self._write(first, bytes(count))
            for first, count in _runs(present):
                self._write(first, b"\1" * count)
            os.fdatasync(self._file)
        self.stale -= stale

    def take_back(self, numbers: Iterable[int]) -> None:
        """Frames that are not present after all: seen by a successor of this process at once, durable after a record.

        Raises:
            NoSpaceError, UnavailableError: they are taken back with the next record, if there is one.
        """
        taken = [number for number in numbers if self.recorded[number]]
        self.stale.update(taken)
        with os_errors(self._what):
            for first, count in _runs(taken):
                self._write(first, bytes(count))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, first: int, presence: bytes) -> None:
        at, view = self._presence_at + first, memoryview(presence)
        while view:
            written = os.pwrite(self._file, view, at)
            if written == 0:
                raise OSError(errno.EIO, "the file system took no bytes")
            view, at = view[written:], at + written
        self.recorded[first : first + len(presence)] = presence


def _presence_at(header: FramesHeader) -> int:
    return FramesHeader.STRUCT.size + header.frames * FrameRecord.STRUCT.size


def _read(file: int, at: int, size: int) -> bytes:
    """``size`` bytes, or what there is of them."""
    parts: list[bytes] = []
    end = at + size
    while at < end and (part := os.pread(file, end - at, at)):
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Neighbours joined: (first, count)."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs
