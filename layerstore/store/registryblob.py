"""Open blobs of a registry's repository."""

from __future__ import annotations

from collections.abc import Callable

from layerstore.errors import CorruptError, NotFoundError
from layerstore.registry.blobs import Blobs, Place
from layerstore.store.heldblob import check_range


class RegistryBlob:
    """A blob in a registry; it holds no connection. ``late`` gives all of it where the registry has no such blob."""

    def __init__(
        self, blobs: Blobs, place: Place, size: int, start: bytes, late: Callable[[], bytes] | None = None
    ) -> None:
        self._blobs = blobs
        self._place = place
        self._size = size
        self._start = start
        self._late = late

    @property
    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, length: int) -> bytes:
        check_range(self._place.digest, self._size, offset, length)
        if offset + length > len(self._start) and length:
            try:
                return self._blobs.read(self._place, offset, length, self._size)
            except NotFoundError:
                if self._late is None:
                    raise
                self._start = self._late()
                if len(self._start) != self._size:
                    actual = f"{len(self._start)}"
                    raise CorruptError(self._place.what, expected=f"{self._size} bytes", actual=actual) from None
        return self._start[offset : offset + length]

    def close(self) -> None: ...

    def __enter__(self) -> RegistryBlob:
        return self

    def __exit__(self, *exc: object) -> None: ...
