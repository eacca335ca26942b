"""A directory for ``layer_content_caches`` of containerd's EROFS snapshotter (2.4): layers that needn't be pulled.

::

    DIR/<algorithm>/<first two hex digits>/<hex>.erofs     the flat form of the layer with this diff ID

The snapshotter looks there when it is about to unpack a layer, and mounts what it finds where it lies, read-only; the
directory may be shared, and must not be on overlayfs. It believes what is there, so the directory is only for whom
the machines trust.

A flat form stands for a layer under each diff ID that is known to mean it; the names are hard links:

* its own digest: the diff ID in images that ``export --for containerd`` writes;
* that of the tar layer that ``export`` writes for it: so the ordinary image is all that nodes need from a registry;
* that of the source's layer, where a base was made from one layer alone: then the original image will do. Not for
  layers over others, which are right over their own base only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import UsageError, about, os_errors, printable
from layerstore.export.document import load_stack
from layerstore.export.flat import write_flat
from layerstore.export.gather import Gatherer
from layerstore.export.ociimage import write_layer
from layerstore.image import Layer
from layerstore.opened import open_layer
from layerstore.progress import SILENT, Progress
from layerstore.staging import StagedFile, make_directory, sync_directory
from layerstore.store.protocol import Store

SUFFIX = ".erofs"


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """A flat form of ``size`` bytes and the diff IDs that it is there for; ``written`` is False where it was before."""

    diff_ids: tuple[Digest, ...]
    size: int
    written: bool


def export_cache(
    store: Store,
    name: str,
    directory: str,
    *,
    jobs: int = 2,
    progress: Progress = SILENT,
    warn: Callable[[str], None] = lambda text: None,
) -> list[CachedLayer]:
    """Put the layers of an image into a content cache, which is made where there is none; what is there stays.

    Args:
        store: has the image.
        name: reference or digest.
        directory: its parent is there.
        jobs: threads.
        progress: advances by bytes of flat forms, and of file data as their tar layers are hashed.
        warn: receives what tar layers leave out.

    Raises:
        NotFoundError: no such image, or a blob of it is missing.
        CorruptError: a blob isn't what its digest says.
        UnsupportedError: a name that a tar layer can't have.
        NoSpaceError: it is full. Layers that are complete stay.
    """
    image = load_stack(store, name)
    directory = os.path.abspath(directory)
    with os_errors(f"make the content cache {printable(directory)}"):
        if os.path.lexists(directory) and not os.path.isdir(directory):
            raise UsageError(f"{printable(directory)} is no directory")
        make_directory(directory)
    done = []
    with ThreadPoolExecutor(jobs, thread_name_prefix="export") as pool:
        try:
            for number, layer in enumerate(image.layers):
                with about(f"layer {number}"):
                    done.append(_add(store, layer, number == 0, directory, pool, progress, warn))
        finally:
            pool.shutdown(cancel_futures=True)
    return done


def path_of(directory: str, diff_id: Digest) -> str:
    """Where the snapshotter looks for a layer."""
    return os.path.join(directory, diff_id.algorithm, diff_id.hex[:2], diff_id.hex + SUFFIX)


def _add(
    store: Store,
    layer: Layer,
    bottom: bool,
    directory: str,
    pool: ThreadPoolExecutor,
    progress: Progress,
    warn: Callable[[str], None],
) -> CachedLayer:
    tar, _ = write_layer(store, layer, lambda data: None, pool, directory, bottom, progress, warn)
    named = [tar]
    if bottom and len(layer.diff_ids) == 1:
        named += layer.diff_ids
    with os_errors("write to the content cache"):
        if all(os.path.exists(path_of(directory, diff_id)) for diff_id in named):
            return CachedLayer(tuple(named), os.stat(path_of(directory, tar)).st_size, False)
        own, size = _write(store, layer, directory, pool, progress)
        for diff_id in named:
            _link(path_of(directory, own), path_of(directory, diff_id))
    return CachedLayer((*named, own), size, True)


def _write(
    store: Store, layer: Layer, directory: str, pool: ThreadPoolExecutor, progress: Progress
) -> tuple[Digest, int]:
    """Write a layer's flat form under its own digest; that, and its size."""
    hasher = hashlib.sha256()
    staged = StagedFile(directory)

    def write(data: memoryview) -> None:
        hasher.update(data)
        staged.write(data)

    try:
        with open_layer(store, layer, scratch=directory) as opened, Gatherer(store, layer.packs, pool) as gatherer:
            flat = write_flat(opened, gatherer, write, scratch=directory, progress=progress)
        staged.seal()
        own = Digest("sha256", hasher.hexdigest())
        path = path_of(directory, own)
        _make_parents(path)
        staged.publish(path)
        sync_directory(os.path.dirname(path))
    finally:
        staged.discard()
    return own, flat.size


def _link(path: str, name: str) -> None:
    """Give a file another name, durably. What has that name stays: somebody may have it mounted."""
    _make_parents(name)
    try:
        os.link(path, name)
    except FileExistsError:
        return
    sync_directory(os.path.dirname(name))


def _make_parents(path: str) -> None:
    shard = os.path.dirname(path)
    make_directory(os.path.dirname(shard))
    make_directory(shard)
