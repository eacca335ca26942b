"""Sparse files in all four notations."""

from __future__ import annotations

import random

import pytest
from support import tars
from support.tars import Pieces, file, pax, sparse_gnu, sparse_pax, tar

from layerstore.errors import LimitError, MalformedError, UnsupportedError
from layerstore.limits import DEFAULT_LIMITS, GIB, Limits
from layerstore.tar.member import Member, Run
from layerstore.tar.reader import MemberReader

FORMATS = ["gnu", "0.0", "0.1", "1.0"]


def sparse(form: str, name: str, size: int, pieces: Pieces) -> bytes:
    return sparse_gnu(name, size, pieces) if form == "gnu" else sparse_pax(name, size, pieces, form)


def members(data: bytes, limits: Limits = DEFAULT_LIMITS) -> list[Member]:
    def at(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    return list(MemberReader(at, limits=limits, warn=pytest.fail))


def content(data: bytes, member: Member) -> bytes:
    out = bytearray(member.size)
    for offset, length, at in member.data:
        out[offset : offset + length] = data[at : at + length]
    return bytes(out)


@pytest.mark.case("T64")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (4098, [(4096, b"ab")]),
        (4098, [(0, b"ab")]),
        (1, [(0, b"x")]),
        (1, []),
        (0, []),
        (511, [(0, b"a" * 511)]),
        (513, [(0, b"a" * 100), (512, b"z")]),
        (9 * 4096, [(i * 4096, b"%04d" % i * 1024) for i in range(1, 9, 2)]),
    ],
)
def test_content_size_and_name_are_exact(form: str, size: int, pieces: list[tuple[int, bytes]]) -> None:
    data = tar(sparse(form, "dir/real", size, pieces), file("next", b"intact"))
    real, following = members(data)
    expected = bytearray(size)
    for offset, piece in pieces:
        expected[offset : offset + len(piece)] = piece
    assert real.path == b"dir/real"
    assert content(data, real) == bytes(expected)
    assert sum(run.length for run in real.data) == sum(len(piece) for _, piece in pieces)
    assert (following.path, content(data, following)) == (b"next", b"intact")


@pytest.mark.case("T64")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("count", [4, 5, 21, 25, 26, 46, 47, 100])
def test_maps_over_several_blocks(form: str, count: int) -> None:
    pieces = [(i * 1000, random.Random(i).randbytes(i % 9 + 1)) for i in range(count)]
    data = tar(sparse(form, "f", count * 1000, pieces), file("next"))
    found, following = members(data)
    assert [(run.offset, data[run.at : run.at + run.length]) for run in found.data] == pieces
    assert following.path == b"next"


@pytest.mark.parametrize("form", FORMATS)
def test_pieces_that_touch_are_one_run(form: str) -> None:
    data = tar(sparse(form, "f", 20, [(2, b"ab"), (4, b"cd"), (10, b"e")]))
    (found,) = members(data)
    assert [(run.offset, run.length) for run in found.data] == [(2, 4), (10, 1)]


@pytest.mark.case("T46")
@pytest.mark.parametrize("form", FORMATS)
def test_huge_holes_cost_nothing_and_the_limit_is_on_the_logical_size(form: str) -> None:
    size = 300 * GIB
    data = tar(sparse(form, "var/log/lastlog", size, [(size - 512, b"x" * 512)]), file("next"))
    found, _ = members(data)
    assert found.size == size
    assert found.data == (Run(size - 512, 512, found.data[0].at),)
    with pytest.raises(LimitError, match=f'"var/log/lastlog" at byte .* is {size} bytes'):
        members(data, Limits(file_bytes=size - 1))


@pytest.mark.case("T43")
@pytest.mark.parametrize(
    "records",
    [
        {"GNU.sparse.size": "x", "GNU.sparse.numblocks": "0", "GNU.sparse.map": ""},
        {"GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,4"},
        {"GNU.sparse.size": "4", "GNU.sparse.map": "0,4"},
        {"GNU.sparse.size": "4", "GNU.sparse.numblocks": "2", "GNU.sparse.map": "0,4"},
        {"GNU.sparse.size": "4", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,4,4"},
        {"GNU.sparse.size": "4", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,-4"},
        {"GNU.sparse.size": "4", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0, 4"},
        {"GNU.sparse.size": "3", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,4"},
        {"GNU.sparse.size": "9", "GNU.sparse.numblocks": "2", "GNU.sparse.map": "4,2,2,2"},
        {"GNU.sparse.size": "9", "GNU.sparse.numblocks": "2", "GNU.sparse.map": "0,3,2,1"},
        {"GNU.sparse.size": "9", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,3"},
        {"GNU.sparse.size": "9", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,5"},
        {"GNU.sparse.size": str(2**63), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,4"},
        {"GNU.sparse.size": "4", "GNU.sparse.numblocks": "1", "GNU.sparse.offset": "0"},
        {"GNU.sparse.size": "4", "GNU.sparse.numblocks": "1", "GNU.sparse.numbytes": "4", "GNU.sparse.offset": "0"},
        {"GNU.sparse.name": "only"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"},
    ],
)
def test_maps_that_make_no_sense_are_refused(records: dict[str, str]) -> None:
    with pytest.raises(MalformedError, match=r'malformed layer member "(victim|only)": .*\(at byte \d+\)'):
        members(tar(pax(records), file("victim", b"data"), file("next")), Limits(file_bytes=2**70))


@pytest.mark.parametrize(
    "text", [b"", b"1\n0\n4", b"2\n0\n4\n", b"x\n", b"-1\n", b"1\n0\n5\n", b"1" * 40 + b"\n", b"\n", b"1\n\n4\n"]
)
def test_maps_in_the_body_that_make_no_sense_are_refused(text: bytes) -> None:
    records = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "4"}
    with pytest.raises(MalformedError, match='malformed layer member "victim"'):
        members(tar(pax(records), file("victim", tars.padded(text) + b"data"), file("next")))


def test_old_gnu_maps_that_make_no_sense_are_refused() -> None:
    good = sparse_gnu("victim", 8192, [(0, b"a" * 512), (4096, b"b" * 512)])
    for fields in (
        {"realsize": tars.octal(4000, 12)},
        {"realsize": tars.base256(-1, 12)},
        {"realsize": b"junk"},
        {"sp": tars.octal(0, 12) + tars.octal(511, 12)},
        {"sp": tars.octal(0, 12) + tars.base256(-512, 12)},
        {"sp": b"junk".ljust(12) + tars.octal(1024, 12)},
    ):
        head = tars.header(
            "victim", typeflag=b"S", size=1024, magic=tars.GNU, raw={"realsize": tars.octal(8192, 12), **fields}
        )
        with pytest.raises(MalformedError, match='malformed layer member "victim"'):
            members(tar(head + good[512:]))


def test_unknown_versions_are_not_supported() -> None:
    records = {"GNU.sparse.major": "2", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    with pytest.raises(UnsupportedError, match=r"2\.0"):
        members(tar(pax(records), file("f", b"data")))


@pytest.mark.parametrize("form", FORMATS)
def test_cuts_inside_a_map_or_body_are_truncation(form: str) -> None:
    data = tar(sparse(form, "f", 100_000, [(i * 1000, b"%03d" % i) for i in range(60)]))
    last = len(data) - len(tars.END) - 512 + 60 * 3 % 512
    for cut in (*range(513, last, 331), last - 1):
        with pytest.raises(MalformedError, match="truncated layer"):
            members(data[:cut])


def test_the_number_of_pieces_is_bounded() -> None:
    text = b"999999999\n"
    records = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "4"}
    with pytest.raises(LimitError, match="999999999 pieces"):
        members(tar(pax(records), file("f", tars.padded(text))))
    many = {"GNU.sparse.size": "4", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,0," * 300_000 + "0,4"}
    with pytest.raises(LimitError, match="300000 pieces"):
        members(tar(pax(many), file("f", b"data")))
