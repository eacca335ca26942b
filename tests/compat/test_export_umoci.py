"""umoci unpacks our tar layers, with the kernel as witness: the trees are the ones that were exported."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.erofs_images import ACL, CAPABILITY
from support.images import small_layout
from support.tars import block, char, directory, fifo, file, hardlink, opaque, sparse_pax, symlink, tar, whiteout
from support.tools import need_root, need_tool
from support.trees import Row, manifest

from layerstore.compose import plan_stack, publish_stack
from layerstore.export.compress import Compression
from layerstore.export.ociimage import export_image
from layerstore.export.targetname import open_target
from layerstore.image import Role
from layerstore.tree.local import scan

pytestmark = [pytest.mark.compat, pytest.mark.privileged]

ODD = tar(
    directory("./", mode=0o711, mtime=5),
    directory("d", mode=0o2750, uid=3_000_000, gid=4294967294, pax={"mtime": "-5.25"}),
    file("d/setuid", noise(50_000, 1), mode=0o4755, uid=70_000, pax={"mtime": "1635528968.103142160"}),
    hardlink("d/again", "d/setuid"),
    hardlink("d/third", "d/again"),
    file("d/old", b"1970", mtime=-5),
    file("d/late", b"2106", mtime=1 << 33),
    file("d/caps", b"c", pax={"SCHILY.xattr.security.capability": CAPABILITY}),
    file("d/acl", b"a", mode=0o640, pax={"SCHILY.xattr.system.posix_acl_access": ACL}),
    file("d/attrs", b"", pax={"SCHILY.xattr.user.bin": bytes(range(256)), "SCHILY.xattr.trusted.x": b"1"}),
    file(b"caf\xe9\nline", b"bytes"),
    directory("p" * 120, mtime=7),
    file("long", b"split", pax={"path": "p" * 120 + "/" + "n" * 90}),
    file("longer", b"beyond ustar", pax={"path": "p" * 120 + "/" + "m" * 255}),
    file("raw", b"no text, and long", pax={"path": b"p" * 120 + b"/" + b"\xe9" * 200}),
    symlink("link", "d/setuid", mtime=99),
    hardlink("link2", "link"),
    symlink("far", "t" * 300),
    directory("dev", mtime=16),
    char("dev/tty", 5, 1, mode=0o620, gid=5),
    block("dev/big", 4095, 1048575, mode=0o660),
    fifo("dev/pipe", mode=0o600, mtime=3),
    sparse_pax("sparse", 3_000_000, [(1_000_000, noise(40_000, 2))], "1.0"),
    directory("gone", mtime=17),
    file("gone/f", b"f"),
    directory("opaque", mode=0o750, mtime=18),
    file("opaque/old", b"old"),
    file("turns", b"file"),
)
OVER = tar(
    whiteout("gone"),
    opaque("opaque"),
    file("opaque/new", b"new", mtime=8),
    directory("opaque", mode=0o755, mtime=118),
    directory("turns", mtime=9),
    file("turns/f", b"now a directory", mtime=10),
    file("d/again", b"no longer a link", mtime=11),
    directory("d", mode=0o700, uid=3_000_001, gid=5, mtime=12),
    directory("dev", mtime=16),
    directory("./", mode=0o755, mtime=6),
)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory that is gone afterwards, devices and all."""
    path = tmp_path / "scratch"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def unpacked(layout: Path, tag: str, rootfs: Path) -> dict[bytes, Row]:
    need_root()
    command = [need_tool("umoci"), "raw", "unpack", "--image", f"{layout}:{tag}", rootfs]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return manifest(scan(str(rootfs), warn=[].append))


def export(site: Site, name: str, layout: Path, compression: Compression) -> None:
    with open_target(f"oci:{layout}:{name}") as target:
        export_image(site.store, name, target, compression=compression)


def stacked(site: Site, base: str, changed: str) -> None:
    """``base``, and ``env``: what ``changed`` adds to it on top."""
    site.convert(base, tag="base")
    site.convert(changed, Role.WORKSPACE, base="base", tag="changed")
    publish_stack(site.store, plan_stack(site.store, base="base", workspace="changed"), tag="env")


@pytest.mark.parametrize("compression", [Compression.GZIP, Compression.NONE])
def test_odd_trees(scratch: Path, compression: Compression) -> None:
    """Modes, ids, times, attributes, devices, links, names and holes, and a second layer that deletes some."""
    site = Site(scratch)
    stacked(site, site.image([ODD]), site.image([ODD, OVER]))
    for name in ("base", "env"):
        export(site, name, scratch / "out", compression)
        expected = site.rows(name)
        found = unpacked(scratch / "out", name, scratch / name)
        assert found.keys() == expected.keys()
        assert {path: (found[path], row) for path, row in expected.items() if found[path] != row} == {}
    assert b"gone" not in expected
    assert expected[b"link2"].links == {b"link", b"link2"}


def test_real_images(scratch: Path) -> None:
    site = Site(scratch)
    layout = small_layout()
    stacked(site, f"oci:{layout}:base", f"oci:{layout}:changed")
    export(site, "env", scratch / "out", Compression.GZIP)
    expected = site.rows("env")
    found = unpacked(scratch / "out", "env", scratch / "rootfs")
    assert found.keys() == expected.keys()
    assert {path: (found[path], row) for path, row in expected.items() if found[path] != row} == {}
    assert len(expected) > 3000
