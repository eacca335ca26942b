"""What the keeper writes down, and what it reads from the kernel: records, and bytes that are none."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.children import Child

from layerstore.errors import ImgtoolError, LimitError, MalformedError, UnsupportedError
from overlay.lazy import fanotify
from overlay.lazy.fanotify import (
    FAN_EVENT_INFO_TYPE_RANGE,
    FAN_NOFD,
    FAN_PRE_ACCESS,
    FAN_Q_OVERFLOW,
    FANOTIFY_METADATA_VERSION,
    UNKNOWN,
    Event,
    events,
)
from overlay.lazy.journal import CAPACITY, MAGIC, VERSION, Journal, JournalHeader, Record

record = st.builds(
    Record,
    pid=st.integers(-(1 << 31), (1 << 31) - 1),
    offset=st.integers(0, (1 << 64) - 1),
    length=st.integers(0, (1 << 64) - 1),
    deadline=st.floats(allow_nan=False),
    pack_sha256=st.binary(min_size=32, max_size=32),
)
SAMPLE = Record(7, 4096, 8192, 12.5, b"p" * 32)


@pytest.fixture
def journal() -> Iterator[Journal]:
    with Journal.create(64) as made:
        yield made


def raw_event(
    number: int = 5,
    pid: int = 9,
    records: bytes | None = None,
    *,
    mask: int = FAN_PRE_ACCESS,
    vers: int = FANOTIFY_METADATA_VERSION,
    metadata_len: int = 24,
    event_len: int | None = None,
) -> bytes:
    """An event in the kernel's words, by default about 8192 bytes at 4096."""
    if records is None:
        records = raw_range(4096, 8192)
    size = 24 + len(records) if event_len is None else event_len
    return struct.pack("=IBBHQii", size, vers, 0, metadata_len, mask, number, pid) + records


def raw_range(offset: int, count: int, size: int = 24) -> bytes:
    return struct.pack("=BBHIQQ", FAN_EVENT_INFO_TYPE_RANGE, 0, size, 0, offset, count)


# --- the journal


def test_records_have_the_documented_sizes() -> None:
    assert JournalHeader.STRUCT.size == 64
    assert Record.STRUCT.size == 60
    with Journal.create() as journal:
        assert os.fstat(journal.fd).st_size == 64 + 64 * CAPACITY
        assert os.fstat(journal.fd).st_blocks * 512 <= 64 << 10, "memory that nobody has used"


def test_what_was_put_is_there_for_others_until_it_is_cleared(journal: Journal) -> None:
    journal.put(3, SAMPLE)
    journal.put(63, Record(8, 0, 1, 2.0, b"q" * 32))
    with Journal(os.dup(journal.fd)) as other:
        assert list(other.records().items()) == [(63, Record(8, 0, 1, 2.0, b"q" * 32)), (3, SAMPLE)]
        assert other.high == 64
    journal.clear(3)
    journal.clear(62)
    assert list(journal.records()) == [63]
    with Journal(os.dup(journal.fd)) as other:
        assert list(other.records()) == [63]


@given(st.dictionaries(st.integers(0, 63), record), st.sets(st.integers(0, 63)))
@settings(deadline=None, max_examples=100)
def test_a_journal_is_a_dictionary_in_the_order_of_deadlines(puts: dict[int, Record], cleared: set[int]) -> None:
    with Journal.create(64) as journal:
        for number, one in puts.items():
            journal.put(number, one)
        for number in cleared:
            journal.clear(number)
        found = journal.records()
        assert found == {number: one for number, one in puts.items() if number not in cleared}
        assert sorted(one.deadline for one in found.values()) == [one.deadline for one in found.values()]
        assert journal.high == max(puts, default=-1) + 1


def test_high_is_kept_within_the_journal(journal: Journal) -> None:
    journal.high = 10
    assert journal.high == 10
    journal.high = 1 << 20
    with Journal(os.dup(journal.fd)) as other:
        assert other.high == journal.high == 64


@pytest.mark.parametrize("number", [-1, 64, 1 << 30])
def test_numbers_without_a_place_are_refused(journal: Journal, number: int) -> None:
    with pytest.raises(LimitError, match="has no place in a journal of 64"):
        journal.put(number, SAMPLE)
    assert journal.records() == {}


def test_a_record_is_whole_or_not_there_whenever_its_writer_is_killed(journal: Journal) -> None:
    others = [Record(number, number, number, float(number), bytes([number]) * 32) for number in (1, 2)]

    def write(child: Child) -> None:
        with Journal(os.dup(journal.fd)) as mine:
            child.tell()
            while True:
                for one in others:
                    mine.put(5, one)
                    mine.clear(5)

    for _ in range(20):
        with Child(write) as child:
            child.hear()
            seen = [journal.records() for _ in range(50)]
            child.kill()
        assert journal.records() in ({}, {5: others[0]}, {5: others[1]})
        assert all(set(found) <= {5} for found in seen)


def test_nobody_can_cut_a_journal(journal: Journal) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(journal.fd, 0)


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"", MalformedError, "journal of 0 bytes is shorter than its header"),
        (JournalHeader(4).pack()[:63], MalformedError, "journal of 63 bytes is shorter than its header"),
        (b"x" * 64, MalformedError, "not a journal of events: 7878787878787878"),
        (struct.pack("<8sHxxII44x", MAGIC, VERSION + 1, 4, 0), UnsupportedError, "of version 2; this release knows 1"),
        (JournalHeader(4, 5).pack() + bytes(256), MalformedError, "journal of 4 events has used 5 numbers"),
        (JournalHeader(4).pack() + bytes(255), MalformedError, "journal of 319 bytes does not hold 4 events"),
        (JournalHeader(1 << 31).pack(), MalformedError, "journal of 64 bytes does not hold 2147483648 events"),
    ],
)
def test_what_is_no_journal_is_refused(data: bytes, error: type[ImgtoolError], says: str) -> None:
    fd = os.memfd_create("test")
    try:
        os.write(fd, data)
        with pytest.raises(error, match=says):
            Journal(fd)
    finally:
        os.close(fd)


# --- events


def test_records_have_the_kernels_sizes() -> None:
    assert fanotify.fanotify_event_metadata.size == 24
    assert fanotify.fanotify_event_info_header.size == 4
    assert fanotify.fanotify_event_info_range.size == 24
    assert fanotify.fanotify_response.size == 8


def test_events_one_after_the_other() -> None:
    data = raw_event(5, 9) + raw_event(6, 0, raw_range(1 << 40, 1)) + raw_event(7, 10, raw_range(0, 0))
    assert list(events(data)) == [Event(5, 9, 4096, 8192), Event(6, 0, 1 << 40, 1), Event(7, 10, 0, 0)]
    assert list(events(b"")) == []


def test_unknown_records_and_longer_metadata_are_passed_over() -> None:
    unknown = struct.pack("=BBH8x", 99, 0, 12)
    assert list(events(raw_event(5, 9, unknown + raw_range(1, 2) + unknown) + raw_event(6))) == [
        Event(5, 9, 1, 2),
        Event(6, 9, 4096, 8192),
    ]
    longer = raw_event(5, 9, bytes(8) + raw_range(1, 2), metadata_len=32)
    assert list(events(longer)) == [Event(5, 9, 1, 2)]
    more = raw_event(5, 9, raw_range(1, 2, 32) + bytes(8))
    assert list(events(more)) == [Event(5, 9, 1, 2)]


def test_an_event_without_a_range_says_so() -> None:
    assert list(events(raw_event(5, 9, b"") + raw_event(6))) == [Event(5, 9, 0, UNKNOWN), Event(6, 9, 4096, 8192)]


def test_an_overflow_has_no_number() -> None:
    data = raw_event(-1, 0, b"", mask=FAN_Q_OVERFLOW) + raw_event(6)
    assert list(events(data)) == [Event(FAN_NOFD, 0, 0, UNKNOWN), Event(6, 9, 4096, 8192)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (raw_event()[:23], "event of 23 bytes is shorter than its metadata"),
        (raw_event(vers=2), "events of version 2; 3 is known"),
        (raw_event()[:47], "event of 48 bytes, metadata of 24, in 47"),
        (raw_event(event_len=23), "event of 23 bytes, metadata of 24"),
        (raw_event(event_len=0), "event of 0 bytes"),
        (raw_event(metadata_len=23), "metadata of 23"),
        (raw_event(metadata_len=49), "metadata of 49"),
        (raw_event(records=b"\6\0\1"), "ends 3 bytes into a record"),
        (raw_event(records=struct.pack("=BBH", 9, 0, 3)), "record of 3 bytes in 4"),
        (raw_event(records=struct.pack("=BBH", 9, 0, 0)), "record of 0 bytes in 4"),
        (raw_event(records=struct.pack("=BBH", 9, 0, 5)), "record of 5 bytes in 4"),
        (raw_event(records=struct.pack("=BBH16x", 6, 0, 20)), "range record of 20 bytes"),
    ],
)
def test_what_contradicts_itself_is_refused_after_the_events_before_it(data: bytes, says: str) -> None:
    found = events(raw_event(3) + data)
    assert next(found) == Event(3, 9, 4096, 8192)
    with pytest.raises(MalformedError, match=says):
        list(found)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=200)
def test_any_bytes_end_as_events_or_in_our_error(data: bytes) -> None:
    found = []
    try:
        found.extend(events(data))
    except MalformedError:
        pass
    assert len(found) <= len(data) // 24


@given(
    st.lists(st.tuples(st.integers(-1, 1 << 20), st.integers(0, (1 << 64) - 1)), min_size=1, max_size=5),
    st.integers(0, 239),
    st.binary(min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=200)
def test_damaged_events_end_as_events_or_in_our_error(numbers: list[tuple[int, int]], at: int, put: bytes) -> None:
    data = bytearray(b"".join(raw_event(number, 1, raw_range(offset, 1)) for number, offset in numbers))
    at %= len(data)
    data[at : at + len(put)] = put
    try:
        for event in events(bytes(data)):
            assert event.length >= UNKNOWN
            assert event.offset >= 0
    except MalformedError:
        pass


def test_one_read_takes_as_many_events_as_it_says() -> None:
    ours, kernels = os.pipe()
    try:
        os.write(kernels, b"".join(raw_event(number) for number in range(fanotify.BATCH + 1)))
        assert len(list(fanotify.read(ours))) == fanotify.BATCH
        assert len(list(fanotify.read(ours))) == 1
    finally:
        os.close(ours)
        os.close(kernels)
