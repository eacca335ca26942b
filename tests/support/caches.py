"""A node's cache over a store in memory, whose packs have small frames.

::

    bench = CacheBench(tmp_path)
    pack = bench.make_pack(8)                       # eight frames of one block
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        bench.fill(cached, [0, 1])                  # what a fetcher would do
        bench.assert_right(cached)                  # what is READY is what the pack holds
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from layerstore.cache.cache import Cache
from layerstore.cache.format import FramesHeader
from layerstore.cache.framemap import READY
from layerstore.cache.packs import CachedPack
from layerstore.digest import Digest
from layerstore.pack import writer as pack_writer
from layerstore.pack.chunks import chunk_key
from layerstore.pack.format import BLOCK_SIZE, FrameRecord
from layerstore.pack.stored import StoredPack
from layerstore.pack.writer import PackWriter
from layerstore.store.memory import MemoryStore
from support.conversions import noise


class CacheBench:
    """The node at ``path``, and what its packs should hold."""

    def __init__(self, path: Path | str) -> None:
        self.root = str(path)
        self.store = MemoryStore()
        self.raw: dict[str, bytes] = {}
        self.warnings: list[str] = []

    def make_pack(self, frames: int = 8, seed: int = 0, *, frame_size: int = BLOCK_SIZE, level: int = 1) -> StoredPack:
        """A pack in the store; the same arguments make the same pack."""
        raw = noise(frames * frame_size, seed + 1)
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool, self.store.upload() as upload:
            patch.setattr(pack_writer, "FRAME_SIZE", frame_size)
            writer = PackWriter(upload, pool, jobs=1, level=level)
            if raw:
                writer.add([(chunk_key(raw), len(raw) // BLOCK_SIZE)], raw)
            pack = writer.finish()
            upload.commit(pack.blob, pack.blob_size)
        self.raw[pack.digest.hex] = raw
        return pack

    def open(self, **fields: Any) -> Cache:
        return Cache(self.root, **{"warn": self.warnings.append, **fields})

    def place(self, pack: StoredPack | CachedPack) -> Path:
        return Path(self.root, "cache", "packs", "sha256", pack.digest.hex)

    def frame(self, cached: CachedPack, number: int) -> bytes:
        offset, length = cached.index.raw_range(number)
        return self.raw[cached.hex][offset : offset + length]

    def fill(self, cached: CachedPack, numbers: Iterable[int] | None = None) -> None:
        """Write frames, by default all that aren't READY."""
        for number in cached.unready(range(len(cached.index))) if numbers is None else numbers:
            cached.write(number, self.frame(cached, number))

    def recorded(self, pack: StoredPack | CachedPack) -> list[int]:
        """The frames that the file says are there."""
        content = (self.place(pack) / "frames").read_bytes()
        header = FramesHeader.unpack(content)
        presence = content[FramesHeader.STRUCT.size + header.frames * FrameRecord.STRUCT.size :]
        return [number for number, byte in enumerate(presence) if byte]

    def on_disk(self, cached: CachedPack, number: int) -> bytes:
        offset, length = cached.index.raw_range(number)
        return os.pread(cached.data_fd, length, offset)

    def is_hole(self, cached: CachedPack, number: int) -> bool:
        offset, length = cached.index.raw_range(number)
        try:
            return os.lseek(cached.data_fd, offset, os.SEEK_DATA) >= offset + length
        except OSError:
            return True

    def assert_right(self, cached: CachedPack) -> list[int]:
        """The frames that are READY, all of which hold what they should."""
        ready = [number for number, state in enumerate(cached.frames.states()) if state == READY]
        for number in ready:
            assert self.on_disk(cached, number) == self.frame(cached, number)
        return ready

    def damage(self, pack: StoredPack | CachedPack, number: int, *, size: int = BLOCK_SIZE) -> None:
        """Change a byte of a frame, behind everybody's back; ``size`` is that of the frames."""
        with open(self.place(pack) / "data", "r+b") as file:
            file.seek(number * size + 17)
            byte = file.read(1)
            file.seek(number * size + 17)
            file.write(bytes([byte[0] ^ 1]))

    def leftovers(self) -> list[str]:
        """Temporary names anywhere in the node."""
        return [
            name
            for _, directories, files in os.walk(self.root)
            for name in (*directories, *files)
            if name.startswith(".tmp-")
        ]


def descriptors() -> set[str]:
    """What this process has open: equal before and after something that must close all that it opens."""
    return {
        f"{name}:{os.readlink(f'/proc/self/fd/{name}')}"
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    }


def digest_of(cached: CachedPack) -> Digest:
    """Of the whole data file."""
    return Digest.of(Path(cached.data_path).read_bytes())
