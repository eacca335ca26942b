"""The xattrs behind an inode: a header with a name filter, ids of shared entries, entries.

The filter lets a kernel (6.6 and later) answer "no such xattr" without a search. One that is wrong hides an xattr, a
file capability or an opaque mark, so it is compared with the names when an image is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xxhash

from layerstore.erofs.format import (
    EROFS_NAME_LEN,
    EROFS_XATTR_FILTER_SEED,
    EROFS_XATTR_INDEX_POSIX_ACL_ACCESS,
    EROFS_XATTR_INDEX_POSIX_ACL_DEFAULT,
    EROFS_XATTR_INDEX_SECURITY,
    EROFS_XATTR_INDEX_TRUSTED,
    EROFS_XATTR_INDEX_USER,
    EROFS_XATTR_LONG_PREFIX,
    MAX_XATTR_ICOUNT,
    MAX_XATTR_VALUE,
    XATTR_ENTRY_SIZE,
    XATTR_HEADER_SIZE,
    XattrEntry,
    XattrIbodyHeader,
    round_up,
    xattr_ibody_size,
)
from layerstore.errors import LimitError, MalformedError, UnsupportedError, printable
from layerstore.tree.inode import Xattrs

OPAQUE = b"trusted.overlay.opaque"
"""On a directory: what layers below have in it is hidden, if the value is ``y``."""

_PREFIXES = (
    (EROFS_XATTR_INDEX_USER, b"user."),
    (EROFS_XATTR_INDEX_TRUSTED, b"trusted."),
    (EROFS_XATTR_INDEX_SECURITY, b"security."),
)
_WHOLE = {
    b"system.posix_acl_access": EROFS_XATTR_INDEX_POSIX_ACL_ACCESS,
    b"system.posix_acl_default": EROFS_XATTR_INDEX_POSIX_ACL_DEFAULT,
}
_NAMES = dict(_PREFIXES) | {index: name for name, index in _WHOLE.items()}
_NO_NAMES = 0xFFFF_FFFF


def split_name(name: bytes) -> tuple[int, bytes] | None:
    """The name index and what is left of the name; None when EROFS has no index for it."""
    index = _WHOLE.get(name)
    if index is not None:
        return index, b""
    for index, prefix in _PREFIXES:
        if name.startswith(prefix) and len(name) > len(prefix):
            return index, name[len(prefix) :]
    return None


def name_filter(names: Iterable[bytes]) -> int:
    """``h_name_filter`` for these full names."""
    value = _NO_NAMES
    for name in names:
        split = split_name(name)
        assert split is not None
        value &= ~(1 << (xxhash.xxh32_intdigest(split[1], EROFS_XATTR_FILTER_SEED + split[0]) & 31))
    return value


def encode_xattrs(xattrs: Xattrs, where: str) -> bytes:
    """What stands between an inode and its data, all entries in it and none shared.

    Args:
        xattrs: sorted by name.
        where: the entry, for messages.

    Raises:
        UnsupportedError: a name that EROFS can't hold.
        LimitError: a value, or all of them together, are too large.
        MalformedError: a name twice, or no name of an xattr.
    """
    if not xattrs:
        return b""
    parts = [XattrIbodyHeader(0, 0).pack()]
    previous = None
    for name, value in xattrs:
        if not name or len(name) > EROFS_NAME_LEN or b"\0" in name:
            raise MalformedError(f"{where}: not a name of an xattr: {printable(name)}")
        if previous is not None and name <= previous:
            raise MalformedError(f"{where}: xattrs are not in order, or one is there twice: {printable(name)}")
        previous = name
        split = split_name(name)
        if split is None:
            raise UnsupportedError(
                f"{where}: EROFS has no place for the xattr {printable(name)}; it holds user.*, trusted.*, "
                "security.* and POSIX ACLs"
            )
        if len(value) > MAX_XATTR_VALUE:
            raise LimitError(
                f"{where}: the xattr {printable(name)} has {len(value)} bytes; EROFS holds at most {MAX_XATTR_VALUE}"
            )
        index, rest = split
        entry = XattrEntry(len(rest), index, len(value)).pack() + rest + value
        parts.append(entry + bytes(-len(entry) % 4))
    parts[0] = XattrIbodyHeader(name_filter(name for name, _ in xattrs), 0).pack()
    body = b"".join(parts)
    limit = xattr_ibody_size(MAX_XATTR_ICOUNT)
    if len(body) > limit:
        raise LimitError(f"{where}: its xattrs take {len(body)} bytes; an EROFS inode holds at most {limit}")
    return body


def icount(body: bytes) -> int:
    """``i_xattr_icount`` for an encoded body."""
    return (len(body) - XATTR_HEADER_SIZE) // 4 + 1 if body else 0


def decode_entry(data: bytes, offset: int) -> tuple[bytes, bytes, int]:
    """The entry at ``offset``: full name, value, and the offset of the next.

    Raises:
        MalformedError: it doesn't end within ``data``, or has no proper name.
        UnsupportedError: a name index of an unknown or long prefix.
    """
    if offset + XATTR_ENTRY_SIZE > len(data):
        raise MalformedError("an xattr entry is cut off")
    entry = XattrEntry.unpack(data, offset)
    start = offset + XATTR_ENTRY_SIZE
    middle = start + entry.e_name_len
    end = middle + entry.e_value_size
    if end > len(data):
        raise MalformedError("an xattr entry is longer than the xattrs of its inode")
    if entry.e_name_index & EROFS_XATTR_LONG_PREFIX:
        raise UnsupportedError("an xattr has a long name prefix, which isn't read here")
    prefix = _NAMES.get(entry.e_name_index)
    if prefix is None:
        raise UnsupportedError(f"an xattr has the unknown name index {entry.e_name_index}")
    name = prefix + data[start:middle]
    if b"\0" in name or len(name) > EROFS_NAME_LEN or (entry.e_name_len == 0) != (prefix in _WHOLE):
        raise MalformedError(f"not a name of an xattr: {printable(name)}")
    return name, data[middle:end], round_up(end, 4)


def decode_xattrs(body: bytes, shared: Callable[[int], tuple[bytes, bytes]]) -> tuple[Xattrs, int]:
    """The xattrs of an inode, sorted by name, and their name filter.

    Args:
        body: what stands behind the inode, as long as i_xattr_icount says.
        shared: gives (name, value) of the shared entry with an id.

    Raises:
        MalformedError: it isn't what it should be; an xattr that can't be read is never taken for absent.
        UnsupportedError: as :func:`decode_entry`.
    """
    if not body:
        return (), _NO_NAMES
    if len(body) <= XATTR_HEADER_SIZE:
        raise MalformedError("the xattrs are shorter than their header")
    header = XattrIbodyHeader.unpack(body)
    offset = XATTR_HEADER_SIZE + 4 * header.h_shared_count
    if offset > len(body):
        raise MalformedError("the xattrs are shorter than their header says")
    found = {}
    count = header.h_shared_count
    for at in range(XATTR_HEADER_SIZE, offset, 4):
        name, value = shared(int.from_bytes(body[at : at + 4], "little"))
        found[name] = value
    while offset < len(body):
        name, value, offset = decode_entry(body, offset)
        found[name] = value
        count += 1
    if count != len(found):
        raise MalformedError("an xattr is there twice")
    return tuple(sorted(found.items())), header.h_name_filter
