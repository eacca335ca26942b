from __future__ import annotations

import stat
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.erofs_images import (
    Forgery,
    Packs,
    Source,
    attrs,
    directory,
    image_bytes,
    inline,
    sealed,
    symlink,
    zoo,
)

from layerstore.digest import Digest
from layerstore.erofs.checker import check, require_sound
from layerstore.erofs.directory import Entry, encode_blocks
from layerstore.erofs.format import BLOCK_SIZE, EROFS_SUPER_OFFSET, InodeExtended
from layerstore.erofs.layout import Device
from layerstore.erofs.reader import Image
from layerstore.errors import ImgtoolError, MalformedError


def victim() -> Forgery:
    """A small image with one of each thing that can be wrong."""
    packs = Packs(2)
    one = inline(b"linked")
    opaque = directory()
    opaque.opaque = True
    root = directory(
        {
            b"big": directory({b"%04d" % number: inline(b"") for number in range(400)}),
            b"chunks": packs.file(attrs(stat.S_IFREG), [b"1" * 8192, b"2" * 100], bits=1, spread=True),
            b"dir": directory({b"aaaa": inline(b"1"), b"bbbb": inline(b"2"), b"sub": directory()}),
            b"file": inline(b"f" * 3000),
            b"h1": one,
            b"h2": one,
            b"link": symlink(b"target"),
            b"longlink": symlink(b"n" * 4090),
            b"opaque": opaque,
            b"xattr": inline(b"", xattrs=((b"security.capability", b"12345678"),)),
        }
    )
    return Forgery(root, packs.devices)


def test_nothing_is_wrong_with_ours() -> None:
    assert check(victim().image()) == []
    root, packs = zoo()
    require_sound(Image(Source(image_bytes(root, packs.devices))))


def nid(forgery: Forgery, path: bytes) -> int:
    return forgery.original.resolve(path, follow=False).nid


HARM: dict[str, tuple[Callable[[Forgery], object], str]] = {
    "superblock longer than the image": (lambda f: f.superblock(blocks=10_000), "superblock: 10000 blocks"),
    "root is a file": (lambda f: f.superblock(rootnid_2b=nid(f, b"/file")), "/: the root of the image is not a"),
    "root outside": (lambda f: f.superblock(rootnid_2b=65535), "/: 32 bytes at 2097120 are outside"),
    "chunked files without the feature": (
        lambda f: f.superblock(feature_incompat=8),
        "/chunks: it has chunks, but the image says that no file has",
    ),
    "tag is no digest": (lambda f: f.slot(1, tag=b"\xff" * 64), "device table: a tag is no sha256"),
    "tag is cut": (lambda f: f.slot(2, tag=b"abc"), "device table: a tag is no sha256"),
    "device over the image": (lambda f: f.slot(1, uniaddr=1), "device 1: it lies over another"),
    "device over the other": (lambda f: f.slot(1, blocks=100), "device 2: it lies over another"),
    "device beyond 32 bits": (lambda f: f.slot(2, uniaddr=0xFFFF_FFFF), "device 2: it is beyond the 32-bit"),
    "device of 48 bits": (lambda f: f.slot(1, blocks_hi=1), "device 1: its addresses have 48 bits"),
    "chunk beyond its device": (
        lambda f: f.slot(1, blocks=1),
        "/chunks: chunk 0 is at block 0 of device 1, beyond its end",
    ),
    "chunk of no device": (
        lambda f: f.write(f.body(b"/chunks"), struct.pack("<HHI", 0, 3, 0)),
        "/chunks: chunk 0 is at block 0 of device 3",
    ),
    "chunk outside of the flat form": (
        lambda f: f.write(f.body(b"/chunks"), struct.pack("<HHI", 0, 0, 0x10000)),
        "2 blocks at 65536 are outside of the image and its devices",
    ),
    "more chunks than the image has bytes": (
        lambda f: f.inode(b"/chunks", i_size=1 << 50),
        "chunk addresses are outside of the image",
    ),
    "negative size": (lambda f: f.inode(b"/file", i_size=1 << 63), "has a size of 9223372036854775808 bytes"),
    "unknown chunk format": (lambda f: f.inode(b"/chunks", i_u=0xA0), "chunk format 0xa0"),
    "48-bit chunks": (lambda f: f.inode(b"/chunks", i_u=0x61), "chunk format 48BIT"),
    "compressed": (lambda f: f.inode(b"/file", i_format=3), "layout COMPRESSED_FULL"),
    "compressed too": (lambda f: f.inode(b"/file", i_format=7), "layout COMPRESSED_COMPACT"),
    "unknown layout": (lambda f: f.inode(b"/file", i_format=11), "layout 5"),
    "unknown format bit": (lambda f: f.inode(b"/file", i_format=5 | 0x20), "unknown format 0x25"),
    "extended inode without links": (lambda f: f.inode(b"/file", i_format=5 | 0x10), "unknown format 0x15"),
    "no type": (lambda f: f.inode(b"/file", i_mode=0o644), "of no type"),
    "type of its entry": (lambda f: f.inode(b"/link", i_mode=0o100644), "/link: its entry has the type 7"),
    "nanoseconds": (lambda f: f.inode(b"/file", i_mtime_nsec=10**9), "/file: its time has 1000000000 ns"),
    "no links": (lambda f: f.inode(b"/file", i_nlink=0), "/file: its link count is 0"),
    "more links than names": (lambda f: f.inode(b"/h1", i_nlink=3), "/h1: its link count is 1 higher"),
    "more names than links": (lambda f: f.inode(b"/h1", i_nlink=1), "/h2: its inode"),
    "directory's link count": (
        lambda f: f.inode(b"/dir", i_nlink=2),
        "/dir: its link count is 2, but it has 1 directories",
    ),
    "special file with a size": (
        lambda f: f.inode(b"/file", i_mode=0o010644).dirent(b"/", b"file", file_type=5),
        "/file: a special file of 3000 bytes",
    ),
    "tail across a block": (
        lambda f: f.inode(b"/h1", i_size=BLOCK_SIZE - f.body(b"/h1") % BLOCK_SIZE + 1),
        "its inline tail crosses a block",
    ),
    "flat file outside": (
        lambda f: f.inode(b"/file", i_format=1, i_u=5000),
        "1 blocks at 5000 are outside of the image",
    ),
    "flat file far outside": (
        lambda f: f.inode(b"/file", i_format=1, i_u=0, i_size=1 << 60),
        "blocks at 0 are outside of the image",
    ),
    "empty link": (lambda f: f.inode(b"/link", i_size=0), "a symbolic link of 0 bytes"),
    "link too long": (lambda f: f.inode(b"/longlink", i_size=4096), "a symbolic link of 4096 bytes"),
    "NUL in a link": (lambda f: f.write(f.body(b"/link") + 1, b"\0"), "/link: inode"),
    "link in chunks": (lambda f: f.inode(b"/link", i_format=9), "has chunks but isn't a regular file"),
    "directory in chunks": (lambda f: f.inode(b"/dir", i_format=9), "has chunks but isn't a regular file"),
    "directory without blocks": (lambda f: f.inode(b"/dir", i_size=0), '/dir: its entries "." and ".."'),
    "directory in a hole": (
        lambda f: f.inode(b"/dir", i_format=1, i_u=0xFFFF_FFFF),
        "a directory with holes, or on another device",
    ),
    "directory on a device": (
        lambda f: f.inode(b"/dir", i_format=1, i_u=f.original.slots[0].uniaddr),
        "a directory with holes, or on another device",
    ),
    "huge directory": (lambda f: f.inode(b"/dir", i_size=1 << 40), "/dir: inode"),
    "slash in a name": (lambda f: f.rename(b"/dir", b"aaaa", b"a/aa"), "can't be named 'a/aa'"),
    "NUL in a name": (lambda f: f.rename(b"/dir", b"aaaa", b"a\0aa"), "can't be named 'a\\\\x00aa'"),
    "dot twice": (lambda f: f.rename(b"/dir", b"sub", b".\0\0"), "/dir: the entry . is out of order"),
    "name twice": (lambda f: f.rename(b"/dir", b"bbbb", b"aaaa"), "/dir: the entry aaaa is out of order"),
    "names not in order": (lambda f: f.rename(b"/dir", b"bbbb", b"Zbbb"), "/dir: the entry Zbbb is out of order"),
    "empty name": (lambda f: f.dirent(b"/dir", b"bbbb", nameoff=63), "the name of a directory entry is at"),
    "offset beyond the block": (lambda f: f.dirent(b"/dir", b"sub", nameoff=60000), "the name of a directory entry"),
    "offset of the first name": (lambda f: f.dirent(b"/dir", b".", nameoff=5), "the first name of a directory block"),
    "entry outside of the image": (
        lambda f: f.dirent(b"/dir", b"aaaa", nid=1 << 40),
        "/dir/aaaa: its inode 1099511627776 is outside",
    ),
    "entry at the very end": (lambda f: f.dirent(b"/dir", b"aaaa", nid=len(f.data) // 32 - 1), "/dir/aaaa: "),
    "type of an entry": (lambda f: f.dirent(b"/dir", b"aaaa", file_type=2), "/dir/aaaa: its entry has the type 2"),
    "type of no kind": (lambda f: f.dirent(b"/dir", b"aaaa", file_type=99), "/dir/aaaa: its entry has the type 99"),
    "type of dot": (lambda f: f.dirent(b"/dir", b".", file_type=1), "/dir: the entry . isn't marked a directory"),
    "dot elsewhere": (lambda f: f.dirent(b"/dir", b".", nid=nid(f, b"/")), '/dir: its entries "." and ".."'),
    "dots elsewhere": (lambda f: f.dirent(b"/dir", b"..", nid=nid(f, b"/dir")), '/dir: its entries "." and ".."'),
    "directory cycle": (lambda f: f.dirent(b"/dir", b"sub", nid=nid(f, b"/")), "/dir/sub: its inode"),
    "directory in itself": (lambda f: f.dirent(b"/dir", b"sub", nid=nid(f, b"/dir")), "/dir/sub: its inode"),
    "directory with two names": (
        lambda f: f.dirent(b"/dir", b"sub", nid=nid(f, b"/opaque")),
        "is a directory's, or has more names",
    ),
    "xattr count": (lambda f: f.inode(b"/xattr", i_xattr_icount=0xFFFF), "/xattr: "),
    "xattr header alone": (lambda f: f.inode(b"/xattr", i_xattr_icount=1), "shorter than their header"),
    "xattr entry too long": (lambda f: f.write(f.offset(b"/xattr") + 64 + 14, b"\xff\xff"), "an xattr entry is longer"),
    "shared xattr outside": (
        lambda f: f.write(f.offset(b"/xattr") + 64 + 4, b"\1").write(f.offset(b"/xattr") + 64 + 12, b"\xff" * 4),
        "are outside of the image",
    ),
    "name filter hides a capability": (
        lambda f: f.write(f.offset(b"/xattr") + 64, b"\xff" * 4),
        "/xattr: its name filter hides an xattr",
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_harm_is_found(harm: str) -> None:
    change, message = HARM[harm]
    forgery = victim()
    change(forgery)
    image = forgery.image()
    problems = [str(problem) for problem in check(image)]
    assert any(message in problem for problem in problems), problems
    with pytest.raises(MalformedError, match="the image can't be trusted: "):
        require_sound(image)


def test_checksum() -> None:
    data = bytearray(victim().data)
    data[EROFS_SUPER_OFFSET + 0x30] ^= 1
    problems = check(Image(Source(bytes(data)), verify=False))
    assert [problem.where for problem in problems] == ["superblock"]
    assert "checksum" in problems[0].what


@pytest.mark.case("O14")
@pytest.mark.parametrize("at", [64 + 4, 64 + 12, 64 + 13, 64 + 14])
def test_an_unreadable_opaque_mark_is_an_error(at: int) -> None:
    """Not the same as a directory that isn't opaque: what is below would come back."""
    forgery = victim()
    image = forgery.write(forgery.offset(b"/opaque") + at, b"\xee").image()
    with pytest.raises(ImgtoolError):
        image.resolve(b"/opaque")
    assert any(problem.where == "/opaque" for problem in check(image))


def test_problems_are_not_counted_without_end() -> None:
    root = directory({b"%04d" % number: inline(b"") for number in range(1000)})
    forgery = Forgery(root)
    for name in root.entries:
        forgery.inode(b"/" + name, i_nlink=0)
    assert len(check(forgery.image())) == 100


class Counted(Source):
    """Counts the bytes that are read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.given = 0

    def read_at(self, offset: int, length: int) -> bytes:
        self.given += length
        return super().read_at(offset, length)


def given_by(image: Image) -> int:
    assert isinstance(image.source, Counted)
    return image.source.given


def hand_made(entries: list[tuple[bytes, int, int]], inodes: dict[int, bytes], blocks: int) -> Image:
    """An image of a root (nid 40, its entries in block 1 and following) and raw inodes at other numbers."""
    listed = [Entry(*entry) for entry in sorted([*entries, (b".", 40, 2), (b"..", 40, 2)])]
    data = bytearray(image_bytes(directory()).ljust(blocks * BLOCK_SIZE, b"\0"))
    pieces = list(encode_blocks(listed))
    size = (len(pieces) - 1) * BLOCK_SIZE + len(pieces[-1])
    subdirectories = sum(kind == 2 for _, _, kind in entries)
    head = InodeExtended(1, 0, stat.S_IFDIR | 0o755, 0, size, 1, 1, 0, 0, 0, 0, 2 + subdirectories).pack()
    superblock = Image(Source(bytes(data))).superblock
    data[40 * 32 : 40 * 32 + 64] = head
    for number, piece in enumerate(pieces, 1):
        data[number * BLOCK_SIZE : number * BLOCK_SIZE + len(piece)] = piece
    for number, raw in inodes.items():
        data[number * 32 : number * 32 + len(raw)] = raw
    changed = replace(superblock, rootnid_2b=40, blocks=blocks)
    data[EROFS_SUPER_OFFSET : EROFS_SUPER_OFFSET + 128] = changed.pack()
    return Image(Counted(sealed(data)))


def test_inodes_that_share_their_chunk_tables_cost_no_more_than_the_image() -> None:
    """20,000 inodes, 64 bytes apart, each with a table of 4 MiB over the rest: 80 GB to look at."""
    count, blocks = 20_000, 2048
    first = (200 * BLOCK_SIZE) // 32
    table = InodeExtended(9, 0, stat.S_IFREG, 0, (4 << 20) // 8 * BLOCK_SIZE, 0x20, 1, 0, 0, 0, 0, 1).pack()
    image = hand_made(
        [(b"%06d" % number, first + 2 * number, 1) for number in range(count)],
        {first + 2 * number: table for number in range(count)},
        blocks,
    )
    assert "lie over each other" in check(image)[-1].what
    assert given_by(image) < 4 * image.size


def test_directories_that_share_their_blocks_are_walked_once() -> None:
    """1,000 directories whose data is the root's own: a walk without a bound visits a million entries."""
    first = (100 * BLOCK_SIZE) // 32
    entries = [(b"%06d" % number, first + 2 * number, 2) for number in range(1000)]
    size = sum(12 + len(name) for name, _, _ in entries)
    below = InodeExtended(1, 0, stat.S_IFDIR, 0, size, 1, 1, 0, 0, 0, 0, 2).pack()
    image = hand_made(entries, {first + 2 * number: below for number in range(1000)}, 200)
    assert "lie over each other" in check(image)[-1].what
    assert given_by(image) < 4 * image.size


def test_shared_xattrs_are_not_read_without_end() -> None:
    """Each of 5,000 inodes points 60 times at one shared value of 60 KiB: 18 GB."""
    count = 5000
    first = (100 * BLOCK_SIZE) // 32
    shared_at = 1500 * BLOCK_SIZE
    slots = (64 + 12 + 60 * 4 + 31) // 32
    body = struct.pack("<IB7x", 0, 60) + b"".join(struct.pack("<I", shared_at // 4 + 4 * n) for n in range(60))
    icount = (len(body) - 12) // 4 + 1
    raw = InodeExtended(1, icount, stat.S_IFREG, 0, 0, 0, 1, 0, 0, 0, 0, 1).pack() + body
    values = b"".join(struct.pack("<BBH", 5, 1, 60_000) + b"%05d" % n + b"\0" * 7 for n in range(60))
    inodes = {first + slots * number: raw for number in range(count)}
    inodes[shared_at // 32] = values
    image = hand_made([(b"%06d" % n, first + slots * n, 1) for n in range(count)], inodes, 1600)
    assert "shared xattrs" in check(image)[-1].what
    assert given_by(image) < 70 * image.size


def test_device_table_alone() -> None:
    packs = [Device(Digest.of(bytes([number])), number) for number in range(200)]
    assert check(Image(Source(image_bytes(directory(), packs)))) == []
