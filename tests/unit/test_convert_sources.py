"""Sources as they come: compressions, containers, odd archives, odd configs, and many of everything."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.conversions import Site, expected_rows, noise
from support.faults import fsync_for_free
from support.layouts import OCI_LAYER, Saved, compress, config_of, digest_of, docker_archive
from support.tars import (
    BLOCK,
    END,
    char,
    directory,
    fifo,
    file,
    global_pax,
    hardlink,
    opaque,
    symlink,
    tar,
    whiteout,
)
from support.tars import pax as extended
from support.trees import directory_at

from layerstore.errors import LimitError, MalformedError, NotFoundError, UnavailableError, UnsupportedError
from layerstore.image import Role, load_image, read_document
from layerstore.oci.platform import Platform
from layerstore.pack.format import SKIPPABLE_MAGIC, skippable

LAYER = tar(directory("d", mode=0o700), file("d/f", noise(70_000, 1)), symlink("l", "d/f"), file("small", b"s"))
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
COMPRESSIONS = ("", "gzip", "zstd", "xz", "bzip2")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fsync_for_free():
        yield Site(tmp_path)


def config_at(site: Site, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(read_document(site.store, load_image(site.store, name).config, "config"))
    return document


# -- compression and containers ---------------------------------------------------------------------------------------


@pytest.mark.case("Z07")
@pytest.mark.parametrize("docker", [False, True])
def test_content_decides_and_not_the_media_type(site: Site, docker: bool) -> None:
    found = set()
    for claimed in ("", "gzip", "zstd"):
        for real in ("", "gzip", "zstd"):
            if docker:
                media_type = DOCKER_LAYER + (f".{claimed}" if claimed else "")
            else:
                media_type = OCI_LAYER + (f"+{claimed}" if claimed else "")
            layout = site.layout()
            layout.image([layout.layer(LAYER, real, media_type=media_type)], tag="it")
            warnings: list[str] = []
            report = site.convert(layout.name("it"), warn=warnings.append)
            found.add((report.layer.metadata, report.layer.diff_ids))
            assert [media_type in text for text in warnings] == [True] * (claimed != real)
    assert len(found) == 1


@pytest.mark.case("Z01", "Z03", "Z08")
def test_every_container_and_compression_gives_the_same_layer(site: Site) -> None:
    half = 3 * BLOCK + 512
    frames = zstandard.ZstdCompressor(write_content_size=False)
    blobs = [compress(LAYER, name) for name in COMPRESSIONS]
    blobs += [
        gzip.compress(LAYER[:half], mtime=0) + gzip.compress(LAYER[half:], mtime=0),
        skippable(b"note", SKIPPABLE_MAGIC + 3) + frames.compress(LAYER[:half]) + frames.compress(LAYER[half:]),
        compress(LAYER[:half], "xz") + compress(LAYER[half:], "xz"),
    ]
    sources = [site.raw_tar(blob) for blob in blobs]
    layout = site.layout()
    for name in COMPRESSIONS:
        layout.image([layout.layer(LAYER, name)], tag=name or "plain")
        sources.append(layout.name(name or "plain"))
    for name in ("", "gzip", "zstd"):
        archive = layout.archive(site.path / f"archive{name}.tar", compression=name)
        sources.append(f"oci-archive:{archive}:gzip")
    for number, (style, inner) in enumerate(
        [("id", ""), ("flat", "gzip"), ("blobs", "zstd"), ("id", "xz"), ("id", "bzip2")]
    ):
        path = site.path / f"docker{number}.tar"
        docker_archive(path, [Saved([LAYER], tags=["it:1"], compression=inner)], style=style)
        sources.append(f"docker-archive:{path}:it:1")
    metadata = {site.convert(source).layer.metadata for source in sources}
    assert len(metadata) == 1
    assert site.rows(site.convert(sources[-1])) == expected_rows(LAYER)


@pytest.mark.case("M11")
def test_sha512_is_verified_and_kept(site: Site) -> None:
    layout = site.layout()
    layer = layout.layer(LAYER, algorithm="sha512")
    plain = layout.layer(tar(file("second", b"2")))
    layout.image([layer, plain], tag="it", algorithm="sha512")
    report = site.convert(layout.name("it"))
    assert [diff_id.algorithm for diff_id in report.layer.diff_ids] == ["sha512", "sha256"]
    assert report.layer.source is not None and report.layer.source.algorithm == "sha512"
    assert {digest.algorithm for digest in report.image.blobs} == {"sha256"}
    assert site.rows(report)[b"second"].value == b"2"


@contextmanager
def standard_input(data: bytes) -> Iterator[None]:
    """``data`` on descriptor 0, from a pipe."""
    saved = os.dup(0)
    reading, writing = os.pipe()

    def write() -> None:
        with open(writing, "wb") as pipe:
            pipe.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    os.dup2(reading, 0)
    os.close(reading)
    try:
        yield
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        writer.join()


def test_standard_input_is_a_source(site: Site) -> None:
    expected = site.convert(site.raw_tar(LAYER))
    for data in (LAYER, compress(LAYER, "gzip")):
        with standard_input(data):
            report = site.convert("tar:-")
        assert report.layer.metadata == expected.layer.metadata
        assert report.source_size == len(data)
    with standard_input(b""):
        assert set(site.rows(site.convert("tar:-"))) == {b""}


@pytest.mark.case("M01", "M02", "M03")
def test_the_platform_chooses_and_attestations_never_count(site: Site) -> None:
    layout = site.layout()
    images = []
    for architecture in ("amd64", "arm64"):
        platform = {"os": "linux", "architecture": architecture}
        layer = tar(file("arch", architecture.encode()))
        images.append(layout.image([layer], listed=False, platform=platform, config=platform))
    layout.index([layout.attestation(images[0]), *images], tag="it")
    for name in ("amd64", "arm64"):
        report = site.convert(layout.name("it"), platform=Platform("linux", name), tag=name)
        assert site.rows(report)[b"arch"].value == name.encode()
        assert config_at(site, name)["architecture"] == name
        assert str(report.layer.source) == images[name == "arm64"]["digest"]
    with pytest.raises(NotFoundError, match="riscv64"):
        site.convert(layout.name("it"), platform=Platform("linux", "riscv64"))


# -- archives ---------------------------------------------------------------------------------------------------------


@pytest.mark.case("Z05")
def test_what_follows_the_end_counts_for_the_digest_and_is_no_part_of_the_layer(site: Site) -> None:
    second = tar(file("second", b"not part"))
    for tail in (bytes(10_240), bytes(512), second, b"garbage"):
        data = LAYER + tail
        report = site.convert(site.image([data]))
        assert str(report.layer.diff_ids[0]) == digest_of(data)
        assert site.rows(report) == expected_rows(LAYER)


@pytest.mark.case("T41", "T45")
@pytest.mark.parametrize(
    ("data", "names", "warnings"),
    [
        (LAYER.removesuffix(END), {b"", b"d", b"d/f", b"l", b"small"}, 1),
        (LAYER.removesuffix(END) + bytes(BLOCK), {b"", b"d", b"d/f", b"l", b"small"}, 1),
        (b"", {b""}, 1),
        (END, {b""}, 0),
        (tar(global_pax({"comment": "0123"})), {b""}, 0),
        (tar(global_pax({"uid": "7"}), file("a")), {b"", b"a"}, 0),
    ],
    ids=["no end", "half an end", "nothing", "only an end", "only a global header", "global header first"],
)
def test_incomplete_ends_and_empty_archives_are_accepted(
    site: Site, data: bytes, names: set[bytes], warnings: int
) -> None:
    for source in (site.raw_tar(data), site.image([data])):
        report = site.convert(source)
        assert set(site.rows(report)) == names
        assert str(report.layer.diff_ids[0]) == digest_of(data)
        assert len(report.warnings) <= warnings


@pytest.mark.case("T37", "T57", "T32", "T68")
def test_what_would_steer_an_overlay_is_escaped_with_a_warning(site: Site) -> None:
    report = site.convert(
        site.tar(
            directory("d", pax={"SCHILY.xattr.trusted.overlay.opaque": b"y"}),
            directory("e", pax={"SCHILY.xattr.trusted.overlay.redirect": b"/etc"}),
            file("f", pax={"SCHILY.xattr.trusted.overlay.metacopy": b""}),
            directory("g", pax={"SCHILY.xattr.user.overlay.opaque": b"y"}),
            file("cap", pax={"SCHILY.xattr.security.capability": b"\1\0\0\4" + bytes(17)}),
            extended({"path": "nobody"}),
        )
    )
    rows = site.rows(report)
    assert [rows[name].attrs.xattrs[0][0] for name in (b"d", b"e", b"f", b"g")] == [
        b"trusted.overlay.overlay.opaque",
        b"trusted.overlay.overlay.redirect",
        b"trusted.overlay.overlay.metacopy",
        b"user.overlay.opaque",
    ]
    assert not any(row.opaque for row in rows.values())
    assert rows[b"cap"].attrs.xattrs == ((b"security.capability", b"\1\0\0\4" + bytes(17)),)
    assert len(report.warnings) == 5
    for text in ("trusted.overlay.opaque", "redirect", "metacopy", "malformed", "describes nothing"):
        assert any(text in warning for warning in report.warnings), text


@pytest.mark.case("T01", "T20", "T59", "T22", "T07")
def test_odd_names_have_one_meaning(site: Site) -> None:
    report = site.convert(
        site.tar(
            directory("./", mode=0o711),
            file("twice", b"A"),
            file("./twice", b"B"),
            file("/abs", b"absolute"),
            file("../../up", b"up"),
            file("a/./b//c", b"c"),
            symlink("out", "/outside"),
            file("out/f", b"inside"),
            file("p", b"file"),
            file("p/q", b"q"),
            file("back\\slash", b"b"),
            file(".wh..wh.aufs"),
            directory(".wh..wh.plnk"),
            file(".wh..wh.plnk/12.34", b"linked"),
            hardlink("x", ".wh..wh.plnk/12.34"),
        )
    )
    rows = site.rows(report)
    values = {path: row.value for path, row in rows.items() if row.type == "File"}
    assert values == {
        b"twice": b"B",
        b"abs": b"absolute",
        b"up": b"up",
        b"a/b/c": b"c",
        b"outside/f": b"inside",
        b"p/q": b"q",
        b"back\\slash": b"b",
        b"x": b"linked",
    }
    assert rows[b""].attrs.mode & 0o7777 == 0o711
    assert report.warnings == (
        "./twice: in the layer more than once; the last one counts",
        "p: is no directory, but becomes one because of p/q",
    )


@pytest.mark.case("T08", "T40", "T48", "T54", "T57", "T22", "T30", "T62", "T65", "T67")
@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ([file(".wh.")], MalformedError, ".wh."),
        ([file("etc/.wh..")], MalformedError, "etc/.wh.."),
        ([char("var/x", 0, 0)], MalformedError, "var/x: a character device 0:0"),
        ([symlink("", "/")], MalformedError, "root"),
        ([file(".")], MalformedError, "root"),
        ([symlink("s", "x", pax={"linkpath": b"t" * 4096})], MalformedError, "4096"),
        ([file("u", uid=2**32)], MalformedError, "uid"),
        ([file("u", pax={"uid": "4294967295"})], MalformedError, "uid"),
        ([file("n", pax={"path": b"a\0b"})], MalformedError, "NUL"),
        ([hardlink("h", "nowhere")], MalformedError, "nowhere"),
        ([file("x", pax={"SCHILY.xattr.user.big": bytes(65_536)})], LimitError, "user.big"),
        ([hardlink("h", "z", size=512), b"x" * 512, file("z")], MalformedError, "h"),
        ([file("n" * 256, pax={"path": b"n" * 256})], MalformedError, "255"),
    ],
)
def test_what_no_image_can_hold_is_refused_by_name(
    site: Site, parts: list[bytes], error: type[Exception], text: str
) -> None:
    before = site.snapshot()
    with pytest.raises(error) as caught:
        site.convert(site.tar(file("first", b"1"), *parts, file("last", b"2")), tag="it")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)
    assert site.snapshot() == before


# -- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("M15")
def test_an_image_without_layers_is_an_empty_root(site: Site) -> None:
    report = site.convert(site.image([]), tag="empty")
    assert set(site.rows("empty")) == {b""}
    assert report.layer.packs == () and report.layer.diff_ids == ()
    assert (report.entries, report.data_size, report.source_size) == (1, 0, 0)


@pytest.mark.case("P02", "P06")
@pytest.mark.parametrize(
    "layer",
    [
        END,
        tar(directory("a"), directory("a/b"), symlink("a/c", "b"), symlink("loop", "loop")),
        tar(file("empty"), fifo("pipe"), char("null", 1, 3)),
        tar(whiteout("nothing"), opaque("a")),
    ],
    ids=["nothing", "directories", "special", "marks"],
)
def test_layers_without_data_have_no_packs(site: Site, layer: bytes) -> None:
    report = site.convert(site.image([layer]), tag="it")
    assert report.layer.packs == ()
    assert (report.data_size, report.new_size, report.shared_size) == (0, 0, 0)
    assert site.rows("it") == expected_rows(layer)


@pytest.mark.case("Z14", "Z15", "Z19")
def test_nothing_is_missing_from_the_whole(site: Site) -> None:
    layers = [
        tar(
            directory("empty", mode=0o700, mtime=5),
            directory("only-marks"),
            file("only-marks/a", b"a"),
            file("no/parents/listed", b"n"),
            symlink("dangling", "/nowhere"),
            file("zero"),
            file("links/1", noise(10_000, 2)),
            hardlink("links/2", "links/1"),
            char("c", 1, 5),
        ),
        tar(whiteout("only-marks/a"), whiteout("implied/ghost"), directory("./"), file("zero", mode=0o600)),
        tar(*(file(f"dir{number % 7}/file{number}", b"%d" % number * (number % 400)) for number in range(400))),
    ]
    report = site.convert(site.image(layers), tag="it")
    rows = site.rows("it")
    assert rows == expected_rows(*layers)
    assert {b"empty", b"only-marks", b"dangling", b"zero", b"no", b"no/parents"} <= rows.keys()
    assert b"only-marks/a" not in rows and not any(b".wh." in path for path in rows)
    assert len(rows) == report.entries


@pytest.mark.case("O01")
def test_an_image_of_128_layers(site: Site) -> None:
    layers = [tar(file(f"file{number}", b"%d" % number), file("last", b"%d" % number)) for number in range(128)]
    report = site.convert(site.image(layers))
    rows = site.rows(report)
    assert len(rows) == 130
    assert rows[b"last"].value == b"127"
    assert len(report.layer.diff_ids) == 128


@pytest.mark.case("Z20")
def test_a_config_keeps_what_nobody_here_knows(site: Site) -> None:
    fields: dict[str, Any] = {
        "config": {
            "Env": ["PATH=/bin", "A=b=c"],
            "Cmd": ["sh"],
            "Volumes": {"/data": {}},
            "OnBuild": ["RUN x"],
            "Healthcheck": {"Test": ["CMD", "true"], "Interval": 30_000_000_000},
            "Labels": {"maintainer": "Grüße 你好"},
            "StopTimeout": 12345678901234567890123,
            "Future": {"deep": [1, None, True, {}]},
        },
        "unknown": {"kept": [1.5, "two"]},
        "os.features": ["win32k"],
        "history": [{"created_by": "x"}],
        "created": None,
        "variant": "v2",
    }
    report = site.convert(site.image([LAYER], config=fields), tag="it")
    document = config_at(site, "it")
    expected = config_of([], **fields)
    assert document.pop("rootfs") == {"type": "layers", "diff_ids": [str(d) for d in report.layer.raw_digests]}
    assert document.pop("os.features") == ["win32k", "erofs"]
    for changed in ("rootfs", "history", "os.features"):
        del expected[changed]
    assert document == expected


@pytest.mark.case("Z20")
def test_duplicate_keys_of_a_config_are_told(site: Site) -> None:
    layout = site.layout()
    data = b'{"os":"linux","os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":[]}}'
    layout.image([], tag="it", manifest={"config": layout.blob(data, "application/vnd.oci.image.config.v1+json")})
    report = site.convert(layout.name("it"), tag="it")
    assert "twice" in report.warnings[0]
    assert config_at(site, "it")["os"] == "linux"


@pytest.mark.case("M08")
def test_history_is_informative_and_diff_ids_are_not(site: Site) -> None:
    layers = [tar(file("a", b"a")), tar(file("b", b"b"))]
    empty = tar()
    step: dict[str, Any] = {"created_by": "x"}
    history_fits = [step, {**step, "empty_layer": True}, step]
    for config, warned in (
        ({"history": history_fits}, 0),
        ({"history": None}, 0),
        ({"history": [step, step, step]}, 1),
    ):
        report = site.convert(site.image(layers, config=config))
        assert len(report.warnings) == warned
        assert {b"a", b"b"} < site.rows(report).keys()
    assert set(site.rows(site.convert(site.image([empty, *layers, empty])))) == {b"", b"a", b"b"}
    wrong = {"rootfs": {"type": "layers", "diff_ids": [digest_of(layers[0])]}}
    with pytest.raises(MalformedError, match="2 layers and the config 1 diff IDs"):
        site.convert(site.image(layers, config=wrong))


def test_a_large_config_is_published_and_can_be_read(site: Site) -> None:
    labels = {f"label{number}": "x" * 1000 for number in range(5000)}
    site.convert(site.image([LAYER], config={"config": {"Labels": labels}}), tag="it")
    assert config_at(site, "it")["config"]["Labels"] == labels


@pytest.mark.case("M14", "M15")
def test_what_is_no_image_is_unsupported(site: Site) -> None:
    layout = site.layout()
    chart = layout.blob(b"chart", "text/plain")
    layout.image(
        [],
        tag="chart",
        manifest={
            "config": layout.blob(b"{}", "application/vnd.oci.empty.v1+json"),
            "artifactType": "application/vnd.example",
            "layers": [chart],
        },
    )
    layout.image([layout.layer(LAYER, media_type=f"{OCI_LAYER}+gzip+encrypted")], tag="encrypted")
    for tag in ("chart", "encrypted"):
        with pytest.raises(UnsupportedError):
            site.convert(layout.name(tag))
    with pytest.raises(UnavailableError, match=r"oci://127\.0\.0\.1:1/a"):
        site.convert("docker://127.0.0.1:1/a")


# -- many of everything -----------------------------------------------------------------------------------------------


@pytest.mark.case("T62")
def test_many_names_links_and_xattrs(site: Site) -> None:
    names = [f"{number * 2_654_435_761 % 2**32:08x}" for number in range(20_000)]
    attributes = {f"SCHILY.xattr.user.{number}": b"v" for number in range(5000)}
    layer = tar(
        file("target", b"t" * 2000),
        *(hardlink(f"links/{number}", "target") for number in range(66_000)),
        *(file(f"many/{name}") for name in names),
        file("attributes", pax=attributes),
    )
    report = site.convert(site.raw_tar(layer))
    with site.trees(report.layer) as [tree]:
        assert sorted(directory_at(tree, b"many").entries) == sorted(name.encode() for name in names)
        links = directory_at(tree, b"links").entries
        assert len(links) == 66_000
        assert {id(inode) for inode in links.values()} == {id(tree.entries[b"target"])}
        assert len(tree.entries[b"attributes"].attrs.xattrs) == 5000


def test_every_role_takes_an_image(site: Site) -> None:
    source = site.image([LAYER])
    for role in Role:
        report = site.convert(source, role, tag=role.value)
        assert site.rows(role.value) == expected_rows(LAYER)
        assert report.image.layers[0].role is role
