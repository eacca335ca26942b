"""Layers whose packs are sparse files with nothing in them yet, and the right bytes to fill them with."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from layerstore.cache.framemap import MISSING, READY, FrameMap
from layerstore.tree.inode import Inode
from support.sandboxes import layer_with

FRAME = 64 << 10
"""Raw bytes of a frame: smaller than in stores, so that small packs have many."""


class SparsePack:
    """A pack of which the node has nothing at first.

    ``data_fd`` was opened before anybody could mark the file, so writing through it raises no events.
    """

    def __init__(self, path: Path, data: bytes, *, frame: int = FRAME) -> None:
        """Make ``path`` a file as long as ``data`` with no bytes allocated; ``frame`` raw bytes are a frame."""
        self.path = path
        self.data = data
        sha256 = hashlib.sha256(data).digest()
        self.hex = sha256.hex()
        self.frame = frame
        with path.open("wb") as stream:
            stream.truncate(len(data))
        self.data_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        offsets = list(range(0, len(data), frame))
        self.frames = FrameMap.create(sha256, len(data), offsets, bytes([MISSING]) * len(offsets))

    @property
    def descriptors(self) -> tuple[int, int]:
        """Data and frame map, as messages carry them."""
        return self.data_fd, self.frames.fd

    def __len__(self) -> int:
        return len(self.frames)

    def raw(self, number: int) -> bytes:
        """The right bytes of a frame."""
        return self.data[number * self.frame : (number + 1) * self.frame]

    def fill(self, numbers: Iterable[int] | None = None) -> None:
        """Write frames, all by default, and then say that they may be read."""
        for number in range(len(self)) if numbers is None else numbers:
            raw = self.raw(number)
            assert os.pwrite(self.data_fd, raw, number * self.frame) == len(raw)
            self.frames.set(number, READY)

    def close(self) -> None:
        self.frames.close()
        os.close(self.data_fd)


@dataclass(frozen=True)
class LazyImage:
    """A metadata image, its packs in the order of its device table, and what its files hold."""

    image: Path
    packs: list[SparsePack]
    files: dict[str, bytes]

    @property
    def pack(self) -> SparsePack:
        """The only one."""
        [pack] = self.packs
        return pack


@contextmanager
def lazy_image(
    directory: Path,
    files: Mapping[str, bytes] | None = None,
    *,
    packs: int = 1,
    frame: int = FRAME,
    extra: Mapping[bytes, Inode | bytes] | None = None,
) -> Iterator[LazyImage]:
    """A layer in ``directory``, on a file system that EROFS can be mounted from.

    Its files take 16 KiB pieces of each pack in turns, so that with one pack a file is in one piece, and the files are
    one after the other, in the order of their names. By default there are ``a`` of 1 MiB and ``b`` of 300,001 bytes.
    ``extra`` is more of the tree, see :func:`support.sandboxes.tree`.
    """
    if files is None:
        files = {"a": noise(1 << 20, 1), "b": noise(300_001, 2)}
    entries: dict[bytes, Inode | bytes] = {os.fsencode(name): data for name, data in files.items()}
    layer = layer_with(directory, entries | dict(extra or {}), packs=packs)
    made: list[SparsePack] = []
    try:
        for device in layer.devices:
            path = Path(os.fsdecode(device))
            made.append(SparsePack(path, path.read_bytes(), frame=frame))
        yield LazyImage(Path(os.fsdecode(layer.image)), made, dict(files))
    finally:
        for pack in made:
            pack.close()


def noise(size: int, seed: int) -> bytes:
    """Bytes that no two places share, the same for a seed."""
    return random.Random(seed).randbytes(size)
