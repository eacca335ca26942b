"""Packs of small frames, stores that misbehave, and a clock that tests move: what fetching is tested with."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import zstandard

from layerstore.cache.packs import CachedPack
from layerstore.digest import Digest
from layerstore.errors import CorruptError, ImgtoolError, NotFoundError, UnavailableError
from layerstore.pack.format import (
    BLOCK_SIZE,
    ChunkListHeader,
    FrameIndexHeader,
    FrameRecord,
    SkippableHeader,
    skippable,
)
from layerstore.pack.stored import Span, StoredPack
from prefetch.statistics import Priority
from support.conversions import noise

PATIENCE = 20.0
"""Seconds until a test that waits for something fails."""


@dataclass(frozen=True)
class SmallPack:
    """A pack of ``frames``, as raw bytes, and the blob that stores it."""

    stored: StoredPack
    blob: bytes
    frames: tuple[bytes, ...]

    @property
    def raw(self) -> bytes:
        return b"".join(self.frames)


def small_pack(count: int = 40, *, size: int = 2 * BLOCK_SIZE, seed: int = 0, level: int = 1) -> SmallPack:
    """A pack of ``count`` frames that no two packs have in common; other levels give other blobs of the same pack."""
    half = size // 2
    return pack_frames([noise(half, seed * 100_003 + number) + bytes(size - half) for number in range(count)], level)


def pack_frames(frames: Sequence[bytes], level: int = 1) -> SmallPack:
    # Noise compresses the same at every level.
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=level > 1)
    parts, records, raw = [], [], b"".join(frames)
    start = at = 0
    for frame in frames:
        records.append(FrameRecord(start, at, hashlib.sha256(frame).digest()).pack())
        parts.append(compressor.compress(frame))
        start += len(parts[-1])
        at += len(frame)
    data = b"".join(parts)
    chunks = ChunkListHeader(0).pack()
    index = FrameIndexHeader(len(raw), len(frames)).pack() + b"".join(records)
    head = SkippableHeader.STRUCT.size
    blob = data + skippable(chunks) + skippable(index)
    stored = StoredPack(
        Digest.of(raw),
        len(raw),
        Digest.of(blob),
        len(blob),
        Span(len(data) + 2 * head + len(chunks), len(index), Digest.of(index)),
        Span(len(data) + head, len(chunks), Digest.of(chunks)),
    )
    return SmallPack(stored, blob, tuple(frames))


Fault = Callable[[int, int, bytes], bytes]
"""Offset, length and right answer to what a store answers instead; or it raises, or waits."""


class FaultyStore:
    """Blobs in memory, and what befalls those who read frames of them.

    Attributes:
        blobs: by digest.
        fault: applied to reads of frames; a list is used up, one for each.
        reads: blob, offset and length of each read of frames, in order of their start.
        opened: how often a blob was opened.
        concurrent, most: reads under way, and the most there ever were.
        gate: held around each read of frames.
    """

    def __init__(self, *packs: SmallPack, location: str = "faulty") -> None:
        self.location = location
        self.blobs = {pack.stored.blob: pack.blob for pack in packs}
        self._data_end = {pack.stored.blob: pack.stored.data_end for pack in packs}
        self.fault: Fault | None = None
        self.faults: list[Fault | None] = []
        self.on_open: Callable[[], None] = lambda: None
        self.reads: list[tuple[Digest, int, int]] = []
        self.opened = self.closed = self.concurrent = self.most = 0
        self.gate: AbstractContextManager[Any] = nullcontext()
        self._lock = threading.Lock()

    def open(self, digest: Digest) -> FaultyBlob:
        self.on_open()
        if digest not in self.blobs:
            raise NotFoundError(f"blob {digest} is not in {self.location}")
        with self._lock:
            self.opened += 1
        return FaultyBlob(self, digest, self.blobs[digest])

    def read(self, blob: FaultyBlob, offset: int, length: int) -> bytes:
        right = blob.data[offset : offset + length]
        if offset >= self._data_end[blob.digest]:
            return right  # an index
        with self._lock:
            self.reads.append((blob.digest, offset, length))
            self.concurrent += 1
            self.most = max(self.most, self.concurrent)
            fault = self.faults.pop(0) if self.faults else self.fault
        try:
            with self.gate:
                return right if fault is None else fault(offset, length, right)
        finally:
            with self._lock:
                self.concurrent -= 1

    def __getattr__(self, name: str) -> Any:
        if name == "open_sized":
            raise AttributeError(name)  # a capability that it lacks
        raise AssertionError(f"fetching asked a store for {name}")


class FaultyBlob:
    def __init__(self, store: FaultyStore, digest: Digest, data: bytes) -> None:
        self._store = store
        self.digest = digest
        self.data = data
        self.is_open = True

    @property
    def size(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, length: int) -> bytes:
        assert self.is_open, "read of a closed blob"
        return self._store.read(self, offset, length)

    def close(self) -> None:
        assert self.is_open, "closed twice"
        self.is_open = False
        with self._store._lock:
            self._store.closed += 1

    def __enter__(self) -> FaultyBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# -- faults


def cut_short(offset: int, length: int, right: bytes) -> bytes:
    return right[:-7]


def ends_early(offset: int, length: int, right: bytes) -> bytes:
    raise CorruptError("the blob was cut off")


def flipped(offset: int, length: int, right: bytes) -> bytes:
    return right[:-9] + bytes([right[-9] ^ 1]) + right[-8:]


def page(offset: int, length: int, right: bytes) -> bytes:
    return b"<html>502 Bad Gateway</html>".ljust(length)


def zeros(offset: int, length: int, right: bytes) -> bytes:
    return bytes(length)


def down(offset: int, length: int, right: bytes) -> bytes:
    raise UnavailableError("connection refused")


def missing(offset: int, length: int, right: bytes) -> bytes:
    raise NotFoundError("404")


def ignores_ranges(pack: SmallPack) -> Fault:
    return lambda offset, length, right: pack.blob


def another_frame(pack: SmallPack) -> Fault:
    """Always the pack's first frames, whatever is asked for."""
    return lambda offset, length, right: pack.blob[:length]


class Stall:
    """A fault that waits for :meth:`end`, then answers rightly. End it before the test does."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.waiting = 0

    def __call__(self, offset: int, length: int, right: bytes) -> bytes:
        self.waiting += 1
        assert self._over.wait(PATIENCE), "nobody ended the stall"
        return right

    def end(self) -> None:
        self._over.set()


class Gate:
    """A context manager that lets nobody through while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def __enter__(self) -> None:
        assert self._open.wait(PATIENCE), "nobody opened the gate"

    def __exit__(self, *exc: object) -> None: ...


# -- time and answers


class SteppedClock:
    """A clock that goes on only by :meth:`advance`; who waits for a time then looks again."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._lock = threading.Lock()
        self._conditions: set[threading.Condition] = set()

    def now(self) -> float:
        return self._now

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        with self._lock:
            self._conditions.add(condition)
            if until is not None and until <= self._now:
                return
        condition.wait()

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()


class Answer:
    """The ``done`` of a want: what it was told, and by which thread."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self.answers: list[ImgtoolError | None] = []

    def __call__(self, error: ImgtoolError | None) -> None:
        self.answers.append(error)
        self._told.set()

    @property
    def given(self) -> bool:
        return self._told.is_set()

    def wait(self) -> ImgtoolError | None:
        assert self._told.wait(PATIENCE), "no answer"
        [answer] = self.answers
        return answer


def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    step = threading.Event()
    for _ in range(int(PATIENCE * 1000)):
        if condition():
            return
        step.wait(0.001)
    raise AssertionError("it never came to that")


@dataclass
class Watching:
    """An observer that remembers."""

    reads: list[tuple[tuple[int, ...], Priority, int]] = field(default_factory=list)
    failures: list[tuple[tuple[int, ...], ImgtoolError]] = field(default_factory=list)

    def fetched(self, pack: CachedPack, numbers: Sequence[int], priority: Priority, seconds: float, size: int) -> None:
        assert seconds >= 0
        self.reads.append((tuple(numbers), priority, size))

    def failed(self, pack: CachedPack, numbers: Sequence[int], error: ImgtoolError) -> None:
        self.failures.append((tuple(numbers), error))


def read_back(pack: CachedPack, small: SmallPack, numbers: Iterable[int]) -> None:
    """These frames are READY, and right."""
    for number in numbers:
        assert pack.frames.is_ready(range(number, number + 1)), f"frame {number} is not ready"
        offset, length = pack.index.raw_range(number)
        assert os.pread(pack.data_fd, length, offset) == small.frames[number], f"frame {number} is wrong"
