"""Reads a stored pack by frames. Nothing is returned before its frame's sha256 has been checked."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections import OrderedDict

import zstandard

from layerstore.digest import Digest
from layerstore.errors import CorruptError, MalformedError
from layerstore.pack.format import FrameIndexHeader, FrameRecord, unpack_frame_index
from layerstore.pack.stored import Span, StoredPack
from layerstore.store.protocol import Blob

_CACHED_FRAMES = 16
_MAX_INDEX = 1 << 30
"""Bytes of an index that are read at once: 22 million frames, or 30 million chunks."""


def read_span(blob: Blob, span: Span, what: str) -> bytes:
    """Read one of a pack's indexes and check its digest."""
    if span.length > _MAX_INDEX:
        raise MalformedError(f"{what} of {span.length} bytes is larger than {_MAX_INDEX}")
    data = blob.read_at(span.offset, span.length)
    hasher = span.digest.hasher()
    hasher.update(data)
    span.digest.check(hasher, what)
    return data


class FrameIndex:
    """The frames of one pack: where each lies in the blob and in the raw pack. About 64 bytes of memory a frame.

    Attributes:
        digest: of the pack.
        raw_size: of the pack, bytes.
        data_end: where the last frame ends in the blob.
        records: FrameRecords as they are stored.
        raw_offsets: where each frame begins in the raw pack; not to be changed.
    """

    def __init__(self, digest: Digest, raw_size: int, data_end: int, data: bytes) -> None:
        """``data`` is a whole frame index; ``raw_size`` and ``data_end`` are what somebody else says of the pack.

        Raises:
            MalformedError, UnsupportedError, CorruptError: it isn't one, or of another pack.
        """
        actual, self.raw_offsets, self._blob_offsets = unpack_frame_index(data, data_end)
        if actual != raw_size:
            raise CorruptError(f"frame index of pack {digest}", expected=f"{raw_size} bytes", actual=f"{actual}")
        self.digest = digest
        self.raw_size = raw_size
        self.data_end = data_end
        self.records = bytes(memoryview(data)[FrameIndexHeader.STRUCT.size :])

    @classmethod
    def read(cls, pack: StoredPack, blob: Blob) -> FrameIndex:
        if blob.size != pack.blob_size:
            raise CorruptError(
                f"blob {pack.blob} has a wrong size", expected=str(pack.blob_size), actual=str(blob.size)
            )
        data = read_span(blob, pack.frame_index, f"frame index of pack {pack.digest}")
        return cls(pack.digest, pack.raw_size, pack.data_end, data)

    def __len__(self) -> int:
        return len(self.raw_offsets)

    def covering(self, offset: int, length: int) -> range:
        """The frames that hold these raw bytes; the caller keeps inside the pack."""
        if length <= 0:
            return range(0)
        first = bisect_right(self.raw_offsets, offset) - 1
        return range(first, bisect_right(self.raw_offsets, offset + length - 1))

    def raw_range(self, number: int) -> tuple[int, int]:
        """Offset and length of a frame in the raw pack."""
        start = self.raw_offsets[number]
        end = self.raw_offsets[number + 1] if number + 1 < len(self) else self.raw_size
        return start, end - start

    def sha256(self, number: int) -> bytes:
        """Of a frame's raw bytes."""
        end = (number + 1) * FrameRecord.STRUCT.size
        return self.records[end - 32 : end]

    def is_frame(self, number: int, raw: bytes) -> bool:
        """Whether these are the raw bytes of a frame."""
        return hashlib.sha256(raw).digest() == self.sha256(number)

    def raw_layout(self) -> tuple[array[int], bytes]:
        """Raw offset and sha256 of every frame: what has to agree between two blobs of one pack."""
        return self.raw_offsets, b"".join(map(self.sha256, range(len(self))))

    def blob_range(self, numbers: range) -> tuple[int, int]:
        """Offset and length in the blob of neighbouring frames."""
        start = self._blob_offsets[numbers[0]]
        after = numbers[-1] + 1
        end = self._blob_offsets[after] if after < len(self) else self.data_end
        return start, end - start

    def compressed_size(self, number: int) -> int:
        """Bytes of a frame in the blob."""
        after = number + 1
        end = self._blob_offsets[after] if after < len(self._blob_offsets) else self.data_end
        return end - self._blob_offsets[number]

    def decode(self, number: int, compressed: bytes | memoryview) -> bytes:
        """Decompress a frame and check it.

        Raises:
            CorruptError: it isn't zstd, has another length, or another digest.
        """
        what = f"frame {number} of pack {self.digest}"
        length = self.raw_range(number)[1]
        try:
            # The header's size decides how much the decoder allocates, so it is checked first.
            claimed = zstandard.get_frame_parameters(compressed).content_size
            if claimed != length:
                raise CorruptError(f"{what} has a wrong length", expected=str(length), actual=str(claimed))
            raw = zstandard.ZstdDecompressor().decompress(compressed, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptError(f"{what} does not decompress: {error}") from error
        actual = hashlib.sha256(raw).digest()
        expected = self.sha256(number)
        if actual != expected:
            raise CorruptError(what, expected=str(Digest.from_raw(expected)), actual=str(Digest.from_raw(actual)))
        return raw


class PackReader:
    """Random access to the raw bytes of a stored pack; keeps the last few frames. For one thread at a time."""

    def __init__(self, pack: StoredPack, blob: Blob) -> None:
        self.pack = pack
        self._blob = blob
        self.index = FrameIndex.read(pack, blob)
        self._cache: OrderedDict[int, bytes] = OrderedDict()

    def read_at(self, offset: int, length: int) -> bytes:
        """Raw bytes of the pack.

        Raises:
            CorruptError: a frame is not what the index promises, or the range leaves the pack.
        """
        if offset < 0 or length < 0 or offset + length > self.pack.raw_size:
            raise CorruptError(
                f"bytes {offset}+{length} lie outside pack {self.pack.digest} of {self.pack.raw_size} bytes"
            )
        parts = []
        for number in self.index.covering(offset, length):
            start, size = self.index.raw_range(number)
            raw = self._frame(number)
            parts.append(raw[max(0, offset - start) : min(size, offset + length - start)])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _frame(self, number: int) -> bytes:
        raw = self._cache.get(number)
        if raw is None:
            raw = self.index.decode(number, self._blob.read_at(*self.index.blob_range(range(number, number + 1))))
            self._cache[number] = raw
            if len(self._cache) > _CACHED_FRAMES:
                self._cache.popitem(last=False)
        return raw
