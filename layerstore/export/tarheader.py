"""Header blocks of tar layers: ustar, and PAX records for what doesn't fit (POSIX.1-2017, pax).

What fits a ustar header has no extended one. Values are bytes from end to end, so nothing is lost of a name that is
no UTF-8 or of a binary attribute; :mod:`layerstore.tar` reads all of it back.

Choices where readers differ:

* Times have nine digits behind the point: readers that count them (mkfs.erofs before 1.9.2) are right then.
* A number that has no place in ustar is 0 there, as Go writes it; who doesn't read PAX can't be helped.
* A name that is no UTF-8 stays in the ustar field where it fits. Where it doesn't, ``hdrcharset=BINARY`` says so.
* An attribute whose name has "=" can't be a ``SCHILY.xattr.`` keyword; it is a ``LIBARCHIVE.xattr.`` one, encoded.
"""

from __future__ import annotations

import binascii
from typing import NamedTuple
from urllib.parse import quote_from_bytes

from layerstore.tar import pax
from layerstore.tar.format import (
    BLKTYPE,
    BLOCK,
    CHRTYPE,
    DIRTYPE,
    FIFOTYPE,
    LNKTYPE,
    MAGIC_POSIX,
    REGTYPE,
    SYMTYPE,
    XHDTYPE,
    Header,
    checksum,
    padded,
)
from layerstore.tree.inode import Attrs, Xattrs

__all__ = ("BLKTYPE", "CHRTYPE", "DIRTYPE", "END", "FIFOTYPE", "LNKTYPE", "REGTYPE", "SYMTYPE", "Entry", "headers")

END = bytes(2 * BLOCK)
"""The end of an archive. What GNU tar adds, up to a record of 20 blocks, nobody needs."""

_NAME = 100
_PREFIX = 155
_ID_MAX = 8**7 - 1
"""Seven octal digits, of ids and device numbers."""
_LONG_MAX = 8**11 - 1
"""Eleven, of sizes and times."""
_EXTENDED_NAME = b"PaxHeaders/x"
"""Of extended headers: nobody but a reader that doesn't know them sees it."""
_MODE = 0o7777


class Entry(NamedTuple):
    """One member, as its headers say it."""

    path: bytes
    """Directories' end in a slash."""
    flag: bytes
    attrs: Attrs
    size: int = 0
    """Of the body."""
    link: bytes = b""
    """Target of a symbolic link, or the first name of a hard link."""
    major: int = 0
    minor: int = 0


def headers(entry: Entry) -> bytes:
    """All blocks in front of the body."""
    records: list[tuple[bytes, bytes]] = []
    attrs = entry.attrs
    fields = _split(entry.path)
    if fields is None:
        records.append((pax.PATH, entry.path))
        fields = b"", entry.path[:_NAME]
    link = entry.link
    if len(link) > _NAME:
        records.append((b"linkpath", link))
        link = link[:_NAME]
    if records and not all(_is_text(value) for _, value in records):
        records.insert(0, (b"hdrcharset", b"BINARY"))
    uid = _number(pax.UID, attrs.uid, _ID_MAX, records)
    gid = _number(pax.GID, attrs.gid, _ID_MAX, records)
    size = _number(pax.SIZE, entry.size, _LONG_MAX, records)
    mtime = attrs.mtime
    if attrs.nsec or not 0 <= mtime <= _LONG_MAX:
        records.append((pax.MTIME, _time(mtime, attrs.nsec)))
        mtime = mtime if 0 <= mtime <= _LONG_MAX else 0
    records.extend(_attributes(attrs.xattrs))
    prefix, name = fields
    block = _block(
        name, entry.flag, attrs.mode & _MODE, (uid, gid), size, mtime, link, (entry.major, entry.minor), prefix
    )
    if not records:
        return block
    body = b"".join(_record(key, value) for key, value in records)
    head = _block(_EXTENDED_NAME, XHDTYPE, 0o644, (0, 0), len(body), 0, b"", (0, 0), b"")
    return head + body.ljust(padded(len(body)), b"\0") + block


def _block(
    name: bytes,
    flag: bytes,
    mode: int,
    owner: tuple[int, int],
    size: int,
    mtime: int,
    link: bytes,
    device: tuple[int, int],
    prefix: bytes,
) -> bytes:
    header = Header(
        name=name,
        mode=b"%07o" % mode,
        uid=b"%07o" % owner[0],
        gid=b"%07o" % owner[1],
        size=b"%011o" % size,
        mtime=b"%011o" % mtime,
        chksum=b"        ",
        typeflag=flag,
        linkname=link,
        magic=MAGIC_POSIX,
        version=b"00",
        uname=b"",
        gname=b"",
        devmajor=b"%07o" % device[0],
        devminor=b"%07o" % device[1],
        prefix=prefix,
        pad=b"",
    )
    return header._replace(chksum=b"%06o\0 " % checksum(header.pack())).pack()


def _split(path: bytes) -> tuple[bytes, bytes] | None:
    """Prefix and name as ustar has them; None where they don't fit. A slash at the end stays with the name."""
    if len(path) <= _NAME:
        return b"", path
    if len(path) > _PREFIX + 1 + _NAME:
        return None
    at = path.rfind(b"/", 0, min(_PREFIX + 1, len(path) - 1))
    name = path[at + 1 :]
    return (path[:at], name) if at > 0 and 0 < len(name) <= _NAME else None


def _number(key: bytes, value: int, most: int, records: list[tuple[bytes, bytes]]) -> int:
    if value <= most:
        return value
    records.append((key, b"%d" % value))
    return 0


def _time(seconds: int, nsec: int) -> bytes:
    """``[-]SECONDS.FRACTION``: the sign is that of the whole."""
    nanoseconds = seconds * 1_000_000_000 + nsec
    whole, fraction = divmod(abs(nanoseconds), 1_000_000_000)
    sign = b"-" if nanoseconds < 0 else b""
    return sign + (b"%d.%09d" % (whole, fraction) if fraction else b"%d" % whole)


def _attributes(xattrs: Xattrs) -> list[tuple[bytes, bytes]]:
    return [
        (pax.LIBARCHIVE_XATTR + quote_from_bytes(name, safe="").encode(), binascii.b2a_base64(value, newline=False))
        if b"=" in name
        else (pax.SCHILY_XATTR + name, value)
        for name, value in xattrs
    ]


def _record(key: bytes, value: bytes) -> bytes:
    """A PAX record: its own length counts the digits of the length too."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) > len(str(rest)):
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
