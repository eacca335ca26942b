"""Raw packs on the node, filled frame by frame."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from layerstore.cache.format import FramesHeader
from layerstore.digest import Digest
from layerstore.errors import CorruptError, ImgtoolError, os_errors, printable
from layerstore.pack.format import FrameIndexHeader, FrameRecord
from layerstore.pack.reader import FrameIndex
from layerstore.pack.stored import StoredPack
from layerstore.staging import reclaim_files, write_file
from layerstore.store.protocol import Blob, Store


class PackCache:
    """``root`` is ``cache/packs`` of the node."""

    def __init__(self, root: str) -> None:
        self._directory = os.path.join(root, "sha256")

    def data_path(self, pack: StoredPack) -> str:
        """The raw pack, to be given to the kernel as a device."""
        return os.path.join(self._directory, pack.digest.hex, "data")

    def open(self, pack: StoredPack, store: Store) -> CachedPack:
        """The pack's place in the cache, made (all holes) if it isn't there; its frame index comes from ``store``."""
        directory = os.path.join(self._directory, pack.digest.hex)
        frames = os.path.join(directory, "frames")
        with os_errors(f"cache pack {pack.digest}"):
            if not os.path.exists(frames):
                with store.open(pack.blob) as blob:
                    index = FrameIndex.read(pack, blob)
                os.makedirs(directory, exist_ok=True)
                self._make(directory, pack, index)
        return CachedPack(directory, pack)

    def _make(self, directory: str, pack: StoredPack, index: FrameIndex) -> None:
        """``frames`` comes last, and once: a second one would forget what the first has of frames."""
        frames = os.path.join(directory, "frames")
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(frames):
                self._write(directory, frames, pack, index)
        finally:
            os.close(lock)

    def _write(self, directory: str, frames: str, pack: StoredPack, index: FrameIndex) -> None:
        with open(os.path.join(directory, "data"), "ab") as file:
            if os.fstat(file.fileno()).st_size < pack.raw_size:
                os.truncate(file.fileno(), pack.raw_size)
            os.fsync(file.fileno())
        header = FramesHeader(len(index), pack.raw_size, pack.data_end, pack.digest.raw, pack.blob.raw)
        content = header.pack() + index.records + bytes(len(index))
        write_file(frames, content)

    def reclaim(self) -> int:
        """Remove what dead writers left; the bytes it took."""
        try:
            packs = os.listdir(self._directory)
        except FileNotFoundError:
            return 0
        now = time.time_ns()
        return sum(reclaim_files(os.path.join(self._directory, pack), now, dry_run=False) for pack in packs)


class CachedPack:
    """One pack of the cache, open. Use as a context manager, from one thread."""

    def __init__(self, directory: str, pack: StoredPack) -> None:
        self.pack = pack
        self._directory = directory
        with os_errors(f"open cached pack {pack.digest}"):
            self._frames = os.open(os.path.join(directory, "frames"), os.O_RDWR | os.O_CLOEXEC)
            try:
                self._data = os.open(os.path.join(directory, "data"), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError as error:
                os.close(self._frames)
                raise self._damaged("its data is gone") from error
            except BaseException:
                os.close(self._frames)
                raise
        try:
            self.index = self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> FrameIndex:
        content = os.pread(self._frames, os.fstat(self._frames).st_size, 0)
        try:
            header = FramesHeader.unpack(content)
        except ImgtoolError as error:
            raise self._damaged(str(error)) from error
        records = header.frames * FrameRecord.STRUCT.size
        self._presence_at = FramesHeader.STRUCT.size + records
        self._blob = header.blob_sha256
        if len(content) != self._presence_at + header.frames or header.pack_sha256 != self.pack.digest.raw:
            raise self._damaged("its frames file is not that pack's")
        if os.fstat(self._data).st_size != header.raw_size or header.raw_size != self.pack.raw_size:
            raise self._damaged("its data has a wrong size")
        index = FrameIndexHeader(header.raw_size, header.frames).pack()
        index += content[FramesHeader.STRUCT.size : self._presence_at]
        if self._blob == self.pack.blob.raw and Digest.of(index) != self.pack.frame_index.digest:
            raise self._damaged("its frames file has another frame index than its blob")
        try:
            return FrameIndex(self.pack.digest, self.pack.raw_size, header.data_end, index)
        except ImgtoolError as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, why: str) -> CorruptError:
        return CorruptError(f"cached pack {self.pack.digest}: {why}; remove {printable(self._directory)}")

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Those of the frames that are not there.

        A frame with a hole in it counts as missing whatever the presence says: it would be read as zeros.
        """
        presence = os.pread(self._frames, len(self.index), self._presence_at)
        holes = self._frames_with_holes()
        return [number for number in numbers if presence[number] != 1 or number in holes]

    def _frames_with_holes(self) -> set[int]:
        found: set[int] = set()
        at, size = 0, self.pack.raw_size
        while at < size:
            try:
                data = min(os.lseek(self._data, at, os.SEEK_DATA), size)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    break  # the file system doesn't tell
                data = size
            found.update(self.index.covering(at, data - at))
            at = os.lseek(self._data, data, os.SEEK_HOLE) if data < size else size
        return found

    def index_for(self, blob: Blob) -> FrameIndex:
        """The frame index to fetch by: the same pack may have been compressed twice, into different blobs.

        Raises:
            CorruptError: the other blob is cut into frames in another way.
        """
        if self._blob == self.pack.blob.raw:
            return self.index
        index = FrameIndex.read(self.pack, blob)
        if index.raw_layout() != self.index.raw_layout():
            raise CorruptError(f"blob {self.pack.blob} has other frames than cached pack {self.pack.digest}")
        return index

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Excludes other processes that would fetch the same frames."""
        fcntl.flock(self._frames, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._frames, fcntl.LOCK_UN)

    def write(self, number: int, raw: bytes) -> None:
        """Put a verified frame in place; it counts as present only after :meth:`record`."""
        offset, length = self.index.raw_range(number)
        assert len(raw) == length
        view = memoryview(raw)
        with os_errors(f"write cached pack {self.pack.digest}"):
            while view:
                written = os.pwrite(self._data, view, offset)
                view = view[written:]
                offset += written

    def record(self, numbers: Iterable[int]) -> None:
        """Make the frames written so far durable, then present."""
        with os_errors(f"write cached pack {self.pack.digest}"):
            os.fdatasync(self._data)
            for number in numbers:
                os.pwrite(self._frames, b"\1", self._presence_at + number)
            os.fdatasync(self._frames)

    def close(self) -> None:
        os.close(self._frames)
        os.close(self._data)

    def __enter__(self) -> CachedPack:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
