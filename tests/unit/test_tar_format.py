"""Records and numbers of the tar format, against Python's own writer."""

from __future__ import annotations

import tarfile

import pytest
from support import tars

from layerstore.tar import format as fmt
from layerstore.tar.format import Header, SparseExtension, SparseHeader, parse_number


def test_a_header_is_one_block_and_packs_to_what_it_was_read_from() -> None:
    info = tarfile.TarInfo("dir/" * 20 + "n" * 90)
    info.mode, info.uid, info.gid, info.size, info.mtime = 0o4755, 1000, 2000, 12345, 1_600_000_000
    info.uname, info.gname = "user", "group"
    block = info.tobuf(tarfile.USTAR_FORMAT)
    header = Header.unpack(block)
    assert header.pack() == block
    assert len(block) == fmt.BLOCK
    assert fmt.string(header.prefix) + b"/" + fmt.string(header.name) == info.name.encode()
    fields = (header.mode, header.uid, header.gid, header.size, header.mtime)
    assert [parse_number(field) for field in fields] == [0o4755, 1000, 2000, 12345, 1_600_000_000]
    assert (header.magic, header.version, header.uname.rstrip(b"\0")) == (fmt.MAGIC_POSIX, b"00", b"user")
    assert parse_number(header.chksum) == fmt.checksum(block)


def test_sparse_records_lie_where_gnu_tar_puts_them() -> None:
    block = bytearray(512)
    block[386:482] = bytes(range(96))
    block[482] = 1
    block[483:495] = b"12345670123\0"
    header = SparseHeader.unpack(bytes(block))
    assert (header.sp, header.isextended, parse_number(header.realsize)) == (bytes(range(96)), 1, 0o12345670123)
    extension = SparseExtension.unpack(bytes(range(252)) * 2 + b"\1" + bytes(7))
    assert (extension.sp, extension.isextended) == (bytes(range(252)) * 2, 1)


@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("value", [0, 1, -1, 2**31, 2**32, -(2**40), 2**53 + 1])
def test_base_256(width: int, value: int) -> None:
    assert parse_number(tars.base256(value, width)) == value
    assert parse_number(tars.number(value, width)) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"0000644\0", 0o644),
        (b"644     ", 0o644),
        (b"   644 \0", 0o644),
        (bytes(8), 0),
        (b" " * 8, 0),
        (b"77777777", 0o77777777),
    ],
)
def test_octal(field: bytes, value: int) -> None:
    assert parse_number(field) == value


@pytest.mark.parametrize(
    "field", [b"0000648\0", b"-000644\0", b"0o00644\0", b"06 44   ", b"+0644\0\0\0", b"0_644\0\0\0", b"\x7fELF\0\0\0\0"]
)
def test_what_is_no_number(field: bytes) -> None:
    with pytest.raises(ValueError, match=r"not an? (octal )?number"):
        parse_number(field)


@pytest.mark.parametrize("block", [bytes(512), b"\xff" * 512, bytes(range(256)) * 2])
def test_checksums_are_sums(block: bytes) -> None:
    rest = block[:148] + b" " * 8 + block[156:]
    assert fmt.checksum(block) == sum(rest)
    assert fmt.signed_checksum(block) == sum(byte - 256 if byte > 127 else byte for byte in rest)
