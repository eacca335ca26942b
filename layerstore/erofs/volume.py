"""The frame of an EROFS image: its bytes, superblock, device table and unified addresses.

A feature that isn't understood is refused by its name here, before anything else of an image is looked at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property
from operator import itemgetter
from typing import Protocol, TypeVar

from layerstore.digest import Digest
from layerstore.erofs.crc32c import superblock_checksum
from layerstore.erofs.format import (
    DEVICE_SLOT_SIZE,
    EROFS_FEATURE_COMPAT_SB_CHKSUM,
    EROFS_FEATURE_INCOMPAT_DEVICE_TABLE,
    EROFS_ISLOTBITS,
    EROFS_SUPER_MAGIC_V1,
    EROFS_SUPER_OFFSET,
    INCOMPAT_READ,
    MAX_BLOCK_BITS,
    MIN_BLOCK_BITS,
    SUPER_SIZE,
    DeviceSlot,
    SuperBlock,
    incompat_names,
)
from layerstore.erofs.layout import Device
from layerstore.errors import CorruptError, MalformedError, NotFoundError, UnsupportedError
from layerstore.tree.inode import ByteSource

T = TypeVar("T")

_PIECE_BITS = 16
"""Metadata is read in pieces of 64 KiB …"""
_PIECES = 32
"""… of which the last 32 are kept."""


class ImageSource(ByteSource, Protocol):
    """An image's bytes, and how many there are: a blob of a store, a local file."""

    @property
    def size(self) -> int: ...


class Volume:
    """The frame of an EROFS image: what has to be understood before its inodes can be read.

    Attributes:
        source: its bytes.
        size: how many.
        superblock: of the image.
        slots: the device table as it is.
        block_size: in bytes.
        device_mask: the bits of a chunk's device that count; formats to come may use the others.
    """

    def __init__(self, source: ImageSource, *, verify: bool = True) -> None:
        """Read superblock and device table.

        Args:
            source: stays open as long as the image is used.
            verify: whether the superblock's checksum is compared, where it has one. Only for a look at a broken image.

        Raises:
            MalformedError: no EROFS image, or one that contradicts itself.
            CorruptError: the checksum differs.
            UnsupportedError: it needs a feature that isn't handled here; the message names it.
        """
        self.source = source
        self.size = source.size
        self._pieces: dict[int, bytes] = {}
        self.superblock = SuperBlock.unpack(self.bytes_at(EROFS_SUPER_OFFSET, SUPER_SIZE))
        self._check_superblock()
        self.block_size = 1 << self.superblock.blkszbits
        if verify:
            self.verify_checksum()
        self.slots = self._read_slots()
        self._starts = sorted((slot.uniaddr, number) for number, slot in enumerate(self.slots, 1) if slot.uniaddr)
        self.device_mask = (1 << len(self.slots).bit_length()) - 1

    def _check_superblock(self) -> None:
        superblock = self.superblock
        if superblock.magic != EROFS_SUPER_MAGIC_V1:
            raise MalformedError("not an EROFS image: its magic number is missing", offset=EROFS_SUPER_OFFSET)
        unknown = superblock.feature_incompat & ~INCOMPAT_READ
        if unknown:
            raise UnsupportedError(
                f"the EROFS image needs features that aren't handled here: {incompat_names(unknown)}"
            )
        if not MIN_BLOCK_BITS <= superblock.blkszbits <= MAX_BLOCK_BITS:
            raise MalformedError(f"the EROFS image has blocks of 2^{superblock.blkszbits} bytes")
        if superblock.dirblkbits:
            raise UnsupportedError("the EROFS image has directory blocks of a size of their own")

    def checksum(self) -> int:
        """What the superblock's checksum should be."""
        end = self.block_size if self.block_size > EROFS_SUPER_OFFSET else EROFS_SUPER_OFFSET + self.block_size
        return superblock_checksum(self.bytes_at(0, end))

    def verify_checksum(self) -> None:
        """Compare the superblock's checksum, where it has one.

        Raises:
            CorruptError: it differs.
        """
        superblock = self.superblock
        if superblock.feature_compat & EROFS_FEATURE_COMPAT_SB_CHKSUM:
            actual = self.checksum()
            if actual != superblock.checksum:
                raise CorruptError(
                    "the checksum of the EROFS superblock differs",
                    expected=f"{superblock.checksum:#010x}",
                    actual=f"{actual:#010x}",
                )

    def _read_slots(self) -> tuple[DeviceSlot, ...]:
        superblock = self.superblock
        if not superblock.feature_incompat & EROFS_FEATURE_INCOMPAT_DEVICE_TABLE:
            return ()
        table = self.bytes_at(superblock.devt_slotoff * DEVICE_SLOT_SIZE, superblock.extra_devices * DEVICE_SLOT_SIZE)
        return tuple(DeviceSlot(*values) for values in DeviceSlot.STRUCT.iter_unpack(table))

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Bytes of the image.

        Raises:
            MalformedError: it ends before that.
        """
        if offset + length > self.size:
            raise MalformedError(f"{length} bytes at {offset} are outside of the image, which has {self.size}")
        number = offset >> _PIECE_BITS
        start = number << _PIECE_BITS
        if offset + length > start + (1 << _PIECE_BITS):
            return self.source.read_at(offset, length)
        piece = self._pieces.get(number)
        if piece is None:
            piece = self.source.read_at(start, min(1 << _PIECE_BITS, self.size - start))
            for oldest in list(self._pieces)[: 1 - _PIECES]:  # a copy: another thread may be adding one
                self._pieces.pop(oldest, None)
            self._pieces[number] = piece
        return piece[offset - start : offset - start + length]

    # ---- devices

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The packs by their digests, in order.

        Raises:
            MalformedError: a slot's tag is no digest.
        """
        return tuple(Device(Digest.parse(f"sha256:{slot.tag.decode('latin-1')}"), slot.blocks) for slot in self.slots)

    def bind(self, packs: Mapping[Digest, T]) -> list[T]:
        """What ``packs`` has for each device, in the order in which the kernel and :class:`Devices` want them.

        The kernel maps devices by order alone and reads wrong bytes without an error, so they are found by digest.

        Raises:
            NotFoundError: one is missing; the message names it.
        """
        bound = []
        for number, device in enumerate(self.devices, 1):
            if device.digest not in packs:
                raise NotFoundError(f"device {number} of the image is missing: pack {device.digest}")
            bound.append(packs[device.digest])
        return bound

    # ---- addresses

    def offset_of(self, nid: int) -> int:
        return (self.superblock.meta_blkaddr << self.superblock.blkszbits) + (nid << EROFS_ISLOTBITS)

    def unified(self, nid: int, block: int, count: int) -> tuple[int, int]:
        """The device that holds these blocks of the unified space, and the block there at which they begin.

        Raises:
            MalformedError: none does; the message names the inode that needs them.
        """
        if block + count <= min(self.superblock.blocks, self.size // self.block_size):
            return 0, block
        at = bisect_right(self._starts, block, key=itemgetter(0)) - 1
        if at >= 0:
            start, number = self._starts[at]
            if block + count <= start + self.slots[number - 1].blocks:
                return number, block - start
        raise MalformedError(f"inode {nid}: {count} blocks at {block} are outside of the image and its devices")
