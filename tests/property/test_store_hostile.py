"""Hostile bytes in a store's documents and in manifests raise our errors, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores import image

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, UsageError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.format import LeaseDocument, ReferenceDocument, StoreMarker
from layerstore.store.names import check_name, decode_name, encode_name
from layerstore.store.reach import links

GOOD = {
    "marker": StoreMarker().to_bytes(),
    "reference": ReferenceDocument("a/b", Descriptor("x", Digest.of(b""), 0, {"a": "b"})).to_bytes(),
    "lease": LeaseDocument("id", 1_700_000_000, frozenset({Digest.of(b"")})).to_bytes(),
    "manifest": next(reversed(image(b"layer").blobs.values())),
}
PARSE: dict[str, Callable[[bytes, str], object]] = {
    "marker": StoreMarker.parse,
    "reference": ReferenceDocument.parse,
    "lease": LeaseDocument.parse,
    "manifest": links,
}
KINDS = sorted(GOOD)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


def assert_one_line(error: ImgtoolError) -> None:
    text = str(error)
    assert text.encode()
    assert len(text.splitlines()) == 1


def feed(kind: str, data: bytes) -> None:
    try:
        PARSE[kind](data, "x")
    except ImgtoolError as error:
        assert_one_line(error)


@given(kind=st.sampled_from(KINDS), data=st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_any_bytes(kind: str, data: bytes) -> None:
    feed(kind, data)


@given(kind=st.sampled_from(KINDS), at=st.integers(0), cut=st.integers(0, 20), put=st.binary(max_size=8))
@settings(deadline=None, max_examples=200)
def test_good_bytes_spoiled(kind: str, at: int, cut: int, put: bytes) -> None:
    good = GOOD[kind]
    at %= len(good) + 1
    feed(kind, good[:at] + put + good[at + cut :])


@given(kind=st.sampled_from(KINDS), number=st.integers(0), value=values)
@settings(deadline=None, max_examples=200)
def test_good_documents_with_another_value(kind: str, number: int, value: object) -> None:
    document = json.loads(GOOD[kind])
    document[sorted(document)[number % len(document)]] = value
    feed(kind, json.dumps(document).encode("utf-8", "surrogatepass"))


@given(value=values)
@settings(deadline=None, max_examples=100)
def test_any_descriptor_anywhere(value: object) -> None:
    document = {
        "x": [{"mediaType": "x", "digest": str(Digest.of(b"")), "size": 0, "annotations": value, "data": value}]
    }
    feed("manifest", json.dumps(document).encode("utf-8", "surrogatepass"))


@given(name=st.text(max_size=300) | st.from_regex(r"[A-Za-z0-9._:/-]{1,300}", fullmatch=True))
@settings(deadline=None, max_examples=200)
def test_names(name: str) -> None:
    try:
        check_name(name)
    except UsageError as error:
        assert_one_line(error)
        return
    file = encode_name(name)
    assert decode_name(file) == name
    assert "/" not in file
    assert not file.startswith(".")
    assert len(file.encode()) <= 255


@given(one=st.from_regex(r"[a-c./%2F]{1,8}", fullmatch=True), two=st.from_regex(r"[a-c./%2F]{1,8}", fullmatch=True))
@settings(deadline=None, max_examples=200)
def test_no_two_names_are_one_file(one: str, two: str) -> None:
    try:
        files = encode_name(one), encode_name(two)
    except UsageError:
        with pytest.raises(UsageError):
            encode_name(one)
            encode_name(two)
        return
    assert (files[0] == files[1]) == (one == two)
