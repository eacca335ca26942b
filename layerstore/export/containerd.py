"""Images for containerd's EROFS snapshotter: a flat form for each layer, under the media types that a release knows.

=======  ==================================================  ===================================  ======================
form     media type of a layer                               diff ID                              ``os.features``
=======  ==================================================  ===================================  ======================
``2.1``  ``application/vnd.oci.image.layer.v1.erofs``        the layer's digest                   without ``erofs``
``2.3``  ``application/vnd.erofs.layer.v1``, and ``+zstd``   digest of the uncompressed layer     ``erofs``
=======  ==================================================  ===================================  ======================

containerd 2.1 and 2.2 unpack nothing of a type they don't know, without a word, and leave out images that require
``erofs``; 2.3 knows the ``.erofs`` type no longer. So there is no image for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

from layerstore.digest import Digest
from layerstore.errors import UsageError, about
from layerstore.export.compress import Compression, compressor
from layerstore.export.document import EROFS_FEATURE, load_config, load_stack
from layerstore.export.exported import Exported, ExportedLayer, publish
from layerstore.export.flat import write_flat
from layerstore.export.gather import Gatherer
from layerstore.export.target import Target
from layerstore.image import Layer
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.platform import Platform
from layerstore.opened import open_layer
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Store


class Form(StrEnum):
    """Which of containerd's releases it is for, and those after it up to the next."""

    V2_1 = "2.1"
    V2_3 = "2.3"


_MEDIA_TYPE = {
    Form.V2_1: "application/vnd.oci.image.layer.v1.erofs",
    Form.V2_3: "application/vnd.erofs.layer.v1",
}
_FEATURES: dict[Form, tuple[str, ...]] = {Form.V2_1: (), Form.V2_3: (EROFS_FEATURE,)}


def export_containerd(
    store: Store,
    name: str,
    target: Target,
    *,
    form: Form,
    compression: Compression | None = None,
    platform: Platform | None = None,
    jobs: int = 2,
    progress: Progress = SILENT,
    warn: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write an image for containerd; the target is published when all of it is there.

    Args:
        store: has the image.
        name: reference or digest.
        target: entered.
        form: the release.
        compression: none, or zstd for 2.3, which is what None means there.
        platform: put in where the image names none.
        jobs: threads; the result doesn't depend on it.
        progress: advances by bytes of flat forms.
        warn: hears of what the image may not work for.

    Raises:
        NotFoundError: no such image, or a blob of it is missing.
        CorruptError: a blob isn't what its digest says.
        UsageError: a compression that the form has not, or another platform than the image's.
        NoSpaceError: the target is full; it is as it was.
    """
    compression = _compression(form, compression)
    image = load_stack(store, name)
    config = load_config(store, image, name, platform, warn)
    with ThreadPoolExecutor(jobs, thread_name_prefix="export") as pool:
        try:
            layers = [
                _write_layer(store, layer, number, target, form, compression, pool, jobs, progress)
                for number, layer in enumerate(image.layers)
            ]
        finally:
            pool.shutdown(cancel_futures=True)
    return publish(target, image, config, layers, _FEATURES[form])


def _compression(form: Form, asked: Compression | None) -> Compression:
    if form is Form.V2_1:
        if asked not in (None, Compression.NONE):
            raise UsageError(f"containerd 2.1 takes EROFS layers uncompressed only, not with {asked}")
        return Compression.NONE
    if asked is Compression.GZIP:
        raise UsageError("containerd takes EROFS layers with zstd or uncompressed, not with gzip")
    return asked or Compression.ZSTD


def _write_layer(
    store: Store,
    layer: Layer,
    number: int,
    target: Target,
    form: Form,
    compression: Compression,
    pool: ThreadPoolExecutor,
    jobs: int,
    progress: Progress,
) -> ExportedLayer:
    raw = hashlib.sha256()
    with (
        about(f"layer {number}"),
        open_layer(store, layer, scratch=target.scratch) as opened,
        Gatherer(store, layer.packs, pool) as gatherer,
        target.upload() as upload,
    ):
        packed = compressor(compression, upload.write, pool, jobs=jobs)
        try:

            def write(data: memoryview) -> None:
                if compression is not Compression.NONE:
                    raw.update(data)
                packed.write(data)

            flat = write_flat(opened, gatherer, write, scratch=target.scratch, progress=progress)
            packed.close()
        finally:
            packed.abandon()
        digest, size = upload.digest(), upload.size
        upload.commit(digest, size)
    diff_id = digest if compression is Compression.NONE else Digest("sha256", raw.hexdigest())
    media_type = _MEDIA_TYPE[form] + (f"+{compression.suffix}" if compression.suffix else "")
    return ExportedLayer(Descriptor(media_type, digest, size), diff_id, flat.size)
