"""Other tools' files: what each asks for, what is skipped, what is written, and which format a file is of."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from layerstore.digest import Digest
from layerstore.errors import LimitError, MalformedError, UnsupportedError, UsageError
from prefetch.plans.format import Plan, PlannedRange, PlanPart, order
from prefetch.trace.exchange import cvmfs, listing, nri, nydus, overlaybd, own, paths, stargz
from prefetch.trace.exchange.formats import (
    AUTO,
    FORMATS,
    READABLE,
    WRITABLE,
    detect,
    read_listing,
    write_parts,
)
from prefetch.trace.exchange.listing import Kind, Listing, Wanted
from prefetch.trace.exchange.parts import Part, Parts, parts_of_plan, parts_of_trace
from prefetch.trace.format import MAX_TIME, Access, Trace, TracedLayer, TraceHeader

LAYER = TracedLayer(Digest.of(b"layer"), (Digest.of(b"pack"),))
LONG = b"/" + b"x/" * 2100


def kinds(found: Listing) -> list[tuple[bytes, Kind]]:
    return [(wanted.path, wanted.kind) for wanted in found.wanted]


def parts(*of: tuple[bytes, int, int], skipped: Mapping[str, int] | None = None) -> Parts:
    return Parts(tuple(Part(*part) for part in of), skipped or {})


# -- nydus


def test_nydus_list() -> None:
    data = b"/usr/bin/python3\n  /app  \r\n\nrelative\n/app/main.py\n/app\n/usr/bin/\n/usr/bin/x\n/application\n" + LONG
    found = nydus.read_list(data, "l")
    assert kinds(found) == [
        (b"usr/bin/python3", Kind.TREE),
        (b"app", Kind.TREE),
        (b"usr/bin", Kind.TREE),
        (b"application", Kind.TREE),
    ]
    assert found.skipped == {
        "not an absolute path": 1,
        "covered by an earlier line": 3,
        "longer than a path can be, or with a NUL": 1,
    }
    assert all(wanted.at is None and wanted.ranges is None for wanted in found.wanted)


def test_nydus_list_of_the_root_covers_everything() -> None:
    found = nydus.read_list(b"/etc\n/\n/usr\n", "l")
    assert kinds(found) == [(b"etc", Kind.TREE), (b"", Kind.TREE)]
    assert found.skipped == {"covered by an earlier line": 1}


def test_nydus_list_written() -> None:
    done = nydus.write_list(
        parts(
            (b"b", 0, 5), (b"a", 0, 1), (b"b", 9, 5), (b"\xff", 0, 1), (b"n\nl", 0, 1), (b"end ", 0, 1), (b" c", 0, 1)
        )
    )
    assert done.data == b"/b\n/a\n/ c\n"
    assert done.entries == 3
    assert done.skipped == {"not UTF-8": 1, "with a line end in the path": 1, "ends with white space": 1}
    assert done.sample == ("\\xff", "n\\x0al", "end ")


def test_nydus_optimize() -> None:
    document = {
        "version": "v1",
        "files": [
            {"path": "/usr/bin/python3", "ranges": [[0, 65_536], [1 << 20, 4096]]},
            {"path": "/app/caf\u00e9.py"},
            {"path": "/null", "ranges": None, "later": 1},
            {"path": "/none", "ranges": []},
            {"path": "/empty", "ranges": [[5, 0]]},
        ],
    }
    found = nydus.read_optimize(json.dumps(document).encode(), "o")
    assert found.wanted == [
        Wanted(b"usr/bin/python3", Kind.FILE, ((0, 65_536), (1 << 20, 4096))),
        Wanted("app/café.py".encode()),
        Wanted(b"null"),
    ]
    assert found.skipped == {"no range": 2}


@pytest.mark.parametrize(
    "text",
    [
        "{}", '{"version":"v1"}', '{"version":"v1","files":{}}', '{"version":"v1","files":[1]}',
        '{"version":"v1","files":[{"path":5}]}', '{"version":"v1","files":[{"path":"/a","ranges":1}]}',
        '{"version":"v1","files":[{"path":"/a","ranges":[1]}]}',
        '{"version":"v1","files":[{"path":"/a","ranges":[[1]]}]}',
        '{"version":"v1","files":[{"path":"/a","ranges":[[0,-1]]}]}',
        '{"version":"v1","files":[{"path":"/a","ranges":[[0,1.5]]}]}',
        '{"version":"v1","files":[{"path":"/a","ranges":[[true,1]]}]}',
        '{"version":"v1","files":[{"path":"/a","ranges":[[0,99999999999999999999]]}]}', "[]", "", "\x00",
    ],
)  # fmt: skip
def test_nydus_optimize_that_is_none(text: str) -> None:
    with pytest.raises((MalformedError, UnsupportedError), match=r"^o"):
        nydus.read_optimize(text.encode(), "o")


@pytest.mark.parametrize("version", ["v2", "1", 1, None, ["v1"]])
def test_nydus_optimize_of_another_version(version: object) -> None:
    with pytest.raises(UnsupportedError, match="version"):
        nydus.read_optimize(json.dumps({"version": version, "files": []}).encode(), "o")


def test_nydus_optimize_written() -> None:
    done = nydus.write_optimize(
        parts(
            (b"b", 8192, 4096), (b"a\n", 0, 4096), (b"b", 12_288, 4096), (b"b", 0, 4096), (b"b", 8192, 4096),
            (b"\xe9", 0, 1), skipped={"without a path": 2},
        )
    )  # fmt: skip
    assert json.loads(done.data) == {
        "version": "v1",
        "files": [{"path": "/b", "ranges": [[8192, 8192], [0, 4096]]}, {"path": "/a\n", "ranges": [[0, 4096]]}],
    }
    assert (done.entries, done.skipped, done.sample) == (2, {"without a path": 2, "not UTF-8": 1}, ("\\xe9",))
    assert nydus.read_optimize(done.data, "o").wanted == [
        Wanted(b"b", Kind.FILE, ((8192, 8192), (0, 4096))),
        Wanted(b"a\n", Kind.FILE, ((0, 4096),)),
    ]


# -- nydus-snapshotter's optimizer


def test_nri_list_keeps_the_bytes_of_a_line() -> None:
    found = nri.read_list(b"/b\n/a \n\nnope\n/caf\xe9", "l")
    assert kinds(found) == [(b"b", Kind.FILE), (b"a ", Kind.FILE), (b"caf\xe9", Kind.FILE)]
    assert found.skipped == {"not an absolute path": 1}


def test_nri_csv_has_sizes_and_times() -> None:
    found = nri.read_csv(
        b'path,size,elapsed\n/a,100,12\n"/b,""c""",5,7\n/r,1.5 MiB,12.345 ms\n/s,17 B,1.234 s\n/t,3.0 GiB,9 us\n'
        b"/bad,1,soon\nrel,1,1\n/few,1\n\n/odd,big,4\n",
        "c",
    )
    assert [(wanted.path, wanted.size, wanted.at) for wanted in found.wanted] == [
        (b"a", 100, 12),
        (b'b,"c"', 5, 7),
        (b"r", 1_572_864, 12_345),
        (b"s", 17, 1_234_000),
        (b"t", 3 << 30, 9),
        (b"odd", None, 4),
    ]
    assert found.skipped == {"no time": 1, "not an absolute path": 1, "not 3 fields": 1}


@pytest.mark.parametrize("data", [b"", b"path,size\n", b"/a,1,2\n", b'path,size,elapsed\n"/a,1,2\n'])
def test_nri_csv_that_is_none(data: bytes) -> None:
    with pytest.raises(MalformedError, match=r"^c"):
        nri.read_csv(data, "c")


# -- stargz


def test_stargz_record() -> None:
    found = stargz.read_record(
        b'{"path":"usr/bin/bash","manifestDigest":"sha256:x","layerIndex":0}\n{"path":"a"}\n\n{"path":"a"}\n{"pa', "r"
    )
    assert kinds(found) == [(b"usr/bin/bash", Kind.FILE), (b"a", Kind.FILE), (b"a", Kind.FILE)]
    assert found.skipped == {"cut line": 1}


@pytest.mark.parametrize("line", [b'{"path":5}', b"{}", b"[]", b"x", b'{"path":"a","path":"b"}', b'{"path":"\xff"}'])
def test_stargz_record_that_is_none(line: bytes) -> None:
    with pytest.raises(MalformedError, match=r"^r, line 2"):
        stargz.read_record(b'{"path":"a"}\n' + line + b"\n", "r")


def test_stargz_record_written() -> None:
    done = stargz.write_record(parts((b"usr/b", 0, 1), ("ä\n".encode(), 0, 1), (b"usr/b", 5, 1), (b"\xff", 0, 1)))
    assert done.data.decode() == '{"path":"usr/b"}\n{"path":"ä\\n"}\n'
    assert (done.entries, done.skipped) == (2, {"not UTF-8": 1})
    assert kinds(stargz.read_record(done.data, "r")) == [(b"usr/b", Kind.FILE), ("ä\n".encode(), Kind.FILE)]


def test_stargz_globs() -> None:
    found = stargz.read_globs(b"# hot\n/usr/lib/**/*.so\n\n  etc/h?sts  \n" + LONG + b"\n", "g")
    assert kinds(found) == [(b"usr/lib/**/*.so", Kind.GLOB), (b"etc/h?sts", Kind.GLOB)]
    assert found.skipped == {"longer than a path can be, or with a NUL": 1}


# -- overlaybd


def test_overlaybd_list() -> None:
    found = overlaybd.read_list(b"/usr/bin/sh\n  //etc/\n/opt/*\n/\na/b\n/sp ace\n/a//b\n/caf\xe9\n/x+y\n\n/a*b\n", "l")
    assert kinds(found) == [
        (b"usr/bin/sh", Kind.FILE),
        (b"etc", Kind.TREE),
        (b"opt", Kind.TREE),
        (b"", Kind.TREE),
        (b"a/b", Kind.FILE),
    ]
    assert found.skipped == {"characters that overlaybd doesn't take": 5}


def test_overlaybd_list_is_limited_as_it_is_there() -> None:
    line = b"/" + b"a" * 62 + b"\n"
    assert len(overlaybd.read_list(line * 1024, "l").wanted) == 1024
    with pytest.raises(LimitError, match="65536"):
        overlaybd.read_list(line * 1024 + b"\n", "l")


def test_overlaybd_list_written_has_nothing_that_would_be_skipped() -> None:
    odd = (b"a b", b"caf\xc3\xa9", b"x+y", b"star*", b"n\nl", b"c:d", b"ok/../x")
    done = overlaybd.write_list(parts((b"usr/bin/sh", 0, 1), *((path, 0, 1) for path in odd), (b"_-.9", 0, 1)))
    assert done.data == b"/usr/bin/sh\n/ok/../x\n/_-.9\n"
    assert done.skipped == {"characters that overlaybd doesn't take": 6}
    assert done.sample == ("a b", "café", "x+y", "star*", "n\\x0al")
    assert not overlaybd.read_list(done.data, "l").skipped


def test_overlaybd_list_written_is_as_long_as_it_may_be() -> None:
    done = overlaybd.write_list(parts(*((b"d/%08d" % number, 0, 1) for number in range(6000))))
    assert len(done.data) <= 65_536 < len(done.data) + 12
    assert done.entries + done.skipped["beyond the 64 KiB that overlaybd takes"] == 6000
    assert len(overlaybd.read_list(done.data, "l").wanted) == done.entries


# -- CernVM-FS


TRACER = (
    b'"1700000000.500","-1","Tracer","Trace buffer created"\r\n'
    b'"1700000001.002","1","/lib/libc.so","open()"\r\n'
    b'"1700000000.900","1","/bin/sh ""x""","open()"\r\n'
    b'"1700000001.1","4","/bin","lookup()"\r\n"1700000001.2","6","/bin","getattr()"\r\n'
    b'"1700000001.2","77","/bin","?"\r\n"soon","1","/bin","open()"\r\n"1","x","/bin","open()"\r\n"1"\r\n'
)


def test_cvmfs_trace() -> None:
    found = cvmfs.read_trace(TRACER, "t")
    assert [(wanted.path, wanted.at) for wanted in found.wanted] == [(b"lib/libc.so", 102_000), (b'bin/sh "x"', 0)]
    assert found.skipped == {
        "internal": 1, "lookup": 1, "stat": 1, "unknown event": 1, "no time or no code": 2, "not four fields": 1,
    }  # fmt: skip


def test_cvmfs_spec() -> None:
    found = cvmfs.read_spec(b"/a/setup.sh\n/lib/*\n^/top/*\n^/exact\n!/lib/doc\n!/lib/x/*\n\n/*\n", "s")
    assert kinds(found) == [
        (b"a/setup.sh", Kind.FILE),
        (b"lib/", Kind.TREE),
        (b"top/", Kind.LEVEL),
        (b"exact", Kind.FILE),
        (b"lib/doc", Kind.EXCLUDED),
        (b"lib/x/", Kind.EXCLUDED),
        (b"", Kind.TREE),
    ]


@pytest.mark.parametrize("line", [b"a", b"^a/*", b"!a", b"*", b"^", b" /a"])
def test_cvmfs_spec_that_shrinkwrap_would_end_at(line: bytes) -> None:
    with pytest.raises(MalformedError, match=r"^s, line 2"):
        cvmfs.read_spec(b"/x\n" + line + b"\n", "s")


def test_cvmfs_spec_written() -> None:
    deep = b"/".join([b"d"] * 256)
    done = cvmfs.write_spec(parts((b"a", 0, 1), (b"b*", 0, 1), (b"c\nd", 0, 1), (deep, 0, 1), (b"\xff", 0, 1)))
    assert done.data == b"/a\n/\xff\n"
    assert done.skipped == {"ends with a star": 1, "with a line end in the path": 1, "too many components": 1}
    assert kinds(cvmfs.read_spec(done.data, "s")) == [(b"a", Kind.FILE), (b"\xff", Kind.FILE)]


# -- plain


def test_paths() -> None:
    found = paths.read_list(b"# find\n./usr/bin/env\n/etc/\netc/hosts\n/caf\xe9\n\n/sp ace \r\n", "p")
    assert kinds(found) == [
        (b"./usr/bin/env", Kind.FILE),
        (b"etc/", Kind.TREE),
        (b"etc/hosts", Kind.FILE),
        (b"caf\xe9", Kind.FILE),
        (b"sp ace ", Kind.FILE),
    ]


def test_paths_with_nul_between_them_may_have_line_ends() -> None:
    assert kinds(paths.read_list(b"./a\nb\0#c\0/d/\0", "p")) == [
        (b"./a\nb", Kind.FILE),
        (b"#c", Kind.FILE),
        (b"d/", Kind.TREE),
    ]


def test_paths_written() -> None:
    done = paths.write_list(parts((b"a", 0, 1), (b"caf\xe9", 0, 1), (b"n\nl", 0, 1), (b"cr\r", 0, 1), (b"#x", 0, 1)))
    assert done.data == b"/a\n/caf\xe9\n/#x\n"
    assert done.skipped == {"with a line end in the path": 2}


def test_ranges_there_and_back() -> None:
    of = ((b"a", 0, 4096), (b'q"u,o\nte', 8192, 4096), (b"a", 4096, 8192), (b"caf\xe9", 0, 1))
    done = paths.write_ranges(parts(*of))
    assert done.data.splitlines()[0] == b"path,offset,length"
    assert (done.entries, done.skipped) == (3, {})
    found = paths.read_ranges(done.data, "r")
    assert found.wanted == [Wanted(path, Kind.FILE, ((offset, length),)) for path, offset, length in of]


def test_ranges_that_are_none_are_skipped() -> None:
    data = b"path,offset,length\n/a,0\n/a,-1,5\n/a,1.0,5\n/a,0,0\n/a,0,%d\n/a,x,y\n/b,7,1\n" % (MAX_TIME + 1)
    found = paths.read_ranges(data, "r")
    assert found.wanted == [Wanted(b"b", Kind.FILE, ((7, 1),))]
    assert found.skipped == {"not 3 fields": 1, "no range": 5}
    with pytest.raises(MalformedError, match="path,offset,length"):
        paths.read_ranges(b"/a,0,1\n", "r")


# -- our own


def test_a_trace_of_ours_has_ranges_times_waits_and_programs() -> None:
    accesses = (Access(5, 0, 1, 0, 4096, 7, 2, "sh", "caf\\xe9", 8192), Access(9, 0, 1, 4096, 4096))
    data = b"".join(Trace(TraceHeader((LAYER,)), accesses).lines()) + b"{"
    found = own.read_own(data, "t")
    assert found.wanted == [Wanted(b"caf\xe9", Kind.FILE, ((8192, 4096),), 5, 7, None, "sh")]
    assert found.skipped == {"cut lines": 1, "without a path": 1}


# -- parts


def test_parts_of_a_trace_and_of_a_plan() -> None:
    accesses = (Access(0, 0, 1, 0, 4096, path="b\\\\"), Access(1, 0, 1, 4096, 4096), Access(2, 0, 1, 0, 8192, path="a"))
    of_trace = parts_of_trace(Trace(TraceHeader((LAYER,)), accesses))
    assert of_trace == parts((b"b\\", 0, 4096), (b"a", 0, 8192), skipped={"without a path": 1})
    ranges = (
        PlannedRange(1, 0, 4096, 30, path="late"),
        PlannedRange(1, 4096, 4096, 10),
        PlannedRange(1, 8192, 4096, 20, path="x"),
    )
    other = (PlannedRange(1, 0, 4096, 5, 100, "first", 4096),)
    plan = Plan((PlanPart(LAYER.metadata, LAYER.packs, order(ranges)), PlanPart(Digest.of(b"w"), LAYER.packs, other)))
    assert parts_of_plan(plan) == parts(
        (b"first", 4096, 4096), (b"x", 0, 4096), (b"late", 0, 4096), skipped={"without a path": 1}
    )


def test_a_path_that_was_not_written_by_us_is_refused() -> None:
    with pytest.raises(MalformedError, match="backslash"):
        parts_of_trace(Trace(TraceHeader((LAYER,)), (Access(0, 0, 1, 0, 4096, path="a\\b"),)))


# -- which it is


EXAMPLES = {
    "imgtool": b"".join(Trace(TraceHeader((LAYER,)), (Access(0, 0, 1, 0, 4096, path="a"),)).lines()),
    "nydus-optimize": b'{\n "version": "v1",\n "files": [{"path": "/a"}]}',
    "stargz-record": b'{"path":"usr/bin/bash","layerIndex":0}\n{"path":"a"}\n',
    "nri-csv": b"path,size,elapsed\n/a,1,2\n",
    "ranges": b"path,offset,length\r\n/a,0,5\r\n",
    "cvmfs-trace": TRACER,
    "strace": b'100 1700000000.5 openat(AT_FDCWD, "/a", O_RDONLY) = 3\n100 1700000000.6 +++ exited with 0 +++\n',
    "cvmfs-spec": b"/a\n^/b/*\n!/c\n",
    "stargz-globs": b"usr/lib/**/*.so\n",
    "paths": b"/usr/bin/sh\n./etc/hosts\n",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_format_is_known_by_its_looks(name: str) -> None:
    assert detect(EXAMPLES[name], "x").name == name
    item, found = read_listing(EXAMPLES[name], AUTO, "x")
    assert item.name == name and found.wanted
    assert [other for other, data in EXAMPLES.items() if FORMATS[name].detect and FORMATS[name].detect(data)] in (  # type: ignore[misc]
        [name],
        [name, "stargz-globs"],
        ["cvmfs-spec", "paths"],
    )


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\x7fELF\0\0", b"hello world\n", b'{"a":1}', b"[1,2]"])
def test_what_is_no_format_has_to_be_named(data: bytes) -> None:
    with pytest.raises(MalformedError, match="say which it is: imgtool, nydus-optimize"):
        read_listing(data, AUTO, "x")


def test_formats_are_described_and_can_do_something() -> None:
    assert set(READABLE) | set(WRITABLE) == set(FORMATS)
    assert set(EXAMPLES) == {item.name for item in FORMATS.values() if item.detect}
    for name, item in FORMATS.items():
        assert item.name == name and item.description and "\n" not in item.description


@pytest.mark.parametrize("name", ["", "tar", "AUTO", "soci"])
def test_names_of_no_format(name: str) -> None:
    with pytest.raises(UsageError, match="choose of"):
        read_listing(b"/a\n", name, "x")
    with pytest.raises(UsageError, match="choose of"):
        write_parts(parts(), name)
    with pytest.raises(UsageError, match="nothing writes"):
        write_parts(parts(), "strace")


@pytest.mark.case("P03")
def test_a_list_of_which_nothing_is_left_says_why() -> None:
    with pytest.raises(MalformedError, match="names no path as nydus-list: skipped 2 not an absolute path"):
        read_listing(b"a\nb\n", "nydus-list", "x")
    with pytest.raises(MalformedError, match=r"names no path as paths$"):
        read_listing(b"", "paths", "x")


def test_a_prefix_is_taken_off_where_it_is() -> None:
    data = b"/mnt/root/usr/a\n/mnt/root\n/usr/b\n/mnt/rootfs/c\n"
    _, found = read_listing(data, "paths", "x", strip=b"/mnt/root/")
    assert [wanted.path for wanted in found.wanted] == [b"usr/a", b"mnt/root", b"usr/b", b"mnt/rootfs/c"]


def test_the_number_and_size_of_entries_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_WANTED", 2)
    with pytest.raises(LimitError, match="limit of 2"):
        read_listing(b"/a\n/b\n/c\n", "paths", "x")
    monkeypatch.setattr(listing, "LIST_BYTES", 4)
    for name in ("ranges", "nri-csv"):
        with pytest.raises(LimitError, match="limit of 4"):
            read_listing(b"/a\n/b\n", name, "x")
