"""erofs-utils, the kernel, skopeo and GNU tar as readers of what is exported."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.exports import blob, documents, entry, listing, registry
from support.mounts import erofs_mounted, require_file_backed_erofs
from support.tars import directory, fifo, file, hardlink, opaque, sparse_pax, symlink, tar, whiteout
from support.tools import need_tool
from support.trees import manifest

from layerstore.compose import plan_stack, publish_stack
from layerstore.export.compress import Compression
from layerstore.export.containerd import Form, export_containerd
from layerstore.export.ociimage import export_image
from layerstore.export.targetname import open_target
from layerstore.image import Role
from layerstore.tree.local import scan

pytestmark = pytest.mark.compat

LOWER = tar(
    directory("./", mode=0o711, mtime=3),
    directory("d", mode=0o750, mtime=-5),
    file("d/data", noise(700_000, 1), mode=0o4755, pax={"mtime": "5.000000001", "SCHILY.xattr.user.a": "1"}),
    hardlink("d/link", "d/data"),
    file("d/again", noise(700_000, 1)),
    file("d/small", b"small", uid=100_000),
    sparse_pax("d/sparse", 40_000_000, [(30_000_000, noise(70_000, 2))], "1.0"),
    symlink("symlink", "d/data"),
    fifo("pipe"),
    directory("o"),
    file("o/old"),
)
UPPER = tar(whiteout("pipe"), opaque("o"), file("o/new", noise(40_000, 3)), file("other", noise(20_000, 4)))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """With a store that has some of the data in another image's pack, and ``env``, a stack of two layers."""
    site = Site(tmp_path)
    site.convert(site.tar(file("x", noise(700_000, 1)), file("y", noise(500_000, 9))), tag="first")
    site.convert(site.image([LOWER]), tag="base")
    site.convert(site.image([LOWER, UPPER]), Role.WORKSPACE, base="base", tag="work")
    publish_stack(site.store, plan_stack(site.store, base="base", workspace="work"), tag="env")
    return site


def ran(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=120,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}"
    return done.stdout


@pytest.fixture(params=[(Form.V2_1, None), (Form.V2_3, None), (Form.V2_3, Compression.NONE)], ids=str)
def layers(request: pytest.FixtureRequest, site: Site, tmp_path: Path) -> list[Path]:
    """The layers of an export as containerd mounts them: decompressed, where they are compressed."""
    form, compression = request.param
    with open_target(f"oci:{tmp_path / 'out'}:it") as target:
        export_containerd(site.store, "env", target, form=form, compression=compression)
    found = []
    for layer in documents(tmp_path / "out", "it")[0]["layers"]:
        path = blob(tmp_path / "out", layer["digest"])
        if layer["mediaType"].endswith("+zstd"):
            plain = tmp_path / f"{path.name}.erofs"
            ran(need_tool("zstd"), "-d", "-q", path, "-o", plain)
            path = plain
        found.append(path)
    return found


def test_fsck_finds_nothing(layers: list[Path]) -> None:
    for layer in layers:
        output = ran(need_tool("fsck.erofs", "1.8"), layer)
        assert "<E>" not in output and "<W>" not in output


@pytest.mark.privileged
def test_the_kernel_mounts_it_without_devices(site: Site, layers: list[Path], tmp_path: Path) -> None:
    require_file_backed_erofs()
    names = ("base", "work")
    for number, (layer, name) in enumerate(zip(layers, names, strict=True)):
        with erofs_mounted(layer, [], tmp_path / f"mount{number}") as root:
            seen = {row[0]: row for row in listing(root)}
        expected = site.rows(name)
        assert seen.keys() == expected.keys()
        for path, row in expected.items():
            attrs = row.attrs
            time = attrs.mtime * 1_000_000_000 + attrs.nsec
            assert seen[path][1:5] == (attrs.mode, attrs.uid, attrs.gid, time), path
            if row.type == "File":
                assert seen[path][-1] == row.value, path
    assert seen[b"pipe"][5] == 0  # a whiteout: a character device 0:0


def test_gnu_tar_reads_the_layers(site: Site, tmp_path: Path) -> None:
    """The plain layer of an image that is whole, unpacked as the user we are, is the tree."""
    with open_target(f"oci:{tmp_path / 'out'}:it") as target:
        export_image(site.store, "base", target, compression=Compression.GZIP)
    [layer] = documents(tmp_path / "out", "it")[0]["layers"]
    root = tmp_path / "root"
    root.mkdir()
    path = blob(tmp_path / "out", layer["digest"])
    ran(need_tool("tar"), "--numeric-owner", "--xattrs", "-xpzf", path, "-C", root)
    found, expected = manifest(scan(str(root), warn=[].append)), site.rows("base")
    assert found.keys() == expected.keys()
    for path_in, row in expected.items():
        assert (found[path_in].type, found[path_in].value) == (row.type, row.value)
        assert found[path_in].attrs._replace(uid=0, gid=0) == row.attrs._replace(uid=0, gid=0)
        assert found[path_in].links == row.links


@pytest.mark.parametrize("form", [None, Form.V2_1, Form.V2_3])
def test_a_registry_has_what_a_layout_has(site: Site, tmp_path: Path, form: Form | None) -> None:
    """docker://, as skopeo reads it back: the same manifest and blobs as in a layout; sent once, however often."""

    def export(target: str) -> None:
        with open_target(target) as opened:
            if form is None:
                export_image(site.store, "env", opened)
            else:
                export_containerd(site.store, "env", opened, form=form)

    export(f"oci:{tmp_path / 'out'}:it")
    with registry(tmp_path / "registry") as address:
        for _ in range(2):
            export(f"docker://{address}/team/env:it")
        back = tmp_path / "back"
        copy = [need_tool("skopeo"), "copy", "-q", "--preserve-digests", "--src-tls-verify=false"]
        ran(*copy, f"docker://{address}/team/env:it", f"oci:{back}:it")
    assert entry(back, "it")["digest"] == entry(tmp_path / "out", "it")["digest"]
    assert {path.name for path in (back / "blobs/sha256").iterdir()} == {
        path.name for path in (tmp_path / "out/blobs/sha256").iterdir()
    }


def test_skopeo_reads_archives(site: Site, tmp_path: Path) -> None:
    with open_target(f"oci-archive:{tmp_path / 'out.tar'}:it") as target:
        digest = export_image(site.store, "env", target).manifest.digest
    back = tmp_path / "back"
    ran(
        need_tool("skopeo"),
        "copy",
        "-q",
        "--preserve-digests",
        f"oci-archive:{tmp_path / 'out.tar'}:it",
        f"oci:{back}:it",
    )
    assert entry(back, "it")["digest"] == str(digest)
