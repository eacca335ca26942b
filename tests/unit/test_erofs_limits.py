"""What EROFS can hold, what it can't, and what no image should: large numbers, and trees that contradict themselves."""

from __future__ import annotations

import io
import random
import stat
from array import array
from typing import BinaryIO

import pytest
from support.erofs_images import (
    attrs,
    directory,
    image_bytes,
    image_of,
    inline,
    listing,
)
from support.trees import Bytes

from layerstore.digest import Digest
from layerstore.erofs.checker import check
from layerstore.erofs.format import (
    MAX_INLINE,
)
from layerstore.erofs.layout import HOLE, Chunked, Device
from layerstore.erofs.tree import load_tree
from layerstore.erofs.writer import write_image
from layerstore.errors import LimitError, MalformedError, NoSpaceError, UnsupportedError
from layerstore.tree.inode import Attrs, Directory, Extent, File, Inode, Special, Symlink


@pytest.mark.case("T62")
def test_two_hundred_thousand_files_in_one_directory() -> None:
    rng = random.Random(62)
    empty = attrs(stat.S_IFREG)
    root = directory({rng.randbytes(10).hex().encode(): File(empty, 0, ()) for _ in range(200_000)})
    image = image_of(root)
    assert check(image) == []
    for name in list(root.entries)[::200]:
        assert image.lookup(image.root, name).size == 0
    assert [entry.name for entry in image.entries(image.root)] == sorted(root.entries)


@pytest.mark.case("T62")
def test_seventy_thousand_links_and_subdirectories() -> None:
    one = inline(b"")
    own = attrs(stat.S_IFDIR)
    root = directory(
        {
            b"links": directory({b"%d" % number: one for number in range(70_000)}),
            b"directories": directory({b"%d" % number: Directory(own) for number in range(70_000)}),
        }
    )
    image = image_of(root)
    assert check(image) == []
    assert image.resolve(b"/links/69999").nlink == 70_000
    assert image.resolve(b"/directories").nlink == 70_002
    assert len({entry.nid for entry in image.entries(image.resolve(b"/links"))}) == 1


@pytest.mark.case("T62")
def test_xattrs_at_their_limits() -> None:
    many = tuple((b"user.%04d" % number, b"v") for number in range(5000))
    root = directory(
        {b"many": inline(b"t" * 3000, xattrs=many), b"big": inline(b"", xattrs=((b"user.b", bytes(65535)),))}
    )
    image = image_of(root)
    assert check(image) == []
    assert listing(load_tree(image)) == listing(root)


@pytest.mark.case("T62")
def test_xattr_of_64_kib_is_refused_by_name() -> None:
    root = directory({b"d": directory({b"f": inline(b"", xattrs=((b"user.b", bytes(65537)),))})})
    with pytest.raises(LimitError, match=r"^/d/f: the xattr user\.b has 65537 bytes"):
        image_bytes(root)


def test_a_tree_ten_thousand_deep() -> None:
    root = here = directory()
    for _ in range(10_000):
        below = directory()
        here.entries[b"d"] = below
        here = below
    here.entries[b"f"] = inline(b"deep")
    image = image_of(root)
    assert check(image) == []
    tree = load_tree(image)
    for _ in range(10_000):
        child = tree.entries[b"d"]
        assert isinstance(child, Directory)
        tree = child
    assert list(tree.entries) == [b"f"]


def test_deep_path_in_a_message_is_shortened() -> None:
    root = here = directory()
    for _ in range(10_000):
        below = directory()
        here.entries[b"d"] = below
        here = below
    here.entries[b"f"] = File(attrs(stat.S_IFREG), 5000, ())
    with pytest.raises(LimitError) as caught:
        image_bytes(root)
    assert len(str(caught.value)) < 400
    assert "/.../" in str(caught.value)


# ---- limits of the format


@pytest.mark.case("Z18")
def test_packs_beyond_32_bit_addresses_are_refused() -> None:
    packs = [Device(Digest.of(bytes([number])), 1 << 31) for number in range(2)]
    with pytest.raises(LimitError, match="too large for EROFS 32-bit block addresses"):
        image_bytes(directory(), packs)
    # The packs alone would just fit, but not behind the image.
    packs[1] = Device(packs[1].digest, (1 << 31) - 1)
    out = io.BytesIO()
    with pytest.raises(LimitError, match="too large for EROFS 32-bit block addresses"):
        write_image(directory(), packs, out)
    assert out.getvalue() == b""
    packs[1] = Device(packs[1].digest, (1 << 31) - 2)
    assert image_of(directory(), packs).slots[1].uniaddr == (1 << 31) + 1


@pytest.mark.case("Z18")
def test_a_sparse_file_of_3_tib_is_fine() -> None:
    size = 3 << 40
    file = File(attrs(stat.S_IFREG), size, ())
    file.chunks = Chunked(20, array("Q", [HOLE]) * (size >> 32))
    image = image_of(directory({b"f": file}))
    assert check(image) == []
    node = image.resolve(b"/f")
    assert node.size == size
    assert image.read(node, size - 10, 100) == bytes(10)


def test_too_many_packs_are_refused() -> None:
    packs = [Device(Digest.of(b""), 1)] * 65536
    with pytest.raises(LimitError, match="at most 65535"):
        image_bytes(directory(), packs)


def test_most_packs() -> None:
    packs = [Device(Digest.of(b""), 1)] * 65535
    root = directory({b"f": inline(b"1")}, xattrs=((b"user.r", b"v" * 5000),))
    image = image_of(root, packs)
    assert len(image.slots) == 65535
    assert image.superblock.rootnid_2b == 36
    assert check(image) == []
    assert listing(load_tree(image)) == listing(root)


@pytest.mark.parametrize("count", [0, 1, 22, 23, 24, 55, 16300, 16340, 16350, 16360, 16400])
def test_root_is_within_reach_of_16_bits(count: int) -> None:
    packs = [Device(Digest.of(b""), 1)] * count
    root = directory({b"f" * 200 + b"%d" % number: inline(b"1") for number in range(18)})
    image = image_of(root, packs)
    assert len(image.slots) == count
    assert check(image) == []
    assert listing(load_tree(image)) == listing(root)


# ---- trees that contradict themselves


def chunked(size: int, *addresses: int, bits: int = 0) -> File:
    file = File(attrs(stat.S_IFREG), size, ())
    file.chunks = Chunked(bits, array("Q", addresses))
    return file


@pytest.mark.parametrize(
    "inode",
    [
        chunked(4097, 1 << 32),
        chunked(4096, 1 << 32, 1 << 32),
        chunked(4096, 1 << 32 | 8),
        chunked(8192, 1 << 32 | 7, bits=1),
        chunked(4096, 2 << 32),
        chunked(4096, 0),
        chunked(4096, 1 << 32, bits=32),
        Symlink(attrs(stat.S_IFLNK), b""),
        Symlink(attrs(stat.S_IFLNK), b"a\0b"),
        Symlink(attrs(stat.S_IFLNK), b"n" * 4096),
        Symlink(attrs(stat.S_IFREG), b"t"),
        File(attrs(stat.S_IFLNK), 0, ()),
        Special(attrs(stat.S_IFREG)),
        Directory(attrs(stat.S_IFREG)),
        Inode(attrs(stat.S_IFREG)),
        File(Attrs(1 << 16 | stat.S_IFREG, 0, 0, 0, 0), 0, ()),
        File(attrs(stat.S_IFREG), 5, (Extent(3, 4, Bytes(b"1234"), 0),)),
    ],
    ids=[
        "too few chunks",
        "too many chunks",
        "chunk beyond its pack",
        "end of a chunk beyond its pack",
        "pack that is not there",
        "pack 0",
        "chunk too large",
        "empty link",
        "NUL in a link",
        "link too long",
        "link that is a file",
        "file that is a link",
        "special file that is a file",
        "directory that is a file",
        "inode of no kind",
        "mode too large",
        "more data than size",
    ],
)
def test_contradictions_are_named(inode: Inode) -> None:
    with pytest.raises(MalformedError, match=r"^/d/x: "):
        image_bytes(directory({b"d": directory({b"x": inode})}), [Device(Digest.of(b""), 8)])


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0b", b"n" * 256])
def test_impossible_names_are_refused(name: bytes) -> None:
    with pytest.raises(MalformedError, match=r"^/d: an entry can't be named"):
        image_bytes(directory({b"d": directory({name: inline(b"")})}))


def test_a_file_without_address_must_be_small() -> None:
    assert image_of(directory({b"f": inline(b"x" * MAX_INLINE)})).resolve(b"/f").size == MAX_INLINE
    with pytest.raises(LimitError, match=r"^/f: 4033 bytes without an address in a pack; at most 4032"):
        image_bytes(directory({b"f": inline(b"x" * (MAX_INLINE + 1))}))


@pytest.mark.parametrize("size", [-1, 1 << 63])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(LimitError, match=r"^/f: a file of"):
        image_bytes(directory({b"f": File(attrs(stat.S_IFREG), size, ())}))


def test_directories_with_two_names_are_refused() -> None:
    one = directory()
    with pytest.raises(MalformedError, match="under two names"):
        image_bytes(directory({b"a": one, b"b": one}))
    one.entries[b"self"] = one
    with pytest.raises(MalformedError, match="under two names"):
        image_bytes(one)


def test_xattrs_without_a_place_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^/\\xff: EROFS has no place for the xattr system\.nfs4_acl"):
        image_bytes(directory({b"\xff": inline(b"", xattrs=((b"system.nfs4_acl", b""),))}))


def test_a_full_disk_is_said_to_be_one() -> None:
    class Full(io.BytesIO):
        def write(self, data: object, /) -> int:
            raise OSError(28, "No space left on device")

    out: BinaryIO = Full()
    with pytest.raises(NoSpaceError, match="write the metadata image"):
        write_image(directory(), [], out)
