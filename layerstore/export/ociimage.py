"""Ordinary images: a tar layer for each layer, for everything that takes OCI images.

The diff IDs depend on the layers' trees alone. The digests of gzip and zstd blobs also depend on the release of zlib or
zstd that compressed them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from layerstore.digest import Digest
from layerstore.errors import about
from layerstore.export.compress import Compression, compressor
from layerstore.export.document import load_config, load_stack
from layerstore.export.exported import Exported, ExportedLayer, publish
from layerstore.export.gather import Gatherer
from layerstore.export.target import Target
from layerstore.export.tarlayer import Write, data_size, write_tar
from layerstore.image import Layer
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.mediatype import layer_type
from layerstore.oci.platform import Platform
from layerstore.opened import open_layer
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Store


def export_image(
    store: Store,
    name: str,
    target: Target,
    *,
    compression: Compression = Compression.GZIP,
    platform: Platform | None = None,
    jobs: int = 2,
    progress: Progress = SILENT,
    warn: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write an image of tar layers; the target is published when all of it is there.

    Args:
        store: has the image.
        name: reference or digest.
        target: entered.
        compression: of the layers.
        platform: put in where the image names none.
        jobs: threads; the result doesn't depend on it.
        progress: advances by bytes of file data.
        warn: receives a line for what a tar layer can't say and was left out.

    Raises:
        NotFoundError: no such image, or a blob of it is missing.
        CorruptError: a blob isn't what its digest says.
        UnsupportedError: a name that would mean something else in a tar layer.
        UsageError: another platform than the image's.
        NoSpaceError: the target is full; it is as it was.
    """
    image = load_stack(store, name)
    config = load_config(store, image, name, platform, warn)
    layers = []
    with ThreadPoolExecutor(jobs, thread_name_prefix="export") as pool:
        try:
            for number, layer in enumerate(image.layers):
                with about(f"layer {number}"), target.upload() as upload:
                    packed = compressor(compression, upload.write, pool, jobs=jobs)
                    try:
                        digest, raw_size = write_layer(
                            store, layer, packed.write, pool, target.scratch, number == 0, progress, warn
                        )
                        packed.close()
                    finally:
                        packed.abandon()
                    descriptor = Descriptor(layer_type(compression.suffix), upload.digest(), upload.size)
                    upload.commit(descriptor.digest, descriptor.size)
                layers.append(ExportedLayer(descriptor, digest, raw_size))
        finally:
            pool.shutdown(cancel_futures=True)
    return publish(target, image, config, layers, ())


def write_layer(
    store: Store,
    layer: Layer,
    write: Write,
    pool: ThreadPoolExecutor,
    scratch: str,
    bottom: bool,
    progress: Progress,
    warn: Callable[[str], None],
) -> tuple[Digest, int]:
    """Give a layer's tar to ``write``; its diff ID and size in bytes."""
    hasher = hashlib.sha256()
    size = 0

    def out(data: bytes | memoryview) -> None:
        nonlocal size
        hasher.update(data)
        size += len(data)
        write(data)

    with open_layer(store, layer, scratch=scratch) as opened, Gatherer(store, layer.packs, pool) as gatherer:
        tree = opened.tree()
        progress.start("tar", data_size(tree))
        write_tar(tree, gatherer, out, bottom=bottom, warn=warn, progress=progress)
    return Digest("sha256", hasher.hexdigest()), size
