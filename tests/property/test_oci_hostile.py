"""Hostile documents, names and archives raise our errors and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layouts import LINUX_AMD64, Layout, Saved, config_of, digest_of, docker_archive, encode, tar_of
from support.oci_schemas import is_valid

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, MalformedError, UnsupportedError
from layerstore.limits import DEFAULT_LIMITS
from layerstore.oci import mediatype
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import dump, parse, parse_value
from layerstore.oci.manifest import Index, Manifest, parse_document
from layerstore.oci.platform import Platform
from layerstore.oci.reference import DockerReference
from layerstore.oci.selection import select
from layerstore.oci.source_name import SourceName
from layerstore.oci.transport import open_source

bounded = settings(deadline=None, max_examples=100)

LIMITS = dataclasses.replace(DEFAULT_LIMITS, layer_bytes=1 << 20, decoder_memory=1 << 20)
TAR = tar_of({"etc/": None, "etc/hosts": b"127.0.0.1 localhost\n"})
BLOB = {"mediaType": mediatype.OCI_LAYER, "digest": str(Digest.of(b"x")), "size": 1}

texts = st.text(max_size=20) | st.sampled_from(
    [str(Digest.of(b"x")), "md5:" + "a" * 32, "", "linux", "\ud800", *mediatype.INDEXES, *mediatype.CONFIGS]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
names = texts | st.sampled_from(
    ["mediaType", "digest", "size", "data", "urls", "annotations", "layers", "manifests", "config", "platform", "os"]
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=10
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from places(inner)


@st.composite
def mutations(draw: st.DrawFn, document: Any) -> Any:
    """The document with up to three of its values replaced, removed or joined by another."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        spots = list(places(changed))
        if not spots:
            break
        container, key = draw(st.sampled_from(spots))
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "remove":
                del container[key]
            case "add" if isinstance(container, dict):
                container[draw(names)] = draw(values)
            case _:
                container[key] = draw(values)
    return changed


def only_ours(call: Any, *arguments: Any, **keywords: Any) -> Any:
    """The call's result; None if it raised one of our errors, with a message of one printable line."""
    try:
        return call(*arguments, **keywords)
    except ImgtoolError as error:
        text = str(error)
        assert text and "\n" not in text and text.encode()
        return None


@bounded
@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,0123456789.eE+-\\u tfn', max_size=60).map(str.encode))
def test_bytes_as_json(data: bytes) -> None:
    value = only_ours(parse_value, data, "doc")
    assert value is None or parse_value(dump(value), "doc") == value


@bounded
@given(values)
def test_json_round_trip(value: Any) -> None:
    data = json.dumps(value).encode()
    parsed = only_ours(parse_value, data, "doc")
    if parsed is not None:
        assert parsed == json.loads(data)
        assert parse_value(dump(parsed), "doc") == parsed
        assert dump(parse_value(dump(parsed), "doc")) == dump(parsed)


MANIFEST = {
    "schemaVersion": 2,
    "mediaType": mediatype.OCI_MANIFEST,
    "config": {**BLOB, "mediaType": mediatype.OCI_CONFIG},
    "layers": [BLOB, BLOB],
    "subject": BLOB,
    "annotations": {"a": "b"},
}
INDEX = {
    "schemaVersion": 2,
    "manifests": [{**BLOB, "mediaType": mediatype.OCI_MANIFEST, "platform": LINUX_AMD64}, BLOB],
}


NOT_IN_SCHEMAS = ("not a digest", "base64", "ambiguous", "mediaType is not", "says that it is", "surrogate")
"""Complaints about what a JSON Schema can't say."""


def agrees(kind: str, document: Any, call: Any, *arguments: Any) -> None:
    """The parser takes what the schema takes, and refuses what it refuses."""
    valid = is_valid(kind, document)
    try:
        call(*arguments)
    except MalformedError as error:
        assert not valid or any(words in str(error) for words in NOT_IN_SCHEMAS), error
    except UnsupportedError as error:
        assert valid or kind != "descriptor", error
    except ImgtoolError:
        assert valid
    else:
        assert valid


@bounded
@given(mutations({**BLOB, "annotations": {"a": "b"}, "urls": ["u"], "artifactType": "t", "data": None}))
def test_descriptors_agree_with_their_schema(document: Any) -> None:
    agrees("descriptor", document, Descriptor.parse, document, "d")


@bounded
@given(mutations(MANIFEST))
def test_manifests_agree_with_their_schema(document: Any) -> None:
    agrees("manifest", document, parse_document, json.dumps(document).encode(), None)


@bounded
@given(mutations(INDEX))
def test_indexes_agree_with_their_schema(document: Any) -> None:
    agrees("index", document, parse_document, json.dumps(document).encode(), None)


@bounded
@given(mutations(MANIFEST) | mutations(INDEX) | values, st.none() | texts)
def test_documents(document: Any, hint: str | None) -> None:
    data = json.dumps(document).encode()
    parsed = only_ours(parse_document, data, hint)
    if isinstance(parsed, Manifest):
        only_ours(parsed.require_image, "m")
    if isinstance(parsed, Index):
        only_ours(select, parsed, Platform("linux", "amd64"), lambda descriptor: data)
        only_ours(parsed.at, 1, "m")


@bounded
@given(mutations(config_of([digest_of(TAR)], variant="v1", history=[{"empty_layer": True}])))
def test_configs(document: Any) -> None:
    config = only_ours(ImageConfig.parse, json.dumps(document).encode(), "c", warn=lambda line: None)
    if config is not None:
        only_ours(config.check_layers, 1, "c", lambda line: None)
        made = json.loads(config.with_rootfs([Digest.of(b"x")], [], ["erofs"]))
        assert made["rootfs"]["diff_ids"] == [str(Digest.of(b"x"))]
        kept = {name for name in document if name not in ("rootfs", "history", "os.features")}
        assert {name: made[name] for name in kept} == {name: document[name] for name in kept}


PIECES = st.lists(
    st.sampled_from(["oci", "docker", "tar", ":", "://", "@", "/", "a", "B", "localhost", ".", "[::1]", "5000", "\0"])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@bounded
@given(PIECES | st.text(max_size=40), st.booleans())
def test_names(text: str, there: bool) -> None:
    for name in (text, f"oci:{text}", f"docker-archive:{text}", f"docker://{text}"):
        parsed = only_ours(SourceName.parse, name, exists=lambda transport, path: there)
        assert parsed is None or str(parsed)
    reference = only_ours(DockerReference.parse, text)
    assert reference is None or DockerReference.parse(str(reference)) == reference
    platform = only_ours(Platform.parse, text)
    assert platform is None or platform.rank(platform) is not None


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two archives of one image each, and the files of a layout, as ``oci/NAME``."""
    path = tmp_path_factory.mktemp("sound")
    layout = Layout(path / "oci")
    layout.index([layout.image([TAR], listed=False, platform=LINUX_AMD64)], tag="v1")
    layout.archive(path / "oci.tar")
    docker_archive(path / "docker.tar", [Saved([TAR], tags=["a:1"])])
    files = {f"oci/{file.relative_to(layout.path)}": file.read_bytes() for file in layout.path.rglob("*/*/*")}
    files["oci/index.json"] = (layout.path / "index.json").read_bytes()
    return {
        "oci-archive": (path / "oci.tar").read_bytes(),
        "docker-archive": (path / "docker.tar").read_bytes(),
        **files,
    }


def read_all(name: SourceName, scratch: Path) -> int:
    """Read everything of an image; returns the number of its layers."""
    with open_source(name, scratch=str(scratch), limits=LIMITS, warn=lambda line: None) as source:
        image = source.image(Platform("linux", "amd64"))
        for number in range(len(image.layers)):
            with image.open_layer(number) as reader:
                reader.finish()
        return len(image.layers)


@settings(bounded, max_examples=60)
@given(data=st.data())
def test_archives(sound: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    transport = data.draw(st.sampled_from(["oci-archive", "docker-archive"]))
    changed = bytearray(sound[transport])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=12))
        changed[at : at + len(piece)] = piece
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed))) :]
    path = tmp_path_factory.mktemp("hostile")
    (path / "x.tar").write_bytes(changed)
    only_ours(read_all, SourceName(transport, str(path / "x.tar")), path)
    assert [file.name for file in path.iterdir()] == ["x.tar"]


@settings(bounded, max_examples=60)
@given(data=st.data())
def test_layouts(sound: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A document of a layout is changed and, as an attacker would, everything above it is made to fit."""
    path = tmp_path_factory.mktemp("hostile")
    layout = Layout(path / "oci")
    config = data.draw(st.just(None) | mutations(config_of([digest_of(TAR)])))
    manifest = {
        "schemaVersion": 2,
        "config": layout.blob(encode(config or config_of([digest_of(TAR)])), mediatype.OCI_CONFIG),
        "layers": [layout.layer(TAR).descriptor],
    }
    manifest = data.draw(st.just(manifest) | mutations(manifest))
    entry = {**layout.blob(encode(manifest), mediatype.OCI_MANIFEST), "platform": LINUX_AMD64}
    entry = layout.index([data.draw(st.just(entry) | mutations(entry))], listed=False)
    layout.add(data.draw(st.just(entry) | mutations(entry)))
    layers = only_ours(read_all, SourceName("oci", str(layout.path)), path)
    assert layers in (None, 0, 1)


@settings(bounded, max_examples=60)
@given(data=st.data())
def test_flipped_bits_are_always_found(
    sound: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("flipped")
    (path / "oci").mkdir()
    (path / "oci" / "oci-layout").write_bytes(b'{"imageLayoutVersion":"1.0.0"}')
    files = {name: content for name, content in sound.items() if name.startswith("oci/")}
    blobs = sorted(name for name in files if "/blobs/" in name)
    victim = data.draw(st.sampled_from(blobs))
    bit = data.draw(st.integers(0, len(files[victim]) * 8 - 1))
    changed = bytearray(files[victim])
    changed[bit // 8] ^= 1 << bit % 8
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(changed if name == victim else content)
    assert only_ours(read_all, SourceName("oci", str(path / "oci")), path) is None
    (path / victim).write_bytes(files[victim])
    assert read_all(SourceName("oci", str(path / "oci")), path) == 1


@bounded
@given(st.dictionaries(names, values, max_size=3))
def test_parse_gives_objects(document: dict[str, Any]) -> None:
    parsed = only_ours(parse, json.dumps(document).encode(), "doc")
    assert parsed is None or parsed == document
