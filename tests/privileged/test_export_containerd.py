"""containerd, as it is, runs containers from what we export, out of a real registry."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import Site
from support.exports import Containerd, containerd, listing, push, registry
from support.images import small_layout
from support.tars import file
from support.tools import need_root

from layerstore.compose import plan_stack, publish_stack
from layerstore.errors import NoSpaceError
from layerstore.export.compress import Compression
from layerstore.export.containerd import Form, export_containerd
from layerstore.export.contentcache import export_cache
from layerstore.export.ociimage import export_image
from layerstore.export.targetname import open_target
from layerstore.image import Role, load_image
from layerstore.oci.platform import Platform
from layerstore.opened import open_tree
from layerstore.tree.inode import Directory, File, Symlink, walk

pytestmark = pytest.mark.privileged


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    need_root()
    path = tmp_path_factory.mktemp("export")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def site(work: Path) -> Site:
    """A store with a base and a stack with whiteouts and an opaque directory over it."""
    site = Site(work / "site")
    layout = small_layout()
    site.convert(f"oci:{layout}:base", tag="base")
    site.convert(f"oci:{layout}:changed", Role.WORKSPACE, base="base", tag="changed")
    publish_stack(site.store, plan_stack(site.store, base="base", workspace="changed"), tag="env")
    return site


@pytest.fixture(scope="module")
def pushed(work: Path, site: Site) -> Iterator[str]:
    """A registry with the stack under ``env:erofs`` (form 2.1) and ``env:tar``."""
    layout = work / "layout"
    with open_target(f"oci:{layout}:erofs") as target:
        export_containerd(site.store, "env", target, form=Form.V2_1)
    with open_target(f"oci:{layout}:tar") as target:
        export_image(site.store, "env", target, compression=Compression.ZSTD)
    with registry(work / "registry") as address:
        for tag in ("erofs", "tar"):
            push(layout, tag, f"{address}/env:{tag}")
        yield f"{address}/env"


@pytest.fixture(scope="module")
def server(work: Path) -> Iterator[Containerd]:
    with containerd(work / "containerd") as server:
        yield server


@pytest.fixture(scope="module")
def expected(site: Site) -> list[tuple[object, ...]]:
    """What the stack shows, without mounting it."""
    with open_tree(site.store, load_image(site.store, "env")) as tree:
        return rows(tree)


def rows(tree: Directory) -> list[tuple[object, ...]]:
    """A tree as :func:`support.exports.listing` lists it."""
    found: list[tuple[object, ...]] = []
    first: dict[int, bytes] = {}
    for path, inode in walk(tree):
        attrs = inode.attrs
        name = path if isinstance(inode, Directory) else first.setdefault(id(inode), path)
        value: object = None
        if isinstance(inode, Symlink):
            value = inode.target
        elif isinstance(inode, File):
            data = bytearray(inode.size)
            for extent in inode.extents:
                data[extent.offset : extent.offset + extent.length] = extent.source.read_at(extent.at, extent.length)
            value = bytes(data)
        device = os.makedev(getattr(inode, "major", 0), getattr(inode, "minor", 0))
        time = attrs.mtime * 1_000_000_000 + attrs.nsec
        xattrs = tuple((key.decode(), data) for key, data in attrs.xattrs)
        found.append((path, attrs.mode, attrs.uid, attrs.gid, time, device, name, xattrs, value))
    return found


def comparable(found: list[tuple[object, ...]], snapshotter: str) -> dict[bytes, tuple[object, ...]]:
    """By path, but for what is the runtime's own.

    It mounts things on directories and files, and makes what it mounts them on. The root is its own directory, with the
    owner and mode of the image's. containerd's unpacker, which the tar form goes through, moves times before 1970 to
    its beginning.
    """
    hidden = (b"dev", b"proc", b"sys", b"run", b"etc/resolv.conf", b"etc/hosts", b"etc/hostname")
    kept = {}
    for row in found:
        path, time = row[0], row[4]
        assert isinstance(path, bytes) and isinstance(time, int)
        if any(path == name or path.startswith(name + b"/") for name in hidden):
            continue
        if path == b"":
            time = 0
        if snapshotter == "overlayfs":
            time = max(time, 0)
        kept[path] = (*row[:4], time, *row[5:])
    return kept


@pytest.mark.parametrize(("tag", "snapshotter"), [("erofs", "erofs"), ("tar", "overlayfs")])
def test_a_container_runs_and_sees_the_tree(
    server: Containerd,
    pushed: str,
    expected: list[tuple[object, ...]],
    tag: str,
    snapshotter: str,
) -> None:
    """Eager overlayfs from the tar form, the EROFS snapshotter from the 2.1 form: one tree, path by path."""
    reference = f"{pushed}:{tag}"
    server.pull(reference, snapshotter)
    script = "echo $((6 * 7)); cat /etc/debian_version; ls -1a /usr/share/zoneinfo | head -3"
    printed = server.run(reference, f"echo-{tag}", snapshotter, "/bin/sh", "-c", script).splitlines()
    wanted = {row[0]: row for row in expected}
    version = wanted[b"etc/debian_version"][-1]
    assert isinstance(version, bytes)
    assert printed[:2] == ["42", version.decode().strip()]
    with server.rootfs(reference, f"look-{tag}", snapshotter) as root:
        seen = comparable(listing(root), snapshotter)
    left = comparable(expected, snapshotter)
    assert seen.keys() == left.keys()
    different = {path: (seen[path], left[path]) for path in left if seen[path] != left[path]}
    assert not different
    assert len(left) > 3000
    assert {stat.S_IFMT(row[1]) for row in left.values() if isinstance(row[1], int)} >= {
        stat.S_IFCHR,
        stat.S_IFIFO,
        stat.S_IFLNK,
    }
    # Whiteouts and the opaque directory were at work.
    assert b"usr/share/zoneinfo/Africa" not in seen


def test_the_snapshotter_mounts_our_files(server: Containerd, pushed: str) -> None:
    """Nothing was converted on the way: the files that it mounts are the blobs of the layers."""
    reference = f"{pushed}:erofs"
    server.pull(reference, "erofs")
    manifest = json.loads(server.ctr("content", "get", server.digest(reference)))
    wanted = {layer["digest"].partition(":")[2] for layer in manifest["layers"]}
    files = (server.root / "io.containerd.snapshotter.v1.erofs/snapshots").glob("*/layer.erofs")
    assert {hashlib.sha256(file.read_bytes()).hexdigest() for file in files} == wanted


def test_nothing_stays_where_a_test_fails(work: Path, pushed: str) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), containerd(work / "failing") as server:
        server.pull(f"{pushed}:erofs", "erofs")
        with server.rootfs(f"{pushed}:erofs", "standing", "erofs") as root:
            pid = int(root.parts[2])
            assert str(work / "failing") in Path("/proc/mounts").read_text()
            raise RuntimeError("on purpose")
    assert not (work / "failing").exists()
    assert str(work / "failing") not in Path("/proc/mounts").read_text()
    assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    need_root()
    point = tmp_path / "disk"
    point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", point], capture_output=True, text=True)
    assert mounted.returncode == 0, mounted.stderr
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", point], check=True)


@pytest.mark.parametrize("target", ["oci:{}/out:it", "oci:{}:it", "oci-archive:{}/out.tar:it"])
@pytest.mark.parametrize("form", [None, Form.V2_1])
def test_a_full_disk_keeps_what_it_had(site: Site, small_disk: Path, target: str, form: Form | None) -> None:
    """The image doesn't fit: no half of it stays, the tag stands for what it stood for, and the space is free again."""
    site.convert(site.tar(file("little", b"x" * 9000)), tag="little", platform=Platform.parse("linux/amd64"))

    def export(name: str) -> None:
        with open_target(target.format(small_disk)) as opened:
            if form is None:
                export_image(site.store, name, opened)
            else:
                export_containerd(site.store, name, opened, form=form)

    export("little")
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    free = os.statvfs(small_disk).f_bavail
    with pytest.raises(NoSpaceError, match="free space"):
        export("env")
    assert {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()} == before
    assert os.statvfs(small_disk).f_bavail == free
    export("little")


def test_a_content_cache_that_is_full(site: Site, small_disk: Path) -> None:
    free = os.statvfs(small_disk).f_bavail
    with pytest.raises(NoSpaceError, match="free space"):
        export_cache(site.store, "env", str(small_disk / "cache"))
    assert not [path for path in small_disk.rglob("*") if path.is_file()]
    assert free - os.statvfs(small_disk).f_bavail <= 1
