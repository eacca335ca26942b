"""Reading whole blobs, checked."""

from __future__ import annotations

from collections.abc import Iterator

from layerstore.digest import Digest
from layerstore.errors import CorruptError, LimitError
from layerstore.oci.descriptor import Descriptor
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Blob, Store

CHUNK = 1 << 20
"""Bytes read at a time: enough to keep a disk or a connection busy, small beside the memory of a process."""


def read_blob(store: Store, descriptor: Descriptor, *, limit: int) -> bytes:
    """All bytes of a blob, verified.

    Raises:
        LimitError: more than ``limit`` bytes.
        CorruptError: the size or the digest is wrong.
        NotFoundError: no such blob.
    """
    if descriptor.size > limit:
        raise LimitError(f"blob {descriptor.digest} has {descriptor.size} bytes, more than the limit of {limit}")
    return b"".join(stream_blob(store, descriptor.digest, descriptor.size))


def stream_blob(store: Store, digest: Digest, size: int | None = None) -> Iterator[bytes]:
    """The bytes of a blob in pieces. They can be trusted only when the iterator has ended without an error.

    Raises:
        CorruptError: the size or the digest is wrong.
        NotFoundError: no such blob.
    """
    what = f"blob {digest} in {store.location}"
    with store.open(digest) as blob:
        if size is not None and blob.size != size:
            raise CorruptError(what, expected=f"{size} bytes", actual=f"{blob.size}")
        hasher = digest.hasher()
        for piece in pieces(blob):
            hasher.update(piece)
            yield piece
        digest.check(hasher, what)


def pieces(blob: Blob) -> Iterator[bytes]:
    """The bytes of an open blob, unchecked: for who hands them to an upload, which checks them."""
    for offset in range(0, blob.size, CHUNK):
        yield blob.read_at(offset, min(CHUNK, blob.size - offset))


def is_intact(blob: Blob, digest: Digest, progress: Progress = SILENT) -> bool:
    """Whether the bytes of an open blob have this digest."""
    hasher = digest.hasher()
    for piece in pieces(blob):
        hasher.update(piece)
        progress.advance(len(piece))
    return hasher.hexdigest() == digest.hex
