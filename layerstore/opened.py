"""Layers opened for reading straight from a store: for ``tree``, ``cat``, ``diff``, and to convert over a base."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import zstandard

from layerstore.digest import Digest
from layerstore.erofs.checker import require_sound
from layerstore.erofs.reader import Image as ErofsImage
from layerstore.erofs.tree import load_tree
from layerstore.errors import CorruptError, os_errors
from layerstore.image import Image, Layer
from layerstore.pack.reader import PackReader
from layerstore.pack.stored import StoredPack
from layerstore.store.protocol import Blob, Store
from layerstore.tree.inode import Directory
from layerstore.tree.union import merge_overlay

_READ = 8 << 20
"""Bytes of a compressed metadata image that are read at once: most are smaller, and a request costs a turn."""
_STEP = 64 << 10
"""Bytes of it that are decompressed at once: it may stand for any amount of output, up to 1:30,000."""


class FileSource:
    """Random access to an open file; the caller closes it."""

    def __init__(self, fd: int, what: str) -> None:
        self._fd = fd
        self._what = what
        self.size = os.fstat(fd).st_size

    def read_at(self, offset: int, length: int) -> bytes:
        with os_errors(f"read {self._what}"):
            data = os.pread(self._fd, length, offset)
            while len(data) < length:
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    raise CorruptError(f"{self._what} ends at byte {offset + len(data)}, before {offset + length}")
                data += more
        return data


class StoreDevices:
    """The packs of a layer as its devices 1, 2, …, read from the store frame by frame when they are first used."""

    def __init__(self, store: Store, packs: tuple[StoredPack, ...]) -> None:
        self._store = store
        self._packs = packs
        self._readers: dict[int, PackReader] = {}
        self._blobs: list[Blob] = []
        self._lock = threading.Lock()  # readers keep a few frames, and conversions read from several threads

    def read_device(self, index: int, offset: int, length: int) -> bytes:
        """Bytes of device ``index``.

        Raises:
            CorruptError: no such device, or the range leaves it.
        """
        with self._lock:
            reader = self._readers.get(index)
            if reader is None:
                if not 1 <= index <= len(self._packs):
                    raise CorruptError(f"device {index} of a layer with {len(self._packs)} packs")
                blob = self._store.open(self._packs[index - 1].blob)
                self._blobs.append(blob)
                reader = self._readers[index] = PackReader(self._packs[index - 1], blob)
            return reader.read_at(offset, length)

    def close(self) -> None:
        for blob in self._blobs:
            blob.close()


def decompress_metadata(store: Store, layer: Layer, write: Callable[[bytes], object]) -> None:
    """Give the raw metadata image to ``write``, checked against its digest and size.

    Raises:
        CorruptError: the blob is not what the manifest says.
    """
    what = f"metadata image {layer.metadata}"
    hasher = layer.metadata.hasher()
    size = 0
    with store.open(layer.blob) as blob:
        if blob.size != layer.blob_size:
            raise CorruptError(f"blob {layer.blob}", expected=f"{layer.blob_size} bytes", actual=f"{blob.size}")
        decoder = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        try:
            for piece in _pieces(blob):
                raw = decoder.decompress(piece)
                size += len(raw)
                if size > layer.metadata_size:
                    break
                hasher.update(raw)
                write(raw)
        except zstandard.ZstdError as error:
            raise CorruptError(f"{what} does not decompress: {error}") from error
    if size != layer.metadata_size:
        raise CorruptError(what, expected=f"{layer.metadata_size} bytes", actual=f"{size}")
    layer.metadata.check(hasher, what)


def _pieces(blob: Blob) -> Iterator[memoryview]:
    for offset in range(0, blob.size, _READ):
        data = memoryview(blob.read_at(offset, min(_READ, blob.size - offset)))
        for start in range(0, len(data), _STEP):
            yield data[start : start + _STEP]


class OpenLayer:
    """A layer's metadata image, checked, and its devices; ``used`` is what it refers to of each of them."""

    def __init__(self, layer: Layer, source: FileSource, devices: StoreDevices) -> None:
        self.layer = layer
        self.image = ErofsImage(source)
        self.devices = devices
        check_devices(self.image, layer)
        self.used = require_sound(self.image)

    def tree(self) -> Directory:
        """The whole tree; its files read through the devices."""
        return load_tree(self.image, self.devices)


def check_devices(image: ErofsImage, layer: Layer) -> None:
    """Compare the device table with the manifest: a pack in the wrong place would give another file's bytes."""
    table = [(device.digest, device.blocks) for device in image.devices]
    listed = [(pack.digest, pack.blocks) for pack in layer.packs]
    if table != listed:
        raise CorruptError(
            f"device table of metadata image {layer.metadata} is not the manifest's list of packs",
            expected=_devices(listed),
            actual=_devices(table),
        )


def _devices(table: list[tuple[Digest, int]]) -> str:
    return ", ".join(f"{digest.hex[:12]}…+{blocks}" for digest, blocks in table) or "none"


@contextmanager
def open_layer(store: Store, layer: Layer, *, scratch: str | None = None) -> Iterator[OpenLayer]:
    """Open a layer; its metadata image is decompressed to an anonymous temporary file in ``scratch``."""
    with ExitStack() as stack:
        with os_errors("open a temporary file for the metadata image"):
            file = stack.enter_context(tempfile.TemporaryFile(dir=scratch))
        decompress_metadata(store, layer, file.write)
        file.flush()
        devices = StoreDevices(store, layer.packs)
        stack.callback(devices.close)
        yield OpenLayer(layer, FileSource(file.fileno(), f"metadata image {layer.metadata}"), devices)


@contextmanager
def open_tree(store: Store, image: Image) -> Iterator[Directory]:
    """What a sandbox of this image sees: its layers' trees, united as overlayfs unites them."""
    with ExitStack() as stack:
        trees = [stack.enter_context(open_layer(store, layer)).tree() for layer in image.layers]
        yield trees[0] if len(trees) == 1 else merge_overlay(trees)
