"""erofs-utils as the judge of what we write, and as the writer of what we read."""

from __future__ import annotations

import os
import random
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.erofs_images import Packs, Source, attrs, directory, image_bytes, image_of, inline, symlink, zoo
from support.tools import need_tool
from support.trees import content

from layerstore.erofs.checker import check
from layerstore.erofs.reader import Image
from layerstore.erofs.tree import load_tree
from layerstore.erofs.xattrs import name_filter
from layerstore.errors import UnsupportedError
from layerstore.tree.inode import Attrs, Directory, File, Inode, Symlink, walk
from layerstore.tree.links import link_sets

pytestmark = pytest.mark.compat


def run(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, errors="replace", timeout=120
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def fsck(image: Path, *options: object) -> str:
    """Run fsck.erofs; it must find nothing, and say nothing of a fault."""
    output = run(need_tool("fsck.erofs", "1.8"), *options, image)
    assert "<E>" not in output and "<W>" not in output
    return output


def devices_of(paths: list[Path]) -> list[str]:
    return [f"--device={path}" for path in paths]


# ---- what we write


def test_fsck_finds_nothing(tmp_path: Path) -> None:
    root, packs = zoo()
    image = tmp_path / "image"
    image.write_bytes(image_bytes(root, packs.devices))
    fsck(image, *devices_of(packs.save(tmp_path)))


def test_fsck_finds_nothing_in_the_flat_form(tmp_path: Path) -> None:
    root, packs = zoo()
    image = tmp_path / "flat"
    image.write_bytes(image_bytes(root, packs.devices) + b"".join(packs.data))
    fsck(image)


def test_fsck_extracts_what_went_in(tmp_path: Path) -> None:
    root, packs = zoo()
    del directory_in(root, b"files").entries[b"sparse"]  # fsck.erofs fails on holes beyond 2 GiB
    for name in (b"dev", b"overlay", b"owners", b"xattrs"):  # need root to be made
        del root.entries[name]
    image = tmp_path / "image"
    image.write_bytes(image_bytes(root, packs.devices))
    fsck(image, *devices_of(packs.save(tmp_path)), f"--extract={tmp_path / 'out'}")
    for name, inode in walk(root):
        path = os.fsencode(tmp_path / "out") + b"/" + name
        if isinstance(inode, File):
            with open(path, "rb") as file:
                assert file.read() == content(inode), name
        elif isinstance(inode, Symlink):
            assert os.readlink(path) == inode.target
        else:
            assert isinstance(inode, Directory)
            assert sorted(os.listdir(path)) == sorted(inode.entries)


@pytest.mark.case("Z13", "Z15")
def test_ten_thousand_small_files_are_extracted_by_fsck(tmp_path: Path) -> None:
    rng = random.Random(15)
    root = directory()
    for outer in range(20):
        below = directory()
        for number in range(500):
            data = rng.randbytes(rng.randrange(0, 300))
            below.entries[b"f%d" % number] = symlink(b"f%d" % rng.randrange(500)) if number % 9 == 0 else inline(data)
        root.entries[b"d%d" % outer] = below
    image = tmp_path / "image"
    image.write_bytes(image_bytes(root))
    fsck(image, f"--extract={tmp_path / 'out'}")
    for name, inode in walk(root):
        path = os.fsencode(tmp_path / "out") + b"/" + name
        if isinstance(inode, File):
            with open(path, "rb") as file:
                assert file.read() == content(inode)
        elif isinstance(inode, Symlink):
            assert os.readlink(path) == inode.target


def test_dump_reads_the_superblock(tmp_path: Path) -> None:
    root, packs = zoo()
    image = tmp_path / "image"
    image.write_bytes(image_bytes(root, packs.devices))
    superblock = image_of(root, packs.devices).superblock
    shown = run(need_tool("dump.erofs", "1.8"), "-s", *devices_of(packs.save(tmp_path)), image)
    fields = dict(re.findall(r"Filesystem ([^:]+):\s+(.*?)\s*$", shown, re.MULTILINE))
    assert fields["blocks"] == str(superblock.blocks + sum(device.blocks for device in packs.devices))
    assert fields["root nid"] == str(superblock.rootnid_2b)
    assert fields["inode count"] == str(superblock.inos)
    assert fields["UUID"].replace("-", "") == superblock.uuid.hex()
    assert fields["compatible features"].split() == ["sb_csum", "mtime", "xattr_filter"]
    assert fields["incompatible features"].split() == ["chunked_file", "device_table"]


def test_dump_reads_inodes(tmp_path: Path) -> None:
    root, packs = zoo()
    data = image_bytes(root, packs.devices)
    (tmp_path / "image").write_bytes(data)
    image = Image(Source(data))
    options = [*devices_of(packs.save(tmp_path)), str(tmp_path / "image")]
    tool = need_tool("dump.erofs", "1.8")
    for path in ("/files/spread", "/files/largest-inline", "/links/l2", "/dev/odd", "/xattrs/binary", "/hard1"):
        shown = run(tool, f"--path={path}", *options)
        node = image.resolve(path.encode(), follow=False)
        assert f"NID: {node.nid} " in shown
        assert re.search(rf"Links: {node.nlink}\b", shown)
        assert re.search(rf"Size: {node.size}\b", shown)
        assert re.search(rf"Uid: {node.attrs.uid}\s+Gid: {node.attrs.gid}\b", shown)
        if node.kind == stat.S_IFREG:
            ran = subprocess.run([tool, "--cat", f"--path={path}", *options], capture_output=True, timeout=60)
            assert ran.stdout == image.read(node, 0, node.size, packs)


def test_fsck_accepts_the_root_before_a_large_table(tmp_path: Path) -> None:
    packs = Packs()
    root = directory({b"f": inline(b"1"), b"g": packs.file(attrs(stat.S_IFREG), [b"1"])})
    image = tmp_path / "image"
    image.write_bytes(image_bytes(root, packs.devices * 17_000))
    shown = run(need_tool("dump.erofs", "1.8"), "-s", image)
    assert re.search(r"root nid:\s+36$", shown, re.MULTILINE)


def directory_in(root: Directory, name: bytes) -> Directory:
    below = root.entries[name]
    assert isinstance(below, Directory)
    return below


# ---- what we read


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    """A tree on disk for mkfs.erofs, with xattrs where the filesystem has them."""
    with tempfile.TemporaryDirectory(prefix="imgtool-test-", dir="/var/tmp") as name:
        root = Path(name)
        rng = random.Random(1)
        for directory_number in range(4):
            below = root / f"d{directory_number}"
            below.mkdir()
            for number in range(120):
                size = rng.choice([0, 1, 100, 2000, 4096, 5000, 8192, 20_001])
                file = below / f"{number:03}-{'n' * rng.randrange(60)}"
                file.write_bytes(rng.randbytes(size))
                os.utime(file, ns=(0, rng.randrange(2 * 10**18)))
                if number % 3 == 0:
                    os.setxattr(file, "user.shared", b"the same value for many files")
                    os.setxattr(file, "user.own", str(number).encode())
        os.link(root / "d0" / os.listdir(root / "d0")[0], root / "hard")
        (root / "link").symlink_to("d1")
        (root / "long").symlink_to("x" * 4000)
        os.mkfifo(root / "fifo")
        with (root / "sparse").open("wb") as sparse:
            sparse.write(b"start")
            sparse.seek(1 << 20)
            sparse.write(b"end")
        paths = [os.path.join(where, name) for where, folders, files in os.walk(root) for name in folders + files]
        for path in (root, *paths):
            # mkfs.erofs drops the nanoseconds of what is as old as the image, so nothing may be.
            os.utime(path, ns=(0, rng.randrange(10**18)), follow_symlinks=False)
        yield root


def on_disk(root: Path, *, times: bool) -> dict[bytes, tuple[Attrs, object, int]]:
    """What an image of a directory must have, by path: attributes, data or target, number of names."""
    base = os.fsencode(root)
    paths = [b""]
    for where, directories, files in os.walk(base):
        paths += [os.path.join(where, name)[len(base) + 1 :] for name in directories + files]
    rows = {}
    for path in paths:
        full = os.path.join(base, path) if path else base
        found = os.lstat(full)
        value: object = None
        if stat.S_ISREG(found.st_mode):
            with open(full, "rb") as file:
                value = file.read()
        elif stat.S_ISLNK(found.st_mode):
            value = os.readlink(full)
        names = sorted(os.fsencode(name) for name in os.listxattr(full, follow_symlinks=False))
        xattrs = tuple((name, os.getxattr(full, name, follow_symlinks=False)) for name in names)
        time = divmod(found.st_mtime_ns, 10**9) if times else (0, 0)
        made = Attrs(found.st_mode, found.st_uid, found.st_gid, *time, xattrs)
        rows[path] = made, value, 1 if stat.S_ISDIR(found.st_mode) else found.st_nlink
    return rows


def in_image(root: Directory, *, times: bool) -> dict[bytes, tuple[Attrs, object, int]]:
    links = link_sets(root)

    def value(inode: Inode) -> object:
        if isinstance(inode, File):
            return content(inode)
        return inode.target if isinstance(inode, Symlink) else None

    return {
        path: (
            inode.attrs if times else inode.attrs._replace(mtime=0, nsec=0),
            value(inode),
            len(links.get(path, b"1")),
        )
        for path, inode in walk(root)
    }


def mkfs(tmp_path: Path, source: Path, *options: str) -> Image:
    image = tmp_path / "image"
    run(need_tool("mkfs.erofs", "1.8"), "--quiet", *options, image, source)
    return Image(Source(image.read_bytes()))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-x1",),
        ("-Enoinline_data",),
        ("-b1024",),
        ("-b512",),
        ("-x-1", "-Eforce-inode-extended"),
        ("--chunksize=4096",),
        ("--chunksize=16384", "-x1"),
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_images_of_mkfs_are_read_as_they_were_made(tmp_path: Path, source: Path, options: tuple[str, ...]) -> None:
    image = mkfs(tmp_path, source, *options)
    assert check(image) == []
    want = on_disk(source, times=True)
    if "-x-1" in options:
        want = {path: (made._replace(xattrs=()), data, links) for path, (made, data, links) in want.items()}
    assert in_image(load_tree(image), times=True) == want


def test_compact_inodes_have_the_time_of_the_image(tmp_path: Path, source: Path) -> None:
    image = mkfs(tmp_path, source, "-T1234567", "--all-time", "-Eforce-inode-compact")
    assert check(image) == []
    nodes = [image.resolve(path, follow=False) for path in (b"/", b"/d0", b"/hard", b"/link", b"/fifo")]
    assert not any(node.extended for node in nodes)
    assert {(node.attrs.mtime, node.attrs.nsec) for node in nodes} == {(1234567, 0)}
    assert in_image(load_tree(image), times=False) == on_disk(source, times=False)


def test_an_extra_device_of_mkfs_is_read(tmp_path: Path, source: Path) -> None:
    blob = tmp_path / "blob"
    blob.touch()
    image = mkfs(tmp_path, source, "--chunksize=4096", f"--blobdev={blob}")
    assert check(image) == []

    class Blob:
        def read_device(self, index: int, offset: int, length: int) -> bytes:
            assert index == 1
            data = blob.read_bytes()[offset : offset + length]
            return data

    assert in_image(load_tree(image, Blob()), times=True) == on_disk(source, times=True)


def test_name_filters_are_those_of_mkfs(tmp_path: Path, source: Path) -> None:
    image = mkfs(tmp_path, source)
    filters = []
    for name in os.listdir(source / "d2"):
        node = image.resolve(b"/d2/" + name.encode())
        if node.attrs.xattrs:
            filters.append(node.name_filter == name_filter(each for each, _ in node.attrs.xattrs))
    assert len(filters) == 40 and all(filters)


@pytest.mark.case("Z16")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("-zlz4",), "COMPRESSED"),
        (("-zlz4hc", "-C65536"), "COMPR_CFGS"),
        (("-zdeflate",), "COMPR_CFGS"),
        (("-zlz4", "-Efragments"), "FRAGMENTS"),
        (("-zlz4", "-Eztailpacking"), "ZTAILPACKING"),
        (("--xattr-prefix=user.sha",), "XATTR_PREFIXES"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_features_that_are_not_read_are_refused_by_name(
    tmp_path: Path, source: Path, options: tuple[str, ...], named: str
) -> None:
    (source / "compressible").write_bytes(b"a" * 100_000)
    try:
        with pytest.raises(UnsupportedError, match=named):
            load_tree(mkfs(tmp_path, source, *options))
    finally:
        (source / "compressible").unlink()
