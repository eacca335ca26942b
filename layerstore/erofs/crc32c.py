"""CRC-32C (Castagnoli), as far as EROFS needs it: over one block of each image."""

from __future__ import annotations

from layerstore.erofs.format import EROFS_SUPER_OFFSET

_POLYNOMIAL = 0x82F63B78
"""0x1EDC6F41 with its bits reversed."""


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def crc32c(data: bytes, state: int = 0xFFFF_FFFF) -> int:
    """The raw state after ``data``, without the final inversion that makes it the standard checksum."""
    table = _TABLE
    for byte in data:
        state = state >> 8 ^ table[(state ^ byte) & 0xFF]
    return state


def superblock_checksum(block: bytes) -> int:
    """The ``checksum`` field for block 0 of an image.

    It covers the block from the superblock to its end with the field itself as 0; where blocks are 1 KiB or smaller,
    one block's length from the superblock on. The state isn't inverted at the end.

    Args:
        block: the image's first bytes: one block, or 1024 bytes and one block where that is larger.
    """
    covered = bytearray(block[EROFS_SUPER_OFFSET:])
    covered[4:8] = bytes(4)
    return crc32c(bytes(covered))
