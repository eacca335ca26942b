"""What every upload counts of what is written to it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from layerstore.digest import Digest, Hasher
from layerstore.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer


class CountedUpload:
    """The part of an :class:`~layerstore.store.protocol.Upload` that is the same wherever the bytes go."""

    def __init__(self, algorithm: str = "sha256") -> None:
        self._algorithm = algorithm
        self._hasher: Hasher = hashlib.new(algorithm)
        self._size = 0

    @property
    def size(self) -> int:
        return self._size

    def digest(self) -> Digest:
        return Digest(self._algorithm, self._hasher.hexdigest())

    def wrote(self, data: Buffer) -> None:
        """These bytes are on their way."""
        self._hasher.update(data)
        self._size += memoryview(data).nbytes

    def check(self, digest: Digest, size: int) -> None:
        """Raise UsageError or CorruptError unless this is what has been written."""
        if digest.algorithm != self._algorithm:
            raise UsageError(f"an upload for {self._algorithm} can't become {digest}")
        if self._size != size:
            raise CorruptError(f"blob {digest}", expected=f"{size} bytes", actual=f"{self._size}")
        digest.check(self._hasher, f"blob {digest}")
