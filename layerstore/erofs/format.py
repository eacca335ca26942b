"""The on-disk format: magic, features, limits and records, by their names in the kernel's ``fs/erofs/erofs_fs.h``.

All integers are little-endian. Of what others write, this package reads uncompressed images with blocks of 512 bytes
to 64 KiB; it writes one profile: 4 KiB blocks, extended inodes, chunk indexes. To change what is written changes the
digests of all layers, see :data:`layerstore.version.FORMAT_VERSION`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer

EROFS_SUPER_OFFSET = 1024
EROFS_SUPER_MAGIC_V1 = 0xE0F5E1E2

BLOCK_BITS = 12
"""log2 of the block size that is written. Larger blocks don't mount on x86, smaller ones not with dm-verity."""
BLOCK_SIZE = 1 << BLOCK_BITS
MIN_BLOCK_BITS = 9
"""What is read: 512 bytes (tar indexes of mkfs.erofs) …"""
MAX_BLOCK_BITS = 16
"""… to 64 KiB (images for hosts with such pages)."""

EROFS_ISLOTBITS = 5
"""log2 of an inode slot, 32 bytes: nid << 5 is the offset of an inode from the start of the metadata area."""

EROFS_FEATURE_COMPAT_SB_CHKSUM = 0x1
EROFS_FEATURE_COMPAT_MTIME = 0x2
EROFS_FEATURE_COMPAT_XATTR_FILTER = 0x4

EROFS_FEATURE_INCOMPAT_ZERO_PADDING = 0x1
EROFS_FEATURE_INCOMPAT_CHUNKED_FILE = 0x4
EROFS_FEATURE_INCOMPAT_DEVICE_TABLE = 0x8
INCOMPAT_READ = (
    EROFS_FEATURE_INCOMPAT_ZERO_PADDING | EROFS_FEATURE_INCOMPAT_CHUNKED_FILE | EROFS_FEATURE_INCOMPAT_DEVICE_TABLE
)
"""What the reader understands. Zero padding concerns compressed inodes alone, which are refused one by one."""
INCOMPAT_NAMES = {
    0x1: "ZERO_PADDING",
    0x2: "COMPR_CFGS",
    0x4: "CHUNKED_FILE",
    0x8: "DEVICE_TABLE",
    0x10: "ZTAILPACKING",
    0x20: "FRAGMENTS",
    0x40: "XATTR_PREFIXES",
    0x80: "48BIT",
    0x100: "METABOX",
}

EROFS_INODE_FLAT_PLAIN = 0
EROFS_INODE_COMPRESSED_FULL = 1
EROFS_INODE_FLAT_INLINE = 2
EROFS_INODE_COMPRESSED_COMPACT = 3
EROFS_INODE_CHUNK_BASED = 4
LAYOUT_NAMES = {0: "FLAT_PLAIN", 1: "COMPRESSED_FULL", 2: "FLAT_INLINE", 3: "COMPRESSED_COMPACT", 4: "CHUNK_BASED"}

EROFS_I_VERSION_MASK = 0x1
"""Bit 0 of i_format: 0 compact, 1 extended."""
EROFS_I_DATALAYOUT_BIT = 1
EROFS_I_DATALAYOUT_MASK = 0x7
"""To be applied after the shift by EROFS_I_DATALAYOUT_BIT."""
EROFS_I_NLINK_1_BIT = 4
"""A compact inode without a link count; on a directory the same bit says that "." is omitted (Linux 6.15)."""
EROFS_I_ALL = 0x1F

EROFS_CHUNK_FORMAT_BLKBITS_MASK = 0x1F
"""log2 of a chunk in blocks."""
EROFS_CHUNK_FORMAT_INDEXES = 0x20
EROFS_CHUNK_FORMAT_48BIT = 0x40
EROFS_NULL_ADDR = 0xFFFF_FFFF
"""The 32-bit block number of a hole, so the largest block number in use is one less."""

EROFS_NAME_LEN = 255
SYMLINK_MAX = 4095
"""PATH_MAX without its NUL: longer targets can't be read back through the kernel."""
MAX_DEVICES = 0xFFFF
"""extra_devices is 16 bits wide."""
MAX_ROOT_NID = 0xFFFF
MAX_FILE_SIZE = (1 << 63) - 1
MAX_ID = 0xFFFF_FFFE
"""All bits set is Linux's invalid id, which a mount shows as another: 65534."""

EROFS_XATTR_INDEX_USER = 1
EROFS_XATTR_INDEX_POSIX_ACL_ACCESS = 2
EROFS_XATTR_INDEX_POSIX_ACL_DEFAULT = 3
EROFS_XATTR_INDEX_TRUSTED = 4
EROFS_XATTR_INDEX_SECURITY = 6
EROFS_XATTR_LONG_PREFIX = 0x80
EROFS_XATTR_FILTER_SEED = 0x25BBE08F
MAX_XATTR_VALUE = 0xFFFF
"""e_value_size is 16 bits wide: one byte less than Linux's XATTR_SIZE_MAX."""
MAX_XATTR_ICOUNT = 0xFFFF
"""i_xattr_icount counts 4-byte units, the 12-byte header as the first."""

EROFS_FT_REG_FILE = 1
EROFS_FT_DIR = 2
EROFS_FT_CHRDEV = 3
EROFS_FT_BLKDEV = 4
EROFS_FT_FIFO = 5
EROFS_FT_SOCK = 6
EROFS_FT_SYMLINK = 7

NSEC_PER_SEC = 1_000_000_000


class Record:
    """A structure on disk: a frozen dataclass with slots, whose fields are the values of its STRUCT, in order."""

    __slots__: tuple[str, ...] = ()
    STRUCT: ClassVar[Struct]
    _values: ClassVar[Callable[[Any], tuple[Any, ...]]]

    if TYPE_CHECKING:

        def __init__(self, *values: Any) -> None: ...

    def __init_subclass__(cls) -> None:
        if "__slots__" in cls.__dict__:  # not yet there when the class is made, but when the decorator makes it anew
            cls._values = attrgetter(*cls.__slots__)

    @classmethod
    def unpack(cls, data: Buffer, offset: int = 0) -> Self:
        """The caller has made sure that ``data`` holds it."""
        return cls(*cls.STRUCT.unpack_from(data, offset))

    def pack(self) -> bytes:
        return self.STRUCT.pack(*self.__class__._values(self))


@dataclass(frozen=True, slots=True)
class SuperBlock(Record):
    """``erofs_super_block``, at byte 1024."""

    STRUCT: ClassVar[Struct] = Struct("<IIIBBHQqIIII16s16sIHHHBBIQBB2xIQ8x")

    magic: int
    checksum: int
    """See :func:`layerstore.erofs.crc32c.superblock_checksum`."""
    feature_compat: int
    blkszbits: int
    sb_extslots: int
    rootnid_2b: int
    inos: int
    """For statfs."""
    epoch: int
    """Seconds; times of compact inodes are relative to it."""
    fixed_nsec: int
    blocks: int
    """Of the primary device."""
    meta_blkaddr: int
    """Block at which nid 0 is."""
    xattr_blkaddr: int
    """Block at which the shared xattrs begin."""
    uuid: bytes
    volume_name: bytes
    feature_incompat: int
    available_compr_algs: int
    extra_devices: int
    devt_slotoff: int
    """Offset of the device table in units of its slots, 128 bytes."""
    dirblkbits: int
    xattr_prefix_count: int
    xattr_prefix_start: int
    packed_nid: int
    xattr_filter_reserved: int
    ishare_xattr_prefix_id: int
    build_time: int
    """Seconds, relative to epoch."""
    rootnid_8b: int
    """With 48BIT alone."""


@dataclass(frozen=True, slots=True)
class DeviceSlot(Record):
    """``erofs_deviceslot``, 128 bytes of the device table."""

    STRUCT: ClassVar[Struct] = Struct("<64sIIHH52x")

    tag: bytes
    """In our images the 64 hex digits of the sha256 of the device's bytes. The kernel doesn't look at it."""
    blocks: int
    uniaddr: int
    """Block in the flat form at which the device begins; 0 means that it has no place there."""
    blocks_hi: int
    uniaddr_hi: int


@dataclass(frozen=True, slots=True)
class InodeCompact(Record):
    """``erofs_inode_compact``, 32 bytes: what mkfs.erofs writes where it can, and we only read."""

    STRUCT: ClassVar[Struct] = Struct("<HHHHIIIIHH4x")

    i_format: int
    i_xattr_icount: int
    i_mode: int
    i_nlink: int
    i_size: int
    i_mtime: int
    """Seconds, relative to the superblock's epoch."""
    i_u: int
    i_ino: int
    i_uid: int
    i_gid: int


@dataclass(frozen=True, slots=True)
class InodeExtended(Record):
    """``erofs_inode_extended``, 64 bytes: own times, 32-bit ids and link counts, 64-bit sizes."""

    STRUCT: ClassVar[Struct] = Struct("<HHHHQIIIIqII16x")

    i_format: int
    i_xattr_icount: int
    i_mode: int
    i_nb: int
    i_size: int
    i_u: int
    """Start block (flat), device number (devices) or chunk format (chunk-based)."""
    i_ino: int
    """For 32-bit stat alone; st_ino is the nid."""
    i_uid: int
    i_gid: int
    i_mtime: int
    i_mtime_nsec: int
    i_nlink: int


@dataclass(frozen=True, slots=True)
class ChunkIndex(Record):
    """``erofs_inode_chunk_index``, 8 bytes."""

    STRUCT: ClassVar[Struct] = Struct("<HHI")

    startblk_hi: int
    """Not used without 48BIT."""
    device_id: int
    """0: ``startblk_lo`` is a unified address. Else a device, numbered from 1, and it is a block of that device."""
    startblk_lo: int


@dataclass(frozen=True, slots=True)
class XattrIbodyHeader(Record):
    """``erofs_xattr_ibody_header``, 12 bytes; shared ids (4 bytes each) and entries follow."""

    STRUCT: ClassVar[Struct] = Struct("<IB7x")

    h_name_filter: int
    """A bit that is 1 says that no name of this inode hashes to it."""
    h_shared_count: int


@dataclass(frozen=True, slots=True)
class XattrEntry(Record):
    """``erofs_xattr_entry``, 4 bytes; the name without its prefix and the value follow, padded to 4 bytes."""

    STRUCT: ClassVar[Struct] = Struct("<BBH")

    e_name_len: int
    e_name_index: int
    e_value_size: int


@dataclass(frozen=True, slots=True)
class Dirent(Record):
    """``erofs_dirent``, 12 bytes."""

    STRUCT: ClassVar[Struct] = Struct("<QHBB")

    nid: int
    nameoff: int
    """From the start of the directory block."""
    file_type: int
    reserved: int


SUPER_SIZE = SuperBlock.STRUCT.size
DEVICE_SLOT_SIZE = DeviceSlot.STRUCT.size
DEVICE_TABLE_OFFSET = EROFS_SUPER_OFFSET + SUPER_SIZE
"""Where our device table begins: right behind the superblock."""
INODE_SIZE = InodeExtended.STRUCT.size
COMPACT_INODE_SIZE = InodeCompact.STRUCT.size
CHUNK_INDEX_SIZE = ChunkIndex.STRUCT.size
BLOCK_MAP_ENTRY_SIZE = 4
"""``EROFS_BLOCK_MAP_ENTRY_SIZE``: without EROFS_CHUNK_FORMAT_INDEXES, chunks are 32-bit unified addresses."""
XATTR_HEADER_SIZE = XattrIbodyHeader.STRUCT.size
XATTR_ENTRY_SIZE = XattrEntry.STRUCT.size
DIRENT_SIZE = Dirent.STRUCT.size

MAX_INLINE = BLOCK_SIZE - INODE_SIZE
"""The longest tail that is written inline, in bytes, so the largest file that lives in the metadata image.

It fits a block together with its inode, and without it too, however the xattrs between them shift it.
"""


def incompat_names(bits: int) -> str:
    """The features in ``bits`` for a message; a bit without a name is shown as a number."""
    each = [bit for bit in (1 << n for n in range(32)) if bits & bit]
    return ", ".join(INCOMPAT_NAMES.get(bit, f"{bit:#x}") for bit in each)


def rdev_encode(major: int, minor: int) -> int:
    """The kernel's ``new_encode_dev``: 12 bits of major, 20 bits of minor."""
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def rdev_decode(rdev: int) -> tuple[int, int]:
    """(major, minor): the kernel's ``new_decode_dev``."""
    return (rdev & 0xFFF00) >> 8, (rdev & 0xFF) | ((rdev >> 12) & 0xFFF00)


def xattr_ibody_size(icount: int) -> int:
    """Bytes between the inode and what follows its xattrs."""
    return XATTR_HEADER_SIZE + 4 * (icount - 1) if icount else 0


def round_up(value: int, unit: int) -> int:
    """``unit`` is a power of two."""
    return (value + unit - 1) & -unit
