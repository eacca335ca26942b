"""Metadata images on the node: raw, whole, and checked before they get their names."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from layerstore.cache.format import USES_MAGIC, USES_VERSION
from layerstore.erofs.layout import HOLE, Chunked
from layerstore.errors import CorruptError, NotFoundError, os_errors
from layerstore.image import Layer
from layerstore.opened import FileSource, OpenLayer, StoreDevices, decompress_metadata
from layerstore.pack.format import BLOCK_SIZE
from layerstore.staging import StagedFile, reclaim_files, write_file
from layerstore.store.protocol import Store
from layerstore.tree.inode import File, walk


@dataclass(frozen=True, slots=True)
class PackUse:
    """The parts of one pack that a layer refers to: (first block, blocks), sorted and joined."""

    pack: str
    runs: tuple[tuple[int, int], ...]


class MetadataCache:
    """``root`` is ``cache/meta`` of the node."""

    def __init__(self, root: str) -> None:
        self._directory = os.path.join(root, "sha256")

    def path(self, layer: Layer) -> str:
        """Where the layer's metadata image is, or will be."""
        return os.path.join(self._directory, layer.metadata.hex)

    def ensure(self, layer: Layer, store: Store) -> str:
        """Fetch, verify and check the metadata image unless it is there; returns its path.

        Raises:
            CorruptError, MalformedError: it isn't what the manifest says, or isn't a sound image.
        """
        path = self.path(layer)
        if os.path.exists(path) and self._read_uses(layer) is not None:
            return path
        with os_errors("cache a metadata image"):
            os.makedirs(self._directory, exist_ok=True)
            staged = StagedFile(self._directory)
            try:
                decompress_metadata(store, layer, staged.write)
                with _opened(layer, store, staged.fileno()) as opened:
                    uses = pack_uses(opened)
                staged.seal()
                self._write_uses(layer, uses)
                staged.publish(path)
            finally:
                staged.discard()
        return path

    def reclaim(self) -> int:
        """Remove what dead writers left; the bytes it took."""
        return reclaim_files(self._directory, time.time_ns(), dry_run=False)

    def uses(self, layer: Layer) -> list[PackUse]:
        """What the layer needs of each of its packs; the metadata image has to be there.

        Raises:
            CorruptError: it isn't known, or of other packs than the layer's.
        """
        uses = self._read_uses(layer)
        if uses is None:
            raise CorruptError(f"{self.path(layer)}.uses is missing or damaged; remove it and fetch the layer again")
        return uses

    def _read_uses(self, layer: Layer) -> list[PackUse] | None:
        """None if the file is missing, damaged or of another version: then it is to be made anew."""
        try:
            with os_errors("read which data a layer needs"), open(self.path(layer) + ".uses", "rb") as file:
                document = json.loads(file.read())
            if (document["magic"], document["version"]) != (USES_MAGIC, USES_VERSION):
                return None
            uses = [PackUse(pack, tuple((first, count) for first, count in runs)) for pack, runs in document["packs"]]
            if [use.pack for use in uses] != [pack.digest.hex for pack in layer.packs]:
                # A manifest that lists other packs than the image was written for would give other files' bytes.
                raise CorruptError(f"metadata image {layer.metadata} has other packs than its manifest lists")
            for use, pack in zip(uses, layer.packs, strict=True):
                if any(not 0 <= first < first + count <= pack.blocks for first, count in use.runs):
                    return None
        except (NotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return uses

    def _write_uses(self, layer: Layer, uses: list[PackUse]) -> None:
        packs = [[use.pack, use.runs] for use in uses]
        document = {"magic": USES_MAGIC, "version": USES_VERSION, "packs": packs}
        write_file(self.path(layer) + ".uses", json.dumps(document).encode())


@contextmanager
def _opened(layer: Layer, store: Store, fd: int) -> Iterator[OpenLayer]:
    devices = StoreDevices(store, layer.packs)
    try:
        yield OpenLayer(layer, FileSource(fd, f"metadata image {layer.metadata}"), devices)
    finally:
        devices.close()


def pack_uses(opened: OpenLayer) -> list[PackUse]:
    """The blocks of each pack that some file of the layer refers to."""
    runs: list[list[tuple[int, int]]] = [[] for _ in opened.layer.packs]
    seen: set[int] = set()
    for _, inode in walk(opened.tree()):
        if not isinstance(inode, File) or not isinstance(inode.chunks, Chunked) or id(inode) in seen:
            continue
        seen.add(id(inode))
        chunk = BLOCK_SIZE << inode.chunks.bits
        for number, where in enumerate(inode.chunks.addresses):
            if where != HOLE:
                length = min(chunk, inode.size - number * chunk)
                runs[(where >> 32) - 1].append((where & 0xFFFFFFFF, -(-length // BLOCK_SIZE)))
    return [PackUse(pack.digest.hex, _joined(used)) for pack, used in zip(opened.layer.packs, runs, strict=True)]


def _joined(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for first, count in sorted(runs):
        if joined and first <= sum(joined[-1]):
            before, length = joined[-1]
            joined[-1] = before, max(length, first + count - before)
        else:
            joined.append((first, count))
    return tuple(joined)
