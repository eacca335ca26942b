"""Frame maps: states that several processes see."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support.caches import descriptors
from support.children import Child

from layerstore.cache.framemap import (
    MAX_FRAMES,
    MISSING,
    READY,
    UNTOUCHED_VERSION,
    UNVERIFIED,
    FrameMap,
    FrameMapHeader,
)
from layerstore.errors import MalformedError

SHA256 = bytes(range(32))
OFFSETS = array("Q", [0, 4096, 12288, 16384])
SIZE = 20480


@contextmanager
def made(states: bytes = bytes(4)) -> Iterator[FrameMap]:
    frames = FrameMap.create(SHA256, SIZE, OFFSETS, states)
    try:
        yield frames
    finally:
        frames.close()


def test_a_map_tells_which_frames_hold_which_bytes() -> None:
    with made() as frames:
        assert (len(frames), frames.hex) == (4, SHA256.hex())
        owner = [0, 1, 1, 2, 3]
        for first in range(5):
            for last in range(first, 5):
                for offset, end in ((first * 4096, (last + 1) * 4096), (first * 4096 + 4095, last * 4096 + 4096)):
                    expected = range(owner[first], owner[last] + 1)
                    assert frames.covering(offset, end - offset) == expected


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (-1, 5), (5, -1), (SIZE, 1), (SIZE + 5, 100), (1 << 62, 1)])
def test_what_the_pack_does_not_have_has_no_frames(offset: int, length: int) -> None:
    with made() as frames:
        assert list(frames.covering(offset, length)) == []


def test_a_range_over_the_end_has_the_frames_before_it() -> None:
    """The kernel reads ahead to the end of a page or beyond."""
    with made() as frames:
        assert frames.covering(16384, 1 << 40) == range(3, 4)
        assert frames.covering(0, 1 << 62) == range(4)


def test_only_ready_frames_may_be_read() -> None:
    with made(bytes([READY, READY, UNVERIFIED, MISSING])) as frames:
        assert frames.is_ready(range(2)) and frames.is_ready(range(1, 2)) and frames.is_ready(range(0))
        assert not frames.is_ready(range(1, 3)) and not frames.is_ready(range(3, 4))
        assert frames.unready(range(4)) == [2, 3]
        assert frames.unready([3, 0, 2]) == [3, 2]
        frames.set(3, READY)
        assert [frames.state(number) for number in range(4)] == [READY, READY, UNVERIFIED, READY]
        assert frames.states() == bytes([READY, READY, UNVERIFIED, READY])


def test_another_process_sees_every_change_and_outlives_the_first() -> None:
    frames = FrameMap.create(SHA256, SIZE, OFFSETS, bytes(4))
    copy = os.dup(frames.fd)

    def watch(child: Child) -> None:
        mine = FrameMap(os.dup(copy))
        assert not mine.is_ready(range(2))
        child.tell()
        child.hear()
        assert mine.is_ready(range(2))
        mine.set(3, READY)
        mine.close()

    with Child(watch) as child:
        child.hear()
        frames.set(0, READY)
        frames.set(1, READY)
        frames.close()
        child.tell()
        assert child.wait() == 0
    successor = FrameMap(copy)
    assert successor.states() == bytes([READY, READY, MISSING, READY])
    assert successor.describes(OFFSETS, SIZE)
    successor.close()


def test_what_readers_asked_for_is_seen_by_all_and_changes_no_state() -> None:
    with made(bytes([READY, MISSING, READY, MISSING])) as frames:
        copy = os.dup(frames.fd)
        other = FrameMap(copy)
        other.touch(range(1, 3))
        other.touch(range(0))
        other.touch(range(2, 3))
        assert frames.touched() == bytes([0, 1, 1, 0])
        frames.set(1, READY)
        other.touch(range(3, 4))
        assert frames.touched() == other.touched() == bytes([0, 1, 1, 1])
        assert frames.states() == bytes([READY, READY, READY, MISSING])
        other.close()


def test_a_map_of_the_release_before_is_read_and_nothing_of_it_is_touched() -> None:
    """A service that is upgraded while it runs hands over what its former processes made."""

    def before(content: bytes) -> bytes:
        header = FrameMapHeader.unpack(content)
        return replace(header, version=UNTOUCHED_VERSION).pack() + content[len(header.pack()) : -len(OFFSETS)]

    fd = foreign(before)
    frames = FrameMap(fd)
    assert frames.header.version == UNTOUCHED_VERSION
    frames.touch(range(4))
    assert frames.touched() == bytes(4)
    frames.set(3, READY)
    assert frames.states() == bytes([0, 0, 0, READY])
    assert frames.unready(range(4)) == [0, 1, 2]
    assert frames.describes(OFFSETS, SIZE)
    frames.close()


def test_a_map_is_of_one_pack() -> None:
    with made() as frames:
        assert frames.describes(OFFSETS, SIZE)
        assert not frames.describes(OFFSETS, SIZE + 4096)
        assert not frames.describes(OFFSETS[:3], SIZE)
        assert not frames.describes(array("Q", [0, 8192, 12288, 16384]), SIZE)


def test_a_pack_of_nothing_has_a_map_too() -> None:
    frames = FrameMap.create(SHA256, 0, array("Q"), b"")
    assert len(frames) == 0
    assert frames.covering(0, 4096) == range(0)
    assert frames.states() == b""
    frames.close()


def test_the_size_of_a_map_is_sealed() -> None:
    """A front end that reads it could otherwise be killed (SIGBUS) by another process."""
    with made() as frames:
        for size in (0, 10_000):
            with pytest.raises(PermissionError):
                os.ftruncate(frames.fd, size)


def foreign(change: Callable[[bytes], bytes]) -> int:
    with made() as frames:
        content = os.pread(frames.fd, 10_000, 0)
    fd = os.memfd_create("foreign")
    os.write(fd, change(content))
    return fd


@pytest.mark.case("C08")
@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"X" + content[1:],
        lambda content: content[:8] + b"\3" + content[9:],
        lambda content: FrameMapHeader(MAX_FRAMES + 1, SIZE, SHA256).pack(),
        lambda content: FrameMapHeader(MAX_FRAMES, SIZE, SHA256).pack(),
    ],
    ids=["empty", "cut", "longer", "magic", "version", "too many", "claims"],
)
def test_what_is_no_map_is_refused_and_stays_its_owners(change: Callable[[bytes], bytes]) -> None:
    fd = foreign(change)
    before = descriptors()
    with pytest.raises(MalformedError, match="frame map"):
        FrameMap(fd)
    assert descriptors() == before
    os.close(fd)


def test_the_header_comes_back_as_it_was() -> None:
    header = FrameMapHeader(7, 1 << 40, SHA256)
    assert FrameMapHeader.unpack(header.pack()) == header
    assert len(header.pack()) == FrameMapHeader.STRUCT.size == 64
