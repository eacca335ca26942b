"""Holes in sparse files: ``fallocate(2)`` with FALLOC_FL_PUNCH_HOLE, and ``lseek(2)`` with SEEK_DATA and SEEK_HOLE."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02
"""linux/falloc.h"""

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", _libc.fallocate)
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_fallocate.restype = ctypes.c_int


def punch(file: int, offset: int, length: int) -> None:
    """Give these bytes back to the file system; they read as zeros. The file keeps its size.

    Raises:
        OSError: EOPNOTSUPP where the file system can't.
    """
    while _fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def holes(file: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the holes in the first ``size`` bytes, in order; none if the file system doesn't tell."""
    at = 0
    while at < size:
        try:
            data = min(os.lseek(file, at, os.SEEK_DATA), size)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return
            data = size
        if data > at:
            yield at, data - at
        at = os.lseek(file, data, os.SEEK_HOLE) if data < size else size
