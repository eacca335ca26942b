"""Lists looked up in images: links, directories, patterns, exclusions, what is missing, and what is counted."""

from __future__ import annotations

import pytest
from support.placed import BLOCK, WHITEOUT, At, Inline, at, placed_file, places, tree

from layerstore.erofs.layout import HOLE
from layerstore.errors import LimitError
from layerstore.tree.inode import walk
from prefetch.trace.exchange import resolving
from prefetch.trace.exchange.formats import read_listing
from prefetch.trace.exchange.globbing import Glob
from prefetch.trace.exchange.listing import Kind, Listing, Prefixes, Wanted
from prefetch.trace.exchange.resolving import ImportReport, resolve
from prefetch.trace.format import Access, Trace
from prefetch.trace.places import ImagePlaces

TREE = {
    "bin": "usr/bin",
    "usr/bin/python3": "python3.11",
    "usr/bin/python3.11": 20_000,
    "usr/lib/a.so": 5000,
    "usr/lib/b.so": 4096,
    "usr/lib/py/mod.py": Inline(100),
    "usr/lib/py/big.py": 10_000,
    "usr/lib/py/data/x": 4096,
    "etc/empty": Inline(0),
    "etc/loop": "loop",
    "etc/dangling": "/nowhere",
    "holes": At(8192, (HOLE, HOLE)),
}
HERE = places(tree(TREE))  # type: ignore[arg-type]


def found(*wanted: Wanted, here: ImagePlaces = HERE) -> tuple[Trace, ImportReport]:
    return resolve(Listing(list(wanted)), here, format="test", image="it", manifest="m")


def wants(path: str, kind: Kind = Kind.FILE, *ranges: tuple[int, int], **fields: object) -> Wanted:
    return Wanted(path.encode(), kind, ranges or None, **fields)  # type: ignore[arg-type]


def reads(trace: Trace) -> list[tuple[str | None, int, int]]:
    return [(access.path, access.file_offset, access.length) for access in trace.accesses]


def test_a_file_is_read_whole_and_by_its_own_path() -> None:
    trace, report = found(wants("bin/python3"))
    assert trace.accesses == (Access(0, 0, 1, 0, 20_480, path="usr/bin/python3.11"),)
    assert trace.header.layers == HERE.layers
    assert (trace.header.image, trace.header.manifest, trace.header.origin) == ("it", "m", "test")
    assert trace.ended == 0
    assert report == ImportReport(
        "test", {}, entries=1, matched=1, missing=0, missing_sample=(), directories=0, files=1, inline=0, excluded=0,
        repeated=0, accesses=1, bytes=20_480, bytes_wanted=20_000, bytes_matched=20_000, unsized=0,
    )  # fmt: skip
    assert report.path_rate == report.byte_rate == 1.0


def test_ranges_are_whole_blocks_in_their_order() -> None:
    trace, report = found(wants("usr/bin/python3", Kind.FILE, (9000, 1), (0, 100), (4095, 2)))
    name = "usr/bin/python3.11"
    assert reads(trace) == [(name, 8192, 4096), (name, 0, 4096), (name, 4096, 4096)]
    assert [access.at for access in trace.accesses] == [0, 1, 2]
    assert (report.bytes, report.bytes_wanted, report.bytes_matched, report.repeated) == (12_288, 103, 103, 0)


def test_a_block_counts_when_it_is_first_wanted() -> None:
    trace, report = found(
        wants("usr/lib/a.so", Kind.FILE, (4096, 10)),
        wants("usr/lib/a.so"),
        wants("usr/lib/a.so", Kind.FILE, (4096, 10)),
        wants("usr/lib/a.so", Kind.FILE, (0, 5000)),
    )
    assert [(access.file_offset, access.length, access.times) for access in trace.accesses] == [
        (4096, 4096, 2),
        (0, 4096, 1),
    ]
    assert report.repeated == 2


def test_what_is_beyond_the_end_of_a_file_is_not_matched() -> None:
    trace, report = found(wants("usr/lib/a.so", Kind.FILE, (4096, 100_000), (8192, 5), (1 << 50, 5)))
    assert reads(trace) == [("usr/lib/a.so", 4096, 4096)]
    assert (report.bytes_wanted, report.bytes_matched) == (100_010, 4096)
    assert report.matched == 1


def test_a_directory_is_all_below_it_in_path_order_where_the_format_says_so() -> None:
    trace, report = found(wants("usr/lib", Kind.TREE))
    assert [path for path, _, _ in reads(trace)] == [
        "usr/lib/a.so", "usr/lib/b.so", "usr/lib/py/big.py", "usr/lib/py/data/x",
    ]  # fmt: skip
    assert (report.entries, report.matched, report.files, report.inline, report.directories) == (1, 1, 5, 1, 0)
    trace, report = found(wants("bin", Kind.TREE), wants("usr", Kind.FILE))
    assert reads(trace) == [("usr/bin/python3.11", 0, 20_480)]
    assert (report.matched, report.directories) == (2, 1)


@pytest.mark.case("P03")
def test_a_list_with_the_root_alone_is_the_whole_image() -> None:
    here = places(tree({"a": 5000, "b/c": 4096, "b/d": 1, "e": Inline(5), "f": 12_288}))
    _, listing = read_listing(b"/\n", "nydus-list", "l")
    trace, report = resolve(listing, here, format="nydus-list")
    assert sum(access.length for access in trace.accesses) == report.bytes == 8192 + 4096 + 4096 + 12_288
    assert (report.files, report.inline, report.path_rate, report.byte_rate) == (5, 1, 1.0, 1.0)


def test_each_directory_is_walked_once() -> None:
    trace, report = found(
        wants("usr/lib/py", Kind.TREE),
        wants("usr/lib", Kind.TREE),
        wants("usr/lib/py/data", Kind.TREE),
        wants("usr", Kind.TREE),
    )
    assert len(trace.accesses) == 5
    assert report.repeated >= 1


def test_a_level_is_the_directory_s_own_files() -> None:
    trace, report = found(wants("usr/lib", Kind.LEVEL), wants("usr/lib", Kind.TREE))
    assert [path for path, _, _ in reads(trace)] == [
        "usr/lib/a.so", "usr/lib/b.so", "usr/lib/py/big.py", "usr/lib/py/data/x",
    ]  # fmt: skip
    assert report.repeated == 2


def test_exclusions_hold_wherever_they_stand() -> None:
    trace, report = found(
        wants("usr/lib", Kind.TREE),
        wants("usr/lib/py", Kind.EXCLUDED),
        wants("usr/lib/py/data/x"),
        wants("bin", Kind.EXCLUDED),
        wants("usr/bin/python3.11"),
        wants("nothing", Kind.EXCLUDED),
    )
    assert [path for path, _, _ in reads(trace)] == ["usr/lib/a.so", "usr/lib/b.so"]
    assert (report.entries, report.excluded, report.matched, report.missing) == (3, 4, 3, 0)


def test_what_is_missing_is_counted_with_its_size_and_a_sample() -> None:
    names = [wants(f"no/{number}") for number in range(7)]
    trace, report = found(
        *names,
        wants("etc/loop"),
        wants("etc/dangling"),
        wants("usr/bin/python3.11/x"),
        wants("sized", size=1000),
        wants("ranged", Kind.FILE, (0, 10), (50, 5)),
        wants("usr/lib/b.so", size=9_999_999),
        wants("x*y", Kind.GLOB),
        wants("new\nline"),
    )
    assert len(trace.accesses) == 1
    assert (report.entries, report.matched, report.missing, report.unsized) == (15, 1, 14, 12)
    assert report.missing_sample == tuple(f"no/{number}" for number in range(5))
    assert (report.bytes_wanted, report.bytes_matched) == (1000 + 15 + 4096, 4096)
    assert report.path_rate == pytest.approx(1 / 15)
    assert report.byte_rate == pytest.approx(4096 / 5111)


@pytest.mark.case("P02")
def test_an_image_without_data_gives_a_trace_without_accesses() -> None:
    here = places(
        tree({"dir": None, "link": "dir", "zero": Inline(0), "small": Inline(200), "holes": At(4096, (HOLE,))})
    )
    _, listing = read_listing(b"/\n", "nydus-list", "l")
    trace, report = resolve(listing, here, format="nydus-list")
    assert (trace.accesses, trace.ended) == ((), 0)
    assert (report.files, report.inline, report.accesses, report.bytes) == (3, 3, 0, 0)
    assert report.path_rate == report.byte_rate == 1.0


def test_times_order_accesses_and_are_kept() -> None:
    trace, _ = found(
        wants("usr/lib/b.so", at=500, waited=30, comm="late"),
        wants("usr/lib/py/big.py"),
        wants("usr/bin/python3", Kind.FILE, (0, 1), (4096, 1), at=7, waited=9, comm="sh"),
        wants("usr/lib/b.so", at=900, waited=5),
    )
    assert [(access.at, access.path, access.waited, access.times, access.comm) for access in trace.accesses] == [
        (7, "usr/bin/python3.11", 9, 1, "sh"),
        (7, "usr/bin/python3.11", 0, 1, "sh"),
        (500, "usr/lib/b.so", 35, 2, "late"),
        (500, "usr/lib/py/big.py", 0, 1, ""),
    ]
    assert trace.ended == 500


def test_hard_links_and_shared_chunks_are_read_once() -> None:
    inode = placed_file(8192, (at(1, 0), at(1, 1)))
    here = places(tree({"a": inode, "b": inode, "c": At(8192, (at(1, 1), at(1, 2)))}))
    trace, report = found(wants("b"), wants("a"), wants("c"), here=here)
    assert [(access.path, access.offset, access.length, access.times) for access in trace.accesses] == [
        ("b", 0, 8192, 2),
        ("c", 8192, 4096, 1),
    ]
    assert (report.files, report.repeated, report.bytes) == (3, 1, 12_288)
    assert trace.accesses[1].file_offset == 4096


def test_a_stack_is_looked_up_as_a_sandbox_sees_it() -> None:
    here = places(tree({"etc/os": 4096, "gone": 4096}), tree({"etc/os": 8192, "gone": WHITEOUT, "src": 4096}))
    trace, report = found(wants("", Kind.TREE), wants("gone"), here=here)
    assert [(access.path, access.layer) for access in trace.accesses] == [("etc/os", 1), ("src", 1)]
    assert report.missing == 1


def test_names_that_are_no_text_are_shown_as_everywhere() -> None:
    here = places(tree({b"caf\xe9/new\nline": 1}))
    trace, _ = found(Wanted(b"caf\xe9/new\nline"), here=here)
    assert trace.accesses[0].path == "caf\\xe9/new\\x0aline"


def test_the_number_of_accesses_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "MAX_ACCESSES", 3)
    found(wants("usr/lib", Kind.TREE), wants("usr/lib/a.so"), here=places(tree({"usr/lib/a.so": 1, "usr/lib/b": 1})))
    with pytest.raises(LimitError, match="limit of 3"):
        found(wants("", Kind.TREE))


def test_covered_ranges_agree_with_a_set_of_blocks() -> None:
    import random

    for seed in range(30):
        chance = random.Random(seed)
        covered, blocks = resolving._Covered(), set[int]()
        for _ in range(60):
            start = chance.randrange(40)
            end = start + chance.randrange(1, 12)
            fresh = covered.add(start, end)
            assert [b for s, e in fresh for b in range(s, e)] == [b for b in range(start, end) if b not in blocks]
            blocks |= set(range(start, end))
            assert covered._starts == sorted(covered._starts)
            assert len(covered._starts) == sum(b - 1 not in blocks for b in blocks)


# -- patterns


def matched(pattern: str) -> list[str]:
    glob = Glob(pattern.encode())
    return [path.decode() for path, inode in glob.matches(HERE.root) if inode is not None]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("usr/lib/*.so", ["usr/lib/a.so", "usr/lib/b.so"]),
        ("usr/lib/?.so", ["usr/lib/a.so", "usr/lib/b.so"]),
        ("usr/lib/[a].so", ["usr/lib/a.so"]),
        ("usr/lib/[!a].so", ["usr/lib/b.so"]),
        ("usr/lib/[^b-z].so", ["usr/lib/a.so"]),
        ("usr/lib/[", []),
        ("**/x", ["usr/lib/py/data/x"]),
        ("usr/**/py", ["usr/lib/py"]),
        (
            "usr/lib/py/**",
            ["usr/lib/py", "usr/lib/py/big.py", "usr/lib/py/data", "usr/lib/py/data/x", "usr/lib/py/mod.py"],
        ),
        ("**/**/big.py", ["usr/lib/py/big.py"]),
        ("*/*/*.so", ["usr/lib/a.so", "usr/lib/b.so"]),
        ("usr/lib/py/d*a/x", ["usr/lib/py/data/x"]),
        ("usr/bin/python3.11", ["usr/bin/python3.11"]),
        ("usr/bin/python3\\.11", ["usr/bin/python3.11"]),
        ("usr/bin/python3?11", ["usr/bin/python3.11"]),
        ("bin/python3", []),
        ("*", ["bin", "etc", "holes", "usr"]),
        ("usr/lib/py*x", []),
        ("", []),
    ],
)
def test_patterns(pattern: str, expected: list[str]) -> None:
    assert matched(pattern) == expected


def test_a_star_is_any_part_of_a_component_in_any_script() -> None:
    root = tree({"été/naïve": 1, b"caf\xe9": 1, "a]b": 1, "a-c": 1, "*": 1})

    def names(pattern: bytes) -> list[bytes]:
        return [path for path, inode in Glob(pattern).matches(root) if inode is not None]

    assert names(b"?t?/na?ve") == ["été/naïve".encode()]
    assert names("[é]*".encode()) == ["été".encode()]
    assert names(b"caf?") == [b"caf\xe9"]
    assert names(b"a[]]b") == [b"a]b"]
    assert names(b"a[b-]c") == [b"a-c"]
    assert names(b"\\*") == names(b"[*]") == [b"*"]


def test_every_path_matches_itself_and_any_depth() -> None:
    every = [path for path, _ in walk(HERE.root) if path]
    assert sorted(path.encode() for path in matched("**")) == sorted(every)
    for path in every:
        assert path.decode() in matched(path.decode())


def test_files_that_patterns_match_are_read_and_directories_are_not() -> None:
    trace, report = found(wants("usr/lib/**", Kind.GLOB), wants("usr/bin/p*", Kind.GLOB), wants("etc/*", Kind.GLOB))
    assert [path for path, _, _ in reads(trace)] == [
        "usr/lib/a.so", "usr/lib/b.so", "usr/lib/py/big.py", "usr/lib/py/data/x", "usr/bin/python3.11",
    ]  # fmt: skip
    assert (report.entries, report.matched, report.missing) == (3, 3, 0)


def test_patterns_that_would_take_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Glob(b"a*" * 100 + b"b")
    here = places(tree({"a" * 250: 1, "a" * 251: 1}))
    assert [inode for _, inode in glob.matches(here.root)] == [None]
    assert glob.steps > 2
    monkeypatch.setattr(resolving, "MAX_GLOB_STEPS", 1000)
    with pytest.raises(LimitError, match="too long"):
        found(*[wants("**/" + "a*" * 100 + "b", Kind.GLOB)] * 10, here=here)


def test_prefixes() -> None:
    prefixes = Prefixes()
    assert not prefixes.cover([])
    prefixes.add([b"a", b"b"])
    for parts, expected in (([b"a"], False), ([b"a", b"b"], True), ([b"a", b"b", b"c"], True), ([b"a", b"bc"], False)):
        assert prefixes.cover(parts) is expected
    prefixes.add([b"a"])
    prefixes.add([b"a", b"z"])
    assert prefixes.cover([b"a", b"q"])
    prefixes.add([])
    assert prefixes.cover([]) and prefixes.cover([b"x"])


def test_blocks_of_the_support_are_those_of_packs() -> None:
    assert sum(place.range.length for item in HERE.files() for place in HERE.ranges(item)) % BLOCK == 0
