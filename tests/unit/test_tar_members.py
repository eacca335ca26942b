"""Header blocks to members: names, links, kinds, numbers, and where an archive is refused."""

from __future__ import annotations

import stat
from collections.abc import Iterator

import pytest
from support import tars
from support.tars import END, directory, file, hardlink, header, pax, symlink, tar

from layerstore.errors import LimitError, MalformedError, UnsupportedError
from layerstore.limits import DEFAULT_LIMITS, GIB, Limits
from layerstore.tar.member import Member, Run
from layerstore.tar.reader import MemberReader
from layerstore.tree.inode import Attrs


class Reading:
    """The members of an archive in memory, and the warnings about it."""

    def __init__(self, data: bytes, limits: Limits = DEFAULT_LIMITS) -> None:
        self.data = data
        self.warnings: list[str] = []
        self.furthest = 0
        reader = MemberReader(self._read, limits=limits, warn=self.warnings.append)
        self.iterator: Iterator[Member] = iter(reader)

    def _read(self, offset: int, length: int) -> bytes:
        self.furthest = max(self.furthest, offset + length)
        return self.data[offset : offset + length]

    def content(self, member: Member) -> bytes:
        content = bytearray(member.size)
        for offset, length, at in member.data:
            content[offset : offset + length] = self.data[at : at + length]
        return bytes(content)


def members(data: bytes, limits: Limits = DEFAULT_LIMITS) -> list[Member]:
    """All of them; an archive that is fine gives no warning."""
    reading = Reading(data, limits)
    found = list(reading.iterator)
    assert reading.warnings == []
    return found


def refused(data: bytes, limits: Limits = DEFAULT_LIMITS) -> MalformedError:
    with pytest.raises(MalformedError) as caught:
        list(Reading(data, limits).iterator)
    assert caught.value.offset is not None
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_plain_archive() -> None:
    data = tar(
        directory("etc/", mode=0o755, mtime=7),
        file("etc/passwd", b"root", mode=0o4644, uid=1, gid=2, mtime=1_600_000_000),
        file("empty"),
        symlink("l", "etc/passwd"),
        hardlink("h", "etc/passwd"),
    )
    etc, passwd, empty, link, hard = members(data)
    assert etc == Member(b"etc/", stat.S_IFDIR, Attrs(stat.S_IFDIR | 0o755, 0, 0, 7, 0), 0, None, b"", 0, 0, (), 0)
    assert passwd.attrs == Attrs(stat.S_IFREG | 0o4644, 1, 2, 1_600_000_000, 0)
    assert (passwd.size, passwd.data, passwd.offset) == (4, (Run(0, 4, 1024),), 512)
    assert (empty.size, empty.data, empty.hardlink) == (0, (), None)
    assert (link.kind, link.target, link.attrs.mode) == (stat.S_IFLNK, b"etc/passwd", stat.S_IFLNK | 0o777)
    assert (hard.hardlink, hard.target, hard.data) == (b"etc/passwd", b"", ())


def test_permissions_of_a_symbolic_link_are_linux_s() -> None:
    (link,) = members(tar(symlink("l", "t", mode=0o644)))
    assert link.attrs.mode == stat.S_IFLNK | 0o777


def test_type_bits_in_the_mode_field_are_ignored() -> None:
    (found,) = members(tar(file("f", mode=0o120644)))
    assert found.attrs.mode == stat.S_IFREG | 0o644


# names


@pytest.mark.case("T50")
@pytest.mark.parametrize(
    "parts",
    [
        (file("n" * 99, prefix=b"p" * 155),),
        (tars.longname("p" * 155 + "/" + "n" * 99), file("wrong", magic=tars.GNU)),
        (pax({"path": "p" * 155 + "/" + "n" * 99}), file("wrong")),
        (tars.longname("wrong"), pax({"path": "p" * 155 + "/" + "n" * 99}), file("wrong")),
        (pax({"path": "p" * 155 + "/" + "n" * 99}), tars.longname("wrong"), file("wrong")),
    ],
    ids=["prefix", "longname", "pax", "longname and pax", "pax and longname"],
)
def test_long_names(parts: tuple[bytes, ...]) -> None:
    (found,) = members(tar(*parts))
    assert found.path == b"p" * 155 + b"/" + b"n" * 99


@pytest.mark.case("T50")
def test_long_link_target() -> None:
    target = "d/" * 100 + "t"
    data = tar(tars.longlink(target), hardlink("a", "cut"), tars.longlink(target), symlink("b", "cut"))
    first, second = members(data)
    assert first.hardlink == second.target == target.encode()
    (both,) = members(tar(tars.longlink("wrong"), pax({"linkpath": target}), hardlink("a", "cut")))
    assert both.hardlink == target.encode()


@pytest.mark.case("T50")
def test_gnu_headers_have_times_where_ustar_has_the_prefix() -> None:
    (found,) = members(tar(file("f", magic=tars.GNU, prefix=b"14567012345\x0014567012345\0")))
    assert found.path == b"f"


def test_star_headers_have_times_at_the_end_of_the_prefix() -> None:
    prefix = b"dir".ljust(131, b"\0") + b"14567012345 14567012345 "
    (found,) = members(tar(file("f", prefix=prefix, raw={"pad": bytes(8) + b"tar\0"})))
    assert found.path == b"dir/f"
    filled = b"d" * 131 + b"14567012345 14567012345 "
    (found,) = members(tar(file("f", prefix=filled, raw={"pad": bytes(8) + b"tar\0"})))
    assert found.path == b"d" * 131 + b"/f"


def test_v7_headers_have_no_prefix() -> None:
    (found,) = members(tar(file("f", b"x", magic=tars.V7, prefix=b"p", typeflag=b"\0")))
    assert (found.path, found.size) == (b"f", 1)


@pytest.mark.case("T63")
def test_fields_that_are_full_have_no_nul() -> None:
    name, link, prefix = b"n" * 100, b"n" * 100, b"p" * 155
    data = tar(
        file(name, raw={"uname": b"u" * 32, "gname": b"g" * 32}),
        hardlink("h", link),
        symlink("s", link),
        file(name, prefix=prefix),
    )
    first, hard, soft, deep = members(data)
    assert (first.path, hard.hardlink, soft.target) == (name, link, link)
    assert deep.path == prefix + b"/" + name


@pytest.mark.case("T39")
def test_names_are_bytes() -> None:
    data = tar(
        file(b"caf\xe9"),
        file("f", pax={"path": b"x\xff\xfe"}),
        symlink("l", b"\x80"),
        tars.longname(b"\xff" * 200),
        file("cut"),
        file("f", pax={"path": "h\u00e9\n"}),
    )
    found = members(data)
    assert [m.path for m in found] == [b"caf\xe9", b"x\xff\xfe", b"l", b"\xff" * 200, b"h\xc3\xa9\n"]
    assert found[2].target == b"\x80"


@pytest.mark.case("T39")
def test_names_in_messages_are_one_printable_line() -> None:
    error = refused(tar(file("f", pax={"path": b"a\nb\xff\x1b[31m", "uid": "x"})))
    assert 'member "a\\x0ab\\xff\\x1b[31m"' in str(error)
    assert len(str(refused(tar(file("f", pax={"path": "n" * 60_000, "uid": "x"}))))) < 400


@pytest.mark.case("T40")
def test_empty_and_dotted_names_are_given_as_they_are() -> None:
    data = tar(symlink("", "/"), file(""), directory(""), directory("./"), file("a/../../b//c"), file("/abs"))
    assert [m.path for m in members(data)] == [b"", b"", b"", b"./", b"a/../../b//c", b"/abs"]


@pytest.mark.case("T68")
@pytest.mark.parametrize("name", ["d/", "f//", "./f/"])
@pytest.mark.parametrize("typeflag", [b"0", b"\0", b"7"])
def test_a_file_whose_name_ends_in_a_slash_is_a_directory(name: str, typeflag: bytes) -> None:
    (found,) = members(tar(file(name, typeflag=typeflag)))
    assert (found.kind, stat.S_IFMT(found.attrs.mode)) == (stat.S_IFDIR, stat.S_IFDIR)
    assert "ends in a slash" in str(refused(tar(file(name, b"body", typeflag=typeflag))))
    assert "ends in a slash" in str(refused(tar(file("f", b"body", pax={"path": name}, typeflag=typeflag))))


@pytest.mark.case("T68")
def test_a_sparse_file_whose_name_ends_in_a_slash_is_refused() -> None:
    assert "ends in a slash" in str(refused(tar(tars.sparse_gnu("d/", 4096, []))))
    assert "ends in a slash" in str(refused(tar(tars.sparse_pax("d/", 4096, [], "0.1"))))


# links and kinds


@pytest.mark.case("T48")
def test_symbolic_link_targets_are_exact_up_to_path_max() -> None:
    target = ("l\u00ef\r\n" * 1000).encode()[:4095]
    (found,) = members(tar(symlink("l", "cut", pax={"linkpath": target})))
    assert found.target == target
    for length in (4096, 70_000):
        error = refused(tar(symlink("readme", "cut", pax={"linkpath": b"x\r\n" * length})))
        assert 'member "readme"' in str(error)
        assert "of 4095 allowed" in str(error)
        assert len(str(error)) < 200


@pytest.mark.parametrize("link", [symlink("l", ""), hardlink("l", "")], ids=["symbolic", "hard"])
def test_a_link_without_a_target_is_refused(link: bytes) -> None:
    assert "without a target" in str(refused(tar(link)))


@pytest.mark.case("T56")
def test_devices_and_fifos() -> None:
    data = tar(
        tars.char("c", 5, 1), tars.block("b", 8, 0), tars.char("big", 4095, 1_048_575), tars.fifo("p", mode=0o600)
    )
    c, b, big, p = members(data)
    assert (c.kind, c.major, c.minor) == (stat.S_IFCHR, 5, 1)
    assert (b.kind, b.major, b.minor) == (stat.S_IFBLK, 8, 0)
    assert (big.major, big.minor) == (4095, 1_048_575)
    assert (p.kind, p.attrs.mode) == (stat.S_IFIFO, stat.S_IFIFO | 0o600)
    (found,) = members(tar(tars.char("c", 0, 0, pax={"SCHILY.devmajor": "200", "SCHILY.devminor": "300"})))
    assert (found.major, found.minor) == (200, 300)


@pytest.mark.parametrize(("major", "minor"), [(4096, 0), (0, 1_048_576), (-1, 0), (0, -1)])
def test_device_numbers_that_do_not_exist(major: int, minor: int) -> None:
    assert "out of range" in str(refused(tar(tars.block("b", major, minor))))


@pytest.mark.case("T56")
def test_contiguous_files_are_regular_and_unknown_types_skipped_with_their_body() -> None:
    reading = Reading(tar(file("c", b"7", typeflag=b"7"), file("z", b"?" * 700, typeflag=b"Z"), file("after", b"x")))
    contiguous, after = reading.iterator
    assert (contiguous.kind, contiguous.path, contiguous.size) == (stat.S_IFREG, b"c", 1)
    assert after.path == b"after"
    assert reading.warnings == ["layer member \"z\" at byte 1024 has unknown type 'Z': skipped"]


def test_the_extended_header_of_a_skipped_member_describes_nothing_else() -> None:
    reading = Reading(tar(file("z", b"?" * 700, typeflag=b"Z", pax={"path": "zz", "uid": "7"}), file("after")))
    (after,) = reading.iterator
    assert (after.path, after.attrs.uid) == (b"after", 0)
    assert '"zz"' in reading.warnings[0]


def test_directories_of_incremental_archives_have_a_body() -> None:
    found = members(tar(file("d/", b"Yname\0\0", typeflag=b"D", magic=tars.GNU), file("d/name")))
    assert [(m.path, m.kind) for m in found] == [(b"d/", stat.S_IFDIR), (b"d/name", stat.S_IFREG)]


def test_multi_volume_archives_are_not_supported() -> None:
    with pytest.raises(UnsupportedError, match="multi-volume"):
        list(Reading(tar(file("rest", b"x", typeflag=b"M", magic=tars.GNU))).iterator)


@pytest.mark.case("T65")
@pytest.mark.parametrize(
    "link",
    [
        hardlink("h", "a", size=64_700),
        symlink("s", "a", size=22),
        directory("d", size=4096),
        tars.fifo("p", size=1),
        tars.char("c", 1, 3, size=512),
        hardlink("h", "a", pax={"size": "64700"}),
    ],
)
def test_a_size_on_a_kind_without_body_means_nothing(link: bytes) -> None:
    first, _, z = members(tar(file("a", b"aaa"), link, file("z", b"zzz")))
    assert (first.path, z.path, z.size) == (b"a", b"z", 3)
    assert len(members(tar(file("a", b"aaa"), link))) == 2


@pytest.mark.case("T65")
@pytest.mark.parametrize("body", [b"data" * 128, bytes(512), bytes(1024), bytes(2048)], ids=len)
def test_a_body_behind_a_hard_link_is_refused(body: bytes) -> None:
    error = refused(tar(file("a", b"aaa"), hardlink("h", "a", size=len(body)), body, file("z", b"zzz")))
    assert '"h"' in str(error)


@pytest.mark.case("T65")
def test_zeros_after_the_last_link_are_the_end_whatever_its_size() -> None:
    found = members(tar(hardlink("h", "a", size=1024), end=bytes(10_240)))
    assert [m.path for m in found] == [b"h"]


# numbers


@pytest.mark.case("T53")
@pytest.mark.parametrize("value", [65_536, 2_097_152, 4_294_967_294])
def test_large_ids_are_exact(value: int) -> None:
    data = tar(
        file("octal or base-256", uid=value, gid=value),
        file("pax", pax={"uid": str(value), "gid": str(value)}),
        file("pax over junk", pax={"uid": str(value), "gid": str(value)}, raw={"uid": b"*" * 8, "gid": b"junk    "}),
    )
    assert {(m.attrs.uid, m.attrs.gid) for m in members(data)} == {(value, value)}


@pytest.mark.case("T54", "T43", "T67")
@pytest.mark.parametrize(
    "fields",
    [
        {"uid": 2**32},
        {"gid": 2**32 - 1},
        {"uid": -1},
        {"pax": {"uid": "4294967296"}},
        {"pax": {"uid": "4294967295"}},
        {"pax": {"uid": "-1"}},
        {"pax": {"gid": str(2**64)}},
        {"pax": {"uid": "9" * 5000}},
        {"raw": {"uid": b"0000009\0"}},
        {"raw": {"gid": b"12 45  \0"}},
    ],
)
def test_ids_outside_uid_t_are_refused(fields: dict[str, object]) -> None:
    reading = Reading(tar(file("ok"), file("dir/bad", b"body", **fields), file("after")))
    assert next(reading.iterator).path == b"ok"
    with pytest.raises(MalformedError, match=r'member "dir/bad": .* \(at byte \d+\)'):
        next(reading.iterator)


@pytest.mark.case("T43")
@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("size", "abc"),
        ("size", "-1"),
        ("size", "1e3"),
        ("size", " 5"),
        ("size", "1_0"),
        ("size", "\u0661"),
        ("size", str(2**63)),
        ("size", "9" * 10_000),
        ("uid", "-1"),
        ("mtime", "1e400"),
        ("GNU.sparse.size", "x"),
        ("GNU.sparse.realsize", "-5"),
    ],
)
def test_numbers_in_extended_headers_must_be_numbers(keyword: str, value: str) -> None:
    data = tar(file("victim", b"b" * 512, pax={keyword: value}), file("later"))
    error = refused(data, Limits(file_bytes=2**70))
    assert '"victim"' in str(error)
    assert error.offset == 512 + len(tars.padded(tars.record(keyword, value)))


@pytest.mark.parametrize("field", [b"garbage     ", b"0000000000 8", b"-0000000001\0", b"0x10\0", tars.base256(-5, 12)])
def test_numbers_in_headers_must_be_numbers(field: bytes) -> None:
    error = refused(tar(file("ok"), file("victim", raw={"size": field}), file("later")))
    assert '"victim"' in str(error)
    assert error.offset == 512


def test_numbers_may_be_padded_by_blanks_and_nuls() -> None:
    data = tar(
        file(
            "f", b"12345", raw={"mode": b" 755 \0\0\0", "uid": b"      7\0", "gid": bytes(8), "size": b"          5 "}
        ),
        file("g", raw={"mtime": b"17\0 leftover"}),
    )
    f, g = members(data)
    assert (f.attrs.mode & 0o7777, f.attrs.uid, f.attrs.gid, f.size, g.attrs.mtime) == (0o755, 7, 0, 5, 0o17)


@pytest.mark.case("T52")
@pytest.mark.parametrize("seconds", [-1, -(2**63), 2**31, 4_102_444_800, 253_402_300_800, 2**63 - 1])
def test_times_are_exact_within_64_bits(seconds: int) -> None:
    data = tar(file("field", mtime=seconds), file("pax", pax={"mtime": str(seconds)}))
    assert [(m.attrs.mtime, m.attrs.nsec) for m in members(data)] == [(seconds, 0), (seconds, 0)]


@pytest.mark.case("T52")
@pytest.mark.parametrize("seconds", [2**63, -(2**63) - 1])
def test_times_outside_64_bits_are_refused(seconds: int) -> None:
    assert "outside 64 bits" in str(refused(tar(file("late", mtime=seconds))))
    assert "outside 64 bits" in str(refused(tar(file("late", pax={"mtime": str(seconds)}))))


@pytest.mark.case("Z18")
def test_a_file_above_the_limit_is_refused_before_its_body_is_looked_at() -> None:
    reading = Reading(header("huge", size=3 << 40) + b"x" * 512, Limits(file_bytes=2 << 40))
    with pytest.raises(LimitError, match='"huge" at byte 0 is 3298534883328 bytes; 2199023255552 are the limit'):
        list(reading.iterator)
    assert reading.furthest == 512


def test_the_number_of_entries_is_limited() -> None:
    data = tar(*(file(f"f{i}") for i in range(5)))
    assert len(members(data, Limits(entries=5))) == 5
    with pytest.raises(LimitError, match="more than 4 entries"):
        list(Reading(data, Limits(entries=4)).iterator)


# damage and ends


@pytest.mark.case("T41")
@pytest.mark.parametrize(
    "end", [b"", bytes(512), bytes(300), bytes(700)], ids=["none", "one", "part", "one and a part"]
)
def test_a_missing_end_marker_is_a_warning(end: bytes) -> None:
    reading = Reading(tar(file("a", b"x" * 700), end=end))
    assert [m.path for m in reading.iterator] == [b"a"]
    assert reading.warnings == ['layer has no complete end marker after member "a"']


@pytest.mark.case("T41")
def test_the_padding_of_the_last_body_may_be_missing_with_the_end_marker() -> None:
    reading = Reading(tar(file("a", b"x" * 700), end=b"")[: 512 + 700])
    assert [m.size for m in reading.iterator] == [700]
    assert len(reading.warnings) == 1


@pytest.mark.case("T41")
@pytest.mark.parametrize("cut", [513, 512 + 699, 512 + 1024 + 1, 512 + 1024 + 511])
def test_an_archive_cut_inside_a_body_or_header_is_truncated(cut: int) -> None:
    data = tar(file("a", b"x" * 700), file("b", b"y"))
    error = refused(data[:cut])
    assert "truncated layer" in str(error)
    assert '"a"' in str(error)


@pytest.mark.case("T41")
def test_every_cut_is_either_told_or_loses_nothing() -> None:
    parts = [file("a", b"x" * 700), file("b", b"y", pax={"mtime": "1.5"}), tars.longname("n" * 150), file("cut", b"z")]
    data = tar(*parts)
    whole = members(data)
    complete = [0, len(parts[0]), len(parts[0] + parts[1]), len(b"".join(parts))]
    for cut in range(len(data) + 1):
        reading = Reading(data[:cut])
        try:
            found = list(reading.iterator)
        except MalformedError as error:
            assert "truncated layer" in str(error)
            continue
        ends = [member.data[0].at + member.size for member in found]
        assert found == whole[: len(found)]
        assert len(found) == len(whole) or (cut - (ends[-1] if ends else 0) < 512 and complete[len(found)] - cut < 512)
        assert bool(reading.warnings) == (cut < len(data))


@pytest.mark.case("T41")
def test_nothing_is_an_empty_layer() -> None:
    reading = Reading(b"")
    assert list(reading.iterator) == []
    assert members(END) == []


@pytest.mark.case("T61", "T42")
@pytest.mark.parametrize("position", [0, 50, 100, 124, 150, 156, 200, 400, 511])
def test_one_flipped_byte_in_a_later_header_is_an_error(position: int) -> None:
    data = bytearray(tar(file("one"), file("two", b"2"), file("three")))
    data[512 + position] ^= 0x55
    reading = Reading(bytes(data))
    assert next(reading.iterator).path == b"one"
    with pytest.raises(MalformedError, match='corrupt layer: no valid header after member "one"') as caught:
        next(reading.iterator)
    assert caught.value.offset == 512


@pytest.mark.case("T61", "T41")
def test_a_later_header_that_is_cut_short_is_an_error() -> None:
    error = refused(tar(file("one"), file("two"))[: 512 + 100])
    assert "truncated layer: ends inside the header after member" in str(error)
    assert error.offset == 512


def test_what_is_no_archive_is_called_so() -> None:
    assert "not a tar archive" in str(refused(b"PK\3\4" + b"x" * 1000))
    assert "truncated layer" in str(refused(b"short"))


def test_checksums_may_be_of_signed_characters() -> None:
    name = b"\xe9t\xe9"
    right = sum(header(name)[:148] + b" " * 8 + header(name)[156:])
    assert [m.path for m in members(tar(file(name, checksum=right - 2 * 256)))] == [name]
    refused(tar(file(name, checksum=right - 1 * 256)))


def test_a_lone_zero_block_between_members_is_an_error() -> None:
    error = refused(tar(file("a"), bytes(512), file("lost")))
    assert "lone zero block" in str(error)
    assert error.offset == 512


@pytest.mark.case("Z05")
def test_what_follows_the_end_marker_is_no_part_of_the_layer() -> None:
    first = tar(file("mine"), end=bytes(10_240))
    assert [m.path for m in members(first + tar(file("not mine")))] == [b"mine"]
    assert [m.path for m in members(tar(file("mine")) + b"\xff" * 5000)] == [b"mine"]


@pytest.mark.case("T68")
@pytest.mark.parametrize("front", [pax({"path": "zz"}), tars.longname("zz"), tars.longlink("zz")])
def test_an_extended_header_at_the_end_is_a_warning(front: bytes) -> None:
    reading = Reading(tar(file("a", b"x"), front))
    assert [m.path for m in reading.iterator] == [b"a"]
    assert len(reading.warnings) == 1
    assert "describes nothing" in reading.warnings[0]
    assert "truncated layer" in str(refused(tar(file("a", b"x"), front, end=b"")))


def test_warnings_are_bounded() -> None:
    reading = Reading(tar(*(file(f"f{i}", typeflag=b"Z") for i in range(250))))
    assert list(reading.iterator) == []
    assert len(reading.warnings) == 101
    assert reading.warnings[-1] == "150 more warnings about this layer"


def test_limits_of_a_default_conversion_admit_large_files() -> None:
    (found,) = (m for m in [next(Reading(header("f", size=3000 * GIB)).iterator)])
    assert found.size == 3000 * GIB
