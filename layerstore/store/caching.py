"""A store whose small blobs are remembered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from layerstore.digest import Digest
from layerstore.oci.descriptor import Descriptor
from layerstore.store.heldblob import WholeBlob
from layerstore.store.protocol import Blob, Reference, SizedStore, Store
from layerstore.store.retrying import close_store

SMALL_BYTES = 256 << 10
"""Of a blob that is remembered: documents, and little else."""
KEPT_BYTES = 32 << 20


class CachingStore:
    """A :class:`~layerstore.store.protocol.Store` that asks another one, and keeps documents in memory.

    A blob of up to SMALL_BYTES is read whole when it is opened, and remembered if it is what its name promises, up to
    KEPT_BYTES in all, those that were wanted last. Blobs never change, so it stays right; it may have been deleted
    since, as one that is held open. Whether a blob is there, and what a reference stands for, is asked each time. What
    is large is in the node's cache (``layerstore/cache``), on disk.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = threading.Lock()
        self._kept: OrderedDict[Digest, bytes] = OrderedDict()
        self._bytes = 0

    @property
    def location(self) -> str:
        return self._store.location

    def stat(self, digest: Digest) -> int:
        return self._store.stat(digest)

    def open(self, digest: Digest) -> Blob:
        return self._known(digest) or self._kept_from(self._store.open(digest), digest)

    def open_sized(self, digest: Digest, size: int) -> Blob:
        store = self._store
        if size <= SMALL_BYTES or not isinstance(store, SizedStore):
            return self.open(digest)
        return store.open_sized(digest, size)

    def names(self) -> Iterator[str]:
        return self._store.names()

    def resolve(self, name: str) -> Descriptor:
        return self._store.resolve(name)

    def references(self) -> Iterator[Reference]:
        return self._store.references()

    def close(self) -> None:
        close_store(self._store)

    def _known(self, digest: Digest) -> WholeBlob | None:
        with self._mutex:
            data = self._kept.get(digest)
            if data is None:
                return None
            self._kept.move_to_end(digest)
        return WholeBlob(digest, data)

    def _kept_from(self, blob: Blob, digest: Digest) -> Blob:
        if blob.size > SMALL_BYTES:
            return blob
        with blob:
            data = blob.read_at(0, blob.size)
        hasher = digest.hasher()
        hasher.update(data)
        if hasher.hexdigest() == digest.hex:
            with self._mutex:
                if digest not in self._kept:
                    self._kept[digest] = data
                    self._bytes += len(data)
                while self._bytes > KEPT_BYTES:
                    self._bytes -= len(self._kept.popitem(last=False)[1])
        return WholeBlob(digest, data)
