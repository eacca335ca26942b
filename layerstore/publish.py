"""Writing blobs and images to a store, always in the same order: pin, write, and the reference last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from layerstore.digest import Digest
from layerstore.errors import ConflictError, NotFoundError
from layerstore.image import CONFIG_MEDIA_TYPE
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.store.protocol import Lease, Store, Upload, WriteStore


class Publishable(Protocol):
    """An image, or an artifact."""

    def manifest(self) -> bytes: ...
    def descriptor(self) -> Descriptor: ...

    @property
    def blobs(self) -> Mapping[Digest, int]: ...


class Publisher:
    """Writes to ``store`` under ``lease``.

    Attributes:
        grown: bytes of the blobs that the store lacked.
    """

    def __init__(self, store: WriteStore, lease: Lease) -> None:
        self.store = store
        self.lease = lease
        self.grown = 0

    def commit(self, upload: Upload, digest: Digest) -> None:
        """Commit what has been uploaded."""
        self.lease.pin([digest])
        try:
            self.store.stat(digest)
        except NotFoundError:
            self.grown += upload.size
        upload.commit(digest, upload.size)

    def small(self, data: bytes) -> Digest:
        """Publish a blob that fits in memory."""
        digest = Digest.of(data)
        with self.store.upload() as upload:
            upload.write(data)
            self.commit(upload, digest)
        return digest

    def config(self, config: ImageConfig, diff_ids: list[Digest]) -> Descriptor:
        """Publish a config with the rootfs of what we publish; everything else in it stays."""
        data = config.with_rootfs(diff_ids, None, os_features=["erofs"])
        return Descriptor(CONFIG_MEDIA_TYPE, self.small(data), len(data))

    def image(self, image: Publishable, *, tag: str | None, expected: Descriptor | None) -> Descriptor:
        """Publish the manifest of an image or artifact whose blobs are there, and point ``tag`` at it.

        Raises:
            ConflictError: ``tag`` is not ``expected`` any more, or a blob or the lease is gone.
        """
        self.lease.renew()
        self.lease.pin(image.blobs)
        target = image.descriptor()
        self.small(image.manifest())
        if tag is not None:
            self.reference(tag, target, image, expected=expected)
        return target

    def reference(self, name: str, target: Descriptor, image: Publishable, *, expected: Descriptor | None) -> None:
        """Make ``name``, which stands for ``expected``, stand for an image or artifact of this store.

        It is no conflict if somebody else has published the same image under it meanwhile.

        Raises:
            ConflictError: as :meth:`image`.
        """
        reaches = [target.digest, *image.blobs]
        self.lease.pin(reaches)
        try:
            self.store.set_reference(name, target, expected=expected, lease=self.lease, reaches=reaches)
        except ConflictError:
            now = current(self.store, name)
            if now is None or now.digest != target.digest:
                raise


def current(store: Store, name: str) -> Descriptor | None:
    """What ``name`` stands for now, or None."""
    try:
        return store.resolve(name)
    except NotFoundError:
        return None
