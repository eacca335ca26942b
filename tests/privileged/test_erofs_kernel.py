"""The kernel as the judge of what we write: every path of a mounted image, compared with the tree it came from."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.erofs_images import CAPABILITY, Packs, attrs, directory, image_bytes, image_of, inline, zoo
from support.mounts import erofs_mounted, require_file_backed_erofs
from support.trees import Bytes

from layerstore.erofs.format import EROFS_ISLOTBITS
from layerstore.tree.inode import Directory, File, Inode, Special, Symlink, walk
from layerstore.tree.links import link_sets

pytestmark = pytest.mark.privileged


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory on a real filesystem; a metadata image can't be mounted from tmpfs."""
    require_file_backed_erofs()
    with tempfile.TemporaryDirectory(prefix="imgtool-test-", dir="/var/tmp") as path:
        yield Path(path)


def data_map(path: Path) -> list[tuple[int, int]]:
    """(start, end) of what is no hole."""
    runs = []
    with path.open("rb") as file:
        end = 0
        size = os.fstat(file.fileno()).st_size
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError as error:
                assert error.errno == errno.ENXIO
                break
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            runs.append((start, end))
    return runs


def expected_map(file: File) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for extent in file.extents:
        start, end = extent.offset, extent.offset + extent.length
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs


def xattrs_of(path: Path) -> list[tuple[bytes, bytes]]:
    names = sorted(os.fsencode(name) for name in os.listxattr(path, follow_symlinks=False))
    return [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]


def assert_same(inode: Inode, path: Path, links: int) -> None:
    found = os.lstat(path)
    want = inode.attrs
    assert found.st_mode == want.mode
    assert (found.st_uid, found.st_gid) == (want.uid, want.gid)
    assert found.st_mtime_ns == want.mtime * 10**9 + want.nsec
    expected = list(want.xattrs)
    if isinstance(inode, Directory):
        if inode.opaque:
            expected = sorted([*expected, (b"trusted.overlay.opaque", b"y")])
        assert found.st_nlink == 2 + sum(isinstance(child, Directory) for child in inode.entries.values())
        assert sorted(os.listdir(os.fsencode(path))) == sorted(inode.entries)
    else:
        assert found.st_nlink == links
    assert xattrs_of(path) == expected
    if isinstance(inode, Symlink):
        assert os.readlink(os.fsencode(path)) == inode.target
        assert found.st_size == len(inode.target)
    elif isinstance(inode, Special):
        assert (os.major(found.st_rdev), os.minor(found.st_rdev)) == (inode.major, inode.minor)
    elif isinstance(inode, File):
        assert found.st_size == inode.size
        if inode.chunks is not None:
            assert data_map(path) == expected_map(inode)
        with path.open("rb") as file:
            for extent in inode.extents:
                file.seek(extent.offset)
                assert file.read(extent.length) == extent.source.read_at(extent.at, extent.length)


def assert_mounted_equals(root: Directory, mounted: Path) -> None:
    links = link_sets(root)
    numbers: dict[bytes, int] = {}
    for name, inode in walk(root):
        path = Path(os.fsdecode(bytes(mounted) + b"/" + name))
        try:
            assert_same(inode, path, len(links.get(name, b"1")))
        except AssertionError as error:
            error.add_note(f"at {name!r}")
            raise
        numbers[name] = os.lstat(path).st_ino
    for names in links.values():
        assert len({numbers[name] for name in names}) == 1


@pytest.mark.case("T27", "T29", "T30", "T33", "T52", "T53", "T56", "D07")
def test_kernel_sees_the_tree_through_devices(disk: Path) -> None:
    root, packs = zoo()
    image = disk / "image"
    image.write_bytes(image_bytes(root, packs.devices))
    with erofs_mounted(image, packs.save(disk), disk / "mounted") as mounted:
        assert_mounted_equals(root, mounted)
        # T33: the capability as the kernel gives it to execve.
        assert os.getxattr(mounted / "xattrs/ping", "security.capability") == CAPABILITY


def test_flat_form_is_the_same_file_system(disk: Path) -> None:
    root, packs = zoo()
    flat = disk / "flat"
    flat.write_bytes(image_bytes(root, packs.devices) + b"".join(packs.data))
    with erofs_mounted(flat, [], disk / "mounted") as mounted:
        assert_mounted_equals(root, mounted)


def test_image_without_packs(disk: Path) -> None:
    root = directory({b"a": inline(b"1"), b"d": directory()})
    image = disk / "image"
    image.write_bytes(image_bytes(root))
    with erofs_mounted(image, [], disk / "mounted") as mounted:
        assert_mounted_equals(root, mounted)


def test_root_before_a_device_table_of_17000_slots(disk: Path) -> None:
    """The root's number has 16 bits; behind this table it would not fit."""
    packs = Packs()
    root = directory({b"f": packs.file(attrs(stat.S_IFREG), [b"data"]), b"s": inline(b"small")})
    devices = packs.devices * 17_000
    image = disk / "image"
    image.write_bytes(image_bytes(root, devices))
    [pack] = packs.save(disk)
    with erofs_mounted(image, [pack] * len(devices), disk / "mounted") as mounted:
        assert_mounted_equals(root, mounted)


@pytest.mark.case("D07")
def test_wrong_order_of_devices_mounts_and_reads_wrong_bytes(disk: Path) -> None:
    """Why devices are bound by digest: the kernel maps them by position, and nothing fails."""
    packs = Packs(3)
    root = directory()
    for device in (1, 2, 3):
        file = packs.file(attrs(stat.S_IFREG), [None, None, None])
        piece = bytes([device]) * 4096
        packs.add(device, piece)
        file.chunks.addresses[0] = device << 32  # type: ignore[attr-defined]
        root.entries[b"f%d" % device] = file
    data = image_bytes(root, packs.devices)
    (disk / "image").write_bytes(data)
    one, two, three = packs.save(disk)
    with erofs_mounted(disk / "image", [one, two, three], disk / "mounted") as mounted:
        assert [(mounted / f"f{n}").read_bytes()[:1] for n in (1, 2, 3)] == [b"\1", b"\2", b"\3"]
    with erofs_mounted(disk / "image", [two, three, one], disk / "mounted") as mounted:
        assert [(mounted / f"f{n}").read_bytes()[:1] for n in (1, 2, 3)] == [b"\2", b"\3", b"\1"]


@pytest.mark.case("T62")
def test_large_directories_and_link_counts(disk: Path) -> None:
    one = inline(b"linked")
    root = directory(
        {
            b"files": directory({os.urandom(8).hex().encode(): inline(b"") for _ in range(30_000)}),
            b"subdirectories": directory({b"%d" % n: directory() for n in range(70_000)}),
            b"links": directory({b"%d" % n: one for n in range(70_000)}),
        }
    )
    (disk / "image").write_bytes(image_bytes(root))
    with erofs_mounted(disk / "image", [], disk / "mounted") as mounted:
        assert os.stat(mounted / "subdirectories").st_nlink == 70_002
        assert os.stat(mounted / "links/69999").st_nlink == 70_000
        for name in ("files", "subdirectories", "links"):
            below = root.entries[name.encode()]
            assert isinstance(below, Directory)
            assert {os.fsencode(each) for each in os.listdir(mounted / name)} == set(below.entries)
        for name in list(root.entries[b"files"].entries)[::100]:  # type: ignore[attr-defined]
            assert os.lstat(bytes(mounted) + b"/files/" + name).st_size == 0
        with pytest.raises(FileNotFoundError):
            os.lstat(mounted / "files/absent")


def test_inode_number_is_the_nid(disk: Path) -> None:
    root = directory({b"a": inline(b"1")})
    (disk / "image").write_bytes(image_bytes(root))
    node = image_of(root).resolve(b"/a")
    with erofs_mounted(disk / "image", [], disk / "mounted") as mounted:
        assert os.stat(mounted / "a").st_ino == node.nid
        assert image_of(root).offset_of(node.nid) == node.nid << EROFS_ISLOTBITS


def test_kernel_refuses_a_wrong_checksum(disk: Path) -> None:
    data = bytearray(image_bytes(directory()))
    data[1024 + 0x30] ^= 1  # uuid
    (disk / "image").write_bytes(data)
    with pytest.raises(OSError), erofs_mounted(disk / "image", [], disk / "mounted"):
        pass


def test_holes_are_zeros(disk: Path) -> None:
    packs = Packs()
    root = directory({b"f": packs.file(attrs(stat.S_IFREG), [None, b"d" * 4096, None])})
    file = root.entries[b"f"]
    assert isinstance(file, File) and isinstance(file.extents[0].source, Bytes)
    (disk / "image").write_bytes(image_bytes(root, packs.devices))
    with erofs_mounted(disk / "image", packs.save(disk), disk / "mounted") as mounted:
        assert (mounted / "f").read_bytes() == bytes(4096) + b"d" * 4096 + bytes(4096)
