"""Open blobs that several readers have at once, for wrappers that open anew while others still read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from layerstore.digest import Digest
from layerstore.errors import CorruptError
from layerstore.store.protocol import Blob

B = TypeVar("B", bound=Blob)


class CountedBlob(Generic[B]):
    """A blob with users; it is closed when the last of them has left. Whoever makes it is the first."""

    def __init__(self, blob: B) -> None:
        self.blob = blob
        self._users = 1
        self._mutex = threading.Lock()

    def join(self) -> None:
        """Be one more user. Only while there is one."""
        with self._mutex:
            self._users += 1

    def leave(self) -> None:
        with self._mutex:
            self._users -= 1
            last = self._users == 0
        if last:
            self.blob.close()


class ReplaceableBlob(Generic[B]):
    """What is read now in the place of a blob; another one may take its place while readers are in it."""

    def __init__(self, blob: B) -> None:
        self._mutex = threading.Lock()
        self._held = CountedBlob(blob)

    @contextmanager
    def reading(self) -> Iterator[B]:
        """The one of now; it stays open for as long as the block runs."""
        with self._mutex:
            held = self._held
            held.join()
        try:
            yield held.blob
        finally:
            held.leave()

    def replace(self, old: B, opened: Callable[[], B]) -> None:
        """Open another one, unless somebody else has replaced ``old`` already."""
        if self._held.blob is not old:
            return
        new = CountedBlob(opened())
        with self._mutex:
            left, self._held = (self._held, new) if self._held.blob is old else (new, self._held)
        left.leave()

    def close(self) -> None:
        self._held.leave()


def check_range(digest: Digest, size: int, offset: int, length: int) -> None:
    """Raise CorruptError unless a blob of ``size`` bytes has that range."""
    if offset < 0 or length < 0 or offset + length > size:
        raise CorruptError(f"blob {digest} has {size} bytes, {length} at {offset} were to be read: publish it again")


class WholeBlob:
    """A small blob, all in memory."""

    def __init__(self, digest: Digest, data: bytes) -> None:
        self._digest = digest
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read_at(self, offset: int, length: int) -> bytes:
        check_range(self._digest, len(self._data), offset, length)
        return self._data[offset : offset + length]

    def close(self) -> None: ...

    def __enter__(self) -> WholeBlob:
        return self

    def __exit__(self, *exc: object) -> None: ...
