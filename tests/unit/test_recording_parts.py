"""What recordings are made of, without a kernel that is asked for anything."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recording import header_of
from support.sandboxes import layer_with, write_layer
from support.sandboxes import tree as tree_of
from support.trees import content

from layerstore.digest import Digest
from layerstore.erofs.layout import Chunked, address
from layerstore.erofs.reader import Image
from layerstore.erofs.tree import load_tree
from layerstore.errors import ConflictError, MalformedError
from layerstore.opened import FileSource
from layerstore.tree.inode import Directory, File, walk
from overlay.layers import MountableLayer
from overlay.recording import perf
from overlay.recording.accesses import BLOCK, Accesses
from overlay.recording.completion import complete, complete_part, with_waits
from overlay.recording.pages import PageRanges
from overlay.recording.partial import DELAY, Partial
from overlay.recording.programs import Programs
from overlay.recording.spec import RecordedLayer, RecordingSpec, load_spec
from prefetch.trace.format import Access, TracedLayer, TraceHeader, Wait, access_line, parse_trace, wait_line
from prefetch.trace.naming import named
from prefetch.trace.places import ImagePlaces
from prefetch.trace.traces import Traces

reads = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 2), st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=40
)


@given(reads)
def test_each_block_is_seen_once_and_counted_by_its_range(read: list[tuple[int, int, int, int]]) -> None:
    accesses = Accesses()
    first: dict[tuple[int, int, int], int] = {}
    for at, (layer, device, start, count) in enumerate(read):
        new = accesses.add(at, layer, device, start * BLOCK, count * BLOCK, "")
        fresh = [block for block in range(start, start + count) if (layer, device, block) not in first]
        assert [b for seen in new for b in range(seen.offset // BLOCK, (seen.offset + seen.length) // BLOCK)] == fresh
        for block in fresh:
            first[layer, device, block] = at
    found = list(accesses)
    assert len(accesses) == len(found)
    assert [seen.at for seen in found] == sorted(seen.at for seen in found)
    for seen in found:
        blocks = range(seen.offset // BLOCK, (seen.offset + seen.length) // BLOCK)
        assert {first.pop((seen.layer, seen.device, block)) for block in blocks} == {seen.at}
        touching = [
            each
            for each in read
            if each[:2] == (seen.layer, seen.device) and each[2] < blocks.stop and each[2] + each[3] > blocks.start
        ]
        assert seen.times == len(touching)
    assert not first


def test_ranges_are_of_whole_blocks() -> None:
    accesses = Accesses()
    [seen] = accesses.add(1, 0, 1, BLOCK + 7, 2, "sh")
    assert (seen.offset, seen.length) == (BLOCK, BLOCK)
    assert accesses.add(2, 0, 1, BLOCK, 1, "sh") == []
    assert seen.times == 2


def test_what_is_too_much_is_counted() -> None:
    accesses = Accesses(most=2)
    for number in range(5):
        accesses.add(number, 0, 1, number * 2 * BLOCK, BLOCK, "")
    assert (len(accesses), accesses.dropped) == (2, 3)
    assert accesses.add(9, 0, 1, 0, 3 * BLOCK, "") == []
    assert accesses.dropped == 4


def spec_in(directory: Path, layers: Iterable[RecordedLayer] = ()) -> RecordingSpec:
    return RecordingSpec("box", "it", str(directory), str(directory / "sandboxes/box"), None, tuple(layers))


def part_with(directory: Path, header: TraceHeader | None = None) -> tuple[RecordingSpec, TraceHeader]:
    header = header or TraceHeader((TracedLayer(Digest.of(b"m"), (Digest.of(b"p"),)),))
    spec = spec_in(directory)
    Path(spec.part).write_bytes(header.line())
    return spec, header


def test_lines_are_those_of_a_trace(tmp_path: Path) -> None:
    spec, header = part_with(tmp_path)
    partial = Partial(spec.part, 100.0)
    assert partial.patience(100.0, 1.0) == 1.0
    assert partial.note(100.0015, 0, 1, 8192, 12288, 'we"ird ü\\x80')
    assert not partial.note(100.002, 0, 1, 8192, 16384, "")
    assert partial.patience(100.0015, 1.0) == pytest.approx(DELAY)
    assert not partial.is_due(100.01)
    assert partial.is_due(100.0015 + DELAY)
    assert parse_trace(Path(spec.part).read_bytes(), "part").accesses == ()
    partial.flush()
    partial.wait(99.0, 100.5)
    assert partial.end(101.0) == 1_000_000
    partial.close()
    expected = [
        access_line(Access(1500, 0, 1, 8192, 12288, comm='we"ird ü\\x80')),
        access_line(Access(2000, 0, 1, 20480, 4096)),
        wait_line(Wait(0, 500_000)),
    ]
    assert Path(spec.part).read_bytes() == header.line() + b"".join(expected)
    assert [(seen.offset, seen.times) for seen in partial.accesses] == [(8192, 2), (20480, 1)]
    assert partial.waits == [(0, 500_000)]


def test_what_is_being_recorded_is_seen_and_not_removed(tmp_path: Path) -> None:
    traces = Traces(str(tmp_path))
    Path(traces.directory).mkdir()
    spec = RecordingSpec("box", "it", traces.directory, str(tmp_path / "sandboxes/box"), None, ())
    Path(spec.part).write_bytes(TraceHeader((TracedLayer(Digest.of(b"m")),)).line())
    partial = Partial(spec.part, 0.0)
    partial.end(1.0)  # its paths are looked for now
    [listed] = traces.list()
    assert listed.recording and not listed.complete
    with pytest.raises(ConflictError, match="is being recorded"):
        traces.remove("it")
    partial.close()
    [listed] = traces.list()
    assert not listed.recording
    traces.remove("it")
    assert traces.list() == []


def test_many_are_written_before_they_are_old(tmp_path: Path) -> None:
    spec, _ = part_with(tmp_path)
    partial = Partial(spec.part, 0.0)
    for number in range(512):
        partial.note(1.0, 0, 1, number * BLOCK, BLOCK, "")
    assert partial.is_due(1.0)
    partial.end(1.0)
    partial.close()
    assert len(parse_trace(Path(spec.part).read_bytes(), "part").accesses) == 512


def test_a_full_disk_ends_the_file_and_not_the_recording() -> None:
    partial = Partial("/dev/full", 0.0)
    for number in range(2):
        partial.note(1.0, 0, 1, number * BLOCK, BLOCK, "")
        partial.flush()
    assert partial.failure == "No space left on device"
    partial.end(1.0)
    partial.close()
    assert len(partial.accesses) == 2


def test_waits_belong_to_what_is_nearest() -> None:
    accesses = [Access(at, 0, 1, at * BLOCK, BLOCK) for at in (1000, 20_000, 26_000, 100_000)]
    waits = [Wait(1200, 19_000), Wait(20_100, 25_900), Wait(50_000, 60_000), Wait(100_001, 100_002)]
    assert [access.waited for access in with_waits(accesses, waits)] == [17_800, 5_800, 0, 1]
    assert [access.waited for access in with_waits(accesses, [Wait(20_000, 21_000)] * 2)] == [0, 2000, 0, 0]
    assert with_waits([], waits) == []
    assert with_waits(accesses, []) == accesses


def places(root: Directory) -> ImagePlaces:
    return ImagePlaces([TracedLayer(Digest.of(b"m"), (Digest.of(b"p"),))], [root])


def test_accesses_are_cut_where_a_file_ends() -> None:
    root = tree_of({b"one": bytes(5 * BLOCK - 9), b"two": bytes(BLOCK), b"three\xff": bytes(2 * BLOCK)})
    one, two, three = (root.entries[name] for name in (b"one", b"two", b"three\xff"))
    assert isinstance(one, File) and isinstance(two, File) and isinstance(three, File)
    one.chunks = Chunked(2, array("Q", [address(1, 0), address(1, 4)]))
    two.chunks = Chunked(2, array("Q", [address(1, 5)]))
    three.chunks = Chunked(0, array("Q", [address(1, 8), address(1, 7)]))  # in another order
    access = Access(5, 0, 1, 0, 10 * BLOCK, waited=7, times=2, comm="sh")
    found = list(named(access, places(root)))
    assert [(a.offset // BLOCK, a.length // BLOCK, a.path, a.file_offset // BLOCK, a.waited) for a in found] == [
        (0, 5, "one", 0, 7),
        (5, 1, "two", 0, 0),
        (6, 1, None, 0, 0),
        (7, 1, "three\\xff", 1, 0),
        (8, 1, "three\\xff", 0, 0),
        (9, 1, None, 0, 0),
    ]
    assert {(a.at, a.layer, a.device, a.times, a.comm) for a in found} == {(5, 0, 1, 2, "sh")}
    [none] = named(access._replace(device=2), places(root))
    assert none == access._replace(device=2)


def test_pages_are_where_the_tree_says(tmp_path: Path) -> None:
    """Every page of every file: read from its pack, it is what the file has."""
    root = tree_of({b"a": os.urandom(200_001), b"d/b": os.urandom(BLOCK * 8), b"small": b"x", b"empty": b""})
    layer = write_layer(tmp_path / "layer", root, packs=3)
    packs = [Path(os.fsdecode(device)).read_bytes() for device in layer.devices]
    ranges = PageRanges([os.fsdecode(layer.image)])
    try:
        with open(layer.image, "rb") as stream:
            image = Image(FileSource(stream.fileno(), "image"))
            nids = {name: nid for name, nid, _ in image.entries(image.root)}
            nids[b"d/b"] = next(nid for name, nid, _ in image.entries(image.node(nids.pop(b"d"))) if name == b"b")
            files = {path: node for path, node in walk(load_tree(image)) if isinstance(node, File)}
        for path, node in walk(root):
            if not isinstance(node, File):
                continue
            data = content(node)
            pages = -(-len(data) // BLOCK)
            for first, count in [(page, 1) for page in range(pages)] + [(0, pages), (3, 6), (pages, 1), (0, 1 << 20)]:
                found = b"".join(
                    packs[device - 1][offset : offset + length]
                    for device, offset, length in ranges.of(0, nids[path], first, count)
                )
                assert files[path].size == len(data)
                wanted = data[first * BLOCK : (first + count) * BLOCK] if len(data) > 1 else b""
                assert found[: len(wanted)] == wanted
                assert len(found) - len(wanted) in range(BLOCK)
        with pytest.raises(MalformedError):
            ranges.of(0, 1 << 40, 0, 1)
    finally:
        ranges.close()


def test_what_a_recorder_is_told(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, [RecordedLayer("/meta", ("/one", "/two")), RecordedLayer("/m2", ())])
    assert RecordingSpec.parse(spec.to_bytes()) == spec
    assert (spec.target, spec.part) == (f"{tmp_path}/it.jsonl", f"{tmp_path}/it.jsonl.part")
    with pytest.raises(FileNotFoundError):
        load_spec(str(tmp_path))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"version": 2}', b'{"version": 1}', b'{"version": 1, "layers": [1]}', b"\xff", b"1"]
)
def test_what_a_writer_that_was_killed_has_left_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError, match="record of a recording"):
        RecordingSpec.parse(data)


def test_a_part_is_completed(tmp_path: Path) -> None:
    layer = layer_with(tmp_path / "layer", {b"a": bytes(3 * BLOCK)})
    header = header_of([layer])
    spec = spec_in(tmp_path, [recorded_of(layer)])
    lines = [access_line(Access(5, 0, 1, 0, BLOCK)), wait_line(Wait(1, 4)), b'{"at":9,"la']
    Path(spec.part).write_bytes(header.line() + b"".join(lines))
    done = complete_part(spec)
    assert (done.accesses, done.bytes, done.complete) == (1, BLOCK, False)
    trace = parse_trace(Path(spec.target).read_bytes(), "it")
    assert trace.accesses == (Access(5, 0, 1, 0, BLOCK, waited=3, path="a"),)
    assert (trace.waits, trace.ended, trace.header) == ((Wait(1, 4),), None, header)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it.jsonl", "layer"]


def test_a_trace_of_the_same_name_is_never_replaced(tmp_path: Path) -> None:
    spec, _ = part_with(tmp_path)
    spec = spec._replace(layers=(RecordedLayer("/missing", ("/pack",)),))
    Path(spec.target).write_text("other")
    with pytest.raises(ConflictError, match="appeared meanwhile"):
        complete(spec, [], [], 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it.jsonl", "it.jsonl.part"]
    assert Path(spec.target).read_text() == "other"


def recorded_of(layer: MountableLayer) -> RecordedLayer:
    return RecordedLayer(os.fsdecode(layer.image), tuple(map(os.fsdecode, layer.devices)))


def test_names_of_programs() -> None:
    programs = Programs()
    own = Path("/proc/self/comm").read_text().strip()
    assert programs.name(os.getpid(), 1.0) == own
    programs.executes(7 << 22, "made up")
    assert programs.name(7 << 22, 1e9) == "made up"
    programs.forks(7 << 22, 8 << 22)
    assert programs.name(8 << 22, 1.0) == "made up"
    programs.ends(7 << 22)
    assert programs.name(7 << 22, 1.0) == ""
    assert programs.name(8 << 22, 1.0) == "made up"


def test_records_of_the_kernel() -> None:
    header, identity = perf.perf_event_header, perf._IDENTITY
    sample = perf._SAMPLE.pack(perf.PERF_RECORD_SAMPLE, 0, perf._SAMPLE.size + 4, 5, 6, 300, 4) + b"data"
    comm = header.pack(perf.PERF_RECORD_COMM, 0, 8 + 16 + 16) + b"\x05\0\0\0\x05\0\0\0sh\0\0\0\0\0\0"
    comm += identity.pack(5, 5, 200)
    assert list(perf._records(sample + comm)) == [
        perf.Record(300, perf.PERF_RECORD_SAMPLE, 5, b"data"),
        perf.Record(200, perf.PERF_RECORD_COMM, 5, b"\x05\0\0\0\x05\0\0\0sh\0\0\0\0\0\0"),
    ]
    assert list(perf._records(sample + header.pack(9, 0, 0))) == [perf.Record(300, 9, 5, b"data")]
    assert perf.perf_event_attr.size == 120
