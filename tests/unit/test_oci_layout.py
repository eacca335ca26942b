from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.layouts import (
    LINUX_AMD64,
    OCI_LAYER,
    REF_NAME,
    Layer,
    Layout,
    compress,
    digest_of,
    encode,
    tar_of,
)

from layerstore.errors import (
    CorruptError,
    LimitError,
    MalformedError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from layerstore.limits import DEFAULT_LIMITS
from layerstore.oci import layout as layout_module
from layerstore.oci import selection
from layerstore.oci.document import CONFIG_BYTES, MANIFEST_BYTES
from layerstore.oci.platform import Platform
from layerstore.oci.source import SourceImage
from layerstore.oci.source_name import SourceName
from layerstore.oci.transport import open_source

TAR = tar_of({"etc/": None, "etc/hosts": b"127.0.0.1 localhost\n"})
ARM64 = {"architecture": "arm64", "os": "linux"}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "oci")


@pytest.fixture(autouse=True)
def on_amd64(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (selection, layout_module):
        monkeypatch.setattr(module, "host", lambda: Platform("linux", "amd64"))


class Read:
    """Opens an image of a layout and keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def __call__(self, layout: Layout, rest: str = "", platform: str | None = None) -> SourceImage:
        name = SourceName.parse(layout.name() + rest)
        source = open_source(name, scratch="/nowhere", limits=DEFAULT_LIMITS, warn=self.warnings.append)
        return source.image(Platform.parse(platform) if platform else None)


@pytest.fixture
def read() -> Read:
    return Read()


def chosen(image: SourceImage) -> str:
    return str(image.descriptor.digest)


def content(image: SourceImage, number: int = 0) -> bytes:
    with image.open_layer(number) as reader:
        return reader.read()


# which image


@pytest.mark.case("M05")
def test_tags(layout: Layout, read: Read) -> None:
    one = layout.image([TAR], tag="one")
    two = layout.image([TAR], tag="docker.io/lib/x:1", config={"author": "two"})
    bare = layout.image([], config={"author": "bare"})
    assert chosen(read(layout, ":one")) == one["digest"]
    assert chosen(read(layout, ":docker.io/lib/x:1")) == two["digest"]
    assert chosen(read(layout, "@2")) == bare["digest"]
    assert chosen(read(layout, f"@{bare['digest']}")) == bare["digest"]
    with pytest.raises(UsageError) as caught:
        read(layout)
    for text in ("3 images", "'one'", "'docker.io/lib/x:1'", bare["digest"]):
        assert text in str(caught.value)


@pytest.mark.case("M05")
def test_tags_that_do_not_exist(layout: Layout, read: Read) -> None:
    with pytest.raises(NotFoundError, match=r"does not exist; index.json of .* has nothing"):
        read(layout)
    layout.image([TAR], tag="a\nb")
    with pytest.raises(NotFoundError, match=r":v1 does not exist; index.json of .* has 'a\\x0ab' @sha256:"):
        read(layout, ":v1")
    with pytest.raises(NotFoundError, match="does not exist"):
        read(layout, "@sha256:" + "0" * 64)
    with pytest.raises(NotFoundError, match="has 1 entries, and so none at position 1"):
        read(layout, "@1")


@pytest.mark.case("M05")
def test_one_name_for_different_images(layout: Layout, read: Read) -> None:
    one = layout.image([TAR], tag="latest", config={"author": "one"})
    two = layout.image([TAR], tag="latest", config={"author": "two"})
    with pytest.raises(UsageError, match="latest can mean 2 images") as caught:
        read(layout, ":latest")
    assert one["digest"] in str(caught.value) and two["digest"] in str(caught.value)
    assert chosen(read(layout, "@1")) == two["digest"]


@pytest.mark.case("M05")
def test_one_name_twice_for_one_image(layout: Layout, read: Read) -> None:
    one = layout.image([TAR], tag="latest")
    layout.add(one, "latest")
    layout.add(one, "other")
    assert chosen(read(layout, ":latest")) == one["digest"]
    assert chosen(read(layout)) == one["digest"]


@pytest.mark.case("M05")
def test_one_name_for_different_platforms(layout: Layout, read: Read) -> None:
    amd = layout.image([TAR], tag="v1", platform=LINUX_AMD64)
    arm = layout.image([TAR], tag="v1", platform=ARM64, config=ARM64)
    assert chosen(read(layout, ":v1")) == amd["digest"]
    assert chosen(read(layout, ":v1", "linux/arm64/v8")) == arm["digest"]
    assert chosen(read(layout, "", "linux/arm64")) == arm["digest"]
    with pytest.raises(NotFoundError, match="is not there for linux/s390x: it has linux/amd64"):
        read(layout, ":v1", "linux/s390x")


@pytest.mark.case("M05")
def test_names_in_nested_indexes_are_ignored(layout: Layout, read: Read) -> None:
    inner = layout.image([TAR], listed=False, platform=LINUX_AMD64)
    layout.index([{**inner, "annotations": {REF_NAME: "inner"}}])
    with pytest.raises(NotFoundError, match="inner does not exist"):
        read(layout, ":inner")
    assert chosen(read(layout)) == inner["digest"]


@pytest.mark.case("M05")
def test_containerds_whole_name_is_a_name_too(layout: Layout, read: Read) -> None:
    entry = layout.image([TAR], listed=False)
    name = "docker.io/library/a:1"
    layout.add({**entry, "annotations": {"io.containerd.image.name": name}}, "1")
    assert chosen(read(layout, ":1")) == chosen(read(layout, f":{name}")) == entry["digest"]


@pytest.mark.case("M01")
@pytest.mark.parametrize("attestation_first", [False, True])
@pytest.mark.parametrize("platform", [None, "linux/amd64"])
def test_attestations(layout: Layout, read: Read, attestation_first: bool, platform: str | None) -> None:
    real = layout.image([TAR], listed=False, platform=LINUX_AMD64)
    entries = [real, layout.attestation(real)]
    layout.index(entries[::-1] if attestation_first else entries, tag="latest")
    assert chosen(read(layout, ":latest", platform)) == real["digest"]
    assert chosen(read(layout, "", platform)) == real["digest"]


@pytest.mark.case("M01")
def test_an_attestation_beside_the_image_in_index_json(layout: Layout, read: Read) -> None:
    real = layout.image([TAR], listed=False, platform=LINUX_AMD64)
    attestation = layout.attestation(real)
    layout.add(attestation)
    layout.add(real)
    assert chosen(read(layout)) == real["digest"]
    with pytest.raises(UnsupportedError, match=r"not an image of tar layers: .*application/vnd.in-toto\+json"):
        read(layout, "@0")


@pytest.mark.case("M02")
def test_variants(layout: Layout, read: Read) -> None:
    plain = layout.image([TAR], listed=False, platform=ARM64, config=ARM64)
    layout.index([plain], tag="a")
    eight = layout.image([TAR], listed=False, platform={**ARM64, "variant": "v8"}, config={**ARM64, "author": "x"})
    layout.index([eight], tag="b")
    for wanted in ("linux/arm64", "linux/arm64/v8", "linux/arm64/v9", "linux/aarch64"):
        assert chosen(read(layout, ":a", wanted)) == plain["digest"]
        assert chosen(read(layout, ":b", wanted)) == eight["digest"]
    with pytest.raises(NotFoundError, match="no image for linux/arm/v7"):
        read(layout, ":a", "linux/arm")


@pytest.mark.case("M03")
def test_a_variant_in_the_index_alone(layout: Layout, read: Read) -> None:
    image = layout.image([TAR], listed=False, platform={**ARM64, "variant": "v9"}, config=ARM64)
    layout.index([image], tag="a")
    assert read(layout, ":a", "linux/arm64/v9").platform == Platform("linux", "arm64", "v9")
    assert read.warnings == []


@pytest.mark.case("M03")
@pytest.mark.parametrize(("architecture", "platform"), [("x86_64", "linux/amd64"), ("aarch64", "linux/arm64")])
def test_other_spellings_in_a_config(layout: Layout, read: Read, architecture: str, platform: str) -> None:
    layout.image([TAR], tag="a", config={"architecture": architecture})
    assert read(layout, ":a", platform).platform == read(layout, ":a").platform == Platform.parse(platform)
    assert read.warnings == []


@pytest.mark.case("M03")
@pytest.mark.parametrize("fields", [{"architecture": ""}, {"architecture": None, "os": None}])
def test_a_config_that_does_not_say_its_platform(layout: Layout, read: Read, fields: dict[str, Any]) -> None:
    layout.image([TAR], tag="a", config=fields)
    assert read(layout, ":a").platform.architecture == ""
    assert read.warnings == []
    assert read(layout, ":a", "linux/arm64").platform == Platform("linux", "arm64")
    assert len(read.warnings) == 1 and "taken for linux/arm64" in read.warnings[0]


@pytest.mark.case("M03")
def test_the_index_is_trusted_over_the_config(layout: Layout, read: Read) -> None:
    image = layout.image([TAR], listed=False, platform=ARM64, config={"architecture": "amd64"})
    layout.index([image], tag="a")
    assert read(layout, ":a", "linux/arm64").platform == Platform("linux", "arm64")
    assert len(read.warnings) == 1 and "linux/arm64 by its index and linux/amd64 by its config" in read.warnings[0]


# what is no image


@pytest.mark.case("M15")
@pytest.mark.parametrize("tag", ["", ":chart"])
def test_artifacts(layout: Layout, read: Read, tag: str) -> None:
    layer = Layer(layout.blob(b"hello", "text/plain"), digest_of(b"hello"), b"hello")
    layout.image([layer], tag="chart", config_type="application/vnd.oci.empty.v1+json")
    with pytest.raises(UnsupportedError, match=r"not an image .*application/vnd\.oci\.empty\.v1\+json"):
        read(layout, tag)


@pytest.mark.case("M15")
def test_encrypted_images(layout: Layout, read: Read) -> None:
    layout.image([layout.layer(TAR, media_type=OCI_LAYER + "+gzip+encrypted")], tag="a")
    with pytest.raises(UnsupportedError, match=r"layer 0, .* is encrypted .*tar\+gzip\+encrypted"):
        read(layout, ":a")


@pytest.mark.case("M14")
def test_schema_1(layout: Layout, read: Read) -> None:
    media_type = "application/vnd.docker.distribution.manifest.v1+prettyjws"
    layout.add(layout.blob(encode({"schemaVersion": 1, "fsLayers": []}), media_type), "old")
    with pytest.raises(UnsupportedError, match=r"manifest\.v1\+prettyjws: schema 1 is not supported"):
        read(layout, ":old")


@pytest.mark.case("M18")
def test_a_document_that_is_two(layout: Layout, read: Read) -> None:
    entry = layout.image([TAR], tag="good")
    layout.image([TAR], tag="bad", manifest={"manifests": [entry]})
    with pytest.raises(MalformedError, match="ambiguous"):
        read(layout, ":bad")
    assert chosen(read(layout, ":good")) == entry["digest"]


@pytest.mark.case("M08")
@pytest.mark.parametrize("diff_ids", [[digest_of(TAR)], [digest_of(TAR)] * 3, []])
def test_diff_ids_that_do_not_pair(layout: Layout, read: Read, diff_ids: list[str]) -> None:
    layout.image([TAR, TAR], tag="a", config={"rootfs": {"type": "layers", "diff_ids": diff_ids}})
    with pytest.raises(MalformedError, match=f"2 layers and the config {len(diff_ids)} diff IDs"):
        read(layout, ":a")


@pytest.mark.case("M08")
def test_history_that_does_not_pair(layout: Layout, read: Read) -> None:
    layout.image([TAR, TAR], tag="a", config={"history": [{}, {}, {}]})
    assert len(read(layout, ":a").layers) == 2
    assert len(read.warnings) == 1 and "history" in read.warnings[0]


@pytest.mark.case("M08")
def test_dockers_empty_layer_twice(layout: Layout, read: Read) -> None:
    empty = bytes.fromhex("1f8b080000096e8800ff621805a360148c5800080000ffff2eafb5ef00040000")
    assert digest_of(empty) == "sha256:a3ed95caeb02ffe68cdd9fd84406680ae93d633cb16422d00e8a7c22955b46d4"
    blob = layout.blob(empty, OCI_LAYER + "+gzip")
    layout.image([Layer(blob, digest_of(bytes(1024)), empty)] * 2, tag="a")
    image = read(layout, ":a")
    assert [content(image, number) for number in (0, 1)] == [empty, empty]


# verification


@pytest.mark.case("M11")
@pytest.mark.parametrize("algorithms", [("sha512", "sha512"), ("sha256", "sha512"), ("sha512", "sha256")])
def test_sha512(layout: Layout, read: Read, algorithms: tuple[str, str]) -> None:
    layer = layout.layer(TAR, algorithm=algorithms[0])
    layout.image([layer, TAR], tag="a", algorithm=algorithms[1])
    image = read(layout, ":a")
    assert content(image) == layer.data
    assert image.layers[0].descriptor.digest.algorithm == algorithms[0]
    assert image.descriptor.digest.algorithm == algorithms[1]
    assert str(image.layers[0].diff_id) == layer.diff_id
    path = layout.blob_path(layer.descriptor["digest"])
    path.write_bytes(bytes(len(layer.data)))
    with pytest.raises(CorruptError, match=f"expected {algorithms[0]}:"):
        content(image)


@pytest.mark.case("M11")
@pytest.mark.parametrize(
    ("digest", "error"),
    [
        ("sha256:" + "AB" * 32, MalformedError),
        ("sha256:" + "a" * 63, MalformedError),
        ("md5:" + "a" * 32, UnsupportedError),
        ("sha256:../../x", MalformedError),
        ("sha256:../../index.json", MalformedError),
    ],
)
@pytest.mark.parametrize("place", ["index", "manifest", "layer", "diff_id"])
def test_digests_are_checked_before_they_become_paths(
    layout: Layout, read: Read, digest: str, error: type[Exception], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layout.layer(TAR)
    if place == "layer":
        layer = Layer({**layer.descriptor, "digest": digest}, layer.diff_id, layer.data)
    if place == "diff_id":
        layer = Layer(layer.descriptor, digest, layer.data)
    entry = layout.image([layer], listed=False)
    if place == "manifest":
        entry["digest"] = digest
    if place == "index":
        entry = layout.index([{**entry, "digest": digest}], listed=False)
    layout.add(entry, "a")
    monkeypatch.chdir(layout.path)
    with pytest.raises(error):
        read(layout, ":a")
    assert not any(".." in path for path in os.listdir("."))


@pytest.mark.case("M12")
@pytest.mark.parametrize("change", [-1, 1, 2**62])
@pytest.mark.parametrize("place", ["manifest", "config", "layer"])
def test_sizes_are_checked_before_digests(layout: Layout, read: Read, change: int, place: str) -> None:
    def wrong(descriptor: dict[str, Any]) -> dict[str, Any]:
        return {**descriptor, "size": descriptor["size"] + change}

    layer = layout.layer(TAR)
    if place == "layer":
        layer = Layer(wrong(layer.descriptor), layer.diff_id, layer.data)
    entry = layout.image([layer], listed=False)
    if place == "config":
        document = json.loads(layout.blob_path(entry["digest"]).read_bytes())
        document["config"] = wrong(document["config"])
        entry = layout.blob(encode(document), entry["mediaType"])
    layout.add(wrong(entry) if place == "manifest" else entry, "a")
    too_large = change > 1 and place != "layer"
    with pytest.raises(LimitError if too_large else CorruptError, match="limit" if too_large else "wrong size"):
        read(layout, ":a").open_layer(0)


@pytest.mark.case("M12")
@pytest.mark.parametrize("size", [-1, 2**63, "10", 1.5, None, True])
@pytest.mark.parametrize("place", ["index.json", "layer"])
def test_sizes_that_are_none(layout: Layout, read: Read, size: object, place: str) -> None:
    layer = layout.layer(TAR)
    if place == "layer":
        layer = Layer({**layer.descriptor, "size": size}, layer.diff_id, layer.data)
    entry = layout.image([layer], listed=False)
    layout.add({**entry, "size": size} if place == "index.json" else entry, "a")
    with pytest.raises(MalformedError, match="size"):
        read(layout, ":a")


@pytest.mark.case("M12")
def test_embedded_data_needs_no_blob_but_has_to_be_right(layout: Layout, read: Read) -> None:
    import base64

    entry = layout.image([TAR], listed=False)
    path = layout.blob_path(entry["digest"])
    data = base64.b64encode(path.read_bytes()).decode()
    path.unlink()
    layout.add({**entry, "data": data}, "good")
    assert chosen(read(layout, ":good")) == entry["digest"]
    layout.add({**entry, "data": base64.b64encode(b"{}").decode()}, "bad")
    with pytest.raises(CorruptError, match=r"manifests\[1\]\.data"):
        read(layout, ":good")


@pytest.mark.case("M12")
def test_documents_have_limits(layout: Layout, read: Read) -> None:
    manifest = layout.image([TAR], listed=False, manifest={"annotations": {"a": "x" * MANIFEST_BYTES}})
    layout.add(manifest, "a")
    with pytest.raises(LimitError, match=f"limit of {MANIFEST_BYTES}"):
        read(layout, ":a")
    layout.image([TAR], tag="b", config={"author": "x" * CONFIG_BYTES})
    with pytest.raises(LimitError, match=f"limit of {CONFIG_BYTES}"):
        read(layout, ":b")


@pytest.mark.case("M13")
@pytest.mark.parametrize("place", ["manifest", "config", "index"])
def test_a_flipped_bit_in_a_document(layout: Layout, read: Read, place: str) -> None:
    image = layout.image([TAR], listed=False, platform=LINUX_AMD64)
    index = layout.index([image], tag="a")
    config = json.loads(layout.blob_path(image["digest"]).read_bytes())["config"]
    digest = {"manifest": image, "config": config, "index": index}[place]["digest"]
    path = layout.blob_path(digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        read(layout, ":a")
    assert caught.value.expected == digest
    assert caught.value.actual == digest_of(bytes(data))
    assert str(layout.path) in str(caught.value)


@pytest.mark.case("M13")
def test_a_longer_blob_is_not_read_at_all(layout: Layout, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layout.layer(TAR)
    layout.image([layer], tag="a")
    image = read(layout, ":a")
    with layout.blob_path(layer.descriptor["digest"]).open("ab") as stored:
        stored.truncate(1 << 40)
    with pytest.raises(CorruptError, match=f"expected {len(layer.data)} bytes, got {1 << 40}"):
        image.open_layer(0)


@pytest.mark.case("M10")
def test_missing_layers_are_named(layout: Layout, read: Read) -> None:
    layer = layout.layer(TAR)
    layout.image([TAR + bytes(512), layer], tag="a")
    digest = layer.descriptor["digest"]
    layout.blob_path(digest).unlink()
    image = read(layout, ":a")
    assert digest_of(content(image, 0)) == str(image.layers[0].descriptor.digest)
    with pytest.raises(NotFoundError) as caught:
        image.open_layer(1)
    assert f"layer 1 of {layout.name('a')} is missing: {digest} is not in {layout.path}/blobs/sha256" == str(
        caught.value
    )


@pytest.mark.case("M10")
@pytest.mark.parametrize("url", ["https://example.test/layer", "file:///etc/passwd", "http://169.254.169.254/latest"])
@pytest.mark.parametrize(
    "media_type",
    [
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        OCI_LAYER + "+gzip",
    ],
)
def test_foreign_layers(layout: Layout, read: Read, url: str, media_type: str) -> None:
    layer = layout.layer(TAR, media_type=media_type)
    foreign = Layer({**layer.descriptor, "urls": [url]}, layer.diff_id, layer.data)
    layout.image([foreign], tag="a")
    image = read(layout, ":a")
    assert content(image) == layer.data
    layout.blob_path(layer.descriptor["digest"]).unlink()
    with pytest.raises(NotFoundError, match=r"layer 0 of .* is missing: .*; it is a foreign layer, and its urls"):
        image.open_layer(0)


@pytest.mark.case("Z07")
@pytest.mark.parametrize("real", ["", "gzip", "zstd"])
@pytest.mark.parametrize(
    ("media_type", "claimed"),
    [
        (OCI_LAYER, ""),
        (OCI_LAYER + "+gzip", "gzip"),
        (OCI_LAYER + "+zstd", "zstd"),
        ("application/vnd.docker.image.rootfs.diff.tar", ""),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", "gzip"),
        ("application/vnd.docker.image.rootfs.diff.tar.zstd", "zstd"),
    ],
)
def test_media_types_that_lie(layout: Layout, read: Read, media_type: str, claimed: str, real: str) -> None:
    layout.image([layout.layer(TAR, real, media_type=media_type)], tag="a")
    assert content(read(layout, ":a")) == compress(TAR, real)
    assert len(read.warnings) == (claimed != real)
    for line in read.warnings:
        assert f"is {real or 'not compressed'}, though its media type is {media_type}" in line


# the files of the layout


@pytest.mark.parametrize(
    ("spoil", "error", "complaint"),
    [
        (lambda path: (path / "oci-layout").unlink(), MalformedError, "has no oci-layout"),
        (lambda path: (path / "index.json").unlink(), MalformedError, "has no index.json"),
        (lambda path: (path / "oci-layout").write_bytes(b'{"imageLayoutVersion":"2.0"}'), UnsupportedError, "'2.0'"),
        (lambda path: (path / "oci-layout").write_bytes(b"{}"), MalformedError, "imageLayoutVersion"),
        (lambda path: (path / "oci-layout").write_bytes(b" " * 5000), LimitError, "limit of 4096"),
        (lambda path: (path / "index.json").write_bytes(b"["), MalformedError, "not JSON"),
        (lambda path: (path / "index.json").write_bytes(b"{}"), MalformedError, "neither"),
        (lambda path: os.truncate(path / "index.json", CONFIG_BYTES + 1), LimitError, "limit"),
    ],
)
def test_broken_layouts(
    layout: Layout, read: Read, spoil: Callable[[Path], object], error: type[Exception], complaint: str
) -> None:
    layout.image([TAR], tag="a")
    spoil(layout.path)
    with pytest.raises(error, match=complaint) as caught:
        read(layout, ":a")
    assert str(layout.path) in str(caught.value)


def test_a_manifest_in_place_of_the_index(layout: Layout, read: Read) -> None:
    entry = layout.image([TAR], tag="a")
    (layout.path / "index.json").write_bytes(layout.blob_path(entry["digest"]).read_bytes())
    with pytest.raises(MalformedError, match="is a manifest where an index belongs"):
        read(layout, ":a")


@pytest.mark.parametrize("kind", ["fifo", "directory", "dangling"])
def test_blobs_that_are_no_files(layout: Layout, read: Read, kind: str) -> None:
    layer = layout.layer(TAR)
    layout.image([layer], tag="a")
    image = read(layout, ":a")
    path = layout.blob_path(layer.descriptor["digest"])
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    with pytest.raises(NotFoundError if kind == "dangling" else MalformedError):
        image.open_layer(0)


def test_blobs_may_be_links(layout: Layout, read: Read, tmp_path: Path) -> None:
    layer = layout.layer(TAR)
    layout.image([layer], tag="a")
    path = layout.blob_path(layer.descriptor["digest"])
    path.rename(tmp_path / "shared")
    path.symlink_to(tmp_path / "shared")
    assert content(read(layout, ":a")) == layer.data


@pytest.mark.case("M11")
def test_a_tag_on_what_cannot_be_verified(layout: Layout, read: Read) -> None:
    entry = layout.image([TAR], tag="good")
    layout.add({**entry, "digest": "blake3:" + "a" * 64}, "bad")
    assert chosen(read(layout, ":good")) == entry["digest"]
    for rest in (":bad", "@1"):
        with pytest.raises(UnsupportedError, match="blake3"):
            read(layout, rest)
    with pytest.raises(NotFoundError, match=r"'good' .*blake3"):
        read(layout, ":other")
