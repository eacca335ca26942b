"""One raw pack on the node, filled frame by frame."""

from __future__ import annotations

import enum
import errno
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from layerstore.cache.directories import directory_size
from layerstore.cache.format import MAX_ORIGINS, ORIGINS_BYTES, Origin, dump_origins, parse_origins
from layerstore.cache.framemap import MISSING, READY, UNVERIFIED, FrameMap
from layerstore.cache.frames import UNREADABLE, FramesFile
from layerstore.cache.holes import holes, punch
from layerstore.cache.openers import is_open_elsewhere
from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    NoSpaceError,
    UnavailableError,
    from_os_error,
    os_errors,
)
from layerstore.pack.reader import FrameIndex
from layerstore.pack.stored import StoredPack
from layerstore.staging import read_file, write_file
from layerstore.store.protocol import Blob


class Trust(enum.Enum):
    """What the presence recorded of a pack is worth when it is opened."""

    RECORD = "recorded frames are there"
    DOUBT = "recorded frames are to be verified: the last owner did not stop in order"
    NOTHING = "nothing is recorded, but what is no hole may be there"


class CachedPack:
    """One pack of the cache, open. One object per pack and process; all its methods may be called by any thread.

    The state of a frame is in ``frames``, for all processes. It is READY only after its verified bytes are in the data
    file, and it is recorded on disk only after a later ``fdatasync``. What has been READY while the pack is in use is
    never taken out of the data file again, since the kernel may be about to read it.

    Attributes:
        digest: of the raw pack.
        hex: the same, as it names the pack in the cache.
        index: its frames.
        frames: their states.
        data_fd: the data file. Opened before any mark is set on the file, so that it raises no events.
        data_path: its name, to be given to the kernel as a device.
        in_use: whether somebody's mount may read it. The cache sets it.
        rejected: frames that :meth:`verify` found wrong.
    """

    def __init__(
        self,
        directory: str,
        *,
        trust: Trust = Trust.RECORD,
        held: tuple[int, int] | None = None,
        witness: StoredPack | None = None,
    ) -> None:
        """Open what is in ``directory``, which is named by the pack.

        Args:
            directory: of the pack in the cache.
            trust: what its record is worth.
            held: descriptors of data and frame map of a process before this one, which stay the caller's: then the
                map has the states, and what is READY there but not recorded will be with the next :meth:`sync`.
            witness: what a manifest says of the pack, in case the cache doesn't know where it came from.

        Raises:
            CorruptError: something is missing or damaged.
        """
        self._directory = directory
        self.hex = os.path.basename(directory)
        self.digest = Digest("sha256", self.hex)
        self.data_path = os.path.join(directory, "data")
        self.in_use = False
        self.rejected = 0
        self._changed = threading.Condition(threading.RLock())
        """Guards everything below, states included; told when a write or a call ends."""
        self._syncing = threading.Lock()
        """Held around group commits. Taken before ``_changed``."""
        self._naming = threading.Lock()
        """Held while the origins change. Taken alone."""
        self._closed = False
        self._busy = 0
        self._inside = 0
        self._writing: set[int] = set()
        self._unsynced: set[int] = set()
        self._inherited: set[int] = set()
        """READY, not recorded, and written by another process: its failed fdatasync may have been the one to tell."""
        self._lost: set[int] = set()
        """Were READY until their fdatasync failed, and may still be about to be read."""
        self._failures = 0
        self._failure = ""
        self.origins = self._read_origins()
        try:
            self._open(trust, held, witness)
        except CorruptError as error:
            raise CorruptError(f"cached pack {self.digest} is damaged: {error}") from error

    def _open(self, trust: Trust, held: tuple[int, int] | None, witness: StoredPack | None) -> None:
        with os_errors(f"open cached pack {self.digest}"), ExitStack() as stack:
            self._file = FramesFile(os.path.join(self._directory, "frames"), self.hex)
            stack.callback(self._file.close)
            self.index = self._file.index
            witnesses = [origin.pack for origin in self.origins if origin.pack.blob == self._file.blob]
            for pack in witnesses or filter(None, [witness]):
                self.check(pack)
            self.data_fd = self._open_data(held)
            stack.callback(os.close, self.data_fd)
            self.frames = self._states(trust) if held is None else self._adopt(held[1])
            stack.pop_all()

    def _open_data(self, held: tuple[int, int] | None) -> int:
        try:
            file = os.dup(held[0]) if held else os.open(self.data_path, os.O_RDWR | os.O_CLOEXEC)
            try:
                status = os.fstat(file)
                if status.st_size != self.index.raw_size:
                    raise CorruptError("its data has a wrong size")
                if held and not os.path.samestat(status, os.stat(self.data_path)):
                    raise CorruptError("its data is not the file that is mounted")
            except BaseException:
                os.close(file)
                raise
        except (FileNotFoundError, IsADirectoryError) as error:
            raise CorruptError("its data is gone") from error
        return file

    def _states(self, trust: Trust) -> FrameMap:
        """A new map, from what is recorded. A frame with a hole in it is missing whatever the record says."""
        there = READY if trust is Trust.RECORD else UNVERIFIED
        if trust is Trust.NOTHING:
            states = bytearray([there]) * len(self.index)
        else:
            states = bytearray(self._file.recorded.replace(b"\1", bytes([there])))
        for offset, length in holes(self.data_fd, self.index.raw_size):
            span = self.index.covering(offset, length)
            states[span.start : span.stop] = bytes(len(span))
        self._settle(states)
        return FrameMap.create(self.digest.raw, self.index.raw_size, self.index.raw_offsets, bytes(states))

    def _adopt(self, map_fd: int) -> FrameMap:
        copy = os.dup(map_fd)
        try:
            frames = FrameMap(copy)
        except BaseException:
            os.close(copy)
            raise
        try:
            if frames.hex != self.hex or not frames.describes(self.index.raw_offsets, self.index.raw_size):
                raise CorruptError("its frame map is of another pack")
            for offset, length in holes(self.data_fd, self.index.raw_size):
                for number in self.index.covering(offset, length):
                    frames.set(number, MISSING)
            states = frames.states()
            self._settle(states)
            ready = {number for number, state in enumerate(states) if state == READY}
            self._inherited = {number for number in ready if not self._file.recorded[number]}
        except BaseException:
            frames.close()
            raise
        return frames

    def _settle(self, states: bytes | bytearray) -> None:
        """Take back the record of what is missing."""
        recorded = self._file.recorded
        self._file.take_back(number for number, state in enumerate(states) if state == MISSING and recorded[number])

    # -- where it comes from ------------------------------------------------------------------------------------------

    def check(self, pack: StoredPack) -> None:
        """Compare with what a manifest says of the pack.

        Raises:
            CorruptError: it is another size, or the same blob has another frame index.
        """
        if pack.raw_size != self.index.raw_size:
            raise CorruptError(
                f"cached pack {self.digest}", expected=f"{pack.raw_size} bytes", actual=f"{self.index.raw_size}"
            )
        if pack.blob == self._file.blob and pack.frame_index.digest != self._file.index_digest:
            raise CorruptError(
                f"frame index of cached pack {self.digest}",
                expected=str(pack.frame_index.digest),
                actual=str(self._file.index_digest),
            )

    def index_for(self, pack: StoredPack, blob: Blob) -> FrameIndex:
        """The frame index to fetch by: the same pack may have been compressed twice, into different blobs.

        Raises:
            CorruptError: the other blob is cut into frames in another way.
        """
        if pack.blob == self._file.blob:
            return self.index
        index = FrameIndex.read(pack, blob)
        if index.raw_layout() != self.index.raw_layout():
            raise CorruptError(f"blob {pack.blob} has other frames than cached pack {self.digest}")
        return index

    def add_origin(self, origin: Origin) -> None:
        """Remember where the pack can be had, before all other places; durable on return."""
        with self._naming:
            if self.origins[:1] == [origin]:
                return
            key = (origin.location, origin.pack.blob)
            others = [other for other in self.origins if (other.location, other.pack.blob) != key]
            origins = [origin, *others][:MAX_ORIGINS]
            with os_errors(f"remember where pack {self.digest} is"):
                write_file(os.path.join(self._directory, "origins"), dump_origins(origins))
            self.origins = origins

    def _read_origins(self) -> list[Origin]:
        try:
            with os_errors("read origins"):
                origins = parse_origins(read_file(os.path.join(self._directory, "origins"), ORIGINS_BYTES))
        except ImgtoolError:
            return []  # those who ask for the pack say it again
        return [origin for origin in origins if origin.pack.digest == self.digest]

    # -- frames -------------------------------------------------------------------------------------------------------

    def unready(self, numbers: Iterable[int]) -> list[int]:
        """Those that may not be read yet."""
        with self._call():
            return self.frames.unready(numbers)

    def lacks(self, numbers: Iterable[int]) -> bool:
        """Whether one of these is not there at all. What is to be verified is there, for all that is known."""
        with self._call():
            states = self.frames.states()
        return any(states[number] == MISSING for number in numbers)

    def touched(self, numbers: Iterable[int]) -> int:
        """How many of these a reader has asked for, since the map was made: see :meth:`FrameMap.touch`."""
        with self._call():
            touched = self.frames.touched()
        return sum(touched[number] for number in numbers)

    def verify(self, number: int) -> bool:
        """Whether a frame may be read; an UNVERIFIED one is hashed, and becomes READY or MISSING.

        Raises:
            UnavailableError: it can't be read now.
        """
        with self._call():
            if self.frames.state(number) != UNVERIFIED:
                return self.frames.state(number) == READY
            right, _ = self._read(number)
            with self._changed:
                if self.frames.state(number) != UNVERIFIED:
                    return self.frames.state(number) == READY  # somebody else was faster
                if right:
                    if not self._file.recorded[number]:
                        self._inherited.add(number)
                    self.frames.set(number, READY)
                else:
                    self._reject(number)
            return right

    def write(self, number: int, raw: bytes) -> None:
        """Put a verified frame in place: it may be read from now on, and outlives a crash after :meth:`sync`.

        One that is READY is left as it is.

        Raises:
            NoSpaceError, UnavailableError: it is missing still, and what was written of it is given back.
        """
        assert len(raw) == self.index.raw_range(number)[1]
        with self._call(), self._alone_with(number) as needed:
            while needed:
                with self._changed:
                    failures = self._failures
                try:
                    self._put(number, raw)
                except BaseException:
                    with self._changed:
                        self._punch(number)
                    raise
                with self._changed:
                    # A sync that failed meanwhile may have been about these bytes, and nobody else will hear of it.
                    if failures == self._failures:
                        self._lost.discard(number)
                        self._unsynced.add(number)
                        self.frames.set(number, READY)
                        return

    @contextmanager
    def _alone_with(self, number: int) -> Iterator[bool]:
        """Excludes other writers of a frame, which is MISSING then; False if it is READY."""
        with self._changed:
            self._changed.wait_for(lambda: number not in self._writing)
            needed = self.frames.state(number) != READY
            if needed:
                # Before its bytes change: whoever takes over from here must not believe the record.
                self._file.take_back([number])
                self._writing.add(number)
                self.frames.set(number, MISSING)
        try:
            yield needed
        finally:
            if needed:
                with self._changed:
                    self._writing.discard(number)
                    self._changed.notify_all()

    def _put(self, number: int, raw: bytes) -> None:
        offset, view = self.index.raw_range(number)[0], memoryview(raw)
        with os_errors(f"write cached pack {self.digest}"):
            while view:
                written = os.pwrite(self.data_fd, view, offset)
                if written == 0:
                    raise OSError(errno.EIO, "the file system took no bytes")
                view, offset = view[written:], offset + written

    def sync(self) -> None:
        """Make durable what has been written, then record it as present.

        Raises:
            NoSpaceError, UnavailableError: what was written and not recorded is missing again, unless it was durable
                and only the record failed.
        """
        with self._changed:
            failures = self._failures
        with self._call(), self._syncing:
            self._take_over()
            with self._changed:
                if failures != self._failures:
                    raise UnavailableError(self._failure)  # a sync that we waited for failed for our frames too
                batch = set(self._unsynced)
                if not batch and not self._file.stale:
                    return
            try:
                os.fdatasync(self.data_fd)
            except OSError as error:
                raise self._lose(error) from error
            self._file.record(batch)
            with self._changed:
                self._unsynced -= batch

    def _take_over(self) -> None:
        """Write inherited frames again, so that the next fdatasync tells of them. They stay READY meanwhile."""
        with self._changed:
            inherited = sorted(self._inherited)
        for number in inherited:
            right, raw = self._read(number)
            if right:
                self._put(number, raw)
            with self._changed:
                self._inherited.discard(number)
                if right:
                    self._unsynced.add(number)
                else:
                    self._lost.add(number)
                    self._reject(number)

    def _reject(self, number: int) -> None:
        """What is in the place of a frame is not the frame."""
        self.rejected += 1
        self.frames.set(number, MISSING)
        self._punch(number)
        with suppress(ImgtoolError):  # the next sync does it, and whoever takes over sees that it is missing
            self._file.take_back([number])

    def _lose(self, error: OSError) -> ImgtoolError:
        """After a failed fdatasync no page says any more whether it is on disk, so nothing written before counts."""
        failure = from_os_error(error, f"make cached pack {self.digest} durable")
        if not isinstance(failure, NoSpaceError):
            failure = UnavailableError(str(failure))
        with self._changed:
            self._failures += 1
            self._failure = str(failure)
            lost, self._unsynced = self._unsynced, set()
            self._lost |= lost
            for number in lost:
                self.frames.set(number, MISSING)
            for number in lost:
                self._punch(number)
        return failure

    def _read(self, number: int) -> tuple[bool, bytes]:
        """What is in the place of a frame, and whether it is the frame."""
        offset, length = self.index.raw_range(number)
        with os_errors(f"read cached pack {self.digest}"):
            try:
                raw = os.pread(self.data_fd, length, offset)
            except OSError as error:
                if error.errno in UNREADABLE:
                    return False, b""
                raise
        return self.index.is_frame(number, raw), raw

    def _punch(self, number: int) -> None:
        """Give back the space of a missing frame, as far as that can be done: its state is what counts."""
        if self.in_use and number in self._lost:
            return
        try:
            punch(self.data_fd, *self.index.raw_range(number))
        except OSError:
            return

    @property
    def complete(self) -> bool:
        """Whether all frames may be read, and are recorded."""
        with self._changed:
            return (
                self.data_fd >= 0
                and self._file.recorded.count(1) == len(self.index) == self.frames.states().count(READY)
                and not self._unsynced
            )

    @property
    def unverified(self) -> int:
        """Frames that were there before an unclean stop, and have not been looked at since."""
        with self._changed:
            return self.frames.states().count(UNVERIFIED) if self.data_fd >= 0 else 0

    @property
    def sound(self) -> bool:
        """Whether what is recorded on disk may be believed by a successor. To be asked after :meth:`sync`."""
        with self._changed:
            return not self._file.stale and not self.unverified

    @property
    def allocated(self) -> int:
        """Bytes that the pack takes on disk, with its frames file and all."""
        return directory_size(self._directory)

    def is_open_elsewhere(self) -> bool:
        """Whether anybody but this process, and those who have its descriptor from it, has the data open: a mount.

        A file of a FUSE mount is another file: who has that open is not seen here.
        """
        with self._call():
            return is_open_elsewhere(self.data_fd)

    # -- end ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Whoever fetches frames holds this, from before it asks what is missing: it keeps the pack from eviction.

        Raises:
            UnavailableError: the pack has been evicted; ask the cache for it again.
        """
        with self._changed:
            self._refuse_closed()
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1

    def retire(self) -> bool:
        """Refuse all further calls, to be evicted; False if somebody is busy with the pack."""
        with self._changed:
            if self._busy or self._inside or self._closed:
                return False
            self._closed = True
            return True

    def close(self) -> None:
        """Refuse further calls, wait for those under way, and let go of the files. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)
            if self.data_fd < 0:
                return
            self._file.close()
            self.frames.close()
            os.close(self.data_fd)
            self.data_fd = -1

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Around whatever uses the descriptors: their numbers may be others' files once they are closed."""
        with self._changed:
            self._refuse_closed()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UnavailableError(f"cached pack {self.digest} was evicted or closed: ask the cache for it again")
