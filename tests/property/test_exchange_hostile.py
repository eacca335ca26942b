"""Hostile bytes raise our errors and nothing else; what is written is read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.placed import BLOCK, Inline, layer_of, places, tree

from layerstore.errors import ImgtoolError, printable
from prefetch.trace.exchange.formats import AUTO, FORMATS, READABLE, WRITABLE, read_listing, write_parts
from prefetch.trace.exchange.globbing import Glob
from prefetch.trace.exchange.parts import Part, Parts, parts_of_trace
from prefetch.trace.exchange.resolving import resolve
from prefetch.trace.format import MAX_PACK, MAX_TIME, Access, Trace, TraceHeader, Wait, parse_trace
from prefetch.trace.naming import name_accesses, raw_path

bounded = settings(deadline=None, max_examples=60)

FILES = {"usr/bin/sh": 20_000, "usr/lib/a.so": 5000, "etc/motd": Inline(5), "l": "usr/lib", "big": 200_000, "d/e/f": 1}
HERE = places(tree(FILES))  # type: ignore[arg-type]

WORDS = [
    b"/usr/bin/sh", b"usr/lib/*", b"/l/a.so", b"**", b"^/usr/*", b"!/etc", b"path,size,elapsed", b"path,offset,length",
    b'{"path":"usr/lib/a.so"}', b'"1.5","1","/big","open()"', b'openat(AT_FDCWD, "/big", O_RDONLY) = 3',
    b'read(3</big>, "", 5) = 5', b'pread64(3, "", 1, 4096) = 1', b"lseek(3, 5, SEEK_SET) = 5",
    b"mmap(NULL, 9, PROT_READ, MAP_PRIVATE, 3, 0x1000) = 0x7", b"clone(flags=CLONE_FILES) = 7",
    b'execve("/usr/bin/sh", [], 0) = 0', b"<unfinished ...>", b"<... read resumed>) = 5", b"1796050766.5", b"[pid  5]",
    b"12:00:00.5", b"/big,0,100", b"/big,5,7", b'{"version":"v1","files":[{"path":"/big","ranges":[[0,5]]}]}',
    b'{"magic":"imgtool trace"', b"\n", b"\r\n", b"\0", b",", b'"', b" ", b"\xff", b"[", b"\\",
]  # fmt: skip
hostile = st.binary(max_size=300) | st.lists(st.sampled_from(WORDS) | st.binary(max_size=6), max_size=25).map(b"".join)
names = st.binary(min_size=1, max_size=12).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
raw_paths = st.lists(names, min_size=1, max_size=4).map(b"/".join)


def is_one_line(message: str) -> bool:
    """Without line ends, control characters and halves of surrogate pairs."""
    return len(message.splitlines()) == 1 and not any(ord(char) < 0x20 for char in message) and bool(message.encode())


@pytest.mark.parametrize("name", [AUTO, *READABLE])
@bounded
@given(data=hostile)
@example(data=b"")
@example(data=b"/" * 5000)
@example(data=b'{"version":"v1","files":[{"path":"\\ud800"}]}')
def test_lists_of_any_bytes(name: str, data: bytes) -> None:
    try:
        item, listing = read_listing(data, name, "it")
        trace, report = resolve(listing, HERE, format=item.name)
    except ImgtoolError as error:
        assert is_one_line(str(error))
        return
    assert parse_trace(b"".join(trace.lines()), "t") == trace
    assert report.matched + report.missing == report.entries
    assert 0 <= report.bytes_matched <= report.bytes_wanted
    assert report.accesses == len(trace.accesses)
    blocks = [
        (access.device, block)
        for access in trace.accesses
        for block in range(access.offset // BLOCK, access.end // BLOCK)
    ]
    assert len(blocks) == len(set(blocks)) == report.bytes // BLOCK
    assert name_accesses(trace, HERE) is trace
    for access in trace.accesses:
        assert access.path is not None
        where = HERE.find(raw_path(access.path))
        assert where is not None
        parts = HERE.ranges(where, access.file_offset, access.length)
        assert [part.range[2:] for part in parts] == [(access.offset, access.length)]


@bounded
@given(st.lists(st.tuples(raw_paths, st.integers(0, 50), st.integers(1, 9)), max_size=12), st.sampled_from(WRITABLE))
def test_what_is_written_is_read_back(of: list[tuple[bytes, int, int]], name: str) -> None:
    parts = Parts(tuple(Part(path, offset * BLOCK, length * BLOCK) for path, offset, length in of))
    done = write_parts(parts, name)
    paths = list(dict.fromkeys(part.path for part in parts.parts))
    assert done.entries + sum(done.skipped.values()) == len(paths)
    if not done.entries:
        return
    _, listing = read_listing(done.data, name, "it")
    assert not listing.skipped or name == "nydus-list"  # which drops a path below another
    read = [wanted.path for wanted in listing.wanted]
    if name == "nydus-list":
        assert set(read) <= set(paths) and read == [path for path in paths if path in set(read)]
    elif name == "ranges":
        assert [Part(wanted.path, *wanted.ranges[0]) for wanted in listing.wanted if wanted.ranges] == list(parts.parts)
    else:
        assert len(read) == done.entries and read == [path for path in paths if path in set(read)]
    if name == "nydus-optimize":
        written = {
            (wanted.path, block)
            for wanted in listing.wanted
            for offset, length in wanted.ranges or ()
            for block in range(offset, offset + length, BLOCK)
        }
        assert written == {
            (part.path, block)
            for part in parts.parts
            if part.path in set(read)
            for block in range(part.offset, part.offset + part.length, BLOCK)
        }


@bounded
@given(raw_paths)
def test_paths_are_shown_and_known_again(path: bytes) -> None:
    assert raw_path(printable(path)) == path


@bounded
@given(st.text(max_size=30))
def test_texts_that_stand_for_paths_or_not(text: str) -> None:
    try:
        raw_path(text)
    except ImgtoolError as error:
        assert is_one_line(str(error))


@bounded
@given(
    st.lists(
        st.sampled_from([b"*", b"?", b"[", b"]", b"a", b"-", b"!", b"\\", b"/", b"**", b"\xff", b"usr"]), max_size=30
    )
)
def test_patterns_of_any_bytes(pieces: list[bytes]) -> None:
    found = [path for path, inode in Glob(b"".join(pieces)).matches(HERE.root) if inode is not None]
    assert len(found) == len(set(found))


digits = st.integers(0, MAX_TIME)
blocks = st.integers(0, (1 << 20)).map(lambda block: block * BLOCK)
accesses = st.builds(
    Access, digits, st.just(0), st.integers(1, 3), blocks, blocks.map(lambda size: size + BLOCK), digits,
    st.integers(1, MAX_TIME), st.text(st.characters(codec="utf-8"), max_size=15), path=st.none(),
    file_offset=st.just(0),
)  # fmt: skip
named = st.builds(
    lambda access, path, at: access._replace(path=printable(path), file_offset=at), accesses, raw_paths, digits
)


@bounded
@given(
    st.lists(accesses | named, max_size=8),
    st.lists(st.tuples(digits, digits).map(lambda pair: Wait(*sorted(pair))), max_size=4),
    st.none() | digits,
    st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=3),
)
def test_traces_there_and_back(found: list[Access], waits: list[Wait], ended: int | None, command: list[str]) -> None:
    header = TraceHeader((layer_of(0),), image="x", command=tuple(command))
    ordered = sorted(found, key=lambda access: access.at)
    trace = Trace(header, tuple(ordered), tuple(sorted(waits)), ended)
    data = b"".join(trace.lines())
    assert parse_trace(data, "t") == trace
    for end in range(0, len(data), max(1, len(data) // 20)):
        try:
            cut = parse_trace(data[:end], "t")
        except ImgtoolError:
            assert end < len(header.line()) - 1
            continue
        assert cut.accesses == tuple(ordered[: len(cut.accesses)])
    assert len(parts_of_trace(trace).parts) == sum(access.path is not None for access in ordered)


@bounded
@given(st.data())
def test_traces_of_any_bytes(data: st.DataObject) -> None:
    lines = [TraceHeader((layer_of(0),)).line()]
    values = st.none() | st.booleans() | st.integers(-5, MAX_PACK) | st.text(max_size=5) | st.floats(allow_nan=False)
    fields = st.dictionaries(
        st.sampled_from(
            ["at", "layer", "device", "offset", "length", "waited", "times", "path", "ended", "waited_from"]
        ),
        values,
    )
    lines += [json.dumps(line).encode() + b"\n" for line in data.draw(st.lists(fields, max_size=4))]
    whole = bytearray(b"".join(lines))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        trace = parse_trace(bytes(whole), "t")
    except ImgtoolError as error:
        assert is_one_line(str(error))
        return
    assert parse_trace(b"".join(trace.lines()), "t").accesses == trace.accesses


def test_the_examples_reach_every_format() -> None:
    assert set(READABLE) == {name for name, item in FORMATS.items() if item.read}
