from __future__ import annotations

import pytest
from support.erofs_images import ACL, ALL_BYTES, CAPABILITY

from layerstore.erofs.format import MAX_XATTR_VALUE, XattrEntry, XattrIbodyHeader, xattr_ibody_size
from layerstore.erofs.xattrs import decode_xattrs, encode_xattrs, icount, name_filter, split_name
from layerstore.errors import LimitError, MalformedError, UnsupportedError
from layerstore.tree.inode import Xattrs


def no_shared(number: int) -> tuple[bytes, bytes]:
    raise AssertionError(number)


def there_and_back(xattrs: Xattrs) -> Xattrs:
    body = encode_xattrs(xattrs, "/f")
    assert len(body) % 4 == 0
    assert xattr_ibody_size(icount(body)) == len(body)
    found, stored = decode_xattrs(body, no_shared)
    assert stored == name_filter(name for name, _ in xattrs)
    return found


@pytest.mark.case("T30", "T33")
def test_values_come_back_byte_for_byte() -> None:
    xattrs: Xattrs = (
        (b"security.capability", CAPABILITY),
        (b"system.posix_acl_access", ACL),
        (b"system.posix_acl_default", ACL[:28]),
        (b"trusted.overlay.redirect", b"/a"),
        (b"user.bin", ALL_BYTES),
        (b"user.empty", b""),
        (b"user.nul", b"\0\0"),
    )
    assert there_and_back(xattrs) == xattrs


def test_none() -> None:
    assert encode_xattrs((), "/f") == b""
    assert icount(b"") == 0
    assert decode_xattrs(b"", no_shared)[0] == ()


def test_bytes_of_one_entry() -> None:
    body = encode_xattrs(((b"user.x", b"y"),), "/f")
    assert body[4:12] == bytes(8)
    assert body[12:] == b"\x01\x01\x01\x00xy\0\0"


@pytest.mark.case("T62")
def test_five_thousand_on_one_inode() -> None:
    xattrs = tuple((b"user.%05d" % number, b"%d" % number) for number in range(5000))
    assert there_and_back(xattrs) == xattrs


@pytest.mark.case("T62")
def test_the_largest_value_is_one_byte_short_of_64_kib() -> None:
    xattrs = ((b"user.big", b"v" * MAX_XATTR_VALUE),)
    assert MAX_XATTR_VALUE == 65535
    assert there_and_back(xattrs) == xattrs


@pytest.mark.case("T62")
@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1])
def test_larger_values_are_refused_by_name(size: int) -> None:
    with pytest.raises(LimitError, match=r"^/dir/file: the xattr user\.big has 6553[67] bytes"):
        encode_xattrs(((b"user.big", bytes(size)),), "/dir/file")


def test_all_together_have_a_limit() -> None:
    xattrs = tuple((b"user.%d" % number, bytes(65000)) for number in range(5))
    with pytest.raises(LimitError, match=r"^/f: its xattrs take 325052 bytes; an EROFS inode holds at most 262148"):
        encode_xattrs(xattrs, "/f")


@pytest.mark.parametrize("name", [b"system.nfs4_acl", b"btrfs.x", b"user.", b"users.x", b"system.posix_acl_accessx"])
def test_names_without_an_index_are_refused(name: bytes) -> None:
    assert split_name(name) is None
    with pytest.raises(UnsupportedError, match=r"^/f: EROFS has no place"):
        encode_xattrs(((name, b""),), "/f")


@pytest.mark.parametrize("names", [[b""], [b"user.a\0b"], [b"user." + b"n" * 251], [b"user.a", b"user.a"]])
def test_what_is_no_name_is_refused(names: list[bytes]) -> None:
    with pytest.raises(MalformedError, match=r"^/f: "):
        encode_xattrs(tuple((name, b"") for name in names), "/f")


def body_of(*entries: bytes, shared: int = 0) -> bytes:
    return XattrIbodyHeader(0, shared).pack() + b"".join(entries)


def test_shared_entries_are_fetched_by_their_id() -> None:
    body = body_of((7).to_bytes(4, "little"), XattrEntry(1, 1, 0).pack() + b"b\0\0\0", shared=1)
    found, _ = decode_xattrs(body, {7: (b"user.a", b"shared")}.__getitem__)
    assert found == ((b"user.a", b"shared"), (b"user.b", b""))


@pytest.mark.case("O14")
@pytest.mark.parametrize(
    "body",
    [
        body_of(),
        body_of(shared=1),
        body_of(bytes(4), shared=2),
        body_of(b"\1\1"),
        body_of(XattrEntry(1, 1, 0).pack()),
        body_of(XattrEntry(1, 1, 9).pack() + b"abcd"),
        body_of(XattrEntry(1, 1, 0xFFFF).pack() + b"abcd"),
        body_of(XattrEntry(0, 1, 0).pack()),
        body_of(XattrEntry(1, 2, 0).pack() + b"a\0\0\0"),
        body_of(XattrEntry(3, 1, 0).pack() + b"a\0b\0"),
        body_of(XattrEntry(255, 6, 0).pack() + b"a" * 255 + b"\0"),
        body_of(XattrEntry(1, 1, 0).pack() + b"a\0\0\0", XattrEntry(1, 1, 0).pack() + b"a\0\0\0"),
    ],
    ids=[
        "header alone",
        "shared count beyond the end",
        "more shared ids than bytes",
        "cut entry",
        "name beyond the end",
        "value beyond the end",
        "value far beyond the end",
        "prefix without a name",
        "ACL with a name",
        "NUL in a name",
        "name too long",
        "twice",
    ],
)
def test_a_broken_body_is_an_error_and_never_looks_like_no_xattrs(body: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_xattrs(body, no_shared)


@pytest.mark.parametrize("index", [0, 5, 7, 0x80, 0xFF])
def test_unknown_prefixes_are_refused(index: int) -> None:
    with pytest.raises(UnsupportedError):
        decode_xattrs(body_of(XattrEntry(1, index, 0).pack() + b"a\0\0\0"), no_shared)
