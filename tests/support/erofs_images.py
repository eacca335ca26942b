"""Trees with their packs in memory, and metadata images made of them."""

from __future__ import annotations

import io
import stat
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from layerstore.digest import Digest
from layerstore.erofs.crc32c import superblock_checksum
from layerstore.erofs.format import (
    BLOCK_SIZE,
    DEVICE_SLOT_SIZE,
    DIRENT_SIZE,
    EROFS_SUPER_OFFSET,
    Dirent,
    InodeExtended,
)
from layerstore.erofs.layout import HOLE, Chunked, Device, address
from layerstore.erofs.reader import Image
from layerstore.erofs.writer import ImageSummary, write_image
from layerstore.tree.inode import (
    Attrs,
    Directory,
    Extent,
    File,
    Inode,
    Special,
    Symlink,
    Whiteout,
    Xattrs,
    walk,
)
from layerstore.tree.links import link_sets
from support.trees import Bytes, content

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
"""security.capability: cap_net_raw+ep, as setcap writes it."""
ACL = bytes.fromhex("0200000001000600ffffffff02000400e803000004000400ffffffff10000400ffffffff20000000ffffffff")
"""system.posix_acl_access: u::rw- u:1000:r-- g::r-- m::r-- o::---"""
ALL_BYTES = bytes(range(256))


class Source(Bytes):
    """An image in memory."""

    @property
    def size(self) -> int:
        return len(self.data)


class Packs:
    """Extra devices in memory. Data goes to any of them; each ends as whole blocks."""

    def __init__(self, count: int = 1) -> None:
        self.data = [bytearray() for _ in range(count)]

    def add(self, device: int, data: bytes) -> int:
        """Append to a device, filled up to a whole block; returns its first block there."""
        pack = self.data[device - 1]
        block = len(pack) // BLOCK_SIZE
        pack += data + bytes(-len(data) % BLOCK_SIZE)
        return block

    def file(self, attrs: Attrs, pieces: Sequence[bytes | None], *, bits: int = 0, spread: bool = False) -> File:
        """A chunked file; None is a hole. With ``spread``, piece i goes to device 1 + i % count."""
        step = BLOCK_SIZE << bits
        addresses = array("Q")
        extents = []
        size = 0
        for number, piece in enumerate(pieces):
            if piece is None:
                addresses.append(HOLE)
                size += step
                continue
            assert len(piece) == step or number == len(pieces) - 1
            device = 1 + number % len(self.data) if spread else 1
            block = self.add(device, piece)
            addresses.append(address(device, block))
            extents.append(Extent(size, len(piece), Bytes(piece), 0))
            size += len(piece)
        file = File(attrs, size, tuple(extents))
        file.chunks = Chunked(bits, addresses)
        return file

    @property
    def devices(self) -> list[Device]:
        return [Device(Digest.of(bytes(data)), len(data) // BLOCK_SIZE) for data in self.data]

    def read_device(self, index: int, offset: int, length: int) -> bytes:
        assert index >= 1
        data = bytes(self.data[index - 1][offset : offset + length])
        assert len(data) == length
        return data

    def save(self, directory: Path) -> list[Path]:
        """Write them to files, in order."""
        paths = []
        for number, data in enumerate(self.data, 1):
            path = directory / f"pack{number}"
            path.write_bytes(data)
            paths.append(path)
        return paths


def attrs(
    kind: int,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: int = 1_600_000_000,
    nsec: int = 0,
    xattrs: Xattrs = (),
) -> Attrs:
    return Attrs(kind | mode, uid, gid, mtime, nsec, tuple(sorted(xattrs)))


def inline(data: bytes, mode: int = 0o644, xattrs: Xattrs = ()) -> File:
    extents = (Extent(0, len(data), Bytes(data), 0),) if data else ()
    return File(attrs(stat.S_IFREG, mode, xattrs=xattrs), len(data), extents)


def directory(entries: dict[bytes, Inode] | None = None, mode: int = 0o755, xattrs: Xattrs = ()) -> Directory:
    made = Directory(attrs(stat.S_IFDIR, mode, xattrs=xattrs))
    made.entries.update(entries or {})
    return made


def symlink(target: bytes) -> Symlink:
    return Symlink(attrs(stat.S_IFLNK, 0o777), target)


def image_bytes(root: Directory, devices: Sequence[Device] = ()) -> bytes:
    out = io.BytesIO()
    summary = write_image(root, devices, out)
    data = out.getvalue()
    assert summary.bytes == len(data) == summary.blocks * BLOCK_SIZE
    assert summary.digest == Digest.of(data)
    return data


def image_of(root: Directory, devices: Sequence[Device] = ()) -> Image:
    return Image(Source(image_bytes(root, devices)))


def summary_of(root: Directory, devices: Sequence[Device] = ()) -> ImageSummary:
    return write_image(root, devices, io.BytesIO())


def sealed(image: bytes | bytearray) -> bytes:
    """The image with its superblock's checksum made right again."""
    data = bytearray(image)
    checksum = superblock_checksum(bytes(data[:BLOCK_SIZE]))
    data[EROFS_SUPER_OFFSET + 4 : EROFS_SUPER_OFFSET + 8] = checksum.to_bytes(4, "little")
    return bytes(data)


def zoo() -> tuple[Directory, Packs]:
    """One of each kind of thing that an image can hold, on three packs."""
    packs = Packs(3)
    file = stat.S_IFREG
    root = directory({}, 0o711)
    entries = root.entries

    one = inline(b"one inode, four names")
    entries[b"hard1"] = one
    link = symlink(b"target")
    entries[b"links"] = directory({b"hard2": one, b"hard3": one, b"l1": link, b"l2": link})
    entries[b"zlinks"] = directory({b"hard4": one})

    entries[b"files"] = directory(
        {
            b"empty": inline(b""),
            b"small": inline(b"x"),
            b"largest-inline": inline(bytes(range(1, 253)) * 16),
            b"one-chunk": packs.file(attrs(file), [b"1" * 4096]),
            b"short-chunk": packs.file(attrs(file), [b"2" * 5000], bits=4),
            b"spread": packs.file(
                attrs(file), [b"%d" % n * 8192 for n in range(7)] + [b"t" * 4097], bits=1, spread=True
            ),
            b"holes": packs.file(attrs(file), [None, b"a" * 4096, None, None, b"b" * 4096, b"c" * 10]),
            b"sparse": packs.file(attrs(file), [None] * 96, bits=14),  # 6 GiB
        }
    )
    entries[b"symlinks"] = directory(
        {
            b"short": symlink(b"a"),
            b"absolute": symlink(b"/files/small"),
            b"up": symlink(b"../../../../files/small"),
            b"dangling": symlink(b"nowhere"),
            b"loop": symlink(b"loop"),
            **{b"l%d" % size: symlink(b"n" * size) for size in (4031, 4032, 4033, 4094, 4095)},
        }
    )
    entries[b"dev"] = directory(
        {
            b"console": Special(attrs(stat.S_IFCHR, 0o600), 5, 1),
            b"sda": Special(attrs(stat.S_IFBLK, 0o660, gid=6), 8, 0),
            b"big": Special(attrs(stat.S_IFCHR), 4095, 1048575),
            b"odd": Special(attrs(stat.S_IFBLK), 300, 70000),
            b"fifo": Special(attrs(stat.S_IFIFO)),
            b"socket": Special(attrs(stat.S_IFSOCK, 0o755)),
        }
    )
    opaque = directory({b"below": inline(b"y")}, xattrs=((b"user.kept", b"1"),))
    opaque.opaque = True
    entries[b"overlay"] = directory({b"gone": Whiteout(attrs(stat.S_IFCHR, 0)), b"opaque": opaque})
    entries[b"xattrs"] = directory(
        {
            b"ping": inline(b"#!", 0o755, ((b"security.capability", CAPABILITY),)),
            b"acl": inline(b"acl", 0o640, ((b"system.posix_acl_access", ACL),)),
            b"binary": inline(b"", xattrs=((b"user.bin", ALL_BYTES), (b"user.empty", b""))),
            b"on-chunks": packs.file(attrs(file, xattrs=((b"user.abc", b"12345"),)), [b"x" * 4096, b"y"]),
            b"trusted": inline(b"t", xattrs=((b"trusted.t", b"\0"),)),
            b"long": inline(b"t" * 4000, xattrs=((b"user.long", b"v" * 9000), (b"user." + b"n" * 250, b"w"))),
            b"link": Symlink(attrs(stat.S_IFLNK, 0o777, xattrs=((b"security.selinux", b"l\0"),)), b"t"),
            b"dir": directory({}, xattrs=((b"system.posix_acl_default", ACL), (b"user.d", b"d"))),
        }
    )
    entries[b"times"] = directory(
        {
            name: File(attrs(file, mtime=mtime, nsec=nsec), 0, ())
            for name, mtime, nsec in (
                (b"before", -1, 999_999_999),
                (b"old", -2_208_988_800, 1),
                (b"epoch", 0, 0),
                (b"2100", 4_102_444_800, 123_456_789),
                (b"10000", 253_402_300_800, 0),
            )
        }
    )
    entries[b"owners"] = directory(
        {b"%d" % uid: File(attrs(file, 0o7777, uid=uid, gid=uid - 1), 0, ()) for uid in (1, 65535, 65536, 4294967294)}
    )
    entries[b"names"] = directory(
        {
            name: inline(name)
            for name in (
                b"!before-dot",
                b"...",
                b" ",
                b"\xff\xfe",
                b"new\nline",
                "grün".encode(),
                b"n" * 255,
                b"-",
                b"\\",
            )
        }
    )
    entries[b"empty"] = directory()
    entries[b"many"] = directory({b"entry-%04d" % n: inline(b"") for n in range(1000)})
    return root, packs


def listing(tree: Directory) -> dict[bytes, tuple[object, ...]]:
    """Every path with all that an image must keep of it; file data whole, or as merged runs if the file is large."""
    links = link_sets(tree)
    rows: dict[bytes, tuple[object, ...]] = {}
    for path, inode in walk(tree):
        value: object = None
        if isinstance(inode, File):
            value = (inode.size, content(inode) if inode.size <= 1 << 20 else _runs(inode))
        elif isinstance(inode, Symlink):
            value = inode.target
        elif isinstance(inode, Special):
            value = (inode.major, inode.minor)
        elif isinstance(inode, Directory):
            value = inode.opaque
        rows[path] = (type(inode).__name__, inode.attrs, value, links.get(path))
    return rows


def _runs(file: File) -> list[tuple[int, bytes]]:
    runs: list[tuple[int, bytes]] = []
    for extent in file.extents:
        data = extent.source.read_at(extent.at, extent.length)
        if runs and runs[-1][0] + len(runs[-1][1]) == extent.offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + data)
        else:
            runs.append((extent.offset, data))
    return runs


class Forgery:
    """An image whose fields are changed one by one; its checksum is made right again at the end."""

    def __init__(self, root: Directory, devices: Sequence[Device] = ()) -> None:
        self.data = bytearray(image_bytes(root, devices))
        self.original = Image(Source(bytes(self.data)))

    def superblock(self, **fields: object) -> Forgery:
        changed = replace(self.original.superblock, **fields)  # type: ignore[arg-type]
        return self.write(EROFS_SUPER_OFFSET, changed.pack())

    def slot(self, number: int, **fields: object) -> Forgery:
        table = self.original.superblock.devt_slotoff * DEVICE_SLOT_SIZE
        changed = replace(self.original.slots[number - 1], **fields)  # type: ignore[arg-type]
        return self.write(table + (number - 1) * DEVICE_SLOT_SIZE, changed.pack())

    def inode(self, path: bytes, **fields: object) -> Forgery:
        at = self.offset(path)
        changed = replace(InodeExtended.unpack(self.data, at), **fields)  # type: ignore[arg-type]
        return self.write(at, changed.pack())

    def dirent(self, path: bytes, name: bytes, **fields: object) -> Forgery:
        """Change the dirent of a name in the directory at a path, which has one inline block."""
        node = self.original.resolve(path)
        [run] = self.original.runs(node)
        [block] = self.original.blocks_of(node)
        at = run.at + DIRENT_SIZE * [entry.name for entry in block].index(name)
        changed = replace(Dirent.unpack(self.data, at), **fields)  # type: ignore[arg-type]
        return self.write(at, changed.pack())

    def rename(self, path: bytes, name: bytes, new: bytes) -> Forgery:
        """Write another name of the same length over one."""
        assert len(name) == len(new)
        [run] = self.original.runs(self.original.resolve(path))
        at = self.data.index(name, run.at + DIRENT_SIZE, run.at + run.length)
        return self.write(at, new)

    def write(self, offset: int, data: bytes) -> Forgery:
        self.data[offset : offset + len(data)] = data
        return self

    def offset(self, path: bytes) -> int:
        return self.original.offset_of(self.original.resolve(path, follow=False).nid)

    def body(self, path: bytes) -> int:
        return self.original.resolve(path, follow=False).body

    def done(self) -> bytes:
        return sealed(self.data)

    def image(self) -> Image:
        return Image(Source(self.done()))
