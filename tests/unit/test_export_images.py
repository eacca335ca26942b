"""Exported images: documents, digests, round trips, and what is refused."""

from __future__ import annotations

import hashlib
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.conversions import Site, noise
from support.exports import blob, documents, entry, flat_of
from support.tars import directory, file, hardlink, opaque, sparse_pax, symlink, tar, whiteout

from layerstore.compose import plan_stack, publish_stack
from layerstore.digest import Digest
from layerstore.errors import CorruptError, NotFoundError, UnsupportedError, UsageError
from layerstore.export.compress import Compression
from layerstore.export.containerd import Form, export_containerd
from layerstore.export.contentcache import export_cache, path_of
from layerstore.export.exported import Exported
from layerstore.export.ociimage import export_image
from layerstore.export.targetname import open_target
from layerstore.image import Role, load_image
from layerstore.oci.platform import Platform

LOWER = tar(
    directory("./", mode=0o711, mtime=3),
    directory("etc", mtime=5),
    file("etc/one", b"one", mtime=6),
    file("etc/two", noise(70_000, 1)),
    hardlink("etc/three", "etc/two"),
    file("gone", noise(30_000, 2)),
    directory("old"),
    file("old/x", b"x"),
)
UPPER = tar(
    whiteout("gone"),
    opaque("old"),
    file("old/new", noise(50_000, 3), pax={"mtime": "9.5", "SCHILY.xattr.user.u": "v"}),
    symlink("link", "etc/one"),
    directory("etc", mtime=50, mode=0o700),
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """With ``base``, and ``env``: a workspace over it."""
    site = Site(tmp_path)
    site.convert(site.image([LOWER], config={"author": "somebody", "os.features": ["other"]}), tag="base")
    site.convert(site.image([LOWER, UPPER]), Role.WORKSPACE, base="base", tag="work")
    publish_stack(site.store, plan_stack(site.store, base="base", workspace="work"), tag="env")
    return site


def exported(site: Site, name: str, tag: str, *, form: Form | None = None, **fields: Any) -> tuple[Path, Exported]:
    layout = site.path / "out"
    with open_target(f"oci:{layout}:{tag}") as target:
        if form is None:
            return layout, export_image(site.store, name, target, **fields)
        return layout, export_containerd(site.store, name, target, form=form, **fields)


def raw_digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_the_form_for_2_1(site: Site) -> None:
    layout, _ = exported(site, "env", "it", form=Form.V2_1)
    manifest, config = documents(layout, "it")
    assert [layer["mediaType"] for layer in manifest["layers"]] == ["application/vnd.oci.image.layer.v1.erofs"] * 2
    # Uncompressed, so digest and diff ID are one; one diff ID a layer, and no feature that would filter it out.
    assert config["rootfs"] == {"type": "layers", "diff_ids": [layer["digest"] for layer in manifest["layers"]]}
    assert "os.features" not in config
    assert entry(layout, "it")["platform"] == {"architecture": "amd64", "os": "linux"}
    for layer, described in zip(load_image(site.store, "env").layers, manifest["layers"], strict=True):
        assert blob(layout, described["digest"]).read_bytes() == flat_of(site.store, layer)


@pytest.mark.parametrize("compression", [None, Compression.ZSTD, Compression.NONE])
def test_the_form_for_2_3(site: Site, compression: Compression | None) -> None:
    layout, _ = exported(site, "env", "it", form=Form.V2_3, compression=compression)
    manifest, config = documents(layout, "it")
    suffix = "" if compression is Compression.NONE else "+zstd"
    assert {layer["mediaType"] for layer in manifest["layers"]} == {f"application/vnd.erofs.layer.v1{suffix}"}
    assert config["os.features"] == ["erofs"]
    assert entry(layout, "it")["platform"] == {"architecture": "amd64", "os": "linux", "os.features": ["erofs"]}
    layers = load_image(site.store, "env").layers
    for number, (layer, described) in enumerate(zip(layers, manifest["layers"], strict=True)):
        data = blob(layout, described["digest"]).read_bytes()
        if suffix:
            with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
                data = reader.read()
        assert data == flat_of(site.store, layer)
        assert config["rootfs"]["diff_ids"][number] == raw_digest(data)


def test_the_ordinary_form(site: Site) -> None:
    layout, _ = exported(site, "env", "it")
    manifest, config = documents(layout, "it")
    assert [layer["mediaType"].rpartition(".")[2] for layer in manifest["layers"]] == ["tar+gzip"] * 2
    assert "os.features" not in config
    assert [step["created_by"].split()[1] for step in config["history"]] == ["base", "workspace"]
    assert config["config"]["Cmd"] == ["/bin/sh"]
    with tarfile.open(blob(layout, manifest["layers"][1]["digest"])) as archive:
        assert archive.getnames() == [".", "etc", ".wh.gone", "link", "old", "old/.wh..wh..opq", "old/new"]


@pytest.mark.parametrize(
    ("form", "features"), [(None, ["other"]), (Form.V2_1, ["other"]), (Form.V2_3, ["other", "erofs"])]
)
def test_the_rest_of_the_config_stays(site: Site, form: Form | None, features: list[str]) -> None:
    layout, _ = exported(site, "base", "it", form=form)
    config = documents(layout, "it")[1]
    assert config["author"] == "somebody"
    assert config["os.features"] == entry(layout, "it")["platform"]["os.features"] == features


@pytest.mark.parametrize("compression", list(Compression))
def test_diff_ids_are_those_of_the_tars(site: Site, compression: Compression) -> None:
    """Whatever the compression and the number of threads."""
    layout, first = exported(site, "env", "a", compression=compression, jobs=1)
    _, second = exported(site, "env", "b", compression=compression, jobs=3)
    _, plain = exported(site, "env", "c", compression=Compression.NONE)
    assert first == second
    assert [layer.diff_id for layer in first.layers] == [layer.descriptor.digest for layer in plain.layers]
    assert [layer.raw_size for layer in first.layers] == [layer.descriptor.size for layer in plain.layers]
    for layer in first.layers:
        assert blob(layout, str(layer.descriptor.digest)).stat().st_size == layer.descriptor.size


def test_an_export_converted_again_is_the_same_image(site: Site, tmp_path: Path) -> None:
    """Without holes and sockets the trees are the same, so in an empty store the layers are too."""
    layout, _ = exported(site, "env", "env")
    exported(site, "base", "base")
    again = Site(tmp_path / "again")
    base = again.convert(f"oci:{layout}:base", tag="base")
    assert base.layer.metadata == load_image(site.store, "base").layers[0].metadata
    work = again.convert(f"oci:{layout}:env", Role.WORKSPACE, base="base", tag="work")
    assert work.layer.metadata == load_image(site.store, "work").layers[0].metadata
    publish_stack(again.store, plan_stack(again.store, base="base", workspace="work"), tag="env")
    assert again.rows("env") == site.rows("env")
    assert exported(again, "env", "env")[1].manifest == exported(site, "env", "env")[1].manifest


def test_holes_are_zeros_when_an_export_is_converted_again(site: Site, tmp_path: Path) -> None:
    """The same content, and another layer: a tar layer has no holes."""
    site.convert(site.tar(sparse_pax("sparse", 900_000, [(500_000, noise(70_000, 5))], "1.0")), tag="sparse")
    layout, _ = exported(site, "sparse", "it", platform=Platform.parse("linux/amd64"))
    again = Site(tmp_path / "again")
    report = again.convert(f"oci:{layout}:it")
    assert report.layer.metadata != load_image(site.store, "sparse").layers[0].metadata
    assert again.rows(report) == site.rows("sparse")


def test_a_layer_over_a_base_is_no_image(site: Site) -> None:
    for form in (None, *Form):
        with pytest.raises(UsageError, match=r"'work' is a workspace over base layer .* compose them"):
            exported(site, "work", "it", form=form)
    with pytest.raises(UsageError, match="compose them"):
        export_cache(site.store, "work", str(site.path / "cache"))
    assert not (site.path / "out").exists()


def test_what_the_forms_do_not_have(site: Site) -> None:
    with pytest.raises(UsageError, match=r"2\.1 takes EROFS layers uncompressed only"):
        exported(site, "base", "it", form=Form.V2_1, compression=Compression.ZSTD)
    with pytest.raises(UsageError, match="not with gzip"):
        exported(site, "base", "it", form=Form.V2_3, compression=Compression.GZIP)
    with pytest.raises(NotFoundError):
        exported(site, "nothing", "it")
    assert not (site.path / "out").exists()


def test_platforms(site: Site) -> None:
    """An image that names none gets one when it is asked for; one that does, keeps its own."""
    warnings: list[str] = []
    site.convert(site.tar(file("a", b"a")), tag="anywhere")
    exported(site, "anywhere", "it", warn=warnings.append)
    assert warnings == ["'anywhere' names no architecture, so container runtimes won't run it: give --platform"]
    layout, _ = exported(site, "anywhere", "it", platform=Platform.parse("linux/arm64"), warn=warnings.append)
    assert len(warnings) == 1
    assert documents(layout, "it")[1]["architecture"] == "arm64"
    assert entry(layout, "it")["platform"] == {"architecture": "arm64", "os": "linux"}
    exported(site, "base", "it", platform=Platform.parse("linux/amd64"))
    with pytest.raises(UsageError, match=r"is for linux.*/amd64, not for linux/arm64"):
        exported(site, "base", "it", platform=Platform.parse("linux/arm64"))


def test_names_that_no_tar_layer_has(site: Site, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / ".wh.x").write_bytes(b"")
    site.convert(f"tree:{tmp_path / 'tree'}", tag="odd")
    with pytest.raises(UnsupportedError, match=r"^layer 0: /\.wh\.x: in a tar layer"):
        exported(site, "odd", "it")
    exported(site, "odd", "it", form=Form.V2_3)


def test_a_damaged_store_gives_no_image(site: Site) -> None:
    site.flip(load_image(site.store, "base").layers[0].packs[0].blob, 100)
    for form in (None, *Form):
        with pytest.raises(CorruptError, match=r"^layer 0: frame"):
            exported(site, "base", "it", form=form)
    assert not (site.path / "out").exists()


# ---- content cache


def test_a_content_cache(site: Site) -> None:
    directory = site.path / "cache"
    layers = export_cache(site.store, "env", str(directory))
    _, ordinary = exported(site, "env", "tar")
    _, erofs = exported(site, "env", "erofs", form=Form.V2_3)
    source = load_image(site.store, "base").layers[0].diff_ids
    assert len(source) == 1
    wanted = [
        {ordinary.layers[0].diff_id, erofs.layers[0].diff_id, *source},
        {ordinary.layers[1].diff_id, erofs.layers[1].diff_id},  # a layer over others stands for its own tar alone
    ]
    assert [set(layer.diff_ids) for layer in layers] == wanted
    for layer, stored in zip(layers, load_image(site.store, "env").layers, strict=True):
        files = [Path(path_of(str(directory), diff_id)) for diff_id in layer.diff_ids]
        assert files[0].read_bytes() == flat_of(site.store, stored)
        assert len({file.stat().st_ino for file in files}) == 1
        assert layer.size == files[0].stat().st_size
    found = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}
    assert found == {f"sha256/{digest.hex[:2]}/{digest.hex}.erofs" for digests in wanted for digest in digests}


def test_a_content_cache_that_has_it_already(site: Site) -> None:
    directory = str(site.path / "cache")
    first = export_cache(site.store, "env", directory)
    files = {path: path.stat().st_ino for path in Path(directory).rglob("*.erofs")}
    again = export_cache(site.store, "env", directory)
    assert [layer.written for layer in first + again] == [True, True, False, False]
    assert [layer.size for layer in first] == [layer.size for layer in again]
    assert {path: path.stat().st_ino for path in Path(directory).rglob("*.erofs")} == files


def test_a_base_of_several_layers_stands_for_none_of_them(site: Site) -> None:
    site.convert(site.image([LOWER, UPPER]), tag="both")
    [layer] = export_cache(site.store, "both", str(site.path / "cache"))
    assert not {*load_image(site.store, "both").layers[0].diff_ids} & {*layer.diff_ids}


def test_a_failed_content_cache_has_no_part_of_a_layer(site: Site) -> None:
    site.flip(load_image(site.store, "base").layers[0].packs[0].blob, 100)
    with pytest.raises(CorruptError, match=r"^layer 0: frame"):
        export_cache(site.store, "env", str(site.path / "cache"))
    assert list((site.path / "cache").rglob("*")) == []
    (site.path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="is no directory"):
        export_cache(site.store, "env", str(site.path / "file"))


def test_the_index_entry_is_the_manifest(site: Site) -> None:
    layout, result = exported(site, "base", "it")
    described = entry(layout, "it")
    data = blob(layout, described["digest"]).read_bytes()
    assert Digest.of(data) == result.manifest.digest
    assert json.loads(data)["schemaVersion"] == 2
    assert described["size"] == len(data)


@pytest.mark.parametrize("form", [None, *Form])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, form: Form | None) -> None:
    """96 MB of data pass through some tens of megabytes."""
    site = Site(tmp_path)
    site.convert(site.tar(*(file(f"f{number}", noise(12_000_000, number)) for number in range(8))), tag="large")
    tracemalloc.start()
    try:
        exported(site, "large", "it", form=form, **({} if form else {"compression": Compression.ZSTD}))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 56 << 20
