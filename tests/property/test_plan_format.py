"""Plans: what is written is read, whatever order it came in; what is hostile raises our errors, in one line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import part, plan

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, LimitError, MalformedError, UnsupportedError
from layerstore.oci.document import dump
from layerstore.pack.format import BLOCK_SIZE
from prefetch.plans.format import (
    CERTAIN,
    FEATURES,
    PLAN_BYTES,
    Plan,
    PlannedRange,
    PlanPart,
    encode_plan,
    order,
    parse_plan,
)
from prefetch.trace.format import MAX_PACK, MAX_TIME

DIGESTS = st.binary(min_size=1, max_size=4).map(Digest.of)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def ranges(draw: st.DrawFn, devices: int) -> PlannedRange:
    length = draw(st.integers(1, MAX_PACK // BLOCK_SIZE))
    offset = draw(st.integers(0, MAX_PACK // BLOCK_SIZE - length))
    path = draw(st.none() | TEXTS)
    return PlannedRange(
        draw(st.integers(1, devices)),
        offset * BLOCK_SIZE,
        length * BLOCK_SIZE,
        draw(st.integers(0, 5) | st.integers(0, MAX_TIME)),
        draw(st.integers(1, CERTAIN)),
        path,
        draw(st.integers(0, MAX_TIME)) if path is not None else 0,
    )


@st.composite
def parts(draw: st.DrawFn, metadata: Digest) -> PlanPart:
    packs = draw(st.lists(DIGESTS, min_size=1, max_size=3))
    return PlanPart(metadata, tuple(packs), order(draw(st.lists(ranges(len(packs)), max_size=6))))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers = draw(st.lists(DIGESTS, max_size=3, unique=True))
    return Plan(
        tuple(draw(parts(layer)) for layer in layers),
        draw(TEXTS),
        draw(TEXTS),
        draw(st.none() | TEXTS),
        draw(st.dictionaries(TEXTS, JSON, max_size=3)),
        draw(st.dictionaries(TEXTS, JSON, max_size=3)),
    )


@given(plans())
def test_what_is_written_is_read(it: Plan) -> None:
    data = encode_plan(it, "it")
    again = parse_plan(data, "it")
    assert again == it
    assert again.to_bytes() == data and again.digest == Digest.of(data)


@given(plans(), st.randoms(use_true_random=False))
def test_the_order_in_which_ranges_come_is_not_in_the_document(it: Plan, dice: random.Random) -> None:
    document = it.to_json()
    for each in document["parts"]:  # type: ignore[attr-defined]
        dice.shuffle(each["ranges"])
    assert parse_plan(dump(document), "it").digest == it.digest


@given(st.lists(ranges(3), max_size=8), st.randoms(use_true_random=False))
def test_order_is_total(some: list[PlannedRange], dice: random.Random) -> None:
    """Also of ranges with the same due, device and offset."""
    twins = [*some, *(each._replace(length=BLOCK_SIZE, chance=1) for each in some)]
    other = list(twins)
    dice.shuffle(other)
    assert order(twins) == order(other)


@given(plans(), st.data())
def test_hostile_changes_raise_our_errors_alone(it: Plan, data: st.DataObject) -> None:
    """Any value anywhere in a document, or any byte of it, changed: a plan, or one of ours in one line."""
    document = json.loads(it.to_bytes())
    places: list[Callable[[Any], None]] = []

    def collect(holder: Any, key: Any) -> None:
        places.append(lambda value: holder.__setitem__(key, value))
        value = holder[key]
        if isinstance(value, dict):
            for name in value:
                collect(value, name)
        elif isinstance(value, list):
            for number in range(len(value)):
                collect(value, number)

    for name in document:
        collect(document, name)
    data.draw(st.sampled_from(places))(data.draw(JSON))
    _parses_or_refuses(dump(document))
    raw = bytearray(it.to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    _parses_or_refuses(bytes(raw))
    _parses_or_refuses(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@given(st.binary(max_size=200))
def test_any_bytes_raise_our_errors_alone(data: bytes) -> None:
    _parses_or_refuses(data)


def _parses_or_refuses(data: bytes) -> None:
    try:
        it = parse_plan(data, "plan x")
    except ImgtoolError as error:
        message = str(error)
        assert message.startswith("plan x") and message.isprintable() and len(message) < 1000
        return
    for each in it.parts:
        for planned in each.ranges:
            assert 1 <= planned.device <= len(each.packs) and planned.end <= MAX_PACK
    assert parse_plan(it.to_bytes(), "again") == it


def _document(**changes: object) -> bytes:
    return dump({**plan(part(1)).to_json(), **changes})


GOOD = [1, 0, 4096, 0, 1]


def _with_range(value: object) -> bytes:
    made = part(1)
    return _document(
        parts=[{"metadata": str(made.metadata), "packs": [str(pack) for pack in made.packs], "ranges": [value]}]
    )


@pytest.mark.parametrize(
    "value",
    [
        None, {}, "x", [], GOOD[:4], [*GOOD, "path"], [*GOOD, "path", 0, 0],
        [0, *GOOD[1:]], [2, *GOOD[1:]], [True, *GOOD[1:]], [1.0, *GOOD[1:]], ["1", *GOOD[1:]],
        [1, 1, 4096, 0, 1], [1, -4096, 4096, 0, 1], [1, 0, 0, 0, 1], [1, 0, 4095, 0, 1], [1, 0, -4096, 0, 1],
        [1, MAX_PACK, 4096, 0, 1], [1, 0, MAX_PACK + 4096, 0, 1],
        [1, 0, 4096, -1, 1], [1, 0, 4096, MAX_TIME + 1, 1], [1, 0, 4096, None, 1],
        [1, 0, 4096, 0, 0], [1, 0, 4096, 0, CERTAIN + 1],
        [*GOOD, 7, 0], [*GOOD, None, 0], [*GOOD, "path", -1], [*GOOD, "path", MAX_TIME + 1],
    ],
)  # fmt: skip
def test_a_range_that_no_pack_can_have_is_refused(value: object) -> None:
    assert parse_plan(_with_range(GOOD), "it").parts[0].ranges == (PlannedRange(1, 0, 4096, 0, 1),)
    with pytest.raises(MalformedError, match=r"^it: .*range"):
        parse_plan(_with_range(value), "it")


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": "imgtool trace"}, {"magic": None}, {"name": None}, {"image": 7}, {"manifest": 7}, {"manifest": []},
        {"learned": []}, {"score": None}, {"parts": {}}, {"parts": None}, {"parts": [7]}, {"parts": [{}]},
        {"parts": [{"metadata": "sha256:x", "packs": [], "ranges": []}]},
        {"parts": [{"metadata": None, "packs": [], "ranges": []}]},
        {"parts": [{"metadata": "md5:" + "0" * 32, "packs": [], "ranges": []}]},
        {"parts": [{"metadata": "sha256:" + "0" * 64, "packs": [7], "ranges": []}]},
        {"parts": [{"metadata": "sha256:" + "0" * 64, "packs": {}, "ranges": []}]},
        {"parts": [{"metadata": "sha256:" + "0" * 64, "packs": [], "ranges": {}}]},
        {"parts": [{"metadata": "sha256:" + "0" * 64, "packs": [], "ranges": []}] * 2},
    ],
)  # fmt: skip
def test_a_document_of_another_shape_is_refused(changes: dict[str, object]) -> None:
    assert parse_plan(_document(), "it") == plan(part(1))
    with pytest.raises(MalformedError, match=r"^it"):
        parse_plan(_document(**changes), "it")


@pytest.mark.parametrize("version", [0, 2, True, 1.0, "1", None, "\n" * 5000, [1]])
def test_another_version_is_refused_by_name(version: object) -> None:
    with pytest.raises(UnsupportedError, match=r"^it has version") as caught:
        parse_plan(_document(version=version), "it")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize("features", [["rewind"], "x", None, ["x" * 10_000], [[]], {}])
def test_a_feature_that_is_not_known_is_refused_by_name(features: object) -> None:
    assert frozenset() == FEATURES
    with pytest.raises(UnsupportedError, match="features that this release lacks") as caught:
        parse_plan(_document(incompatible=features), "it")
    assert len(str(caught.value)) < 300


def test_what_is_not_known_and_compatible_is_ignored() -> None:
    assert parse_plan(_document(compatible=["colour"], colour="red"), "it") == plan(part(1))


def test_sizes_are_limited_before_anything_is_parsed() -> None:
    with pytest.raises(LimitError, match=str(PLAN_BYTES)):
        parse_plan(b"{" * (PLAN_BYTES + 1), "it")
    many = b'{"parts":[' + b"[]," * 1_000_001 + b"[]]}"
    with pytest.raises(LimitError, match="values"):
        parse_plan(many, "it")


def test_what_no_reader_would_take_is_not_encoded() -> None:
    long = PlannedRange(1, 0, 4096, 0, CERTAIN, "p" * (PLAN_BYTES + 1))
    with pytest.raises(LimitError):
        encode_plan(plan(replace(part(1), ranges=(long,))), "it")
    with pytest.raises(MalformedError, match="two of its parts"):
        encode_plan(plan(part(1), part(1)), "it")
    with pytest.raises(MalformedError, match="device 2"):
        encode_plan(plan(replace(part(1), ranges=(PlannedRange(2, 0, 4096, 0),))), "it")


def test_a_plan_of_the_largest_useful_size_is_taken() -> None:
    """A hundred thousand ranges with short paths, as docs/formats.md promises."""
    ranges_of = order(PlannedRange(1, 4096 * n, 4096, n, CERTAIN, "usr/lib/x", 4096 * n) for n in range(100_000))
    it = plan(replace(part(1), ranges=ranges_of))
    assert parse_plan(encode_plan(it, "it"), "it") == it
    assert it.parts[0].bytes == 4096 * 100_000
