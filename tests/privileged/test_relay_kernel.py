"""Images laid out anew on the kernel: what it shows, and what fsck.erofs says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import sandboxes
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.relays import hot, pack_bytes
from support.tars import directory, fifo, file, hardlink, opaque, sparse_pax, symlink, tar, whiteout
from support.tools import need_root, need_tool
from support.trees import Row, manifest

from layerstore.cache.metadata import MetadataCache
from layerstore.compose import plan_stack, publish_stack
from layerstore.hot import HotFile, HotRange
from layerstore.image import Layer, Role, load_image
from layerstore.pack.chunks import CHUNK_SIZE
from layerstore.pack.format import FRAME_SIZE
from layerstore.rawpacks import is_raw
from layerstore.relay import relay
from layerstore.tree.local import scan
from overlay import direct, mountinfo
from overlay.layers import MountableLayer
from overlay.mountapi import MNT_DETACH, umount
from overlay.sandbox import Sandboxes

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]
mounts_unchanged = sandboxes.mounts_unchanged

A, C = noise(5 * CHUNK_SIZE + 100, 1), noise(3 * FRAME_SIZE, 3)
LOWER = tar(
    directory("./", mode=0o751, uid=3, gid=4, mtime=77),
    directory("usr/lib", mode=0o1777, mtime=10, pax={"SCHILY.xattr.trusted.x": b"dir"}),
    file("a", A, mode=0o4755, uid=1000, mtime=5, pax={"SCHILY.xattr.user.k": b"v"}),
    file("usr/lib/big", C, mtime=-7),
    hardlink("usr/lib/a", "a"),
    file("gone", noise(70_000, 2), pax={"mtime": "1635528968.656625010"}),
    sparse_pax("holes", 300_000, [(0, noise(5000, 5)), (200_000, noise(9000, 6))], "1.0"),
    file("small", b"inline"),
    file("empty"),
    symlink("link", "a"),
    fifo("pipe"),
)
UPPER = tar(whiteout("gone"), directory("etc"), opaque("etc"), file("etc/new", noise(80_000, 20)), file("a2", A))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    """A node's root. At the end nothing may be mounted in it; what is, is unmounted and fails the test."""
    need_root()
    made = sandboxes.node_root(tmp_path)
    yield made
    left = list(mountinfo.below(made, mountinfo.read()))
    for mounted in left:
        umount(mounted.target, MNT_DETACH)
    assert left == []


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """``env``, a stack of two layers, and ``foreign``, whose packs are those of others and one of its own."""
    with fsync_for_free():
        site = Site(tmp_path / "site")
        site.convert(site.image([LOWER]), tag="base")
        site.convert(site.image([LOWER, UPPER]), Role.WORKSPACE, base="base", tag="work")
        publish_stack(site.store, plan_stack(site.store, base="base", workspace="work"), tag="env")
        parts = (
            file("own", noise(90_000, 9)),
            file("a", A),
            file("gone", noise(70_000, 2)),
            file("x", noise(80_000, 20)),
        )
        site.convert(site.tar(*parts), tag="foreign")
        yield site


def layers_of(site: Site, root: str, name: str, path: Path, *, raw: bool) -> list[MountableLayer]:
    cache = MetadataCache(os.path.join(root, "cache", "meta"))
    found = []
    for layer in load_image(site.store, name).layers:
        metadata = cache.ensure(layer, site.store)
        if raw:
            found.append(direct.mountable(layer, site.store, metadata, name=name))
        else:
            devices = files_of(site, layer, path)
            found.append(MountableLayer(layer.metadata.hex, metadata, tuple(map(str, devices))))
    return found


def files_of(site: Site, layer: Layer, path: Path) -> list[Path]:
    """The packs of a layer, each as a file of its own."""
    found = []
    for pack in layer.packs:
        found.append(path / pack.digest.hex)
        found[-1].write_bytes(pack_bytes(site.store, pack))
    return found


def seen(site: Site, root: str, name: str, path: Path, *, raw: bool = False) -> dict[bytes, Row]:
    """All that a program sees of an image: contents, times, modes, xattrs, and which names are one file."""
    node = Sandboxes(root)
    sandbox = node.create(layers_of(site, root, name, path, raw=raw), image={}, mode="direct" if raw else "eager")
    try:
        return manifest(scan(sandbox.rootfs, warn=[].append))
    finally:
        node.remove(sandbox.id)


def fsck(site: Site, root: str, name: str, path: Path) -> None:
    program = need_tool("fsck.erofs", "1.8")
    cache = MetadataCache(os.path.join(root, "cache", "meta"))
    for layer in load_image(site.store, name).layers:
        command = [program, *(f"--device={pack}" for pack in files_of(site, layer, path))]
        done = subprocess.run([*command, cache.ensure(layer, site.store)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "<E>" not in done.stdout + done.stderr, done.stdout + done.stderr


def planned(site: Site, name: str) -> list[HotRange]:
    """Something of every layer, with a file that is hidden in the stack, and one name of two."""
    files = {
        "env": [[b"usr/lib/a", b"gone", (b"holes", 200_000, 9000)], [b"etc/new", b"a2"]],
        "foreign": [[b"x", b"a"]],
    }
    layers = load_image(site.store, name).layers
    return [each for layer, parts in zip(layers, files[name], strict=True) for each in hot(site.store, layer, *parts)][
        ::-1
    ]


@pytest.mark.compat
@pytest.mark.case("P06")
@pytest.mark.parametrize("name", ["env", "foreign"])
def test_the_kernel_shows_the_same_and_fsck_finds_nothing(site: Site, root: str, tmp_path: Path, name: str) -> None:
    report = relay(site.store, name, planned(site, name), tag="hot")
    before = load_image(site.store, name)
    assert all(new != old for new, old in zip(report.image.layers, before.layers, strict=True))
    fsck(site, root, "hot", tmp_path)
    old, new = seen(site, root, name, tmp_path), seen(site, root, "hot", tmp_path)
    assert sorted(new) == sorted(old)
    assert new == old
    if name == "foreign":  # x alone was in one of the packs
        assert len(report.image.layers[0].packs) == len(before.layers[0].packs) == 3
        assert 0 in report.layers[0].devices


def test_raw_packs_of_it_are_read_where_they_lie(site: Site, root: str, tmp_path: Path) -> None:
    report = relay(site.store, "env", planned(site, "env"), tag="hot", raw=True)
    assert all(is_raw(site.store, pack) for layer in report.image.layers for pack in layer.packs)
    assert seen(site, root, "hot", tmp_path, raw=True) == seen(site, root, "env", tmp_path)


@pytest.mark.compat
@pytest.mark.case("P06")
def test_a_conversion_by_a_plan_shows_the_same(site: Site, root: str, tmp_path: Path) -> None:
    wanted = tuple(
        HotFile(path, offset, length)
        for path, offset, length in [
            (b"usr/lib/big", 500_000, 90_000),
            (b"usr/lib/a", 0, 50_000),
            (b"missing", 0, 1),
            (b"gone", 0, 1),
            (b"usr/lib/big", 0, 9),
        ]
    )
    for tag, fields in (("plain", {}), ("hot", {"hot": wanted}), ("hot-afresh", {"hot": wanted, "dedup": False})):
        site.convert(site.image([LOWER, UPPER]), tag=tag, **fields)
        fsck(site, root, tag, tmp_path)
    plain = seen(site, root, "plain", tmp_path)
    assert seen(site, root, "hot", tmp_path) == plain
    assert seen(site, root, "hot-afresh", tmp_path) == plain


@pytest.mark.compat
@pytest.mark.case("P02")
@pytest.mark.parametrize(
    "layer", [tar(), tar(directory("d"), symlink("d/l", "x"), file("e"))], ids=["empty", "no data"]
)
def test_a_layer_without_data_passes_fsck(site: Site, root: str, tmp_path: Path, layer: bytes) -> None:
    site.convert(site.tar(layer, end=b""), tag="bare", hot=(HotFile(b"e", 0, 1),))
    (bare,) = load_image(site.store, "bare").layers
    relay(site.store, "bare", [HotRange(bare.metadata, 1, 0, 4096)], tag="hot")
    fsck(site, root, "hot", tmp_path)
    assert seen(site, root, "hot", tmp_path) == seen(site, root, "bare", tmp_path)
