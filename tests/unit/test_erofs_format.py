from __future__ import annotations

import pytest

from layerstore.erofs.crc32c import crc32c, superblock_checksum
from layerstore.erofs.format import (
    BLOCK_SIZE,
    INODE_SIZE,
    MAX_INLINE,
    ChunkIndex,
    DeviceSlot,
    Dirent,
    InodeCompact,
    InodeExtended,
    Record,
    SuperBlock,
    XattrEntry,
    XattrIbodyHeader,
    incompat_names,
    rdev_decode,
    rdev_encode,
)

MKFS_SUPERBLOCK = bytes.fromhex(
    "e2e1f5e022a9987f070000000c00240005000000000000005938 0d6b00000000"
    "0000000003000000000000000000000005cbbc459e07402ebaa711d0aa2833e4" + "00" * 64
)
"""What mkfs.erofs 1.9.4 wrote for a small tree."""


@pytest.mark.parametrize(
    ("record", "size"),
    [
        (SuperBlock, 128),
        (DeviceSlot, 128),
        (InodeCompact, 32),
        (InodeExtended, 64),
        (ChunkIndex, 8),
        (XattrIbodyHeader, 12),
        (XattrEntry, 4),
        (Dirent, 12),
    ],
)
def test_records_have_the_kernels_sizes(record: type[Record], size: int) -> None:
    assert record.STRUCT.size == size
    raw = record.unpack(bytes(size)).pack()
    assert raw == bytes(size)


def test_superblock_of_mkfs() -> None:
    superblock = SuperBlock.unpack(MKFS_SUPERBLOCK)
    assert superblock.checksum == 0x7F98A922
    assert superblock.feature_compat == 7
    assert superblock.blkszbits == 12
    assert superblock.rootnid_2b == 36
    assert superblock.inos == 5
    assert superblock.epoch == 0x6B0D3859
    assert superblock.blocks == 3
    assert superblock.uuid.hex() == "05cbbc459e07402ebaa711d0aa2833e4"
    assert superblock.pack() == MKFS_SUPERBLOCK


def test_extended_inode_field_by_field() -> None:
    raw = InodeExtended(
        i_format=0x0101,
        i_xattr_icount=0x0202,
        i_mode=0x0303,
        i_nb=0,
        i_size=0x0404040404040404,
        i_u=0x05050505,
        i_ino=0x06060606,
        i_uid=0x07070707,
        i_gid=0x08080808,
        i_mtime=-1,
        i_mtime_nsec=0x0A0A0A0A,
        i_nlink=0x0B0B0B0B,
    ).pack()
    want = "0101 0202 0303 0000 0404040404040404 05050505 06060606 07070707 08080808 ffffffffffffffff 0a0a0a0a 0b0b0b0b"
    assert raw == bytes.fromhex(want) + bytes(16)


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        XattrEntry(1, 2, 3).e_name_len = 4  # type: ignore[misc]


def test_crc32c_of_the_check_string() -> None:
    assert crc32c(b"123456789") ^ 0xFFFF_FFFF == 0xE3069283


def test_superblock_checksum_leaves_its_own_field_out() -> None:
    block = bytes(1024) + MKFS_SUPERBLOCK + bytes(range(256)) * 11 + bytes(128)
    changed = bytearray(block)
    changed[1028:1032] = b"\xff" * 4
    assert superblock_checksum(block) == superblock_checksum(bytes(changed))
    changed[4095] ^= 1
    assert superblock_checksum(block) != superblock_checksum(bytes(changed))


@pytest.mark.case("T56")
@pytest.mark.parametrize(
    ("device", "rdev"), [((0, 0), 0), ((5, 1), 0x501), ((8, 0), 0x800), ((4095, 1048575), 0xFFFF_FFFF)]
)
def test_device_numbers(device: tuple[int, int], rdev: int) -> None:
    assert rdev_encode(*device) == rdev
    assert rdev_decode(rdev) == device


def test_features_are_named() -> None:
    assert incompat_names(0x8000_00C0) == "XATTR_PREFIXES, 48BIT, 0x80000000"


def test_largest_inline_file_shares_a_block_with_its_inode() -> None:
    assert INODE_SIZE + MAX_INLINE == BLOCK_SIZE
