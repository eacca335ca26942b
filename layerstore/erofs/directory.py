"""Directory blocks: an array of dirents, then their names, all in byte order so that a name is found by bisection.

``.`` and ``..`` are sorted in like any other name. The order runs over the blocks of a directory too.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from layerstore.erofs.format import (
    BLOCK_SIZE,
    DIRENT_SIZE,
    EROFS_FT_BLKDEV,
    EROFS_FT_CHRDEV,
    EROFS_FT_DIR,
    EROFS_FT_FIFO,
    EROFS_FT_REG_FILE,
    EROFS_FT_SOCK,
    EROFS_FT_SYMLINK,
    EROFS_NAME_LEN,
    Dirent,
)
from layerstore.errors import MalformedError, printable

FILE_TYPES = {
    stat.S_IFREG: EROFS_FT_REG_FILE,
    stat.S_IFDIR: EROFS_FT_DIR,
    stat.S_IFCHR: EROFS_FT_CHRDEV,
    stat.S_IFBLK: EROFS_FT_BLKDEV,
    stat.S_IFIFO: EROFS_FT_FIFO,
    stat.S_IFSOCK: EROFS_FT_SOCK,
    stat.S_IFLNK: EROFS_FT_SYMLINK,
}
"""The type in a dirent, by the S_IFMT part of a mode."""

_unpack_dirent = Dirent.STRUCT.unpack_from


class Entry(NamedTuple):
    """A name of a directory and the inode it stands for. ``file_type`` is one of EROFS_FT_*."""

    name: bytes
    nid: int
    file_type: int


def is_name(name: bytes) -> bool:
    """Whether an entry may have this name; ``.`` and ``..`` may not."""
    return 0 < len(name) <= EROFS_NAME_LEN and b"/" not in name and b"\0" not in name and name not in (b".", b"..")


def split_blocks(names: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """How a directory's names, dots included and sorted, fill its blocks: (first, end, bytes used) of each."""
    first = used = 0
    for position, name in enumerate(names):
        need = DIRENT_SIZE + len(name)
        if used + need > BLOCK_SIZE:
            yield first, position, used
            first, used = position, 0
        used += need
    yield first, len(names), used


def measure(names: Sequence[bytes]) -> tuple[int, int]:
    """Number of blocks before the last, and bytes used in the last."""
    total = DIRENT_SIZE * len(names) + sum(map(len, names))
    if total <= BLOCK_SIZE:
        return 0, total
    full = last = 0
    for _, end, used in split_blocks(names):
        full += end < len(names)
        last = used
    return full, last


def encode_blocks(entries: Sequence[Entry]) -> Iterator[bytes]:
    """The blocks for entries in order, dots included; each as long as it is used."""
    pack = Dirent.STRUCT.pack
    for first, end, _ in split_blocks([entry.name for entry in entries]):
        nameoff = DIRENT_SIZE * (end - first)
        dirents = []
        for name, nid, file_type in entries[first:end]:
            dirents.append(pack(nid, nameoff, file_type, 0))
            nameoff += len(name)
        yield b"".join([*dirents, *(entry.name for entry in entries[first:end])])


def count_entries(block: bytes) -> int:
    """Number of entries in a block that is cut to its directory's size.

    Raises:
        MalformedError: no block of a directory.
    """
    if len(block) < DIRENT_SIZE:
        raise MalformedError("a directory block is too short for an entry")
    names_at = Dirent.unpack(block).nameoff
    if names_at < DIRENT_SIZE or names_at % DIRENT_SIZE or names_at >= len(block):
        raise MalformedError(f"the first name of a directory block is at {names_at}, which can't be")
    return names_at // DIRENT_SIZE


def entry_at(block: bytes, position: int, count: int) -> Entry:
    """One of the ``count`` entries of a block.

    Raises:
        MalformedError: its offsets lead astray, or its name isn't one.
    """
    nid, start, file_type, _ = _unpack_dirent(block, position * DIRENT_SIZE)
    if position + 1 < count:
        end = _unpack_dirent(block, (position + 1) * DIRENT_SIZE)[1]
    else:
        end = block.find(b"\0", start)
        end = len(block) if end < 0 else end
    if not count * DIRENT_SIZE <= start < end <= len(block):
        raise MalformedError(f"the name of a directory entry is at {start} to {end}, which can't be")
    name = block[start:end]
    if not is_name(name) and name not in (b".", b".."):
        raise MalformedError(f"a directory entry can't be named {printable(name)!r}")
    return Entry(name, nid, file_type)


def decode_block(block: bytes) -> list[Entry]:
    """The entries of a block as they stand; whether they are in order isn't checked.

    Raises:
        MalformedError: as :func:`entry_at`.
    """
    count = count_entries(block)
    return [entry_at(block, position, count) for position in range(count)]


def search_block(block: bytes, name: bytes) -> Entry | int:
    """The entry with this name; else -1 if it would be before this block, 1 if behind it, 0 if within.

    Raises:
        MalformedError: as :func:`entry_at`.
    """
    count = count_entries(block)
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        entry = entry_at(block, middle, count)
        if entry.name == name:
            return entry
        if entry.name < name:
            low = middle + 1
        else:
            high = middle
    return -1 if low == 0 else int(low == count)
