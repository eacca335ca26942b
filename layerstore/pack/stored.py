"""A pack as a manifest describes it: the descriptor of its blob, and what its annotations add.

The ``org.erofs.*`` annotations are the draft erofs-image-spec's; ours are under ``org.imgtool.*``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import MalformedError, UnsupportedError
from layerstore.oci.descriptor import Descriptor
from layerstore.pack.format import BLOCK_SIZE, SkippableHeader

PACK_MEDIA_TYPE = "application/octet-stream+zstd"
"""A device of any kind, compressed: what the draft has for data that is no EROFS image by itself."""

ROLE = "org.erofs.role"
UNCOMPRESSED_DIGEST = "org.erofs.uncompressed-digest"
FRAME_INDEX_RANGE = "org.erofs.chunk-index.range"
FRAME_INDEX_DIGEST = "org.erofs.chunk-index.digest"
FRAME_INDEX_MEDIA_TYPE = "org.erofs.chunk-index.mediaType"
FRAME_INDEX_TYPE = "application/vnd.erofs.chunk-index.v1"
UNCOMPRESSED_SIZE = "org.imgtool.uncompressed-size"
CHUNK_LIST_RANGE = "org.imgtool.chunk-list.range"
CHUNK_LIST_DIGEST = "org.imgtool.chunk-list.digest"

_RANGE = re.compile(r"(\d{1,19})-(\d{1,19})")


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` bytes at ``offset`` of a blob, and their digest."""

    offset: int
    length: int
    digest: Digest

    def range_text(self) -> str:
        """``first-last`` as in an HTTP Range header, both inclusive."""
        return f"{self.offset}-{self.offset + self.length - 1}"

    @classmethod
    def parse(cls, range_text: str, digest_text: str, blob_size: int) -> Span:
        match = _RANGE.fullmatch(range_text)
        if match is None:
            raise MalformedError(f"not a byte range: {range_text!r}")
        first, last = int(match[1]), int(match[2])
        if not first <= last < blob_size:
            raise MalformedError(f"byte range {range_text} lies outside a blob of {blob_size} bytes")
        return cls(first, last - first + 1, Digest.parse(digest_text))


@dataclass(frozen=True, slots=True)
class StoredPack:
    """A pack in a store.

    Attributes:
        digest: of the raw bytes, the pack's identity.
        raw_size: bytes, a multiple of the block size.
        blob: the compressed bytes.
        frame_index: its place in the blob.
        chunk_list: its place in the blob.
    """

    digest: Digest
    raw_size: int
    blob: Digest
    blob_size: int
    frame_index: Span
    chunk_list: Span

    @property
    def blocks(self) -> int:
        return self.raw_size // BLOCK_SIZE

    @property
    def data_end(self) -> int:
        """Where the last frame ends in the blob: at the head of the first index."""
        return min(self.frame_index.offset, self.chunk_list.offset) - SkippableHeader.STRUCT.size

    def descriptor(self) -> Descriptor:
        return Descriptor(
            PACK_MEDIA_TYPE,
            self.blob,
            self.blob_size,
            {
                ROLE: "device",
                UNCOMPRESSED_DIGEST: str(self.digest),
                UNCOMPRESSED_SIZE: str(self.raw_size),
                FRAME_INDEX_RANGE: self.frame_index.range_text(),
                FRAME_INDEX_DIGEST: str(self.frame_index.digest),
                FRAME_INDEX_MEDIA_TYPE: FRAME_INDEX_TYPE,
                CHUNK_LIST_RANGE: self.chunk_list.range_text(),
                CHUNK_LIST_DIGEST: str(self.chunk_list.digest),
            },
        )

    @classmethod
    def from_descriptor(cls, descriptor: Descriptor) -> StoredPack:
        """Read back what :meth:`descriptor` wrote.

        Raises:
            MalformedError: an annotation is missing or impossible.
            UnsupportedError: the media type is not a pack's.
        """
        notes = descriptor.annotations
        if descriptor.media_type != PACK_MEDIA_TYPE:
            raise UnsupportedError(f"device {descriptor.digest} has media type {descriptor.media_type!r}")
        try:
            raw_size = int(notes[UNCOMPRESSED_SIZE])
            pack = cls(
                Digest.parse(notes[UNCOMPRESSED_DIGEST]),
                raw_size,
                descriptor.digest,
                descriptor.size,
                Span.parse(notes[FRAME_INDEX_RANGE], notes[FRAME_INDEX_DIGEST], descriptor.size),
                Span.parse(notes[CHUNK_LIST_RANGE], notes[CHUNK_LIST_DIGEST], descriptor.size),
            )
        except KeyError as error:
            raise MalformedError(f"pack {descriptor.digest} lacks the annotation {error}") from error
        except ValueError as error:
            raise MalformedError(f"pack {descriptor.digest}: bad size {notes[UNCOMPRESSED_SIZE]!r}") from error
        if raw_size < 0 or raw_size % BLOCK_SIZE or raw_size > 1 << 44:
            raise MalformedError(f"pack {pack.digest} claims {raw_size} raw bytes")
        if pack.digest.algorithm != "sha256" or pack.data_end < 0:
            raise MalformedError(f"pack {pack.digest}: its indexes leave no room for data, or it isn't sha256")
        return pack
