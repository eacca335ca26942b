from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.layouts import Saved, compress, config_of, digest_of, docker_archive, encode, tar_of

from layerstore.errors import CorruptError, LimitError, MalformedError, NotFoundError, UnsupportedError, UsageError
from layerstore.limits import DEFAULT_LIMITS
from layerstore.oci.docker_archive import DockerArchiveSource
from layerstore.oci.document import CONFIG_BYTES
from layerstore.oci.source import SourceImage
from layerstore.oci.source_name import SourceName
from layerstore.oci.transport import open_source

LOWER = tar_of({"etc/": None, "etc/hosts": b"127.0.0.1 localhost\n"})
UPPER = tar_of({"bin/": None, "bin/sh": b"\x7fELF" * 1000})


def opened(path: Path, rest: str = "", warnings: list[str] | None = None) -> DockerArchiveSource:
    name = SourceName.parse(f"docker-archive:{path}{rest}")
    heard = [] if warnings is None else warnings
    source = open_source(name, scratch=str(path.parent), limits=DEFAULT_LIMITS, warn=heard.append)
    assert isinstance(source, DockerArchiveSource)
    return source


def content(image: SourceImage, number: int) -> bytes:
    with image.open_layer(number) as reader:
        return reader.read()


@pytest.mark.parametrize("style", ["id", "flat", "blobs"])
def test_styles_of_names(tmp_path: Path, style: str) -> None:
    layers = [LOWER, UPPER, LOWER]
    extra = {"repositories": b'{"debian":{"12":"x"}}', "oci-layout": b"{}", "index.json": b"{}"}
    path = docker_archive(tmp_path / "x.tar", [Saved(layers, tags=["debian:12"])], style=style, extra=extra)
    image = opened(path).image()
    assert [content(image, number) for number in range(3)] == layers
    assert [str(layer.diff_id) for layer in image.layers] == [digest_of(tar) for tar in layers]
    assert [layer.descriptor.digest for layer in image.layers] == [layer.diff_id for layer in image.layers]


@pytest.mark.case("Z08")
@pytest.mark.parametrize("style", ["id", "blobs"])
@pytest.mark.parametrize("compression", ["", "gzip", "zstd", "xz", "bzip2"])
def test_compression_is_found_by_magic(tmp_path: Path, compression: str, style: str) -> None:
    warnings: list[str] = []
    path = docker_archive(tmp_path / "x.tar", [Saved([LOWER, UPPER], compression=compression)], style=style)
    image = opened(path, warnings=warnings).image()
    for number, tar in enumerate((LOWER, UPPER)):
        data = compress(tar, compression)
        layer = image.layers[number]
        assert content(image, number) == data
        assert (str(layer.descriptor.digest), str(layer.diff_id)) == (digest_of(data), digest_of(tar))
        suffix = f"+{compression}" if compression else ""
        assert layer.descriptor.media_type == f"application/vnd.oci.image.layer.v1.tar{suffix}"
    assert warnings == []


@pytest.mark.case("Z08")
def test_the_made_up_manifest_is_one(tmp_path: Path) -> None:
    from layerstore.oci.manifest import Manifest, parse_document

    path = docker_archive(tmp_path / "x.tar", [Saved([LOWER], compression="zstd")])
    image = opened(path).image()
    again = parse_document(image.manifest.raw, image.descriptor.media_type)
    assert again == image.manifest and isinstance(again, Manifest)
    again.require_image("m")


def test_tags(tmp_path: Path) -> None:
    images = [
        Saved([LOWER], tags=["debian:12", "debian:bookworm"]),
        Saved([UPPER], tags=["localhost:5000/tool:v1"]),
        Saved([LOWER, UPPER], tags=None),
    ]
    path = docker_archive(tmp_path / "x.tar", images)

    def layers(rest: str) -> int | list[str]:
        return [str(layer.diff_id) for layer in opened(path, rest).image().layers]

    for rest in (":debian:12", ":docker.io/library/debian:bookworm", ":bookworm", "@0", ":@0"):
        assert layers(rest) == [digest_of(LOWER)]
    for rest in (":localhost:5000/tool:v1", ":v1", "@1"):
        assert layers(rest) == [digest_of(UPPER)]
    assert layers("@2") == [digest_of(LOWER), digest_of(UPPER)]
    with pytest.raises(UsageError, match="can mean 3 images") as caught:
        layers("")
    for text in ("'debian:12', 'debian:bookworm'", "'localhost:5000/tool:v1'", "untagged '"):
        assert text in str(caught.value)
    for rest in (":debian", ":5000/tool:v1", ":tool:v1", ":A"):
        with pytest.raises(NotFoundError, match="does not exist"):
            layers(rest)
    with pytest.raises(NotFoundError, match="has 3 images"):
        layers("@3")
    with pytest.raises(UsageError, match="have no digests"):
        layers("@sha256:" + "0" * 64)


def test_one_tag_for_several_images(tmp_path: Path) -> None:
    images = [Saved([LOWER], tags=["a/x:latest"]), Saved([UPPER], tags=["b/x:latest"]), Saved([LOWER], tags=["c:1"])]
    path = docker_archive(tmp_path / "x.tar", images)
    with pytest.raises(UsageError, match="can mean 2 images"):
        opened(path, ":latest").image()
    assert len(opened(path, ":a/x").image().layers) == 1


@pytest.mark.case("M13")
@pytest.mark.parametrize("style", ["flat", "blobs"])
def test_damaged_layers(tmp_path: Path, style: str) -> None:
    path = docker_archive(tmp_path / "x.tar", [Saved([LOWER])], style=style)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"localhost", b"localh0st"))
    image = opened(path).image()
    with image.open_layer(0) as reader, pytest.raises(CorruptError, match="layer 0") as caught:
        reader.read()
    assert caught.value.expected == digest_of(LOWER)


@pytest.mark.case("M13")
def test_what_is_named_by_digest_has_to_have_it(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "x.tar", [Saved([LOWER], config={"author": "somebody"})], style="blobs")
    path.write_bytes(path.read_bytes().replace(b"somebody", b"s0mebody"))
    with pytest.raises(CorruptError, match="wrong digest"):
        opened(path).image()
    named = f"blobs/sha256/{'0' * 64}"
    manifest = encode([{"Config": "c.json", "Layers": [named]}])
    members = {"manifest.json": manifest, "c.json": encode(config_of([digest_of(LOWER)])), named: LOWER}
    (tmp_path / "y.tar").write_bytes(tar_of(members))
    with pytest.raises(CorruptError, match="layer 0"):
        opened(tmp_path / "y.tar").image()


@pytest.mark.case("M08")
@pytest.mark.parametrize("diff_ids", [[], [digest_of(LOWER)] * 2])
def test_diff_ids_have_to_pair(tmp_path: Path, diff_ids: list[str]) -> None:
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    path = docker_archive(tmp_path / "x.tar", [Saved([LOWER], config={"rootfs": rootfs})])
    with pytest.raises(MalformedError, match="1 layers and the config"):
        opened(path).image()


def test_missing_members(tmp_path: Path) -> None:
    manifest = encode([{"Config": "c.json", "RepoTags": ["a:1"], "Layers": ["gone/layer.tar"]}])
    members: dict[str, Any] = {"manifest.json": manifest}
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of(members))
    with pytest.raises(NotFoundError, match=r"config of docker-archive:.* is missing: 'c.json' is not in .*x\.tar"):
        opened(path).image()
    members["c.json"] = encode(config_of([digest_of(LOWER)]))
    path.write_bytes(tar_of(members))
    with pytest.raises(NotFoundError, match=f"layer 0 .{digest_of(LOWER)}. of .* is missing: 'gone/layer.tar'"):
        opened(path).image()


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../etc/passwd"])
def test_layers_cannot_be_outside(tmp_path: Path, target: str) -> None:
    manifest = encode([{"Config": "c.json", "Layers": ["a/layer.tar"]}])
    members: dict[str, bytes | str | None] = {
        "manifest.json": manifest,
        "c.json": encode(config_of([digest_of(LOWER)])),
        "a/layer.tar": f"-> {target}",
    }
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of(members))
    with pytest.raises(MalformedError, match="leads out of"):
        opened(path).image()


@pytest.mark.parametrize(
    ("members", "error", "complaint"),
    [
        ({"repositories": b"{}", "abc/json": b"{}"}, UnsupportedError, "Docker before 1.10"),
        ({"index.json": b"{}"}, MalformedError, "not a docker archive"),
        ({"manifest.json": b"{}"}, MalformedError, "an object where an array belongs"),
        ({"manifest.json": b"[null]"}, MalformedError, r"\[0\] is null"),
        ({"manifest.json": b'[{"Layers":[]}]'}, MalformedError, r"\[0\]\.Config"),
        ({"manifest.json": b'[{"Config":"c","Layers":"x"}]'}, MalformedError, r"\[0\]\.Layers"),
        ({"manifest.json": b'[{"Config":"c","Layers":[1]}]'}, MalformedError, r"\[0\]\.Layers"),
        ({"manifest.json": b'[{"Config":"c","RepoTags":{}}]'}, MalformedError, r"\[0\]\.RepoTags"),
        ({"manifest.json": b'[{"Config":"c","Config":"d"}]'}, MalformedError, "twice"),
        ({"manifest.json": b" " * (CONFIG_BYTES + 1)}, LimitError, "limit"),
        ({"manifest.json/": None}, MalformedError, "not a plain regular file"),
    ],
)
def test_broken_archives(
    tmp_path: Path, members: dict[str, bytes | str | None], error: type[Exception], complaint: str
) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of(members))
    with pytest.raises(error, match=complaint):
        opened(path)


def test_an_archive_of_nothing(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "x.tar", [])
    with pytest.raises(NotFoundError, match="has nothing"):
        opened(path).image()
