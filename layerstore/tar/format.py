"""The tar format: 512-byte blocks, all numbers as text.

Sources: POSIX.1-2017 `pax` (ustar and extended headers); GNU tar manual, "Basic Tar Format" and "Storing Sparse
Files"; star(5) for its variant of the prefix. Field names are those of POSIX and GNU.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import adler32

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)

# typeflag
AREGTYPE = b"\0"  # v7: regular, or a directory if the name ends in "/"
REGTYPE = b"0"
LNKTYPE = b"1"
SYMTYPE = b"2"
CHRTYPE = b"3"
BLKTYPE = b"4"
DIRTYPE = b"5"
FIFOTYPE = b"6"
CONTTYPE = b"7"  # contiguous: regular everywhere today
XHDTYPE = b"x"  # extended header of the next member
XGLTYPE = b"g"  # extended header of all members that follow
SOLARIS_XHDTYPE = b"X"
GNUTYPE_LONGNAME = b"L"
GNUTYPE_LONGLINK = b"K"
GNUTYPE_SPARSE = b"S"
GNUTYPE_DUMPDIR = b"D"  # a directory whose body lists names
GNUTYPE_MULTIVOL = b"M"  # the rest of a file that began in another archive

MAGIC_POSIX = b"ustar\0"
MAGIC_GNU = b"ustar "
STAR_TRAILER = b"tar\0"

# Bounds on what we accept: three of memory and time, then the kernel's.
EXTENDED_BYTES = 4 << 20  # body of one extended header: 5,000 attributes with 800 bytes each, or 63 of 64 KiB
GLOBAL_BYTES = 256 << 10  # bodies of all global headers of a layer, since each member may have to look at them
SPARSE_RUNS = 1 << 18  # entries of one sparse map
ID_MAX = 0xFFFF_FFFE  # uid_t is 32 bits, and (uid_t)-1 means "leave as it is" (chown(2))
TARGET_MAX = 4095  # PATH_MAX without its NUL (linux/limits.h)
XATTR_NAME_MAX = 255  # linux/limits.h
XATTR_SIZE_MAX = 65536  # linux/limits.h
MAJOR_MAX = (1 << 12) - 1  # dev_t inside the kernel: 12 and 20 bits (linux/kdev_t.h)
MINOR_MAX = (1 << 20) - 1
OFFSET_MAX = (1 << 63) - 1  # loff_t
TIME_MIN, TIME_MAX = -(1 << 63), (1 << 63) - 1  # time64_t


_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12s")
_SPARSE_HEADER = struct.Struct("345x12s12s12s4sx96sB12s17x")
_SPARSE_EXTENSION = struct.Struct("504sB7x")


class Header(NamedTuple):
    """A ustar header block. Strings end at a NUL or with their field; numbers: :func:`parse_number`."""

    name: bytes
    mode: bytes
    uid: bytes
    gid: bytes
    size: bytes  # bytes
    mtime: bytes  # seconds since 1970
    chksum: bytes
    typeflag: bytes
    linkname: bytes
    magic: bytes
    version: bytes
    uname: bytes
    gname: bytes
    devmajor: bytes
    devminor: bytes
    prefix: bytes  # GNU: atime, ctime and the sparse map from here on
    pad: bytes

    @classmethod
    def unpack(cls, block: bytes) -> Header:
        return cls._make(_HEADER.unpack(block))

    def pack(self) -> bytes:
        return _HEADER.pack(*self)


class SparseHeader(NamedTuple):
    """What an old GNU sparse member has in place of ``prefix`` and ``pad``; four (offset, numbytes) pairs."""

    atime: bytes
    ctime: bytes
    offset: bytes  # of a multi-volume part
    longnames: bytes
    sp: bytes
    isextended: int  # not 0: a SparseExtension follows
    realsize: bytes  # logical size, bytes

    @classmethod
    def unpack(cls, block: bytes) -> SparseHeader:
        return cls._make(_SPARSE_HEADER.unpack(block))


class SparseExtension(NamedTuple):
    """A block with 21 more (offset, numbytes) pairs."""

    sp: bytes
    isextended: int

    @classmethod
    def unpack(cls, block: bytes) -> SparseExtension:
        return cls._make(_SPARSE_EXTENSION.unpack(block))


SPARSE_PAIR = struct.Struct("12s12s")  # struct sparse: offset, numbytes


def padded(size: int) -> int:
    """``size`` rounded up to whole blocks."""
    return (size + BLOCK - 1) & -BLOCK


def string(field: bytes) -> bytes:
    """A string field: up to its first NUL, or all of it."""
    end = field.find(0)
    return field if end < 0 else field[:end]


def parse_number(field: bytes) -> int:
    """A numeric field: octal digits between blanks and NULs, empty for 0, or GNU's base-256 two's complement.

    Raises:
        ValueError: neither.
    """
    if field[0] & 0x80:
        bits = 8 * len(field) - 1
        value = int.from_bytes(field, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if value >> (bits - 1) else value
    text = field.strip(b" \0")
    if not text:
        return 0
    if not text.isdigit():
        text = string(text).rstrip(b" ")  # some writers leave old bytes behind the NUL
        if not text.isdigit():
            raise ValueError(f"not a number: {field!r}")
    try:
        return int(text, 8)
    except ValueError:
        raise ValueError(f"not an octal number: {field!r}") from None


def checksum(block: bytes) -> int:
    """Sum of a header's bytes, its checksum field counted as blanks.

    The low half of Adler-32 is one more than the sum of the bytes modulo 65,521, hence exact for up to 256 of them;
    three times as fast as ``sum``.
    """
    low = (adler32(block[:256]) & 0xFFFF) + (adler32(block[256:]) & 0xFFFF) - 2
    return low - sum(block[148:156]) + 8 * 0x20


def signed_checksum(block: bytes) -> int:
    """The sum as writers with signed characters compute it; POSIX lets readers accept it."""
    rest = block[:148] + block[156:]
    return sum(byte - 256 if byte > 127 else byte for byte in rest) + 8 * 0x20
