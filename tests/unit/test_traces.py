"""The traces of a node: names, publishing, removing, and what others leave in the directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from support.faults import failing
from support.placed import layer_of

from layerstore.errors import ConflictError, LimitError, MalformedError, NoSpaceError, NotFoundError, UsageError
from prefetch.trace import traces as traces_module
from prefetch.trace.format import Access, Trace, TraceHeader, access_line
from prefetch.trace.traces import NAME_BYTES, Traces, check_trace_name, read_trace

HEADER = TraceHeader((layer_of(0),), image="it", mode="lazy", started="2026-11-30T12:00:00Z")
TRACE = Trace(HEADER, (Access(0, 0, 1, 0, 4096), Access(3, 0, 2, 0, 4096, path="a")), ended=5)


@pytest.fixture
def shelf(tmp_path: Path) -> Traces:
    return Traces(str(tmp_path / "deep" / "root"))


def part(shelf: Traces, name: str, data: bytes | None = None) -> Path:
    Path(shelf.directory).mkdir(parents=True, exist_ok=True)
    path = Path(shelf.directory, f"{name}.jsonl.part")
    path.write_bytes(HEADER.line() + access_line(TRACE.accesses[0]) + b'{"at"' if data is None else data)
    return path


def test_a_root_that_does_not_exist_has_no_traces(shelf: Traces, tmp_path: Path) -> None:
    assert shelf.names() == [] and shelf.list() == []
    with pytest.raises(NotFoundError, match=r"no trace 'x'"):
        shelf.load("x")
    with pytest.raises(NotFoundError):
        shelf.remove("x")
    assert os.listdir(tmp_path) == []


def test_what_is_saved_is_loaded_listed_and_removed(shelf: Traces) -> None:
    path = shelf.save("run-1", TRACE)
    assert path == os.path.join(shelf.directory, "run-1.jsonl")
    assert os.stat(path).st_mode & 0o777 == 0o644
    assert shelf.load("run-1") == TRACE == read_trace(path)
    [listed] = shelf.list()
    assert (listed.name, listed.path, listed.complete, listed.recording) == ("run-1", path, True, False)
    assert (listed.header, listed.accesses, listed.error) == (HEADER, 2, None)
    assert listed.size == os.path.getsize(path)
    shelf.remove("run-1")
    assert shelf.names() == os.listdir(shelf.directory) == []


def test_many_lines_are_written_in_pieces(shelf: Traces) -> None:
    trace = Trace(HEADER, tuple(Access(n, 0, 1, n * 4096, 4096) for n in range(30_000)), ended=1)
    shelf.save("long", trace)
    assert shelf.load("long") == trace
    assert shelf.list()[0].accesses == 30_000


def test_a_name_is_taken_once(shelf: Traces) -> None:
    shelf.save("a", TRACE)
    part(shelf, "b")
    for name in ("a", "b"):
        with pytest.raises(ConflictError, match="already"):
            shelf.save(name, TRACE)
    assert shelf.names() == ["a", "b"]


def test_a_recording_that_was_cut_is_read_and_removed(shelf: Traces) -> None:
    path = part(shelf, "cut")
    trace = shelf.load("cut")
    assert (trace.accesses, trace.ended, trace.unknown) == (TRACE.accesses[:1], None, {"cut lines": 1})
    [listed] = shelf.list()
    assert (listed.complete, listed.recording, listed.accesses) == (False, False, 1)
    shelf.remove("cut")
    assert not path.exists()


def test_a_recording_that_goes_on_is_not_removed(shelf: Traces) -> None:
    path = part(shelf, "now")
    with path.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert shelf.list()[0].recording
        with pytest.raises(ConflictError, match="being recorded"):
            shelf.remove("now")
    assert path.exists() and not shelf.list()[0].recording


def test_a_complete_trace_comes_before_what_is_left_of_its_recording(shelf: Traces) -> None:
    shelf.save("a", TRACE)
    part(shelf, "a")
    assert [(item.name, item.complete) for item in shelf.list()] == [("a", True)]
    assert shelf.load("a").ended == 5


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../x", "sha256:abc", "caf\xe9", "a b", "x" * (NAME_BYTES + 1)])
def test_names_that_are_none(shelf: Traces, name: str) -> None:
    for call in (check_trace_name, shelf.load, shelf.remove, lambda given: shelf.save(given, TRACE)):
        with pytest.raises(UsageError):
            call(name)
    assert not os.path.exists(shelf.directory)


def test_the_longest_name_fits(shelf: Traces) -> None:
    name = "x" * NAME_BYTES
    part(shelf, name)
    assert shelf.names() == [name]
    shelf.remove(name)
    shelf.save(name, TRACE)
    assert shelf.load(name) == TRACE


def test_what_is_not_ours_is_left_alone(shelf: Traces) -> None:
    shelf.save("ours", TRACE)
    for name in ("README", "x.json", ".tmp-1-2", "a b.jsonl", ".jsonl", "y.part", "-z.jsonl.part"):
        Path(shelf.directory, name).write_text("x")
    assert shelf.names() == ["ours"]


def test_damaged_traces_are_listed_with_their_fault(shelf: Traces) -> None:
    part(shelf, "empty", b"")
    part(shelf, "other", b'{"magic":"imgtool plan"}\n')
    Path(shelf.directory, "dir.jsonl").mkdir()
    errors = {item.name: item.error for item in shelf.list()}
    assert set(errors) == {"empty", "other", "dir"} and all(errors.values())
    with pytest.raises(MalformedError, match="trace 'other'"):
        shelf.load("other")


def test_a_file_that_is_too_large_is_not_read(shelf: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shelf.save("a", TRACE)
    monkeypatch.setattr(traces_module, "TRACE_BYTES", 50)
    with pytest.raises(LimitError, match="limit of 50"):
        read_trace(path)


def test_a_full_disk_leaves_nothing(shelf: Traces) -> None:
    with failing("write", 28), pytest.raises(NoSpaceError, match="save trace 'a'"):
        shelf.save("a", TRACE)
    assert os.listdir(shelf.directory) == []
