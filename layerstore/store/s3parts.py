"""Uploads to S3 in parts: how they are cut, sent, and known to have been joined."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from layerstore.errors import LimitError

PART_BYTES = 16 << 20
"""Of a multipart upload; larger for what would have more than MAX_PARTS."""
MAX_PARTS = 10_000
MAX_PART_BYTES = 5 << 30
"""Both as S3 takes."""
PART_STEP = 1 << 20
"""Sizes of parts are multiples of it."""


class Slice:
    """A part of a file, as boto3 reads bodies; others may read other parts, and each may be read again."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._length = length
        self._at = 0

    def read(self, size: int | None = -1) -> bytes:
        left = self._length - self._at
        wanted = left if size is None or size < 0 else min(size, left)
        data = os.pread(self._descriptor, wanted, self._offset + self._at)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def part_ranges(size: int) -> list[tuple[int, int, int]]:
    """Number, offset and length of the parts of an object: few enough, and all but the last of one size.

    Raises:
        LimitError: that can't be.
    """
    step = PART_BYTES
    if size > step * MAX_PARTS:
        step = -(-size // (MAX_PARTS * PART_STEP)) * PART_STEP
    if step > MAX_PART_BYTES:
        raise LimitError(f"{size} bytes are more than an object of S3 can have")
    return [(number, at, min(step, size - at)) for number, at in enumerate(range(0, size, step), 1)]


def joint_etag(etags: Sequence[str]) -> str | None:
    """What S3 makes of the ETags of parts; None where these aren't MD5 sums."""
    try:
        digests = [bytes.fromhex(etag.strip('"')) for etag in etags]
    except ValueError:
        return None
    if any(len(digest) != 16 for digest in digests):
        return None
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(etags)}"
