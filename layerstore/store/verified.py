"""A store whose blobs are compared with their names as they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from layerstore.digest import Digest
from layerstore.errors import CorruptError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.heldblob import WholeBlob, check_range
from layerstore.store.protocol import Blob, Reference, SizedStore, Store
from layerstore.store.retrying import close_store

WHOLE_BYTES = 1 << 20
"""A blob up to this size is read and checked when it is opened."""


class VerifiedStore:
    """A :class:`~layerstore.store.protocol.Store` that asks another one, and doesn't believe it.

    What this is for: whoever has the choice between stores learns here which of them is wrong. A blob of up to
    WHOLE_BYTES is checked before any byte of it is given. A larger one is hashed as long as it is read from its start
    to its end, and instead of its last bytes CorruptError comes if they are wrong; of one that is read here and there,
    nothing is checked, as its frames are by whoever knows their digests.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def location(self) -> str:
        return self._store.location

    def stat(self, digest: Digest) -> int:
        return self._store.stat(digest)

    def open(self, digest: Digest) -> Blob:
        """As of every store.

        Raises:
            CorruptError: the bytes are not what the name promises.
        """
        return self._checked(self._store.open(digest), digest)

    def open_sized(self, digest: Digest, size: int) -> Blob:
        if not isinstance(self._store, SizedStore):
            return self.open(digest)
        return self._checked(self._store.open_sized(digest, size), digest)

    def names(self) -> Iterator[str]:
        return self._store.names()

    def resolve(self, name: str) -> Descriptor:
        return self._store.resolve(name)

    def references(self) -> Iterator[Reference]:
        return self._store.references()

    def close(self) -> None:
        close_store(self._store)

    def _checked(self, blob: Blob, digest: Digest) -> Blob:
        what = f"blob {digest} in {self.location}"
        if blob.size > WHOLE_BYTES:
            return VerifiedBlob(blob, digest, what)
        with blob:
            data = blob.read_at(0, blob.size)
        hasher = digest.hasher()
        hasher.update(data)
        digest.check(hasher, what)
        return WholeBlob(digest, data)


class VerifiedBlob:
    """A blob that is hashed on the way."""

    def __init__(self, blob: Blob, digest: Digest, what: str) -> None:
        self._blob = blob
        self._digest = digest
        self._what = what
        self._hasher = digest.hasher()
        self._hashed = 0
        self._wrong: CorruptError | None = None
        self._mutex = threading.Lock()

    @property
    def size(self) -> int:
        return self._blob.size

    def read_at(self, offset: int, length: int) -> bytes:
        check_range(self._digest, self.size, offset, length)
        data = self._blob.read_at(offset, length)
        with self._mutex:
            if self._wrong is not None:
                raise self._wrong
            if length and offset == self._hashed:
                self._hasher.update(data)
                self._hashed += length
                if self._hashed == self.size:
                    try:
                        self._digest.check(self._hasher, self._what)
                    except CorruptError as error:
                        self._wrong = error
                        raise
        return data

    def close(self) -> None:
        self._blob.close()

    def __enter__(self) -> VerifiedBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
