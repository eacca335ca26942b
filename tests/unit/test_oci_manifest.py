from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from layerstore.digest import Digest
from layerstore.errors import LimitError, MalformedError, NotFoundError, UnsupportedError
from layerstore.oci import mediatype
from layerstore.oci.document import MANIFEST_BYTES
from layerstore.oci.manifest import Index, Manifest, parse_document

BLOB = Digest.of(b"blob")
CONFIG = {"mediaType": mediatype.OCI_CONFIG, "digest": str(BLOB), "size": 4}
LAYER = {"mediaType": mediatype.OCI_LAYER + "+gzip", "digest": str(BLOB), "size": 4}
MANIFEST: dict[str, Any] = {"schemaVersion": 2, "config": CONFIG, "layers": [LAYER]}
INDEX: dict[str, Any] = {"schemaVersion": 2, "manifests": [{**LAYER, "mediaType": mediatype.OCI_MANIFEST}]}
SCHEMA1 = "application/vnd.docker.distribution.manifest.v1+prettyjws"


def parsed(document: object, hint: str | None = None) -> Manifest | Index:
    return parse_document(json.dumps(document).encode(), hint, "m")


def image(**changes: Any) -> Manifest:
    manifest = parsed({**MANIFEST, **changes})
    assert isinstance(manifest, Manifest)
    return manifest


@pytest.mark.parametrize("own", [None, mediatype.OCI_MANIFEST, mediatype.DOCKER_MANIFEST])
def test_a_manifest(own: str | None) -> None:
    document = {**MANIFEST, "annotations": {"a": "b"}, "subject": CONFIG, "artifactType": "x/y", "unknown": 1}
    if own is not None:
        document["mediaType"] = own
    manifest = parsed(document, own)
    assert isinstance(manifest, Manifest)
    assert manifest.media_type == (own or mediatype.OCI_MANIFEST)
    assert manifest.config.media_type == mediatype.OCI_CONFIG
    assert [layer.digest for layer in manifest.layers] == [BLOB]
    assert manifest.annotations == {"a": "b"}
    assert manifest.subject is not None and manifest.subject.digest == BLOB
    assert manifest.artifact_type == "x/y"
    assert json.loads(manifest.raw) == document
    manifest.require_image("m")


def test_an_index() -> None:
    index = parsed({**INDEX, "annotations": None}, "application/json; charset=utf-8")
    assert isinstance(index, Index)
    assert [entry.digest for entry in index.manifests] == [BLOB]
    assert index.media_type == mediatype.OCI_INDEX
    assert parsed({"schemaVersion": 2, "manifests": None}) == Index(
        mediatype.OCI_INDEX, (), raw=b'{"schemaVersion": 2, "manifests": null}'
    )


@pytest.mark.case("M18")
@pytest.mark.parametrize(
    ("own", "hint"),
    list(itertools.product([None, mediatype.OCI_MANIFEST, mediatype.OCI_INDEX], repeat=2)),
)
def test_manifest_and_index_at_once(own: str | None, hint: str | None) -> None:
    document = {**MANIFEST, **INDEX, **({"mediaType": own} if own else {})}
    with pytest.raises(MalformedError, match="ambiguous"):
        parsed(document, hint)


@pytest.mark.case("M18")
@pytest.mark.parametrize(
    ("document", "own", "hint"),
    [
        (MANIFEST, mediatype.OCI_MANIFEST, mediatype.OCI_INDEX),
        (MANIFEST, mediatype.OCI_INDEX, mediatype.OCI_MANIFEST),
        (MANIFEST, mediatype.OCI_MANIFEST, mediatype.DOCKER_MANIFEST),
        (MANIFEST, mediatype.OCI_INDEX, None),
        (MANIFEST, None, mediatype.OCI_INDEX),
        (INDEX, mediatype.OCI_MANIFEST, None),
        (INDEX, None, mediatype.DOCKER_MANIFEST),
        ({**INDEX, "layers": []}, None, None),
        ({**INDEX, "config": None}, None, None),
        ({**MANIFEST, "manifests": None}, None, None),
        ({**MANIFEST, "fsLayers": []}, None, None),
        ({**MANIFEST, "Manifests": []}, None, None),
        ({**INDEX, "LAYERS": []}, None, None),
        ({**MANIFEST, "MediaType": mediatype.OCI_INDEX}, None, None),
    ],
)
def test_conflicts(document: dict[str, Any], own: str | None, hint: str | None) -> None:
    with pytest.raises(MalformedError, match=r"ambiguous|says that it is"):
        parsed({**document, **({"mediaType": own} if own else {})}, hint)


@pytest.mark.case("M18")
def test_duplicate_keys_are_refused_at_any_depth() -> None:
    layers = json.dumps([LAYER]).encode()
    with pytest.raises(MalformedError, match="'layers' twice"):
        parse_document(b'{"schemaVersion":2,"layers":[],"config":{},"layers":' + layers + b"}", None)
    with pytest.raises(MalformedError, match="'digest' twice"):
        parse_document(b'{"schemaVersion":2,"layers":[{"digest":"a","digest":"b"}]}', None)


@pytest.mark.case("M18")
@pytest.mark.parametrize(
    "hint", ["application/json", "text/plain; charset=utf-8", "", None, "application/octet-stream"]
)
def test_a_server_that_does_not_know_contradicts_nothing(hint: str | None) -> None:
    assert parsed({**MANIFEST, "mediaType": mediatype.DOCKER_MANIFEST}, hint).media_type == mediatype.DOCKER_MANIFEST


@pytest.mark.case("M14")
@pytest.mark.parametrize("hint", [SCHEMA1, "application/vnd.docker.distribution.manifest.v1+json", None])
def test_schema_1(hint: str | None) -> None:
    document = {
        "schemaVersion": 1,
        "name": "a/b",
        "tag": "c",
        "architecture": "amd64",
        "fsLayers": [{"blobSum": str(BLOB)}, {"blobSum": str(BLOB)}],
        "history": [{"v1Compatibility": '{"id":"x","throwaway":true}'}, {"v1Compatibility": "{}"}],
        "signatures": [{"header": {}, "signature": "x", "protected": "y"}],
    }
    name = (hint or "application/vnd.docker.distribution.manifest.v1+json").replace("+", r"\+")
    with pytest.raises(UnsupportedError, match=f"{name}: schema 1 is not supported"):
        parsed(document, hint)


@pytest.mark.case("M14")
@pytest.mark.parametrize("document", [{"schemaVersion": 1}, {"fsLayers": []}, {"schemaVersion": 2, "fsLayers": None}])
def test_schema_1_in_pieces(document: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="schema 1 is not supported"):
        parsed(document)


@pytest.mark.case("M15")
@pytest.mark.parametrize(
    ("document", "name"),
    [
        ({"schemaVersion": 2, "mediaType": "application/vnd.cncf.helm.chart.v1"}, "helm"),
        ({"mediaType": "application/vnd.oci.artifact.manifest.v1+json", "blobs": [LAYER]}, "artifact.manifest"),
        ({"blobs": [LAYER]}, "blobs"),
    ],
)
def test_documents_of_other_types(document: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}.* neither an image manifest nor an index"):
        parsed(document)


@pytest.mark.case("M15")
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (
            {
                "config": {**CONFIG, "mediaType": "application/vnd.oci.empty.v1+json"},
                "layers": [{**LAYER, "mediaType": "text/plain"}],
            },
            "vnd.oci.empty",
        ),
        (
            {
                "config": {**CONFIG, "mediaType": "application/vnd.oci.empty.v1+json"},
                "artifactType": "application/vnd.example.sbom",
            },
            "vnd.example.sbom",
        ),
        ({"config": {**CONFIG, "mediaType": "application/vnd.cncf.helm.config.v1+json"}}, "helm"),
        ({"layers": [LAYER, {**LAYER, "mediaType": "application/vnd.in-toto+json"}]}, "layer 1 .*in-toto"),
        ({"layers": [{**LAYER, "mediaType": "application/vnd.erofs"}]}, "layer 0 .*vnd.erofs"),
        ({"layers": [{**LAYER, "mediaType": "application/vnd.oci.image.layer.v1.erofs"}]}, "v1.erofs"),
        ({"layers": [{**LAYER, "mediaType": "text/plain"}]}, "text/plain"),
    ],
)
def test_artifacts_are_documents_but_no_images(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"m is not an image.*{name}"):
        image(**changes).require_image("m")


@pytest.mark.case("M15")
@pytest.mark.parametrize(
    "media_type",
    [
        mediatype.OCI_LAYER + "+gzip+encrypted",
        mediatype.OCI_LAYER + "+encrypted",
        "application/vnd.docker.image.rootfs.diff.tar.gzip+enc",
    ],
)
def test_encrypted_layers(media_type: str) -> None:
    with pytest.raises(UnsupportedError, match=r"layer 0, .* is encrypted") as caught:
        image(layers=[{**LAYER, "mediaType": media_type}]).require_image("m")
    assert media_type in str(caught.value)


@pytest.mark.case("M15")
@pytest.mark.parametrize("layers", [[], None])
def test_no_layers(layers: list[Any] | None) -> None:
    manifest = image(layers=layers)
    manifest.require_image("m")
    assert manifest.layers == ()


@pytest.mark.case("Z07", "M10")
@pytest.mark.parametrize(
    ("media_type", "compression"),
    [
        (mediatype.OCI_LAYER, ""),
        (mediatype.OCI_LAYER + "+gzip", "gzip"),
        (mediatype.OCI_LAYER + "+zstd", "zstd"),
        ("application/vnd.docker.image.rootfs.diff.tar", ""),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", "gzip"),
        ("application/vnd.docker.image.rootfs.diff.tar.zstd", "zstd"),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "gzip"),
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+zstd", "zstd"),
    ],
)
def test_layer_types(media_type: str, compression: str) -> None:
    image(layers=[{**LAYER, "mediaType": media_type}]).require_image("m")
    assert mediatype.compression(media_type) == compression
    assert mediatype.is_foreign(media_type) == ("foreign" in media_type or "nondist" in media_type)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({}, "neither a manifest nor an index"),
        ({"schemaVersion": 2}, "neither a manifest nor an index"),
        ({**MANIFEST, "schemaVersion": 3}, "schemaVersion is '3' and has to be 2"),
        ({**MANIFEST, "schemaVersion": "2"}, "schemaVersion"),
        ({"layers": [], "schemaVersion": 2}, "has no 'config'"),
        ({"config": CONFIG, "layers": []}, "has no 'schemaVersion'"),
        ({**MANIFEST, "layers": {}}, "m: layers is an object where an array belongs"),
        ({**MANIFEST, "layers": [LAYER, {**LAYER, "size": "4"}]}, r"m: layers\[1\]\.size is a string where an integer"),
        ({**MANIFEST, "layers": [5]}, r"m: layers\[0\] is an integer where a descriptor belongs"),
        ({**MANIFEST, "config": None}, "m: config is null where a descriptor belongs"),
        ({**MANIFEST, "subject": {**CONFIG, "size": -1}}, "m: subject.size is out of range: -1"),
        ({**MANIFEST, "annotations": {"a\nb": 1}}, r"m\.annotations\['a\\x0ab'\] is an integer where a string"),
        ({**MANIFEST, "mediaType": 1}, "mediaType is not a string"),
        (
            {**INDEX, "manifests": [{**LAYER, "platform": {"os": 1}}]},
            r"manifests\[0\]\.platform: 'os' is an integer",
        ),
        ({**INDEX, "manifests": [{**LAYER, "platform": "linux"}]}, r"manifests\[0\]\.platform is a string"),
        ({**MANIFEST, "layers": [{**LAYER, "digest": "sha256:ABC"}]}, r"layers\[0\]\.digest is not a digest"),
        (
            {**MANIFEST, "layers": [{**LAYER, "digest": "sha256:../x"}]},
            r"not a digest: 'sha256:../x'",
        ),
        ([MANIFEST], "an array where an object belongs"),
    ],
)
def test_malformed(document: object, complaint: str) -> None:
    with pytest.raises(MalformedError, match=complaint) as caught:
        parsed(document)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_too_large() -> None:
    with pytest.raises(LimitError, match="limit of 4194304"):
        parse_document(b" " * (MANIFEST_BYTES + 1), None)


@pytest.mark.case("M11")
def test_entries_that_cannot_be_verified_do_not_spoil_an_index() -> None:
    entry = INDEX["manifests"][0]
    index = parsed(
        {
            "schemaVersion": 2,
            "manifests": [
                {**entry, "digest": "blake3:" + "a" * 64, "annotations": {"a": "b"}},
                entry,
                {**entry, "digest": "md5:" + "b" * 32},
            ],
        }
    )
    assert isinstance(index, Index)
    assert [item.digest for item in index.manifests] == [BLOB]
    assert [(item.position, item.annotations) for item in index.unusable] == [(0, {"a": "b"}), (2, {})]
    assert index.at(1, "m").digest == BLOB
    with pytest.raises(UnsupportedError, match="blake3"):
        index.at(0, "m")
    with pytest.raises(UnsupportedError, match="md5"):
        index.at(2, "m")
    with pytest.raises(NotFoundError, match="m has 3 entries"):
        index.at(3, "m")


@pytest.mark.case("M11")
def test_a_layer_that_cannot_be_verified_spoils_its_image() -> None:
    with pytest.raises(UnsupportedError, match=r"m: layers\[0\]: digest algorithm 'blake3'"):
        image(layers=[{**LAYER, "digest": "blake3:" + "a" * 64}])
