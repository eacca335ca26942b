"""Metadata images on the node: raw, whole, and checked before they get their names."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from layerstore.cache.format import USES_BYTES, USES_MAGIC, USES_VERSION, is_hex
from layerstore.errors import CorruptError, NotFoundError, os_errors, printable
from layerstore.image import Layer
from layerstore.opened import FileSource, OpenLayer, StoreDevices, decompress_metadata
from layerstore.staging import StagedFile, allocated, read_file, reclaim_files, write_file
from layerstore.store.protocol import Store


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
        return self.path_of(layer.metadata.hex)

    def path_of(self, hex: str) -> str:
        """As :meth:`path`, by the hex of the metadata image's digest."""
        return os.path.join(self._directory, hex)

    def hexes(self) -> list[str]:
        """The hex of all metadata images that are there, sorted."""
        try:
            with os_errors("list metadata images"):
                return sorted(filter(is_hex, os.listdir(self._directory)))
        except NotFoundError:
            return []

    def size(self, hex: str) -> int:
        """Bytes on disk of a metadata image and what belongs to it; 0 if it isn't there."""
        return sum(allocated(status) for status in self._status(hex))

    def last_use(self, hex: str) -> int:
        """When :meth:`touch` was called last, or the image was fetched: nanoseconds since 1970; 0 if it isn't there."""
        return max((status.st_mtime_ns for status in self._status(hex)[:1]), default=0)

    def touch(self, hex: str) -> None:
        """It is used now."""
        try:
            os.utime(self.path_of(hex))
        except FileNotFoundError:
            pass

    def remove(self, hex: str) -> int:
        """Remove a metadata image and what belongs to it; the bytes it took. Whoever has it mounted keeps it."""
        size = self.size(hex)
        with os_errors(f"remove metadata image sha256:{hex}"):
            # The image first: without it, a rest that a crash leaves counts for nothing.
            for path in (self.path_of(hex), f"{self.path_of(hex)}.uses"):
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    continue
        return size

    def has(self, layer: Layer) -> bool:
        """Whether :meth:`ensure` would fetch nothing.

        Raises:
            CorruptError: it is there, but was written for other packs than the layer's.
        """
        return os.path.exists(self.path(layer)) and self._read_uses(layer) is not None

    def uses_of(self, hex: str) -> list[PackUse]:
        """As :meth:`uses`, for those who have no manifest at hand.

        Raises:
            NotFoundError: the metadata image isn't there.
            CorruptError: what it needs isn't known, or is damaged.
        """
        path = self.path_of(hex)
        with os_errors(f"metadata image sha256:{printable(hex)} of the cache"):
            os.stat(path)
            try:
                uses = _parse_uses(read_file(f"{path}.uses", USES_BYTES))
                if not all(is_hex(use.pack) for use in uses):
                    raise ValueError("a pack without a digest")
            except (FileNotFoundError, *_NOT_USES) as error:
                raise CorruptError(f"{printable(path)}.uses is missing or damaged; fetch the layer again") from error
        return uses

    def packs_of(self, hex: str) -> list[str]:
        """The hex of the packs that a metadata image was written for, in the order of its devices.

        Raises:
            NotFoundError, CorruptError: as :meth:`uses_of`.
        """
        return [use.pack for use in self.uses_of(hex)]

    def _status(self, hex: str) -> list[os.stat_result]:
        """Of the image, then of its uses, as far as they are there."""
        found = []
        for path in (self.path_of(hex), f"{self.path_of(hex)}.uses"):
            try:
                found.append(os.stat(path))
            except FileNotFoundError:
                continue
        return found

    def ensure(self, layer: Layer, store: Store) -> str:
        """Fetch, verify and check the metadata image unless it is there; returns its path.

        Raises:
            CorruptError, MalformedError: it isn't what the manifest says, or isn't a sound image.
        """
        path = self.path(layer)
        if self.has(layer):
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
            with os_errors("read which data a layer needs"):
                uses = _parse_uses(read_file(self.path(layer) + ".uses", USES_BYTES))
            if [use.pack for use in uses] != [pack.digest.hex for pack in layer.packs]:
                # A manifest that lists other packs than the image was written for would give other files' bytes.
                raise CorruptError(f"metadata image {layer.metadata} has other packs than its manifest lists")
            for use, pack in zip(uses, layer.packs, strict=True):
                if any(not 0 <= first < first + count <= pack.blocks for first, count in use.runs):
                    return None
        except (NotFoundError, *_NOT_USES):
            return None
        return uses

    def _write_uses(self, layer: Layer, uses: list[PackUse]) -> None:
        packs = [[use.pack, use.runs] for use in uses]
        document = {"magic": USES_MAGIC, "version": USES_VERSION, "packs": packs}
        write_file(self.path(layer) + ".uses", json.dumps(document).encode())


_NOT_USES = (ValueError, KeyError, TypeError, RecursionError)
"""What :func:`_parse_uses` raises for a file that is damaged or of another version."""


def _parse_uses(content: bytes) -> list[PackUse]:
    if len(content) > USES_BYTES:
        raise ValueError(len(content))
    document = json.loads(content)
    if (document["magic"], document["version"]) != (USES_MAGIC, USES_VERSION):
        raise ValueError(document["version"])
    return [PackUse(pack, tuple((first, count) for first, count in runs)) for pack, runs in document["packs"]]


@contextmanager
def _opened(layer: Layer, store: Store, fd: int) -> Iterator[OpenLayer]:
    devices = StoreDevices(store, layer.packs)
    try:
        yield OpenLayer(layer, FileSource(fd, f"metadata image {layer.metadata}"), devices)
    finally:
        devices.close()


def pack_uses(opened: OpenLayer) -> list[PackUse]:
    """The blocks of each pack that some file of the layer refers to."""
    packs = zip(opened.layer.packs, opened.used, strict=True)
    return [PackUse(pack.digest.hex, _joined(used)) for pack, used in packs]


def _joined(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for first, count in sorted(runs):
        if joined and first <= sum(joined[-1]):
            before, length = joined[-1]
            joined[-1] = before, max(length, first + count - before)
        else:
            joined.append((first, count))
    return tuple(joined)
