"""File data in the order in which it is wanted, read ahead frame by frame from wherever it lies.

Ranges of packs are taken in batches. The frames of a batch are fetched by the pool, neighbouring ones in one request,
and verified before a byte of them is handed on; meanwhile the batches before it are consumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, Protocol

from layerstore.erofs.layout import HOLE, Chunked
from layerstore.errors import CorruptError
from layerstore.pack.format import BLOCK_SIZE
from layerstore.pack.reader import FrameIndex
from layerstore.pack.stored import StoredPack
from layerstore.store.protocol import Blob, SizedStore, Store
from layerstore.tree.inode import File

_PIECE = 1 << 20
"""Longest piece: what is handed on at once, and what decides how much a batch may take."""
_BATCH_BYTES = 4 << 20
_BATCH_FRAMES = 32
"""A batch ends with whichever of both comes first: pieces from all over are few bytes of many frames."""
_REQUEST_FRAMES = 16
"""Neighbouring frames that are one request, and one task of the pool."""


class Piece(NamedTuple):
    """``length`` bytes at ``at`` of the raw pack that is device ``device``, counted from 1."""

    device: int
    at: int
    length: int


class Run(NamedTuple):
    """The next ``length`` bytes of a file: on ``device`` at ``at``; device 0 is a hole."""

    device: int
    at: int
    length: int


def runs_of(file: File) -> Iterator[Run]:
    """Where the data of a chunked file lies, from its start to its end, neighbours as one."""
    chunked = file.chunks
    assert isinstance(chunked, Chunked)
    whole = BLOCK_SIZE << chunked.bits
    left = file.size
    device, at, length = 0, 0, 0
    for address in chunked.addresses:
        here = min(whole, left)
        left -= here
        on, start = (0, 0) if address == HOLE else (address >> 32, (address & 0xFFFF_FFFF) * BLOCK_SIZE)
        if length and on == device and (on == 0 or start == at + length):
            length += here
            continue
        if length:
            yield Run(device, at, length)
        device, at, length = on, start, here
    if length:
        yield Run(device, at, length)


class Data(Protocol):
    """Where pieces are read from."""

    def read(self, pieces: Iterable[Piece]) -> Generator[memoryview, None, None]:
        """As :meth:`Gatherer.read`."""
        ...


class _Frames(NamedTuple):
    """Neighbouring frames on their way: the first of them, and all of their bytes."""

    first: int
    raw: Future[list[bytes]]


@dataclass(slots=True)
class _Batch:
    pieces: list[Piece]
    frames: dict[tuple[int, int], _Frames] = field(default_factory=dict)


class Gatherer:
    """Reads the packs of a layer. A context manager; it closes the blobs that it has opened.

    Args:
        store: has the packs.
        packs: in device order.
        pool: fetches and verifies; the order of what is returned doesn't depend on it.
        ahead: batches that are read before they are wanted.
    """

    def __init__(self, store: Store, packs: Sequence[StoredPack], pool: ThreadPoolExecutor, *, ahead: int = 3) -> None:
        self._store = store
        self._packs = packs
        self._pool = pool
        self._ahead = ahead
        self._opened: dict[int, tuple[Blob, FrameIndex]] = {}

    def __enter__(self) -> Gatherer:
        return self

    def __exit__(self, *exc: object) -> None:
        for blob, _ in self._opened.values():
            blob.close()
        self._opened.clear()

    def read(self, pieces: Iterable[Piece]) -> Generator[memoryview, None, None]:
        """The bytes of all pieces, in order; what is yielded never crosses from one piece into the next.

        Who leaves before the end closes the generator, which waits for what is being read.

        Raises:
            CorruptError: a frame is not what its pack's index says, or a piece leaves its pack.
            NotFoundError: a pack isn't in the store.
        """
        batches: deque[_Batch] = deque()
        known: dict[tuple[int, int], _Frames] = {}
        try:
            for batch in self._batches(pieces, known):
                batches.append(batch)
                if len(batches) > self._ahead:
                    yield from self._bytes_of(batches.popleft())
            while batches:
                yield from self._bytes_of(batches.popleft())
        finally:
            for batch in batches:
                for frames in batch.frames.values():
                    frames.raw.cancel()
            # Nobody may read a blob when it is closed.
            for batch in batches:
                for frames in batch.frames.values():
                    if not frames.raw.cancelled():
                        frames.raw.exception()

    def _batches(self, pieces: Iterable[Piece], known: dict[tuple[int, int], _Frames]) -> Iterator[_Batch]:
        """Cut into batches, whose fetches have begun; ``known`` are the frames of the last one."""
        batch: list[Piece] = []
        wanted: set[tuple[int, int]] = set()
        size = 0
        for piece in _cut(pieces):
            frames = {(piece.device, number) for number in self._index(piece).covering(piece.at, piece.length)}
            if batch and (size + piece.length > _BATCH_BYTES or len(wanted | frames) > _BATCH_FRAMES):
                yield self._fetch(batch, wanted, known)
                batch, wanted, size = [], set(), 0
            batch.append(piece)
            wanted |= frames
            size += piece.length
        if batch:
            yield self._fetch(batch, wanted, known)

    def _fetch(
        self, pieces: list[Piece], wanted: set[tuple[int, int]], known: dict[tuple[int, int], _Frames]
    ) -> _Batch:
        batch = _Batch(pieces, {key: known[key] for key in wanted if key in known})
        missing = sorted(wanted - batch.frames.keys())
        for (device, _), group in groupby(enumerate(missing), lambda item: (item[1][0], item[1][1] - item[0])):
            numbers = [number for _, (_, number) in group]
            for start in range(0, len(numbers), _REQUEST_FRAMES):
                some = range(numbers[start], numbers[min(start + _REQUEST_FRAMES, len(numbers)) - 1] + 1)
                blob, index = self._opened[device]
                frames = _Frames(some[0], self._pool.submit(_decoded, blob, index, some))
                batch.frames.update({(device, number): frames for number in some})
        known.clear()
        known.update(batch.frames)
        return batch

    def _bytes_of(self, batch: _Batch) -> Iterator[memoryview]:
        for device, at, length in batch.pieces:
            index = self._opened[device][1]
            for number in index.covering(at, length):
                frames = batch.frames[device, number]
                raw = frames.raw.result()[number - frames.first]
                start, size = index.raw_range(number)
                yield memoryview(raw)[max(0, at - start) : min(size, at + length - start)]

    def _index(self, piece: Piece) -> FrameIndex:
        found = self._opened.get(piece.device)
        if found is None:
            if not 1 <= piece.device <= len(self._packs):
                raise CorruptError(f"device {piece.device} of a layer with {len(self._packs)} packs")
            pack = self._packs[piece.device - 1]
            blob = self._open(pack)
            try:
                found = self._opened[piece.device] = (blob, FrameIndex.read(pack, blob))
            except BaseException:
                blob.close()
                raise
        index = found[1]
        if piece.at < 0 or piece.at + piece.length > index.raw_size:
            raise CorruptError(
                f"bytes {piece.at}+{piece.length} lie outside pack {index.digest} of {index.raw_size} bytes"
            )
        return index

    def _open(self, pack: StoredPack) -> Blob:
        if isinstance(self._store, SizedStore):  # a turn to the store less
            return self._store.open_sized(pack.blob, pack.blob_size)
        return self._store.open(pack.blob)


def _cut(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for device, at, length in pieces:
        for start in range(0, length, _PIECE):
            yield Piece(device, at + start, min(_PIECE, length - start))


def _decoded(blob: Blob, index: FrameIndex, numbers: range) -> list[bytes]:
    start, length = index.blob_range(numbers)
    data = memoryview(blob.read_at(start, length))
    raw = []
    for number in numbers:
        at, size = index.blob_range(range(number, number + 1))
        raw.append(index.decode(number, data[at - start : at - start + size]))
    return raw
