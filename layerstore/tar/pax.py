"""PAX extended headers: records, the keywords that matter, numbers, times and extended attributes.

Values are bytes from end to end: a record's length says where it ends, so it may hold NULs and newlines. Everything
here raises ValueError for what is malformed; the reader adds whose it is, and where.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from layerstore.errors import printable
from layerstore.tar.format import TIME_MAX, TIME_MIN, XATTR_NAME_MAX, XATTR_SIZE_MAX
from layerstore.tree.inode import Xattrs

Records = list[tuple[bytes, bytes]]

PATH = b"path"
LINKPATH = b"linkpath"
SIZE = b"size"
UID = b"uid"
GID = b"gid"
MTIME = b"mtime"
DEVMAJOR = b"SCHILY.devmajor"
DEVMINOR = b"SCHILY.devminor"
SCHILY_XATTR = b"SCHILY.xattr."  # the value as it is
LIBARCHIVE_XATTR = b"LIBARCHIVE.xattr."  # URL-encoded name, base64 value
SPARSE = b"GNU.sparse."
SPARSE_NAME = b"GNU.sparse.name"

UNAPPLIED = (b"SCHILY.acl.", b"RHT.security.selinux", b"SCHILY.fflags")
"""Attributes in notations that need the host's user names or policy; images carry them as xattrs instead."""

_LENGTH_DIGITS = 10
_NUMBER_DIGITS = 40  # beyond every range checked here, and cheap to convert
_TIME = re.compile(rb"(-?)([0-9]+)(?:\.([0-9]*))?")
_BASE64 = re.compile(rb"[A-Za-z0-9+/]*={0,2}")


@dataclass(slots=True)
class Keywords:
    """What extended headers say about a member.

    Attributes:
        values: keyword to value, never empty.
        xattrs: of ``SCHILY.xattr.``, name to value.
        encoded: of ``LIBARCHIVE.xattr.``, both still encoded.
        sparse: ``GNU.sparse.*`` in the order of the header; 0.0 repeats its keywords.
    """

    values: dict[bytes, bytes] = field(default_factory=dict)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    encoded: dict[bytes, bytes] = field(default_factory=dict)
    sparse: Records = field(default_factory=list)

    def apply(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Add an extended header's records; later ones win, an empty one unsets its keyword."""
        for key, value in records:
            if key.startswith(SCHILY_XATTR):
                self.xattrs[key[len(SCHILY_XATTR) :]] = value
            elif key.startswith(LIBARCHIVE_XATTR):
                self.encoded[key[len(LIBARCHIVE_XATTR) :]] = value
            elif key.startswith(SPARSE):
                if value:
                    self.sparse.append((key, value))
            elif value:
                self.values[key] = value
            else:
                self.values.pop(key, None)

    def copy(self) -> Keywords:
        return Keywords(dict(self.values), dict(self.xattrs), dict(self.encoded), list(self.sparse))

    def name(self, keyword: bytes) -> bytes | None:
        """The value of ``path`` or ``linkpath``."""
        value = self.values.get(keyword)
        return None if value is None else checked_name(keyword, value)

    def number(self, keyword: bytes) -> int | None:
        value = self.values.get(keyword)
        return None if value is None else decimal(keyword, value)


def checked_name(keyword: bytes, value: bytes) -> bytes:
    if 0 in value:
        raise ValueError(f"NUL in extended header keyword {printable(keyword)}")
    return value


def parse_records(body: bytes) -> Records:
    r"""Split an extended header into (keyword, value) pairs.

    Raises:
        ValueError: a record is not ``LENGTH KEYWORD=VALUE\n``, LENGTH counting all of it.
    """
    records: Records = []
    start = 0
    while start < len(body):
        blank = body.find(b" ", start, start + _LENGTH_DIGITS + 1)
        if blank < 0 or not body[start:blank].isdigit():
            raise ValueError(f"extended header record {len(records)} has no length")
        end = start + int(body[start:blank])
        if not blank + 1 < end <= len(body):
            raise ValueError(f"extended header record {len(records)} has a wrong length")
        if body[end - 1] != 0x0A:
            raise ValueError(f"extended header record {len(records)} does not end where its length says")
        keyword, equals, value = body[blank + 1 : end - 1].partition(b"=")
        if not equals or not keyword or 0 in keyword:
            raise ValueError(f"extended header record {len(records)} has no keyword")
        records.append((keyword, value))
        start = end
    return records


def decimal(keyword: bytes, value: bytes) -> int:
    """A number that is not negative."""
    if not value.isdigit() or len(value) > _NUMBER_DIGITS:
        raise ValueError(f"{printable(keyword)} is not a number: {printable(value[:64])}")
    return int(value)


def timestamp(value: bytes) -> tuple[int, int]:
    """``[-]SECONDS[.FRACTION]`` as (seconds, nanoseconds), rounded down to whole nanoseconds."""
    match = _TIME.fullmatch(value)
    if match is None or len(match[2]) > _NUMBER_DIGITS:
        raise ValueError(f"not a time: {printable(value[:64])}")
    sign, seconds, fraction = match[1], match[2], match[3] or b""
    nanoseconds = int(seconds) * 1_000_000_000 + int(fraction[:9].ljust(9, b"0"))
    if sign:
        nanoseconds = -nanoseconds - (1 if fraction[9:].strip(b"0") else 0)
    whole, nsec = divmod(nanoseconds, 1_000_000_000)
    return checked_time(whole), nsec


def checked_time(seconds: int) -> int:
    if not TIME_MIN <= seconds <= TIME_MAX:
        raise ValueError(f"time outside 64 bits: {seconds}")
    return seconds


def xattrs_of(keywords: Keywords) -> Xattrs:
    """Names and values, sorted; where both notations name an attribute, ``SCHILY.xattr.`` wins."""
    found: dict[bytes, bytes] = {}
    for encoded, value in keywords.encoded.items():
        name = unquote_to_bytes(encoded)
        if not _BASE64.fullmatch(value):
            raise ValueError(f"extended attribute {_name(name)} is not base64")
        text = value.rstrip(b"=")
        try:
            found[name] = binascii.a2b_base64(text + b"=" * (-len(text) % 4))
        except binascii.Error:
            raise ValueError(f"extended attribute {_name(name)} is not base64") from None
    found.update(keywords.xattrs)
    for name, value in found.items():
        if not name or 0 in name:
            raise ValueError("extended attribute without a proper name")
        if len(name) > XATTR_NAME_MAX:
            raise ValueError(
                f"name of extended attribute {_name(name)} is {len(name)} bytes, of {XATTR_NAME_MAX} allowed"
            )
        if len(value) > XATTR_SIZE_MAX:
            raise ValueError(f"extended attribute {_name(name)} is {len(value)} bytes, of {XATTR_SIZE_MAX} allowed")
    return tuple(sorted(found.items()))


def _name(name: bytes) -> str:
    return printable(name[:64])


# struct vfs_cap_data (linux/capability.h): le32 magic_etc, its top byte the revision, then by revision
_CAPABILITY_SIZES = {1: 12, 2: 20, 3: 24}  # revision 3 ends with a le32 rootid
CAPABILITY = b"security.capability"


def capability_fault(value: bytes) -> str | None:
    """What the kernel would refuse about a ``security.capability``, or None."""
    if len(value) < 4:
        return f"{len(value)} bytes are too few"
    revision = value[3]
    size = _CAPABILITY_SIZES.get(revision)
    if size is None:
        return f"unknown revision {revision}"
    if len(value) != size:
        return f"{len(value)} bytes, where revision {revision} has {size}"
    return None
