"""The files of the cache that are neither metadata image nor raw pack.

``frames`` of a cached pack, little-endian, offsets and sizes in bytes::

    FramesHeader | FrameRecord for each frame (as in the pack's own frame index) | presence, one byte a frame: 0 or 1

The frame index is kept here so that a frame can be verified, and fetched from any store, with no manifest at hand.

``<hex>.uses`` beside a metadata image is one JSON object: ``magic``, ``version``, and ``packs``, for each device in
order ``[hex of the pack's sha256, [[first block, blocks], …]]``. It can be made from the image at any time.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

from layerstore.errors import MalformedError, UnsupportedError

MAGIC = b"imgframe"
VERSION = 1
INCOMPATIBLE = 0
"""Incompatible features that are understood: none yet."""

USES_MAGIC = "imgtool uses"
USES_VERSION = 1
"""One of another version is made anew, so a change costs a node one read of each metadata image."""


@dataclass(frozen=True, slots=True)
class FramesHeader:
    """Identity of the pack and of the blob that its frames were listed for, and the number of frames."""

    frames: int
    raw_size: int
    data_end: int
    pack_sha256: bytes
    blob_sha256: bytes
    incompatible: int = 0

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<8sHxxIIxxxxQQ32s32s")

    def pack(self) -> bytes:
        return self.STRUCT.pack(
            MAGIC,
            VERSION,
            self.incompatible,
            self.frames,
            self.raw_size,
            self.data_end,
            self.pack_sha256,
            self.blob_sha256,
        )

    @classmethod
    def unpack(cls, data: bytes) -> FramesHeader:
        if len(data) < cls.STRUCT.size:
            raise MalformedError(f"frames file of {len(data)} bytes is shorter than its header")
        magic, version, incompatible, frames, raw_size, data_end, pack, blob = cls.STRUCT.unpack_from(data)
        if magic != MAGIC:
            raise MalformedError(f"not a frames file: magic {magic!r}")
        if version != VERSION or incompatible & ~INCOMPATIBLE:
            raise UnsupportedError(f"frames file of version {version} with features {incompatible:#x}")
        return cls(frames, raw_size, data_end, pack, blob, incompatible)
