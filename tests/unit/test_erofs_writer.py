from __future__ import annotations

import io
import random
import stat
from itertools import pairwise

import pytest
from support.erofs_images import (
    Packs,
    attrs,
    directory,
    image_bytes,
    image_of,
    inline,
    listing,
    summary_of,
    symlink,
    zoo,
)

from layerstore.digest import Digest
from layerstore.erofs.checker import check
from layerstore.erofs.format import (
    BLOCK_SIZE,
    EROFS_INODE_CHUNK_BASED,
    EROFS_INODE_FLAT_INLINE,
    EROFS_INODE_FLAT_PLAIN,
    INODE_SIZE,
    MAX_INLINE,
)
from layerstore.erofs.layout import Device
from layerstore.erofs.placement import WINDOW
from layerstore.erofs.tree import load_tree
from layerstore.erofs.writer import write_image
from layerstore.errors import LimitError
from layerstore.tree.inode import Attrs, Directory, File, Inode, Special, Whiteout, walk


def reversed_entries(root: Directory) -> Directory:
    """The same tree, its names put in in another order."""
    made: dict[int, Directory] = {id(root): Directory(root.attrs)}
    stack = [root]
    while stack:
        old = stack.pop()
        made[id(old)].opaque = old.opaque
        for name in reversed(list(old.entries)):
            child = old.entries[name]
            if isinstance(child, Directory):
                made[id(child)] = Directory(child.attrs)
                stack.append(child)
                child = made[id(child)]
            made[id(old)].entries[name] = child
    return made[id(root)]


@pytest.mark.case("T27", "T29", "T30", "T33", "T52", "T53", "T56")
def test_everything_comes_back() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    assert check(image) == []
    assert listing(load_tree(image, packs)) == listing(root)


def test_a_tree_that_was_read_is_written_the_same() -> None:
    root, packs = zoo()
    data = image_bytes(root, packs.devices)
    assert image_bytes(load_tree(image_of(root, packs.devices), packs), packs.devices) == data


def test_order_of_names_in_memory_does_not_matter() -> None:
    root, packs = zoo()
    assert image_bytes(reversed_entries(root), packs.devices) == image_bytes(root, packs.devices)


def test_digest_is_pinned() -> None:
    """A change here is a change of FORMAT_VERSION: every layer gets another digest, and nobody's packs are shared."""
    root, packs = zoo()
    summary = summary_of(root, packs.devices)
    assert str(summary.digest) == "sha256:628e7c276fdf4131af0c9c47066178c6c142500f028d593e8d2fe0d0549aecb3"


def test_uuid_depends_on_the_content_and_on_the_devices() -> None:
    one = directory({b"a": inline(b"1")})
    packs = [Device(Digest.of(b"1"), 1)]
    summaries = [
        summary_of(one),
        summary_of(directory({b"a": inline(b"2")})),
        summary_of(one, packs),
        summary_of(one, [Device(Digest.of(b"2"), 1)]),
        summary_of(one, [Device(Digest.of(b"1"), 2)]),
    ]
    assert len({summary.uuid for summary in summaries}) == 5
    assert len({summary.digest for summary in summaries}) == 5
    assert summary_of(one) == summaries[0]
    assert {(summary.uuid.version, summary.uuid.variant) for summary in summaries} == {(8, "specified in RFC 4122")}


def test_summary() -> None:
    one = inline(b"x")
    summary = summary_of(directory({b"a": one, b"b": one, b"d": directory()}))
    assert (summary.bytes, summary.blocks, summary.inodes) == (4096, 1, 3)


def test_layouts() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    for path, layout in (
        (b"/", EROFS_INODE_FLAT_INLINE),
        (b"/many", EROFS_INODE_FLAT_INLINE),
        (b"/files/empty", EROFS_INODE_FLAT_PLAIN),
        (b"/files/small", EROFS_INODE_FLAT_INLINE),
        (b"/files/largest-inline", EROFS_INODE_FLAT_INLINE),
        (b"/files/one-chunk", EROFS_INODE_CHUNK_BASED),
        (b"/files/sparse", EROFS_INODE_CHUNK_BASED),
        (b"/symlinks/l4032", EROFS_INODE_FLAT_INLINE),
        (b"/symlinks/l4033", EROFS_INODE_FLAT_PLAIN),
    ):
        node = image.resolve(path, follow=False)
        assert node.layout == layout, path
        assert node.extended
    assert image.superblock.extra_devices == 3
    assert image.superblock.devt_slotoff == 9


def test_chunk_indexes_begin_at_a_multiple_of_8_behind_the_xattrs() -> None:
    packs = Packs()
    root = directory()
    for length in range(12):
        xattrs = ((b"user." + b"n" * (1 + length), b"v"),)
        root.entries[b"f%d" % length] = packs.file(attrs(stat.S_IFREG, xattrs=xattrs), [b"%d" % length])
    image = image_of(root, packs.devices)
    starts = [image.chunk_table(image.lookup(image.root, name))[0] for name in root.entries]
    bodies = [image.lookup(image.root, name).body for name in root.entries]
    assert all(start % 8 == 0 for start in starts)
    assert any(body % 8 for body in bodies)
    assert listing(load_tree(image, packs)) == listing(root)


def test_flat_form_addresses_follow_the_image() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    at = image.superblock.blocks
    for slot, device in zip(image.slots, packs.devices, strict=True):
        assert (slot.uniaddr, slot.blocks) == (at, device.blocks)
        assert slot.tag == device.digest.hex.encode()
        at += device.blocks


def directory_filling(used: int) -> Directory:
    """A directory whose only block uses that many bytes."""
    left = used - 27  # the dots
    entries: dict[bytes, Inode] = {}
    number = 0
    while left:
        need = min(left, 112) if left - 112 > 20 or left <= 112 else left - 40
        entries[b"%03d" % number + b"n" * (need - 12 - 3)] = inline(b"")
        left -= need
        number += 1
    return directory(entries)


@pytest.mark.parametrize(
    ("used", "layout"),
    [
        (MAX_INLINE - 1, EROFS_INODE_FLAT_INLINE),
        (MAX_INLINE, EROFS_INODE_FLAT_INLINE),
        (MAX_INLINE + 1, EROFS_INODE_FLAT_PLAIN),
        (BLOCK_SIZE, EROFS_INODE_FLAT_PLAIN),
    ],
)
def test_last_block_of_a_directory_is_inline_if_it_fits(used: int, layout: int) -> None:
    root = directory({b"d": directory_filling(used)})
    image = image_of(root)
    node = image.resolve(b"/d")
    assert (node.size, node.layout) == (used, layout)
    assert check(image) == []
    assert listing(load_tree(image)) == listing(root)


def test_entries_are_in_byte_order_over_all_blocks() -> None:
    names = [b"!first", b"-", b"...", b"\xff" * 200, b"A", b"a"] + [b"%d" % number for number in range(2000)]
    root = directory({name: inline(b"") for name in names})
    image = image_of(root)
    stored = [entry.name for block in image.blocks_of(image.root) for entry in block]
    assert stored == sorted([*names, b".", b".."])
    assert len(list(image.blocks_of(image.root))) > 5


def test_tails_never_cross_a_block_whatever_the_xattrs() -> None:
    rng = random.Random(7)
    root = directory()
    for number in range(400):
        xattrs = ((b"user.x", b"v" * rng.randrange(0, 9000)),) if number % 3 else ()
        root.entries[b"%03d" % number] = inline(rng.randbytes(rng.randrange(1, MAX_INLINE + 1)), xattrs=xattrs)
    image = image_of(root)
    assert check(image) == []
    for entry in image.entries(image.root):
        node = image.node(entry.nid)
        assert node.body % BLOCK_SIZE + node.size <= BLOCK_SIZE
    assert listing(load_tree(image)) == listing(root)


def test_room_before_a_tail_is_used_by_later_inodes() -> None:
    rng = random.Random(3)
    root = directory({b"%04d" % number: inline(rng.randbytes(rng.randrange(1, 4000))) for number in range(2000)})
    needed = sum(INODE_SIZE + inode.size for inode in root.entries.values() if isinstance(inode, File))
    assert summary_of(root).bytes < needed * 1.1  # without it, 1.2


def test_inodes_do_not_overlap() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    spans = []
    for path, _ in walk(root):
        node = image.resolve(path, follow=False)
        end = node.body
        if node.layout == EROFS_INODE_CHUNK_BASED:
            start, entry, count = image.chunk_table(node)
            end = start + entry * count
        elif node.layout == EROFS_INODE_FLAT_INLINE:
            end += list(image.runs(node))[-1].length
        spans.append((image.offset_of(node.nid), end))
    assert len(set(spans)) == image.superblock.inos
    assert all(end <= start for (_, end), (start, _) in pairwise(sorted(set(spans))))


class Watched(io.BytesIO):
    """Notes the largest piece that is written or read, and how far back writes go."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def write(self, data: object, /) -> int:
        written = super().write(data)  # type: ignore[arg-type]
        self.largest = max(self.largest, written)
        return written

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.largest = max(self.largest, len(data))
        return data


def test_the_image_is_streamed() -> None:
    root = directory({b"%06d" % number: inline(b"x" * 1000) for number in range(6000)})
    out = Watched()
    summary = write_image(root, [], out)
    assert summary.bytes > 6_000_000
    assert out.largest <= WINDOW + (2 << 20)


@pytest.mark.case("T29")
def test_hard_links_are_one_inode_and_one_copy() -> None:
    one = inline(b"d" * 4000)
    root = directory({b"a": one, b"d": directory({b"b": one, b"c": one})})
    image = image_of(root)
    nodes = [image.resolve(path) for path in (b"/a", b"/d/b", b"/d/c")]
    assert len({node.nid for node in nodes}) == 1
    assert nodes[0].nlink == 3
    assert image.size == 2 * BLOCK_SIZE
    back = load_tree(image)
    below = back.entries[b"d"]
    assert isinstance(below, Directory)
    assert back.entries[b"a"] is below.entries[b"b"] is below.entries[b"c"]


@pytest.mark.case("T27")
def test_hard_link_to_a_symbolic_link() -> None:
    link = symlink(b"t")
    image = image_of(directory({b"a": directory({b"l": link}), b"b": directory({b"l": link})}))
    node = image.resolve(b"/b/l", follow=False)
    assert node.nid == image.resolve(b"/a/l", follow=False).nid
    assert stat.S_ISLNK(node.attrs.mode)
    assert (node.nlink, image.readlink(node)) == (2, b"t")


@pytest.mark.case("T52")
@pytest.mark.parametrize("mtime", [-(1 << 63), -1, 0, 1 << 31, 4102444800, 253402300800, (1 << 63) - 1])
def test_times_are_exact(mtime: int) -> None:
    root = directory({b"f": File(attrs(stat.S_IFREG, mtime=mtime, nsec=999_999_999), 0, ())})
    node = image_of(root).resolve(b"/f")
    assert (node.attrs.mtime, node.attrs.nsec) == (mtime, 999_999_999)


@pytest.mark.case("T52")
@pytest.mark.parametrize("mtime", [1 << 63, -(1 << 63) - 1])
def test_times_beyond_64_bits_are_refused(mtime: int) -> None:
    root = directory({b"f": File(attrs(stat.S_IFREG, mtime=mtime), 0, ())})
    with pytest.raises(LimitError, match=r"^/f: its time"):
        image_bytes(root)


@pytest.mark.case("T53")
@pytest.mark.parametrize("uid", [0, 65535, 65536, 2097152, 4294967294])
def test_owners_are_exact(uid: int) -> None:
    root = directory({b"f": File(attrs(stat.S_IFREG, uid=uid, gid=4294967294 - uid), 0, ())})
    node = image_of(root).resolve(b"/f")
    assert (node.attrs.uid, node.attrs.gid) == (uid, 4294967294 - uid)


@pytest.mark.case("T53")
@pytest.mark.parametrize("uid", [-1, 4294967295, 1 << 40])
def test_owners_that_linux_does_not_have_are_refused(uid: int) -> None:
    for root in (Directory(attrs(stat.S_IFDIR, uid=uid)), Directory(attrs(stat.S_IFDIR, gid=uid))):
        with pytest.raises(LimitError, match=r"^/: owner"):
            image_bytes(root)


@pytest.mark.case("T56")
def test_devices_are_exact() -> None:
    root, packs = zoo()
    image = image_of(root, packs.devices)
    for name, kind, rdev in (
        (b"console", stat.S_IFCHR, (5, 1)),
        (b"sda", stat.S_IFBLK, (8, 0)),
        (b"big", stat.S_IFCHR, (4095, 1048575)),
        (b"odd", stat.S_IFBLK, (300, 70000)),
        (b"fifo", stat.S_IFIFO, (0, 0)),
        (b"socket", stat.S_IFSOCK, (0, 0)),
    ):
        node = image.resolve(b"/dev/" + name)
        assert (node.kind, node.rdev) == (kind, rdev)


@pytest.mark.case("T56")
@pytest.mark.parametrize("device", [(4096, 0), (0, 1 << 20), (-1, 0)])
def test_devices_that_linux_does_not_have_are_refused(device: tuple[int, int]) -> None:
    with pytest.raises(LimitError, match=r"^/d: device"):
        image_bytes(directory({b"d": Special(attrs(stat.S_IFCHR), *device)}))


def test_whiteouts_and_opaque_directories() -> None:
    opaque = directory(xattrs=((b"user.z", b""), (b"security.a", b"")))
    opaque.opaque = True
    root = directory({b"gone": Whiteout(Attrs(0, 0, 0, 0, 0)), b"opaque": opaque})
    image = image_of(root)
    gone = image.resolve(b"/gone")
    assert (gone.attrs.mode, gone.rdev, gone.is_whiteout) == (stat.S_IFCHR, (0, 0), True)
    assert image.xattrs(image.resolve(b"/opaque")) == (
        (b"security.a", b""),
        (b"trusted.overlay.opaque", b"y"),
        (b"user.z", b""),
    )
    back = load_tree(image)
    assert isinstance(back.entries[b"gone"], Whiteout)
    loaded = back.entries[b"opaque"]
    assert isinstance(loaded, Directory)
    assert loaded.opaque
    assert loaded.attrs == opaque.attrs


@pytest.mark.case("Z15")
def test_ten_thousand_small_files_and_links() -> None:
    rng = random.Random(15)
    root = directory()
    for outer in range(50):
        below = directory()
        root.entries[b"dir%d" % outer] = below
        for number in range(200):
            data = rng.randbytes(rng.randrange(0, 600))
            below.entries[b"%d" % number] = symlink(b"../%d" % number) if number % 10 == 0 else inline(data)
    image = image_of(root)
    assert check(image) == []
    assert listing(load_tree(image)) == listing(root)
