"""Layouts and archives that umoci and skopeo wrote are read, and hold the same image."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
from pathlib import Path

import pytest
from support.layouts import Layout, Saved, docker_archive, tar_of
from support.tools import need_tool

from layerstore.limits import DEFAULT_LIMITS
from layerstore.oci.platform import host
from layerstore.oci.source import SourceImage
from layerstore.oci.source_name import SourceName
from layerstore.oci.transport import open_source

pytestmark = pytest.mark.compat

TARS = [tar_of({"etc/": None, "etc/hosts": b"127.0.0.1 localhost\n"}), tar_of({"etc/hosts": b"changed\n"})]


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def skopeo(source: str, target: str) -> None:
    run(need_tool("skopeo"), "--insecure-policy", "copy", "--quiet", source, target)


def image(name: str, tmp_path: Path) -> SourceImage:
    warnings: list[str] = []
    source = open_source(
        SourceName.parse(name), scratch=str(tmp_path), limits=DEFAULT_LIMITS, warn=warnings.append
    ).image()
    assert warnings == []
    return source


def tars(image: SourceImage) -> list[bytes]:
    """The decompressed layers, each checked against its diff ID."""
    found = []
    for number, layer in enumerate(image.layers):
        with image.open_layer(number) as reader:
            data = reader.read()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        assert str(layer.diff_id) == f"sha256:{hashlib.sha256(data).hexdigest()}"
        found.append(data)
    return found


@pytest.fixture
def umoci_layout(tmp_path: Path) -> str:
    """An image of two layers made by umoci; returns its name."""
    umoci = need_tool("umoci")
    layout = tmp_path / "umoci"
    run(umoci, "init", "--layout", str(layout))
    run(umoci, "new", "--image", f"{layout}:v1")
    for number in range(2):
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        (tree / "file").write_bytes(b"%d" % number * 5000)
        run(umoci, "insert", "--rootless", "--image", f"{layout}:v1", str(tree), f"/opt/{number}")
    run(umoci, "config", "--image", f"{layout}:v1", "--config.user", "1000", "--config.env", "A=ü")
    return f"oci:{layout}:v1"


def test_an_empty_layout_of_umoci(tmp_path: Path) -> None:
    layout = tmp_path / "empty"
    run(need_tool("umoci"), "init", "--layout", str(layout))
    run(need_tool("umoci"), "new", "--image", f"{layout}:bare")
    read = image(f"oci:{layout}:bare", tmp_path)
    assert (read.layers, read.platform) == ((), host())


def test_umoci_and_what_skopeo_makes_of_it(umoci_layout: str, tmp_path: Path) -> None:
    original = image(umoci_layout, tmp_path)
    assert len(original.layers) == 2
    assert original.config.run.user == "1000"
    assert "A=ü" in original.config.run.env
    for target in ("oci-archive:{}/a.tar:docker.io/x/y:1", "docker-archive:{}/b.tar:x/y:1", "oci:{}/copy:a:b"):
        name = target.format(tmp_path)
        skopeo(umoci_layout, name)
        copy = image(name, tmp_path)
        assert copy.config.raw == original.config.raw
        assert [layer.diff_id for layer in copy.layers] == [layer.diff_id for layer in original.layers]
        assert tars(copy) == tars(original)


@pytest.mark.parametrize("compression", ["gzip", "xz"])
def test_compressed_archives(umoci_layout: str, tmp_path: Path, compression: str) -> None:
    archive = tmp_path / "a.tar"
    skopeo(umoci_layout, f"oci-archive:{archive}:x")
    run(need_tool(compression), str(archive))
    packed = next(tmp_path.glob("a.tar.*"))
    assert tars(image(f"oci-archive:{packed}:x", tmp_path)) == tars(image(umoci_layout, tmp_path))


def test_skopeo_reads_what_the_builders_of_the_tests_write(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "oci")
    layout.image(TARS, tag="v1")
    layout.archive(tmp_path / "oci.tar")
    names = [layout.name("v1"), f"oci-archive:{tmp_path}/oci.tar:v1"]
    for style in ("id", "flat", "blobs"):
        path = docker_archive(tmp_path / f"{style}.tar", [Saved(TARS, tags=["docker.io/x/y:1"])], style=style)
        names.append(f"docker-archive:{path}:docker.io/x/y:1")
    for number, name in enumerate(names):
        copy = f"oci:{tmp_path}/copy{number}:v1"
        skopeo(name, copy)
        assert tars(image(copy, tmp_path)) == tars(image(name, tmp_path)) == TARS
