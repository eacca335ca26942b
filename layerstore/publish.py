"""Writing blobs and images to a store, always in the same order: pin, write, and the reference last."""

from __future__ import annotations

from layerstore.digest import Digest
from layerstore.errors import NotFoundError
from layerstore.image import CONFIG_MEDIA_TYPE, Image
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.store.protocol import Lease, Store, Upload, WriteStore


def commit(
    store: WriteStore, lease: Lease, upload: Upload, digest: Digest, grown: dict[Digest, int] | None = None
) -> None:
    """Commit what has been uploaded; ``grown`` collects the blobs that the store lacked, with their sizes."""
    lease.pin([digest])
    if grown is not None:
        try:
            store.stat(digest)
        except NotFoundError:
            grown[digest] = upload.size
    upload.commit(digest, upload.size)


def publish_bytes(store: WriteStore, lease: Lease, data: bytes, grown: dict[Digest, int] | None = None) -> Digest:
    """Publish a small blob; ``grown`` as in :func:`commit`."""
    digest = Digest.of(data)
    with store.upload() as upload:
        upload.write(data)
        commit(store, lease, upload, digest, grown)
    return digest


def publish_config(
    store: WriteStore,
    lease: Lease,
    config: ImageConfig,
    diff_ids: list[Digest],
    grown: dict[Digest, int] | None = None,
) -> Descriptor:
    """Publish a config with the rootfs of what we publish; everything else in it stays."""
    data = config.with_rootfs(diff_ids, None, os_features=["erofs"])
    return Descriptor(CONFIG_MEDIA_TYPE, publish_bytes(store, lease, data, grown), len(data))


def publish_image(
    store: WriteStore,
    lease: Lease,
    image: Image,
    *,
    tag: str | None,
    expected: Descriptor | None,
    grown: dict[Digest, int] | None = None,
) -> Descriptor:
    """Publish the manifest of an image whose blobs are there, and point ``tag`` at it.

    Raises:
        ConflictError: ``tag`` is not ``expected`` any more, or a blob or the lease is gone.
    """
    lease.renew()
    lease.pin(image.blobs)
    target = image.descriptor()
    publish_bytes(store, lease, image.manifest(), grown)
    if tag is not None:
        store.set_reference(tag, target, expected=expected, lease=lease, reaches=[target.digest, *image.blobs])
    return target


def retag(store: WriteStore, target: Descriptor, image: Image, name: str) -> None:
    """Make ``name`` stand for an image of this store.

    Raises:
        ConflictError: somebody moved ``name`` at the same moment.
    """
    with store.lease() as lease:
        reaches = [target.digest, *image.blobs]
        lease.pin(reaches)
        before = current(store, name)
        store.set_reference(name, target, expected=before, lease=lease, reaches=reaches)


def current(store: Store, name: str) -> Descriptor | None:
    """What ``name`` stands for now, or None."""
    try:
        return store.resolve(name)
    except NotFoundError:
        return None
