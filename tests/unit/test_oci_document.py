from __future__ import annotations

import pytest

from layerstore.errors import LimitError, MalformedError
from layerstore.oci.document import DEPTH, VALUES, dump, parse, parse_value, refuse_disguises, shown


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{} {}", "not JSON: Extra data"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a":"\xff"}', "not UTF-8"),
        (b'{"a":"tab\tinside"}', "not JSON"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "-Infinity"),
        (b'{"a":1e999}', "out of range"),
        (b'{"a":' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"\\udfff":1}', "surrogate"),
        (b"[]", "an array where an object belongs"),
        (b"null", "null where an object belongs"),
        (b'{"a":1,"a":1}', "'a' twice"),
        (b'{"x":[{"y":{"a":1,"a":2}}]}', "'a' twice"),
        (b'{"a":' + b"[" * DEPTH + b"]" * DEPTH + b"}", "deep"),
        (b"[" * 900_000, "deep"),
    ],
)
def test_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(MalformedError, match=complaint) as caught:
        parse(data, "doc")
    assert str(caught.value).startswith("doc")
    assert "\n" not in str(caught.value)


def test_the_offset_of_an_error_counts_bytes() -> None:
    with pytest.raises(MalformedError) as caught:
        parse('{"ü":x}'.encode(), "doc")
    assert caught.value.offset == 6


def test_size_and_number_of_values_are_bounded() -> None:
    with pytest.raises(LimitError, match=r"11 bytes.*limit of 10"):
        parse(b'{"a":12345}', "doc", limit=10)
    assert parse(b'{"a":12345}', "doc", limit=11) == {"a": 12345}
    with pytest.raises(LimitError, match="values"):
        parse(b"[" + b"0," * VALUES + b"0]", "doc")


def test_nesting_up_to_the_limit_is_fine() -> None:
    data = b"[" * DEPTH + b"1" + b"]" * DEPTH
    assert dump(parse_value(data, "doc")) == data


@pytest.mark.case("Z20")
def test_duplicates_can_be_reported_instead_the_last_one_wins() -> None:
    heard: list[str] = []
    document = parse(b'{"a":1,"b":{"c":1,"c":2,"c":3},"a":4}', "doc", duplicate=heard.append)
    assert document == {"a": 4, "b": {"c": 3}}
    assert heard == ["'c'", "'c'", "'a'"]


def test_values_survive_a_round_trip() -> None:
    data = '{"big":123456789012345678901234567890,"ü":"☃ 😀","esc":"\\u0000\\n","f":1.5,"neg":-0.0,"n":null}'.encode()
    assert dump(parse(data, "doc")) == data


def test_a_dump_keeps_the_order_of_keys() -> None:
    assert dump({"b": 1, "a": [True, None]}) == b'{"b":1,"a":[true,null]}'


def test_a_float_never_passes_for_an_integer() -> None:
    value = parse(b'{"size":1.0}', "doc")["size"]
    assert isinstance(value, float)


@pytest.mark.case("M18")
@pytest.mark.parametrize("key", ["Layers", "LAYERS", "layer\N{LATIN SMALL LETTER LONG S}"])
def test_keys_that_differ_in_case_alone_are_refused(key: str) -> None:
    with pytest.raises(MalformedError, match="can be read as 'layers'"):
        refuse_disguises({key: []}, ("layers",), "doc")


def test_the_real_key_is_no_disguise() -> None:
    document: dict[str, object] = {"layers": [], "layerss": []}
    refuse_disguises(document, ("layers",), "doc")
    assert list(document) == ["layers", "layerss"]


def test_shown_is_short_and_printable() -> None:
    assert shown("a\nb") == "'a\\x0ab'"
    assert shown("x" * 500, 5) == "'xxxxx…'"
    assert shown("\ud800") == "'\\xed\\xa0\\x80'"
    assert shown("\udcff") == "'\\xff'"
