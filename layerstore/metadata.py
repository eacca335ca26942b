"""Metadata images on their way into a store: written, compressed, committed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import zstandard

from layerstore.digest import Digest
from layerstore.erofs.layout import Device
from layerstore.erofs.writer import write_image
from layerstore.errors import os_errors
from layerstore.pack.stored import StoredPack
from layerstore.progress import Progress
from layerstore.publish import Publisher
from layerstore.tree.inode import Directory

_STEP = 1 << 20
_LEVEL = 9
"""A metadata image is small and is fetched before everything else: worth a slower compressor."""


class StoredMetadata(NamedTuple):
    """Digest and size of a metadata image, raw, and of its blob: the fields of a layer, in their order."""

    metadata: Digest
    metadata_size: int
    blob: Digest
    blob_size: int


def publish_metadata(
    publisher: Publisher, tree: Directory, packs: Sequence[StoredPack], scratch: str, progress: Progress
) -> StoredMetadata:
    """Write and publish the metadata image of a tree whose files have their addresses on ``packs``.

    Raises:
        LimitError, MalformedError, UnsupportedError: as :func:`layerstore.erofs.writer.write_image`.
    """
    devices = [Device(pack.digest, pack.blocks) for pack in packs]
    with ExitStack() as stack:
        with os_errors("write the metadata image"):
            file = stack.enter_context(tempfile.TemporaryFile(dir=scratch))
        upload = stack.enter_context(publisher.store.upload())
        summary = write_image(tree, devices, file)
        progress.start("metadata", summary.bytes)
        compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=summary.bytes)
        with os_errors("read the metadata image"):
            file.seek(0)
            while piece := file.read(_STEP):
                upload.write(compressor.compress(piece))
                progress.advance(len(piece))
        upload.write(compressor.flush())
        blob, size = upload.digest(), upload.size
        publisher.commit(upload, blob)
    return StoredMetadata(summary.digest, summary.bytes, blob, size)
