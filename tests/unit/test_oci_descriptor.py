from __future__ import annotations

import base64
from typing import Any

import pytest

from layerstore.digest import Digest
from layerstore.errors import CorruptError, MalformedError, UnsupportedError
from layerstore.oci.descriptor import Descriptor

HELLO = Digest.of(b"hello")
GOOD: dict[str, Any] = {"mediaType": "text/plain", "digest": str(HELLO), "size": 5}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_fields() -> None:
    document = {
        **GOOD,
        "annotations": {"b": "2", "a": "1"},
        "urls": ["https://example.test/x"],
        "artifactType": "application/x",
        "platform": {"os": "linux"},
        "x-unknown": [1, {"deep": None}],
    }
    descriptor = Descriptor.parse(document, "d")
    assert (descriptor.media_type, descriptor.digest, descriptor.size) == ("text/plain", HELLO, 5)
    assert descriptor.urls == ("https://example.test/x",)
    assert descriptor.artifact_type == "application/x"
    assert descriptor.extra["x-unknown"] == [1, {"deep": None}]
    again = descriptor.to_json()
    assert again == document
    assert list(again)[:3] == ["mediaType", "digest", "size"]
    assert list(again["annotations"]) == ["a", "b"]  # type: ignore[call-overload]
    assert Descriptor.parse(again, "d") == descriptor


def test_null_counts_as_absent() -> None:
    document = {**GOOD, "annotations": None, "urls": None, "data": None, "artifactType": None}
    descriptor = Descriptor.parse(document, "d")
    assert (descriptor.annotations, descriptor.urls, descriptor.data, descriptor.artifact_type) == ({}, (), None, None)


@pytest.mark.case("M12")
@pytest.mark.parametrize("size", [-1, 2**63, 2**64, "10", 1.5, 5.0, True, None, [5], {}])
def test_sizes_are_small_non_negative_integers(size: object) -> None:
    document = {**GOOD, "size": size}
    with pytest.raises(MalformedError, match=r"d\.size"):
        Descriptor.parse(document, "d")


@pytest.mark.case("M12")
@pytest.mark.parametrize("size", [0, 1, 2**62, 2**63 - 1])
def test_sizes_are_only_numbers_until_something_is_read(size: int) -> None:
    assert Descriptor.parse({**GOOD, "size": size}, "d").size == size


@pytest.mark.case("M11")
@pytest.mark.parametrize(
    "digest",
    [
        "sha256:" + "AB" * 32,
        "sha256:" + "a" * 63,
        "sha256:" + "a" * 65,
        "sha256:../../x",
        "sha256:" + "a" * 64 + "/../../x",
        "sha256:",
        "sha256",
        "",
        "../x:" + "a" * 64,
        "sha512:" + "a" * 64,
        "sha256:" + "a" * 63 + "\n",
        " " + str(HELLO),
        None,
        7,
    ],
)
def test_digests_of_bad_grammar(digest: object) -> None:
    with pytest.raises(MalformedError, match=r"d\.digest") as caught:
        Descriptor.parse({**GOOD, "digest": digest}, "d")
    assert "\n" not in str(caught.value)


@pytest.mark.case("M11")
@pytest.mark.parametrize("digest", ["md5:" + "a" * 32, "blake3:" + "a" * 64, "sha256+b64u:abc"])
def test_digests_that_cannot_be_verified(digest: str) -> None:
    with pytest.raises(UnsupportedError, match=r"d: digest algorithm .* can't be verified"):
        Descriptor.parse({**GOOD, "digest": digest}, "d")


@pytest.mark.case("M11")
def test_sha512_is_a_digest_like_another() -> None:
    value = "sha512:" + "0a" * 64
    assert str(Descriptor.parse({**GOOD, "digest": value}, "d").digest) == value


@pytest.mark.case("M12")
def test_embedded_data_is_verified() -> None:
    assert Descriptor.parse({**GOOD, "data": encoded(b"hello")}, "d").data == b"hello"
    with pytest.raises(CorruptError, match="another digest"):
        Descriptor.parse({**GOOD, "data": encoded(b"jello")}, "d")
    with pytest.raises(CorruptError, match="another size"):
        Descriptor.parse({**GOOD, "data": encoded(b"hello!")}, "d")
    for bad in ("aGVsbG8", "a b=", "ü", "aGVs\nbG8="):
        with pytest.raises(MalformedError, match="base64"):
            Descriptor.parse({**GOOD, "data": bad}, "d")
    with pytest.raises(MalformedError, match=r"d\.data is an integer"):
        Descriptor.parse({**GOOD, "data": 5}, "d")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mediaType": ""}, "mediaType"),
        ({"mediaType": None}, "mediaType is null"),
        ({"annotations": {"a": 1}}, r"annotations\['a'\] is an integer"),
        ({"annotations": []}, "annotations is an array"),
        ({"urls": "https://example.test"}, "urls"),
        ({"urls": [1]}, "urls"),
        ({"artifactType": 1}, "artifactType is an integer"),
        ({"Digest": "x"}, "'Digest' can be read as 'digest'"),
    ],
)
def test_other_fields(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(MalformedError, match=complaint):
        Descriptor.parse({**GOOD, **change}, "d")


@pytest.mark.parametrize("name", ["mediaType", "digest", "size"])
def test_required_fields(name: str) -> None:
    document = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(MalformedError, match=f"d has no '{name}'"):
        Descriptor.parse(document, "d")


@pytest.mark.parametrize("document", [None, [], "x", 1, True])
def test_only_objects(document: object) -> None:
    with pytest.raises(MalformedError, match=r"d is .* where a descriptor belongs"):
        Descriptor.parse(document, "d")
