"""What files hold, whatever it is stored as."""

from __future__ import annotations

from layerstore.tree.inode import File

_STEP = 1 << 20


def read_range(file: File, offset: int, length: int) -> bytes:
    """Bytes of a file, holes as zeros; the caller keeps inside its size."""
    data = bytearray(length)
    for start, extent_length, source, at in file.extents:
        low, high = max(start, offset), min(start + extent_length, offset + length)
        if low < high:
            data[low - offset : high - offset] = source.read_at(at + low - start, high - low)
    return bytes(data)


def same_content(one: File, other: File) -> bool:
    """Whether two files hold the same bytes; a hole and zeros are the same."""
    if one.size != other.size:
        return False
    for offset in range(0, one.size, _STEP):
        length = min(_STEP, one.size - offset)
        if read_range(one, offset, length) != read_range(other, offset, length):
            return False
    return True
