from __future__ import annotations

import stat
from typing import Any

import pytest
from support.erofs_images import (
    CAPABILITY,
    Forgery,
    Packs,
    Source,
    attrs,
    directory,
    image_bytes,
    image_of,
    inline,
    listing,
    symlink,
    zoo,
)
from support.trees import content

from layerstore.digest import Digest
from layerstore.erofs.format import BLOCK_SIZE, EROFS_SUPER_OFFSET
from layerstore.erofs.layout import HOLE, Chunked, address
from layerstore.erofs.reader import Image
from layerstore.erofs.tree import load_tree
from layerstore.errors import (
    CorruptError,
    LimitError,
    MalformedError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from layerstore.tree.inode import File, walk


def read_all(image: Image, path: bytes, packs: Packs | None = None) -> bytes:
    node = image.resolve(path)
    return image.read(node, 0, node.size, packs)


# ---- paths


def links_image() -> Image:
    root = directory(
        {
            b"etc": directory(
                {
                    b"passwd": symlink(b"/nix/store/x/passwd"),
                    b"os-release": symlink(b"../../../../etc/shadow"),
                    b"shadow": inline(b"of the image"),
                    b"self": symlink(b"."),
                    b"dir": symlink(b"/nix/store/"),
                    b"loop": symlink(b"loop2"),
                    b"loop2": symlink(b"/etc/loop"),
                    b"dangling": symlink(b"/absent"),
                }
            ),
            b"nix": directory({b"store": directory({b"x": directory({b"passwd": inline(b"nix")})})}),
            b"root": symlink(b"/"),
            **{b"c%d" % number: symlink(b"c%d" % (number - 1)) for number in range(1, 41)},
            b"c0": inline(b"end"),
        }
    )
    return image_of(root)


@pytest.mark.case("O13")
@pytest.mark.parametrize(
    ("path", "data"),
    [
        (b"/etc/passwd", b"nix"),
        (b"etc/passwd", b"nix"),
        (b"/etc/os-release", b"of the image"),
        (b"/../../etc/./shadow", b"of the image"),
        (b"//etc//self/self/shadow", b"of the image"),
        (b"/etc/dir/x/passwd", b"nix"),
        (b"/root/root/etc/shadow", b"of the image"),
        (b"/etc/dir/../../etc/shadow", b"of the image"),
        (b"/nix/store/x/../../../etc/shadow", b"of the image"),
        (b"/c39", b"end"),
        (b"/c40", b"end"),
    ],
)
def test_links_stay_in_the_image(path: bytes, data: bytes) -> None:
    assert read_all(links_image(), path) == data


@pytest.mark.parametrize(
    "path",
    [b"/absent", b"/etc/dangling", b"/c0/x", b"/c0/", b"/c0/.", b"/c0/..", b"/etc/sh", b"/" + b"n" * 300, b"/a\0b"],
)
def test_paths_that_lead_nowhere(path: bytes) -> None:
    with pytest.raises(NotFoundError):
        links_image().resolve(path)


@pytest.mark.parametrize("path", [b"/", b"", b".", b"..", b"/..", b"/root", b"/etc/..", b"/root/."])
def test_paths_of_the_root(path: bytes) -> None:
    image = links_image()
    assert image.resolve(path).nid == image.root.nid


def test_last_link_is_followed_only_if_asked() -> None:
    image = links_image()
    assert image.readlink(image.resolve(b"/etc/dir", follow=False)) == b"/nix/store/"
    assert image.resolve(b"/etc/dir/", follow=False).is_directory
    assert image.resolve(b"/etc/dir/x", follow=False).is_directory


def test_too_many_links() -> None:
    for path in (b"/etc/loop", b"/etc/loop/x"):
        with pytest.raises(LimitError, match="more than 40 symbolic links"):
            links_image().resolve(path)


def test_lookup_of_each_name() -> None:
    names = [b"!", b"-", b"...", b"zz", b"\xff\xff"] + [b"entry-%04d" % number for number in range(1000)]
    image = image_of(directory({name: inline(name) for name in names}))
    for name in names:
        node = image.lookup(image.root, name)
        assert image.read(node, 0, 100) == name
    assert image.lookup(image.root, b".").nid == image.lookup(image.root, b"..").nid == image.root.nid
    for name in (b"", b" ", b"entry-", b"entry-0000x", b"entry-1000", b"zzz", b"\xff\xff\xff"):
        with pytest.raises(NotFoundError):
            image.lookup(image.root, name)


# ---- data


def test_ranges_of_a_chunked_file() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    for path, inode in walk(root):
        if isinstance(inode, File) and inode.size < 1 << 20:
            node = image.resolve(path)
            whole = content(inode)
            for offset, length in (
                (0, 0),
                (0, 1),
                (4095, 2),
                (5, 20_000),
                (8191, 8194),
                (inode.size - 1, 9),
                (1 << 40, 5),
            ):
                if offset >= 0:
                    assert image.read(node, offset, length, packs) == whole[offset : offset + length], path


def test_flat_form_needs_no_devices() -> None:
    root, packs = zoo()
    data = image_bytes(root, packs.devices) + b"".join(packs.data)
    flat = Image(Source(data))
    assert listing(load_tree(flat)) == listing(root)


def test_packs_are_missed_without_the_flat_form() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    with pytest.raises(MalformedError, match="outside of the image"):
        read_all(image, b"/files/one-chunk")


def test_chunks_as_they_were_written() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    for path, inode in walk(root):
        if isinstance(inode, File) and isinstance(inode.chunks, Chunked):
            chunks = image.chunks(image.resolve(path))
            assert (chunks.bits, chunks.addresses) == (inode.chunks.bits, inode.chunks.addresses)
    holes = image.chunks(image.resolve(b"/files/holes"))
    assert holes.addresses[0] == HOLE != holes.addresses[1]
    assert holes.addresses[1] >> 32 == address(1, 0) >> 32
    with pytest.raises(UsageError):
        image.chunks(image.resolve(b"/files/small"))


@pytest.mark.case("D07")
def test_devices_are_numbered_from_one() -> None:
    packs = Packs(3)
    root = directory()
    for device in (1, 2, 3):
        file = packs.file(attrs(stat.S_IFREG), [None])
        packs.add(device, bytes([device]) * BLOCK_SIZE)
        assert isinstance(file.chunks, Chunked)
        file.chunks.addresses[0] = address(device, 0)
        root.entries[b"%d" % device] = file
    image = image_of(root, packs.devices)
    assert [read_all(image, b"/%d" % device, packs)[:1] for device in (1, 2, 3)] == [b"\1", b"\2", b"\3"]
    # Bound by digest, whatever the order in which they are offered.
    offered = {device.digest: number for number, device in enumerate(packs.devices, 1)}
    assert image.bind(dict(reversed(offered.items()))) == [1, 2, 3]
    missing = packs.devices[1].digest
    del offered[missing]
    with pytest.raises(NotFoundError, match=f"device 2 of the image is missing: pack {missing}"):
        image.bind(offered)


def test_device_without_a_digest() -> None:
    packs = Packs()
    packs.add(1, b"x")
    image = Forgery(directory(), packs.devices).slot(1, tag=b"").image()
    with pytest.raises(MalformedError, match="not a digest"):
        _ = image.devices
    assert image.slots[0].blocks == 1


@pytest.mark.case("T30", "T33")
def test_xattrs() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    assert image.xattrs(image.resolve(b"/xattrs/ping")) == ((b"security.capability", CAPABILITY),)
    assert dict(image.xattrs(image.resolve(b"/xattrs/binary")))[b"user.bin"] == bytes(range(256))
    assert image.xattrs(image.root) == ()


def test_only_what_a_node_is_can_be_asked_of_it() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    file, folder = image.resolve(b"/files/small"), image.resolve(b"/files")
    for call in (
        lambda: image.readlink(file),
        lambda: image.read(folder, 0, 1),
        lambda: list(image.entries(file)),
        lambda: image.lookup(file, b"x"),
        lambda: image.read(image.resolve(b"/dev/fifo"), 0, 1),
    ):
        with pytest.raises(UsageError):
            call()
    assert list(image.runs(image.resolve(b"/dev/fifo"))) == []


# ---- hostile images


@pytest.mark.case("Z13")
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1151])
def test_no_superblock(size: int) -> None:
    with pytest.raises(MalformedError):
        Image(Source(image_bytes(directory())[:size]))


@pytest.mark.case("Z13")
def test_a_cut_image_is_noticed() -> None:
    root, packs = zoo()
    data = image_bytes(root, packs.devices)
    with pytest.raises(MalformedError):
        load_tree(Image(Source(data[: len(data) // 2 // BLOCK_SIZE * BLOCK_SIZE])), packs)


def test_not_erofs() -> None:
    with pytest.raises(MalformedError, match="magic"):
        Image(Source(bytes(8192)))


@pytest.mark.case("Z16")
@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0x2, "COMPR_CFGS"),
        (0x10, "ZTAILPACKING"),
        (0x20, "FRAGMENTS"),
        (0x40, "XATTR_PREFIXES"),
        (0x80, "48BIT"),
        (0x100, "METABOX"),
        (0x8000_0000, "0x80000000"),
        (0x8000_0092, "COMPR_CFGS, ZTAILPACKING, 48BIT, 0x80000000"),
    ],
)
def test_unknown_features_are_refused_by_name(bits: int, names: str) -> None:
    forgery = Forgery(directory()).superblock(feature_incompat=4 | bits)
    with pytest.raises(UnsupportedError, match=f"features that aren't handled here: {names}$"):
        forgery.image()


@pytest.mark.case("Z16")
def test_zero_padding_alone_is_harmless() -> None:
    assert Forgery(directory()).superblock(feature_incompat=1).image().root.is_directory


@pytest.mark.case("Z16")
@pytest.mark.parametrize(("layout", "name"), [(1, "COMPRESSED_FULL"), (3, "COMPRESSED_COMPACT"), (5, "5")])
def test_compressed_inodes_are_refused_by_name(layout: int, name: str) -> None:
    forgery = Forgery(directory({b"f": inline(b"x")})).inode(b"/f", i_format=1 | layout << 1)
    with pytest.raises(UnsupportedError, match=f"layout {name}, which"):
        forgery.image().resolve(b"/f")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"blkszbits": 8}, MalformedError),
        ({"blkszbits": 17}, MalformedError),
        ({"blkszbits": 255}, MalformedError),
        ({"dirblkbits": 1}, UnsupportedError),
        ({"feature_incompat": 8, "extra_devices": 65535}, MalformedError),
        ({"feature_incompat": 8, "extra_devices": 1, "devt_slotoff": 65535}, MalformedError),
        ({"magic": 1}, MalformedError),
    ],
    ids=str,
)
def test_broken_superblocks(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Forgery(directory()).superblock(**fields).image()


def test_checksum_is_compared_unless_waived() -> None:
    data = bytearray(image_bytes(directory()))
    data[EROFS_SUPER_OFFSET + 0x30] ^= 1
    with pytest.raises(CorruptError, match="checksum"):
        Image(Source(bytes(data)))
    assert Image(Source(bytes(data)), verify=False).root.is_directory


@pytest.mark.parametrize("meta", [1, 1 << 20, 0xFFFF_FFFF])
def test_metadata_area_outside(meta: int) -> None:
    image = Forgery(directory()).superblock(meta_blkaddr=meta).image()
    with pytest.raises(MalformedError, match="outside"):
        _ = image.root


def test_huge_numbers_allocate_nothing() -> None:
    packs = Packs()
    root = directory({b"f": packs.file(attrs(stat.S_IFREG), [b"1"]), b"l": symlink(b"x"), b"d": directory()})
    huge = (1 << 63) - 1
    image = Forgery(root, packs.devices).inode(b"/f", i_size=huge).inode(b"/l", i_size=huge).image()
    file, link = image.resolve(b"/f"), image.resolve(b"/l", follow=False)
    for call in (
        lambda: image.chunks(file),
        lambda: image.read(file, huge - 10, 10, packs),
        lambda: image.readlink(link),
        lambda: load_tree(image, packs),
    ):
        with pytest.raises(MalformedError):
            call()
    image = Forgery(root, packs.devices).inode(b"/d", i_size=huge).image()
    with pytest.raises(MalformedError):
        list(image.entries(image.resolve(b"/d")))


def test_a_cycle_of_directories_ends() -> None:
    forgery = Forgery(directory({b"d": directory({b"e": directory()})}))
    image = forgery.dirent(b"/d", b"e", nid=forgery.original.root.nid).image()
    with pytest.raises(MalformedError, match="/d/e is a directory with two names"):
        load_tree(image)


def test_digest_of_the_device_table() -> None:
    packs = Packs(2)
    packs.add(1, b"a")
    packs.add(2, b"b" * 5000)
    image = image_of(directory(), packs.devices)
    assert [device.digest for device in image.devices] == [
        Digest.of(b"a" + bytes(4095)),
        Digest.of(b"b" * 5000 + bytes(3192)),
    ]
    assert [device.blocks for device in image.devices] == [1, 2]
