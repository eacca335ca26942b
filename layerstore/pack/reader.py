"""Reads a stored pack by frames. Nothing is returned before its frame's sha256 has been checked."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict

import zstandard

from layerstore.digest import Digest
from layerstore.errors import CorruptError, MalformedError
from layerstore.pack.format import unpack_frame_index
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
    """The frames of one pack: where each lies in the blob and in the raw pack."""

    def __init__(self, pack: StoredPack, data: bytes, data_end: int | None = None) -> None:
        """``data`` is a whole frame index; ``data_end`` of another blob of the same pack than the manifest's."""
        self.data_end = pack.data_end if data_end is None else data_end
        raw_size, self.records = unpack_frame_index(data, self.data_end)
        if raw_size != pack.raw_size:
            raise CorruptError(
                f"frame index of pack {pack.digest}", expected=f"{pack.raw_size} bytes", actual=f"{raw_size}"
            )
        self.pack = pack
        self._raw_offsets = [record.raw_offset for record in self.records]

    @classmethod
    def read(cls, pack: StoredPack, blob: Blob) -> FrameIndex:
        if blob.size != pack.blob_size:
            raise CorruptError(
                f"blob {pack.blob} has a wrong size", expected=str(pack.blob_size), actual=str(blob.size)
            )
        return cls(pack, read_span(blob, pack.frame_index, f"frame index of pack {pack.digest}"))

    def __len__(self) -> int:
        return len(self.records)

    def covering(self, offset: int, length: int) -> range:
        """The frames that hold these raw bytes; the caller keeps inside the pack."""
        if length <= 0:
            return range(0)
        first = bisect_right(self._raw_offsets, offset) - 1
        return range(first, bisect_right(self._raw_offsets, offset + length - 1))

    def raw_range(self, number: int) -> tuple[int, int]:
        """Offset and length of a frame in the raw pack."""
        start = self._raw_offsets[number]
        end = self._raw_offsets[number + 1] if number + 1 < len(self.records) else self.pack.raw_size
        return start, end - start

    def raw_layout(self) -> list[tuple[int, bytes]]:
        """Raw offset and sha256 of every frame: what has to agree between two blobs of one pack."""
        return [(record.raw_offset, record.sha256) for record in self.records]

    def blob_range(self, numbers: range) -> tuple[int, int]:
        """Offset and length in the blob of neighbouring frames."""
        start = self.records[numbers[0]].blob_offset
        after = numbers[-1] + 1
        end = self.records[after].blob_offset if after < len(self.records) else self.data_end
        return start, end - start

    def decode(self, number: int, compressed: bytes | memoryview) -> bytes:
        """Decompress a frame and check it.

        Raises:
            CorruptError: it isn't zstd, has another length, or another digest.
        """
        what = f"frame {number} of pack {self.pack.digest}"
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
        expected = self.records[number].sha256
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
