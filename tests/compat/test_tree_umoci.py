"""What umoci unpacks for an image is what Merge makes of its layers, path by path."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.images import small_layout
from support.layouts import Layout
from support.tars import (
    block,
    char,
    directory,
    fifo,
    file,
    hardlink,
    opaque,
    sparse_pax,
    symlink,
    tar,
    whiteout,
)
from support.tools import need_root, need_tool
from support.trees import Bytes, Row, clone, manifest, same_content

from layerstore.limits import DEFAULT_LIMITS
from layerstore.tar.reader import MemberReader
from layerstore.tree.difference import delta, difference
from layerstore.tree.inode import Directory
from layerstore.tree.local import scan
from layerstore.tree.merge import Merge
from layerstore.tree.union import merge_overlay

pytestmark = [pytest.mark.compat, pytest.mark.privileged]


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory that is gone afterwards, devices and all."""
    path = tmp_path / "scratch"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def unpacked(image: str, rootfs: Path) -> Directory:
    """The tree of what umoci makes of an image."""
    need_root()
    umoci = need_tool("umoci")
    command = [umoci, "raw", "unpack", "--image", image, rootfs]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return scan(str(rootfs), warn=[].append)


def merged(layers: Sequence[bytes], lower: Directory | None = None) -> Directory:
    """What Merge makes of decompressed layers."""
    merge = Merge(lower=lower, warn=[].append, limits=DEFAULT_LIMITS)
    for layer in layers:
        source = Bytes(layer)
        read = memoryview(layer)
        merge.apply(
            MemberReader(
                lambda offset, length, read=read: bytes(read[offset : offset + length]),
                limits=DEFAULT_LIMITS,
                warn=[].append,
            ),
            source,
        )
    return merge.tree()


def rows(tree: Directory, *, directory_times: bool = True) -> dict[bytes, Row]:
    if directory_times:
        return manifest(tree)
    return {
        path: row._replace(attrs=row.attrs._replace(mtime=0, nsec=0)) if row.type == "Directory" else row
        for path, row in manifest(tree).items()
    }


def acl(*entries: tuple[int, int, int]) -> bytes:
    """system.posix_acl_access as the kernel takes it (linux/posix_acl_xattr.h): tag, permissions, id."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


ACL = acl((1, 6, 0xFFFFFFFF), (2, 4, 1000), (4, 4, 0xFFFFFFFF), (0x10, 4, 0xFFFFFFFF), (0x20, 4, 0xFFFFFFFF))
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")

BOTTOM = tar(
    directory("./", mode=0o755, mtime=5),
    directory("usr", mtime=10),
    directory("usr/bin/", mtime=11, pax={"mtime": "1635528968.656625010"}),
    file("usr/bin/ping", b"ping", mode=0o4755, pax={"SCHILY.xattr.security.capability": CAPABILITY}),
    file("usr/bin/acl", b"a", pax={"SCHILY.xattr.system.posix_acl_access": ACL}),
    file("usr/bin/attr", b"", pax={"SCHILY.xattr.user.bin": bytes(range(256)), "SCHILY.xattr.trusted.x": b"1"}),
    file("usr/bin/git", b"g" * 5000, mode=0o755, mtime=-5),
    hardlink("usr/bin/git-add", "usr/bin/git"),
    hardlink("usr/bin/git-rm", "./usr/bin/git-add"),
    directory("usr/lib64", mode=0o711, mtime=12),
    file("usr/lib64/a", b"a"),
    symlink("lib64", "usr/lib64", mtime=99),
    symlink("absolute", "/usr"),
    symlink("dangling", "/no/where"),
    hardlink("dangling2", "dangling"),
    directory("etc", mtime=13),
    file("etc/passwd", b"1"),
    file("etc/gone", b"gone"),
    directory("etc/dir", mode=0o700, uid=65536, gid=4294967294, mtime=14),
    file("etc/dir/f", b"f", uid=2_000_000, gid=7),
    directory("empty", mtime=15),
    directory("dev", mtime=16),
    char("dev/tty", 5, 1, mode=0o620, gid=5),
    block("dev/sda", 8, 0, mode=0o660),
    char("dev/big", 4095, 1048575),
    fifo("dev/pipe", mode=0o600, mtime=3),
    file(b"caf\xe9\nline", b"bytes"),
    file("long", b"long", pax={"path": "n" * 255}),
    sparse_pax("sparse-0.1", 10_000_000, [(4096, b"x" * 4096), (5_000_000, b"y" * 10)], "0.1"),
    sparse_pax("sparse-1.0", 3_000_000, [(1_000_000, b"z" * 512)], "1.0"),
    file("zeros", bytes(100_000)),
    directory("replaced", mtime=17),
    directory("replaced/sub", mtime=17),
    file("replaced/sub/f", b"f"),
    directory("opaque", mode=0o750, mtime=18),
    file("opaque/old", b"old"),
    directory("opaque/sub", mtime=18),
    file("opaque/sub/old", b"old"),
    directory("real", mtime=19),
    file("real/r", b"r"),
    symlink("things", "real"),
    file("becomes-dir", b"file"),
    file("dup", b"first"),
    file("dup", b"second", mode=0o600),
)

MIDDLE = tar(
    directory("etc", mode=0o711, mtime=113),
    file("etc/passwd", b"2", mtime=7),
    whiteout("etc/gone"),
    whiteout("etc/never-was"),
    hardlink("etc/git", "usr/bin/git-rm"),
    file("lib64/b", b"through the link"),
    file("usr/bin/git-add", b"no longer a link"),
    whiteout("usr/bin/git"),
    whiteout("real"),
    directory("things", mode=0o700, mtime=119),
    file("things/x", b"x"),
    symlink("replaced", "e"),
    file("opaque/new", b"new"),
    opaque("opaque"),
    directory("opaque", mode=0o755, mtime=118),
    directory("becomes-dir", mtime=120),
    file("becomes-dir/f", b"f"),
    hardlink("whiteouts/.wh.by-link", "not/there"),
    whiteout("empty"),
    directory("usr", mtime=110),
    directory("usr/bin", mtime=111),
    directory("usr/lib64", mode=0o711, mtime=112),
    directory("./", mode=0o711, mtime=105),
)

TOP = tar(
    symlink("etc/passwd", "x", mtime=1),
    hardlink("etc/passwd-", "etc/passwd"),
    directory("etc", mode=0o755, mtime=213),
    directory("empty", mtime=215),
    file("../escape", b"stays inside"),
    file("/absolute-name", b"here"),
    file("a/../b/./c//d", b"d", mtime=4),
    directory("b/c", mtime=216),
    directory("b", mtime=217),
    whiteout("absolute/lib64/a"),
    directory("usr/lib64", mtime=212),
    directory(".", mtime=205),
)


def test_layers_made_by_hand(scratch: Path) -> None:
    layers = [BOTTOM, MIDDLE, TOP]
    layout = Layout(scratch / "oci")
    for count in (1, 2, 3):
        layout.image(layers[:count], tag=f"v{count}")
        oracle = rows(unpacked(f"{layout.path}:v{count}", scratch / f"v{count}"))
        ours = rows(merged(layers[:count]))
        for path in oracle.keys() | ours.keys():
            assert ours.get(path) == oracle.get(path), path
        for cut in range(1, count):
            lower = merged(layers[:cut])
            layer = clone(merged(layers[cut:count], lower=lower))
            assert rows(merge_overlay([lower, layer])) == oracle


@pytest.mark.case("T01", "T03", "T04", "T05", "T07", "T11", "T13", "T15", "T16", "T18", "T19", "T21", "T22", "T27")
@pytest.mark.case("T29", "T59", "Z19", "O10")
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([[file("foo", b"A"), file("foo", b"B")]], id="T01"),
        pytest.param([[file("a"), hardlink("b", "a"), hardlink("b", "a")]], id="T03"),
        pytest.param(
            [[directory("a"), file("a/old")], [directory("a"), file("a/new"), opaque("a")]], id="T04-marker-last"
        ),
        pytest.param(
            [[directory("a"), file("a/old")], [opaque("a"), directory("a"), file("a/new")]], id="T04-marker-first"
        ),
        pytest.param([[directory("a"), file("a/old")], [opaque("a")]], id="T04-marker-alone"),
        pytest.param([[file("foo/a"), file("foo/b")], [opaque("foo"), file("foo/c")]], id="T05"),
        pytest.param([[file("a")], [whiteout("ghost"), whiteout("no/such/dir"), opaque("nor/this")]], id="T11"),
        pytest.param([[file("tmp/key"), file("tmp/k")], [hardlink("tmp/.wh.key", "tmp/repo")]], id="T13-hardlink"),
        pytest.param([[file("tmp/key"), file("tmp/k")], [symlink("tmp/.wh.key", "k")]], id="T13-symlink"),
        pytest.param([[file("tmp/key"), file("tmp/k")], [directory("tmp/.wh.key/")]], id="T13-directory"),
        pytest.param([[file("tmp/key"), file("tmp/k")], [file("tmp/.wh.key", b"0123456789")]], id="T13-body"),
        pytest.param(
            [
                [directory("usr"), directory("usr/bin"), file("usr/bin/a")],
                [directory("usr", mode=0o711), directory("usr/bin", mode=0o700), file("usr/bin/b")],
            ],
            id="T15",
        ),
        pytest.param([[file("e/p", b"1")], [file("e/p", b"2")], [symlink("e/p", "x")]], id="T16"),
        pytest.param(
            [
                [directory("real"), symlink("things", "real")],
                [whiteout("real"), directory("things"), file("things/x")],
            ],
            id="T18",
        ),
        pytest.param([[directory("d"), file("d/f")], [symlink("d", "e")]], id="T19"),
        pytest.param(
            [[directory("usr/lib64"), file("usr/lib64/a"), symlink("lib64", "usr/lib64")], [file("lib64/b")]], id="T21"
        ),
        pytest.param([[directory("."), symlink("link", "nowhere"), directory("././", mode=0o700)]], id="T22"),
        pytest.param([[symlink("a/l", "t"), hardlink("b/l", "a/l")]], id="T27"),
        pytest.param([[file("f", bytes(4096)), *(hardlink(name, "f") for name in "ghi")]], id="T29"),
        pytest.param(
            [[file("../e"), file("/abs"), file("a/../../e2"), file("a/./b//c"), symlink("p", "/outside"), file("p/f")]],
            id="T59",
        ),
        pytest.param([[file("outside/f"), symlink("p", "../../outside")], [whiteout("p/f")]], id="T59-whiteout"),
        pytest.param([[directory("initdb.d"), file("zero"), symlink("dangling", "/x"), whiteout("d/x")]], id="Z19"),
        pytest.param([[file("test"), file("root/test"), file("a/b/test")], [whiteout("test")]], id="O10"),
        pytest.param(
            [[file("d/x"), file("f")], [file("d/y"), whiteout("d"), file("f", b"2"), whiteout("f")]], id="own"
        ),
        pytest.param([[file("a", b"1")], [hardlink("b", "a"), whiteout("a")]], id="link-then-whiteout"),
        pytest.param([[file("a", b"1")], [hardlink("b", "a"), file("a", b"2")]], id="link-then-replace"),
        pytest.param([[file("a", b"1", mode=0o600), hardlink("b", "a", mode=0o777, uid=3)]], id="link-attributes"),
        pytest.param([[file("d/a"), hardlink("d/b", "d/a"), file("c")], [whiteout("d/a")]], id="fewer-links"),
    ],
)
def test_field_cases(scratch: Path, layers: list[list[bytes]]) -> None:
    """Times of directories are left out: umoci gives implied ones, and parents of removed names, the present."""
    tars = [tar(*parts) for parts in layers]
    layout = Layout(scratch / "oci")
    layout.image(tars, tag="v")
    oracle = rows(unpacked(f"{layout.path}:v", scratch / "rootfs"), directory_times=False)
    assert rows(merged(tars), directory_times=False) == oracle
    for cut in range(1, len(tars)):
        lower = merged(tars[:cut])
        layer = clone(merged(tars[cut:], lower=lower))
        assert rows(merge_overlay([lower, layer]), directory_times=False) == oracle


def test_a_real_image(scratch: Path) -> None:
    need_tool("umoci")
    layout = small_layout()
    layers = layers_of(layout, "changed")
    oracle = unpacked(f"{layout}:changed", scratch / "rootfs")
    tree = merged(layers)
    changes = list(difference(oracle, tree, same_content))
    assert changes == []
    base = merged(layers_of(layout, "base"))
    assert len(manifest(base)) > 3000
    for layer in (
        merged(layers[1:], lower=base),
        delta(base, oracle, same_content),
    ):
        assert list(difference(oracle, merge_overlay([base, clone(layer)]), same_content)) == []


def layers_of(layout: Path, tag: str) -> list[bytes]:
    """The decompressed layers of an image of gzip layers."""

    def blob(digest: str) -> bytes:
        return (layout / "blobs" / Path(*digest.split(":"))).read_bytes()

    index = json.loads((layout / "index.json").read_bytes())
    (entry,) = (
        entry for entry in index["manifests"] if entry["annotations"]["org.opencontainers.image.ref.name"] == tag
    )
    manifest = json.loads(blob(entry["digest"]))
    return [gzip.decompress(blob(layer["digest"])) for layer in manifest["layers"]]


def test_the_oracle_sees_differences(scratch: Path) -> None:
    """A comparison that can't fail proves nothing: each kind of change to an unpacked tree is noticed."""
    layout = Layout(scratch / "oci")
    layout.image([BOTTOM], tag="v")
    tree = merged([BOTTOM])
    rootfs = scratch / "rootfs"
    unpacked(f"{layout.path}:v", rootfs)

    def noticed() -> list[tuple[bytes, tuple[str, ...]]]:
        seen = scan(str(rootfs), warn=[].append)
        return [(change.path, change.what) for change in difference(tree, seen, same_content)]

    assert noticed() == []
    os.setxattr(rootfs / "usr/bin/attr", "user.bin", b"other")
    os.chown(rootfs / "etc/dir/f", 1, 2)
    os.chmod(rootfs / "empty", 0o700)
    os.utime(rootfs / "dev/pipe", ns=(0, 3_000_000_001))
    assert noticed() == [
        (b"dev/pipe", ("mtime",)),
        (b"empty", ("mode",)),
        (b"etc/dir/f", ("owner",)),
        (b"usr/bin/attr", ("xattrs",)),
    ]
