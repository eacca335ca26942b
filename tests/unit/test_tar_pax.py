"""Extended headers: records, unset keywords, times, global headers and extended attributes."""

from __future__ import annotations

import base64
import struct

import pytest
from support import tars
from support.tars import file, global_pax, pax, pax_raw, tar

from layerstore.errors import LimitError, MalformedError
from layerstore.limits import DEFAULT_LIMITS
from layerstore.tar.format import EXTENDED_BYTES
from layerstore.tar.member import Member
from layerstore.tar.pax import parse_records, timestamp
from layerstore.tar.reader import MemberReader

CAPS_V2 = struct.pack("<IIIII", 0x0200_0000, 0x2000, 0, 0, 0)
CAPS_V3 = struct.pack("<IIIIII", 0x0300_0000, 0x2000, 0, 0, 0, 100_000)


def read(data: bytes) -> tuple[list[Member], list[str]]:
    warnings: list[str] = []

    def at(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    return list(MemberReader(at, limits=DEFAULT_LIMITS, warn=warnings.append)), warnings


def only(*parts: bytes) -> Member:
    (member,), warnings = read(tar(*parts))
    assert warnings == []
    return member


def refused(*parts: bytes) -> str:
    with pytest.raises(MalformedError) as caught:
        read(tar(*parts))
    assert caught.value.offset is not None
    return str(caught.value)


# records


@pytest.mark.case("T67")
@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"999 path=zz\n", "wrong length"),
        (b"0 path=zz\n", "wrong length"),
        (b"5 path=zz\n", "does not end"),
        (b"12 path=zz\n", "wrong length"),
        (b"10 path=zzz", "does not end"),
        (b"path=zz\n", "no length"),
        (b"12path=zz\n", "no length"),
        (b" 11 path=zz\n", "no length"),
        (b"-1 path=zz\n", "no length"),
        (b"99999999999999 path=zz\n", "no length"),
        (b"3 \n", "no keyword"),
        (b"8 pathz\n", "no keyword"),
        (b"5 =z\n", "no keyword"),
        (b"9 p\0th=z\n", "no keyword"),
        (b"11 path=zzz\n" + bytes(10), "wrong length|does not end|no length"),
        (b"12 path=zzz\n" + bytes(10), "no length"),
    ],
)
def test_records_that_break_the_format(body: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_records(body)
    assert refused(file("ok"), pax_raw(body, name="PaxHeaders/victim"), file("victim")).endswith("(at byte 512)")


@pytest.mark.case("T67")
@pytest.mark.parametrize("keyword", ["path", "linkpath", "GNU.sparse.name"])
def test_a_nul_in_a_name_is_refused(keyword: str) -> None:
    typeflag = b"1" if keyword == "linkpath" else b"0"
    message = refused(pax({keyword: b"a\0b"}), file("victim", typeflag=typeflag, linkname="a"))
    assert 'member "victim": NUL in' in message


def test_values_may_hold_anything() -> None:
    records: list[tuple[str, str | bytes]] = [("a", "1"), ("b", b"\n5 c=x\n\0=="), ("c", ""), ("a", "2")]
    body = b"".join(tars.record(key, value) for key, value in records)
    assert parse_records(body) == [(b"a", b"1"), (b"b", b"\n5 c=x\n\0=="), (b"c", b""), (b"a", b"2")]


def test_the_last_record_of_a_keyword_counts() -> None:
    assert only(pax([("uid", "1"), ("uid", "2")]), file("f")).attrs.uid == 2


def test_solaris_extended_headers_are_extended_headers() -> None:
    assert only(pax({"path": "real"}, typeflag=b"X"), file("f")).path == b"real"


def test_the_second_of_two_extended_headers_counts() -> None:
    (member,), warnings = read(tar(pax({"path": "first", "size": "9"}), pax({"uid": "5"}), file("f", b"x")))
    assert (member.path, member.attrs.uid, member.size) == (b"f", 5, 1)
    assert ["two extended headers" in warning for warning in warnings] == [True]


def test_unknown_keywords_and_charsets_change_nothing() -> None:
    assert only(pax({"hdrcharset": "BINARY", "comment": "x", "VENDOR.key": "y", "atime": "x"}), file("f")).path == b"f"


def test_the_size_of_an_extended_header_is_bounded() -> None:
    with pytest.raises(LimitError, match="extended header"):
        read(tars.header("x", typeflag=b"x", size=EXTENDED_BYTES + 1))
    with pytest.raises(LimitError, match="global headers"):
        read(tar(*[global_pax({"comment": "c" * 100_000})] * 3))


# unset keywords and global headers


@pytest.mark.case("T36")
def test_an_empty_value_unsets_its_keyword() -> None:
    records = {"path": "", "mtime": "", "uid": "", "size": "", "linkpath": "", "SCHILY.xattr.user.overlay.origin": ""}
    member = only(pax(records), file("ustar", b"xy", mtime=5, uid=6))
    assert (member.path, member.attrs.mtime, member.attrs.uid, member.size) == (b"ustar", 5, 6, 2)
    assert member.attrs.xattrs == ((b"user.overlay.origin", b""),)


@pytest.mark.case("T36", "T45")
def test_an_empty_value_unsets_a_global_one_for_its_member() -> None:
    data = tar(
        global_pax({"uid": "7"}),
        file("a"),
        pax({"uid": ""}),
        file("b", uid=1),
        file("c"),
        global_pax({"uid": ""}),
        file("d"),
    )
    members, warnings = read(data)
    assert [m.attrs.uid for m in members] == [7, 1, 7, 0]
    assert warnings == []


@pytest.mark.case("T45")
def test_global_headers_are_no_members_and_hold_for_those_that_follow() -> None:
    assert read(tar(global_pax({"comment": "0123abcd"}))) == ([], [])
    data = tar(
        file("before", uid=1),
        global_pax({"comment": "c", "uid": "9", "mtime": "1.5"}),
        file("a"),
        pax({"uid": "3"}),
        file("b"),
    )
    members, warnings = read(data)
    assert [(m.path, m.attrs.uid, m.attrs.mtime, m.attrs.nsec) for m in members] == [
        (b"before", 1, 0, 0),
        (b"a", 9, 1, 500_000_000),
        (b"b", 3, 1, 500_000_000),
    ]
    assert warnings == []


def test_a_global_header_between_an_extended_one_and_its_member() -> None:
    member = only(pax({"uid": "3"}), global_pax({"uid": "9", "gid": "9"}), file("f"))
    assert (member.attrs.uid, member.attrs.gid) == (3, 9)


@pytest.mark.parametrize("keyword", ["path", "linkpath", "size", "GNU.sparse.map"])
def test_global_headers_may_not_name_or_size_all_members(keyword: str) -> None:
    assert f"global header sets {keyword}" in refused(global_pax({keyword: "1"}), file("f"))


# times


@pytest.mark.case("T51")
@pytest.mark.parametrize(
    ("text", "seconds", "nanoseconds"),
    [
        ("1635528968.656625010", 1_635_528_968, 656_625_010),
        ("1.9999999999", 1, 999_999_999),
        ("-0.5", -1, 500_000_000),
        ("-1.25", -2, 750_000_000),
        ("-1.0000000001", -2, 999_999_999),
        ("-1.0000000000", -1, 0),
        ("0", 0, 0),
        ("-0", 0, 0),
        ("12.", 12, 0),
        ("0001.1", 1, 100_000_000),
        ("9007199254740993.000000001", 9_007_199_254_740_993, 1),
        ("9223372036854775807.999999999", 2**63 - 1, 999_999_999),
        ("-9223372036854775808", -(2**63), 0),
    ],
)
def test_times_are_exact(text: str, seconds: int, nanoseconds: int) -> None:
    assert timestamp(text.encode()) == (seconds, nanoseconds)
    attrs = only(pax({"mtime": text}), file("f", mtime=99)).attrs
    assert (attrs.mtime, attrs.nsec) == (seconds, nanoseconds)


@pytest.mark.case("T51", "T43")
@pytest.mark.parametrize(
    "text",
    [".5", "1e3", "1e400", "nan", "inf", "--1", "+1", "1.5.5", "1,5", " 1", "1 ", "-", ".", "0x1", "1.-5", "\u0661"],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    assert 'member "f": not a time' in refused(pax({"mtime": text}), file("f"))


# extended attributes


@pytest.mark.case("T30")
def test_attributes_are_bytes() -> None:
    every = bytes(range(256)) * 2
    member = only(
        pax(
            [
                ("SCHILY.xattr.security.capability", CAPS_V2),
                ("SCHILY.xattr.user.bin", every),
                (b"SCHILY.xattr.user.\xff", b"\n"),
            ]
        ),
        file("ping"),
    )
    assert member.attrs.xattrs == (
        (b"security.capability", CAPS_V2),
        (b"user.bin", every),
        (b"user.\xff", b"\n"),
    )


@pytest.mark.case("T31")
def test_both_notations_of_attributes() -> None:
    raw, _ = read(tar(pax({"SCHILY.xattr.security.capability": CAPS_V2}), file("a")))
    assert raw[0].attrs.xattrs == ((b"security.capability", CAPS_V2),)
    value = base64.b64encode(b"\0value\xff\n").rstrip(b"=")
    encoded = only(pax({"LIBARCHIVE.xattr.user.a%3Db%20c": value, "LIBARCHIVE.xattr.user.z": ""}), file("b"))
    assert encoded.attrs.xattrs == ((b"user.a=b c", b"\0value\xff\n"), (b"user.z", b""))
    both = only(pax({"SCHILY.xattr.user.a": "s", "LIBARCHIVE.xattr.user.a": base64.b64encode(b"l")}), file("c"))
    assert both.attrs.xattrs == ((b"user.a", b"s"),)


@pytest.mark.case("T31")
@pytest.mark.parametrize("value", ["%%%", "a", "a===", "YQ\n", "Y Q", "YQ==YQ"])
def test_attributes_that_are_not_base64_are_refused(value: str) -> None:
    assert "user.a is not base64" in refused(pax({"LIBARCHIVE.xattr.user.a": value}), file("f"))


@pytest.mark.case("T32")
@pytest.mark.parametrize("value", [CAPS_V2, CAPS_V3, CAPS_V3[:20] + bytes(4), struct.pack("<III", 0x0100_0001, 1, 2)])
def test_capabilities_are_kept_verbatim(value: bytes) -> None:
    assert only(pax({"SCHILY.xattr.security.capability": value}), file("f")).attrs.xattrs[0][1] == value


@pytest.mark.case("T32")
@pytest.mark.parametrize("value", [b"", b"\1", b"\0\0\0\4" + bytes(20), CAPS_V2 + b"x", CAPS_V3[:21], CAPS_V3[:12]])
def test_capabilities_that_the_kernel_would_refuse_are_kept_with_a_warning(value: bytes) -> None:
    (member,), warnings = read(tar(pax({"SCHILY.xattr.security.capability": value}), file("usr/bin/ping")))
    assert member.attrs.xattrs == ((b"security.capability", value),)
    assert len(warnings) == 1
    assert 'security.capability of layer member "usr/bin/ping" is kept but malformed' in warnings[0]


@pytest.mark.parametrize(
    ("keyword", "value", "what"),
    [
        ("SCHILY.xattr." + "n" * 256, "v", "is 256 bytes, of 255 allowed"),
        ("SCHILY.xattr.user.v", "v" * 65_537, "is 65537 bytes, of 65536 allowed"),
        ("LIBARCHIVE.xattr.user.a%00b", "", "without a proper name"),
        ("SCHILY.xattr.", "v", "without a proper name"),
    ],
)
def test_attributes_that_linux_can_not_store_are_refused(keyword: str, value: str, what: str) -> None:
    message = refused(pax({keyword: value}), file("etc/victim"))
    assert what in message
    assert 'member "etc/victim"' in message


def test_attributes_up_to_the_kernel_s_limits() -> None:
    records = [(f"SCHILY.xattr.user.{i:0250}", b"v" * 100) for i in range(5000)]
    assert len(only(pax(records), file("f")).attrs.xattrs) == 5000
    values = [(f"SCHILY.xattr.user.{i}", b"v" * 65_536) for i in range(16)]
    assert {len(value) for _, value in only(pax(values), file("f")).attrs.xattrs} == {65_536}


def test_attributes_in_notations_that_need_the_host_are_reported_once() -> None:
    records = {"SCHILY.acl.access": "user::rw-", "RHT.security.selinux": "system_u"}
    members, warnings = read(tar(pax(records), file("a"), pax(records), file("b")))
    assert [m.attrs.xattrs for m in members] == [(), ()]
    assert sorted(warning.split(" ")[0] for warning in warnings) == ["RHT.security.selinux", "SCHILY.acl.access"]
