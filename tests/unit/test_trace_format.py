"""The file of a trace: what is written is read back, what was cut is dropped, what is damaged is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from layerstore.digest import Digest
from layerstore.errors import LimitError, MalformedError, UnsupportedError
from prefetch.trace import format as format_module
from prefetch.trace.format import (
    FEATURES,
    LINE_BYTES,
    MAX_PACK,
    MAX_TIME,
    Access,
    Trace,
    TracedLayer,
    TraceHeader,
    Wait,
    access_line,
    end_line,
    parse_trace,
    wait_line,
)

PACKS = tuple(Digest.of(b"pack %d" % number) for number in range(3))
LAYERS = (TracedLayer(Digest.of(b"base"), PACKS[:2]), TracedLayer(Digest.of(b"work"), PACKS))
HEADER = TraceHeader(
    LAYERS,
    image="team/repo:2026.11",
    manifest=str(Digest.of(b"manifest")),
    mode="lazy",
    backend="fanotify",
    command=("python3", "-c", "print('ä')"),
    started="2026-11-30T12:00:00Z",
)
FULL = Access(7, 1, 3, 8192, 4096, 1500, 3, "python3", "usr/lib/caf\\xe9", 12_288)
BARE = Access(0, 0, 1, 0, 4096)
TRACE = Trace(HEADER, (BARE, FULL), (Wait(1, 5), Wait(2, 9)), 10)


def written(trace: Trace) -> bytes:
    return b"".join(trace.lines())


def with_lines(*lines: Any) -> bytes:
    return HEADER.line() + b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


def access(**fields: object) -> dict[str, object]:
    return {"at": 0, "layer": 0, "device": 1, "offset": 0, "length": 4096, **fields}


def test_what_is_written_is_read_back() -> None:
    assert parse_trace(written(TRACE), "t") == TRACE
    cut = dataclasses.replace(TRACE, ended=None)
    assert parse_trace(written(cut), "t") == cut
    empty = Trace(TraceHeader(()), (), ended=0)
    assert parse_trace(written(empty), "t") == empty


def test_the_lines_are_those_of_the_documentation() -> None:
    first, *lines = written(TRACE).splitlines()
    assert list(json.loads(first)) == [
        "magic", "version", "incompatible", "compatible", "image", "manifest", "mode", "backend", "command", "started",
        "origin", "layers",
    ]  # fmt: skip
    assert [json.loads(line) for line in lines] == [
        {"at": 0, "layer": 0, "device": 1, "offset": 0, "length": 4096},
        {
            "at": 7, "layer": 1, "device": 3, "offset": 8192, "length": 4096, "waited": 1500, "times": 3,
            "comm": "python3", "path": "usr/lib/caf\\xe9", "file_offset": 12_288,
        },
        {"waited_from": 1, "waited_until": 5},
        {"waited_from": 2, "waited_until": 9},
        {"ended": 10},
    ]  # fmt: skip
    for line in lines:
        name = next(iter(json.loads(line)))
        assert f"``{name}``" in (format_module.__doc__ or "")


def test_lines_may_come_in_any_order_and_are_sorted_by_time() -> None:
    data = HEADER.line() + end_line(9) + access_line(FULL) + wait_line(Wait(2, 9)) + wait_line(Wait(1, 5))
    data += access_line(BARE) + access_line(FULL._replace(offset=0))
    trace = parse_trace(data, "t")
    assert trace.accesses == (BARE, FULL, FULL._replace(offset=0))  # of equal times as they are in the file
    assert trace.waits == (Wait(1, 5), Wait(2, 9))
    assert trace.ended == 9


@pytest.mark.parametrize("end", range(1, 60))
def test_a_last_line_that_was_cut_is_dropped(end: int) -> None:
    whole = HEADER.line() + access_line(BARE)
    line = access_line(FULL)
    trace = parse_trace(whole + line[:end], "t")
    assert trace.accesses == (BARE,)
    assert trace.unknown == {"cut lines": 1}
    assert trace.ended is None


def test_a_header_that_was_cut_is_no_trace() -> None:
    line = HEADER.line()
    assert parse_trace(line, "t").accesses == ()
    assert parse_trace(line[:-1], "t").accesses == ()  # it lacks its end alone
    for end in (0, 1, 10, len(line) - 2):
        with pytest.raises(MalformedError):
            parse_trace(line[:end], "t")


@pytest.mark.parametrize(
    "fields", [{"layer": 2}, {"layer": 65_536}, {"layer": 0, "device": 3}, {"layer": 1, "device": 4}]
)
def test_ranges_of_packs_that_the_header_lacks_are_counted(fields: dict[str, object]) -> None:
    trace = parse_trace(with_lines(access(), access(**fields)), "t")
    assert len(trace.accesses) == 1
    assert trace.unknown == {"unknown packs": 1}


def test_lines_of_later_releases_are_counted() -> None:
    trace = parse_trace(with_lines({"exec": "sh"}, access(mood="good"), {}), "t")
    assert trace.accesses == (BARE,)
    assert trace.unknown == {"unknown lines": 2}


@pytest.mark.parametrize(
    "line",
    [
        access(at=-1), access(at=1.0), access(at=True), access(at="1"), access(at=None), access(at=MAX_TIME + 1),
        access(layer=-1), access(layer=65_537), access(device=0), access(device=-1), access(device="1"),
        access(offset=1), access(offset=-4096), access(offset=MAX_PACK), access(length=0), access(length=100),
        access(length=-4096), access(length=MAX_PACK, offset=4096), access(waited=-1), access(waited=1.5),
        access(times=-1), access(times=MAX_TIME + 1), access(comm=5), access(path=["a"]), access(path=b"".hex),
        access(path="a", file_offset=-1), {"at": 0}, {"at": 0, "layer": 0, "device": 1, "offset": 0},
        {"waited_from": 5, "waited_until": 4}, {"waited_from": 5}, {"waited_from": -1, "waited_until": 4},
        {"ended": -1}, {"ended": None}, {"ended": 1e3}, [], 5, "x", None, b"", b"{", b"\xff", b"{} {}",
        b'{"at":0,"at":1}', b'{"at":NaN}', b"[" * 60_000,
    ],
    ids=lambda line: str(line)[:60],
)  # fmt: skip
def test_damage_before_the_last_line_is_refused_and_named(line: Any) -> None:
    if isinstance(line, dict) and callable(line.get("path")):
        line = {**line, "path": 5}
    with pytest.raises(MalformedError, match=r"^t, line 3") as caught:
        parse_trace(with_lines(access(), line, access()), "t")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"magic": "imgtool plan"}, {"magic": None}, {"image": 5}, {"mode": None}, {"backend": []}, {"started": 1},
        {"origin": {}}, {"manifest": 5}, {"command": "sh"}, {"command": [1]}, {"layers": None}, {"layers": [1]},
        {"layers": [{}]}, {"layers": [{"metadata": "x", "packs": []}]},
        {"layers": [{"metadata": str(PACKS[0]), "packs": None}]},
        {"layers": [{"metadata": str(PACKS[0]), "packs": [5]}]},
        {"layers": [{"metadata": "md5:" + "a" * 32, "packs": []}]},
    ],
    ids=str,
)  # fmt: skip
def test_headers_that_are_none_are_refused(change: dict[str, object]) -> None:
    document = {**json.loads(HEADER.line()), **change}
    with pytest.raises(MalformedError, match=r"^t"):
        parse_trace(json.dumps(document).encode() + b"\n", "t")


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"version": "1"}, {"version": None}, {"version": True}, {"version": 1.0},
     {"incompatible": ["gaps"]}, {"incompatible": None}, {"incompatible": {}}],
    ids=str,
)  # fmt: skip
def test_other_versions_and_unknown_features_are_unsupported(change: dict[str, object]) -> None:
    assert not FEATURES
    document = {**json.loads(HEADER.line()), **change}
    with pytest.raises(UnsupportedError, match=r"^t "):
        parse_trace(json.dumps(document).encode() + b"\n", "t")


def test_compatible_features_and_new_fields_are_passed_over() -> None:
    document = {**json.loads(HEADER.line()), "compatible": ["colour"], "colour": "blue"}
    assert parse_trace(json.dumps(document).encode() + b"\n", "t").header == HEADER


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LimitError, match=r"^t, line 2"):
        parse_trace(with_lines(access(path="a" * LINE_BYTES)), "t")
    monkeypatch.setattr(format_module, "TRACE_BYTES", 1000)
    with pytest.raises(LimitError, match="1001"):
        parse_trace(bytes(1001), "t")
    monkeypatch.undo()
    monkeypatch.setattr(format_module, "HEADER_BYTES", 100)
    with pytest.raises(LimitError, match="limit of 100"):
        parse_trace(written(TRACE), "t")


def test_times_are_at_least_one() -> None:
    assert parse_trace(with_lines(access(times=0)), "t").accesses[0].times == 1


def test_texts_that_are_no_utf8_are_written_as_they_are_shown() -> None:
    header = dataclasses.replace(HEADER, command=("sh", "caf\udce9", "back\\slash"), image="\ud800")
    trace = Trace(header, (BARE._replace(comm="\udcff\n"),))
    read = parse_trace(written(trace), "t")
    assert read.header.command == ("sh", "caf\\xe9", "back\\slash")
    assert read.header.image == "\\xed\\xa0\\x80"
    assert read.accesses[0].comm == "\\xff\\x0a"


def test_line_ends_in_texts_do_not_end_lines() -> None:
    trace = Trace(dataclasses.replace(HEADER, command=("a\nb",)), (BARE._replace(path="x\u2028\r\n", comm="\n"),))
    assert parse_trace(written(trace), "t") == trace
