"""The documents of a directory store, byte for byte, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from layerstore.digest import Digest
from layerstore.errors import LimitError, MalformedError, UnsupportedError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.format import (
    MARKER_BYTES,
    LeaseDocument,
    ReferenceDocument,
    StoreMarker,
)

ZEROS = "sha256:" + "0" * 64
ONES = "sha256:" + "1" * 64
TARGET = Descriptor("text/x", Digest.parse(ZEROS), 7, {"b": "2", "a": "ü"})
MARKER = b'{"magic":"imgtool store","version":1,"incompatible":[],"compatible":[]}\n'
REFERENCE = (
    '{"magic":"imgtool reference","version":1,"incompatible":[],"compatible":[],"name":"a/b",'
    f'"target":{{"mediaType":"text/x","digest":"{ZEROS}","size":7,"annotations":{{"a":"ü","b":"2"}}}}}}\n'
).encode()
LEASE = (
    '{"magic":"imgtool lease","version":1,"incompatible":[],"compatible":[],"id":"abc","expires":1700000000,'
    f'"pins":["{ZEROS}","{ONES}"]}}\n'
).encode()

Parse = Callable[[bytes, str], object]
ALL = [
    pytest.param(StoreMarker.parse, MARKER, id="marker"),
    pytest.param(ReferenceDocument.parse, REFERENCE, id="reference"),
    pytest.param(LeaseDocument.parse, LEASE, id="lease"),
]


def changed(data: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(data), **fields}).encode()


def without(data: bytes, field: str) -> bytes:
    return json.dumps({name: value for name, value in json.loads(data).items() if name != field}).encode()


def test_the_bytes_are_these() -> None:
    assert StoreMarker().to_bytes() == MARKER
    assert ReferenceDocument("a/b", TARGET).to_bytes() == REFERENCE
    pins = frozenset({Digest.parse(ONES), Digest.parse(ZEROS)})
    assert LeaseDocument("abc", 1_700_000_000, pins).to_bytes() == LEASE


def test_they_read_as_they_were_written() -> None:
    assert StoreMarker.parse(MARKER, "x") == StoreMarker()
    assert ReferenceDocument.parse(REFERENCE, "x") == ReferenceDocument("a/b", TARGET)
    lease = LeaseDocument.parse(LEASE, "x")
    assert lease.pins == {Digest.parse(ONES), Digest.parse(ZEROS)}
    assert lease.to_bytes() == LEASE


def test_a_lease_is_over_at_its_second() -> None:
    lease = LeaseDocument("abc", 1_700_000_000)
    assert not lease.expired(1_700_000_000 * 10**9 - 1)
    assert lease.expired(1_700_000_000 * 10**9)


@pytest.mark.case("C08")
@pytest.mark.parametrize(("parse", "data"), ALL)
def test_other_versions_are_refused_by_number(parse: Parse, data: bytes) -> None:
    for version in (0, 2, -1, 10**30):
        with pytest.raises(UnsupportedError, match=f"version {version}"):
            parse(changed(data, version=version), "x")


@pytest.mark.case("C08")
@pytest.mark.parametrize(("parse", "data"), ALL)
def test_unknown_features_are_named_if_they_matter(parse: Parse, data: bytes) -> None:
    with pytest.raises(UnsupportedError, match="'shards', 'zeal'"):
        parse(changed(data, incompatible=["zeal", "shards"]), "x")
    parse(changed(data, compatible=["zeal"], later_field={"any": ["thing"]}), "x")


@pytest.mark.parametrize(("parse", "data"), ALL)
@pytest.mark.parametrize(
    "bad",
    [
        {"magic": "imgtool other"},
        {"magic": None},
        {"version": "1"},
        {"version": 1.0},
        {"version": True},
        {"incompatible": None},
        {"incompatible": [1]},
        {"compatible": "all"},
    ],
)
def test_the_common_fields_are_checked(parse: Parse, data: bytes, bad: dict[str, object]) -> None:
    with pytest.raises(MalformedError, match="the file"):
        parse(changed(data, **bad), "the file")


@pytest.mark.parametrize(("parse", "data"), ALL)
def test_a_missing_field_is_noticed(parse: Parse, data: bytes) -> None:
    for field in json.loads(data):
        with pytest.raises(MalformedError, match="the file"):
            parse(without(data, field), "the file")


@pytest.mark.parametrize(("parse", "data"), ALL)
@pytest.mark.parametrize(
    "make",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"[" * 60_000,
        lambda data: b"null",
        lambda data: b"\xff" + data,
        lambda data: data + data,
        lambda data: b'{"magic":1,' + data[1:],
        lambda data: b"\0" * len(data),
    ],
)
def test_other_bytes_are_malformed(parse: Parse, data: bytes, make: Callable[[bytes], bytes]) -> None:
    with pytest.raises(MalformedError, match="the file"):
        parse(make(data), "the file")


def test_an_oversized_document_is_not_parsed() -> None:
    with pytest.raises(LimitError, match="the file"):
        StoreMarker.parse(MARKER + b" " * MARKER_BYTES, "the file")


@pytest.mark.parametrize(
    "bad",
    [
        {"expires": -1},
        {"expires": 1 << 40},
        {"expires": "soon"},
        {"expires": True},
        {"pins": {}},
        {"pins": ["sha256:00"]},
        {"pins": ["sha256:../../../etc/passwd"]},
        {"pins": [7]},
        {"id": 7},
    ],
)
def test_the_fields_of_a_lease_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(MalformedError):
        LeaseDocument.parse(changed(LEASE, **bad), "x")


@pytest.mark.case("M11")
@pytest.mark.parametrize(
    "digest", ["sha256:" + "A" * 64, "sha256:" + "0" * 63, "sha256:../../x", "", "sha512:" + "0" * 64, 7]
)
def test_the_target_of_a_reference_is_checked(digest: object) -> None:
    target = {"mediaType": "text/x", "digest": digest, "size": 7}
    with pytest.raises(MalformedError, match="target"):
        ReferenceDocument.parse(changed(REFERENCE, target=target), "x")


@pytest.mark.case("M11")
def test_a_digest_that_cannot_be_verified_is_not_consumed() -> None:
    target = {"mediaType": "text/x", "digest": "blake3:" + "0" * 64, "size": 7}
    with pytest.raises(UnsupportedError, match="blake3"):
        ReferenceDocument.parse(changed(REFERENCE, target=target), "x")
