"""Paths of accesses, there and back, and what a trace comes to."""

from __future__ import annotations

import dataclasses

import pytest
from support.placed import BLOCK, WHITEOUT, At, at, layer_of, places, tree

from layerstore.errors import ConflictError, MalformedError, printable
from prefetch.trace.format import Access, Trace, TraceHeader, Wait
from prefetch.trace.naming import name_accesses, raw_path
from prefetch.trace.summary import covered, has_times, summarize


@pytest.mark.parametrize(
    "path",
    [b"", b"usr/bin/sh", b"caf\xe9", "café ☃".encode(), b"a\\b", b"\\x41", b"new\nline", b"\x7f\xc2\x85\xe2\x80\xa8"],
)
def test_a_path_that_was_shown_is_known_again(path: bytes) -> None:
    assert raw_path(printable(path)) == path


@pytest.mark.parametrize("text", ["\\", "a\\b", "\\x4", "\\xGG", "\\x4A", "a\\\\\\", "\ud800", "\udce9"])
def test_texts_that_are_no_shown_paths_are_refused(text: str) -> None:
    with pytest.raises(MalformedError) as caught:
        raw_path(text)
    assert str(caught.value).isprintable()


HERE = places(tree({"a": 5000, "b": 4096, "late": At(4096, (at(1, 9),))}))
HEADER = TraceHeader(HERE.layers, image="it")


def test_accesses_without_a_path_get_those_of_the_files_that_they_hold() -> None:
    whole = Access(5, 0, 1, 0, 10 * BLOCK, waited=300, times=2, comm="cat")
    named = Access(1, 0, 1, 0, 4096, path="kept", file_offset=7)
    trace = name_accesses(Trace(HEADER, (named, whole), (Wait(1, 2),), 9), HERE)
    assert trace.accesses == (
        named,
        whole._replace(length=8192, path="a"),
        whole._replace(offset=8192, length=4096, waited=0, path="b"),
        whole._replace(offset=3 * BLOCK, length=6 * BLOCK, waited=0),
        whole._replace(offset=9 * BLOCK, length=4096, waited=0, path="late"),
    )
    assert (trace.header, trace.waits, trace.ended) == (HEADER, (Wait(1, 2),), 9)


def test_what_no_file_has_stays_without_a_path() -> None:
    beyond = Access(0, 0, 1, 8 * BLOCK, 4 * BLOCK, waited=9)
    trace = name_accesses(Trace(HEADER, (beyond, beyond._replace(device=3))), HERE)
    assert trace.accesses == (
        beyond._replace(length=4096),
        beyond._replace(offset=9 * BLOCK, length=4096, waited=0, path="late"),
        beyond._replace(offset=10 * BLOCK, length=2 * BLOCK, waited=0),
        beyond._replace(device=3),
    )


def test_a_trace_that_has_all_its_paths_is_left_as_it_is() -> None:
    trace = Trace(HEADER, (Access(0, 0, 1, 0, 4096, path="x"),))
    assert name_accesses(trace, HERE) is trace


def test_an_image_of_other_layers_names_nothing() -> None:
    other = places(tree({}), tree({"a": WHITEOUT}))
    with pytest.raises(ConflictError, match="other layers"):
        name_accesses(Trace(HEADER, (Access(0, 0, 1, 0, 4096),)), other)


def test_a_summary_counts_bytes_once() -> None:
    first, second = layer_of(0), layer_of(1)
    second = dataclasses.replace(second, packs=(first.packs[0], *second.packs[1:]))  # a workspace that uses the base's
    accesses = (
        Access(0, 0, 1, 0, 8192, waited=10, path="a"),
        Access(1, 0, 1, 4096, 8192, waited=20, path="a"),
        Access(2, 1, 1, 0, 4096),
        Access(3, 1, 2, 0, 4096, path="b"),
    )
    trace = Trace(TraceHeader((first, second)), accesses, (Wait(0, 10), Wait(5, 15), Wait(20, 21)), 30)
    summary = summarize(trace)
    assert summary.bytes == 3 * 4096 + 4096
    assert (summary.accesses, summary.files, summary.nameless) == (4, 2, 1)
    assert (summary.waits, summary.waited, summary.blocked, summary.ended) == (2, 30, 16, 30)
    assert summary.image_bytes is summary.share is None


def test_spans_are_covered_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 10), (0, 3), (2, 4), (6, 7), (10, 12)]) == 11


def test_numbers_of_an_imported_list_are_no_times() -> None:
    def trace(origin: str, *times: int) -> Trace:
        return Trace(TraceHeader(HERE.layers, origin=origin), tuple(Access(n, 0, 1, 0, 4096) for n in times))

    assert has_times(trace("recorded", 0, 1, 2))
    assert has_times(trace("strace", 0, 1, 5))
    assert not has_times(trace("nydus-list", 0, 1, 2))
