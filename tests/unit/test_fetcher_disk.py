"""A disk that is full or fails, and when what was fetched is durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fetchers import (
    FRAME,
    SMALL,
    Bench,
    Disk,
    a_bench,
    all_of,
    raised,
    recorded,
    want,
)
from support.fetching import (
    read_back,
    small_pack,
    until,
)

from layerstore.errors import (
    ImgtoolError,
    NoSpaceError,
    UnavailableError,
)
from prefetch.backlog import RAW_PER_READ
from prefetch.commits import SYNC_BYTES, SYNC_SECONDS


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with a_bench(tmp_path) as bench:
        yield bench


# -- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.case("C06")
def test_a_full_disk_means_making_room_and_trying_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.pack(SMALL, bench.store(SMALL))
    disk = Disk(monkeypatch, pack, 3 * FRAME)
    asked: list[tuple[int, str]] = []

    def room(wanted: int, hex: str) -> int:
        asked.append((wanted, hex))
        disk.free += wanted
        return wanted

    bench.room = room
    assert want(bench.fetcher(), pack, *range(10)).wait() is None
    read_back(pack, SMALL, range(10))
    assert asked == [(7 * FRAME, pack.hex)]


@pytest.mark.case("C06")
def test_a_disk_that_stays_full_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    disk = Disk(monkeypatch, pack, 3 * FRAME)
    fetcher = bench.fetcher()
    answers = [want(fetcher, pack, n) for n in range(10)]
    for answer in answers:
        assert type(answer.wait()) in (type(None), NoSpaceError)
    ready = [n for n in range(10) if answers[n].wait() is None]
    assert len(ready) == 3
    read_back(pack, SMALL, ready)
    assert len(pack.unready(range(10))) == 7
    with pytest.raises(NoSpaceError):
        fetcher.run(all_of(pack))
    disk.free = 1 << 20
    fetcher.run(all_of(pack))
    read_back(pack, SMALL, range(40))


@pytest.mark.case("C06")
def test_room_that_others_take_is_asked_for_a_few_times_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.pack(SMALL, bench.store(SMALL))
    Disk(monkeypatch, pack, 0)
    asked: list[int] = []

    def room(wanted: int, hex: str) -> int:
        asked.append(wanted)
        return wanted

    bench.room = room
    raised(want(bench.fetcher(), pack, 1), NoSpaceError)
    assert 1 <= len(asked) <= 5


# -- durable ---------------------------------------------------------------------------------------------------------


@pytest.mark.case("C09")
def test_what_was_fetched_is_recorded_in_groups_once_it_is_durable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = bench.pack(SMALL, bench.store(SMALL))
    syncs: list[list[int]] = []
    monkeypatch.setattr(os, "fdatasync", lambda file: syncs.append(recorded(pack)) if file == pack.data_fd else None)
    fetcher = bench.fetcher(stepped=True)
    for number in range(5):
        assert want(fetcher, pack, number).wait() is None
    assert syncs == [] and recorded(pack) == []
    bench.clock.advance(SYNC_SECONDS)
    until(lambda: recorded(pack) == [0, 1, 2, 3, 4])
    assert syncs == [[]], "recorded after, not before"
    assert want(fetcher, pack, 9).wait() is None
    bench.elapse(lambda: recorded(pack) == [0, 1, 2, 3, 4, 9])
    assert len(syncs) == 2


def test_much_that_was_fetched_is_not_left_for_later(bench: Bench) -> None:
    large = small_pack(SYNC_BYTES // RAW_PER_READ + 1, size=RAW_PER_READ)
    pack = bench.pack(large, bench.store(large))
    fetcher = bench.fetcher(stepped=True)
    assert want(fetcher, pack, *range(len(large.frames))).wait() is None
    until(lambda: len(recorded(pack)) >= len(large.frames) - 1)


@pytest.mark.case("C06", "C09")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_a_failing_sync_takes_back_is_fetched_once_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    disk = Disk(monkeypatch, pack, 1 << 30)
    disk.failing = [number]
    asked: list[str] = []

    def room(wanted: int, hex: str) -> int:
        asked.append(hex)
        return wanted

    bench.room = room
    fetcher = bench.fetcher()
    fetcher.run(all_of(pack))
    assert len(store.reads) == 6, "three, twice"
    assert asked == ([pack.hex] if number == errno.ENOSPC else [])
    read_back(pack, SMALL, range(40))
    assert pack.complete


@pytest.mark.case("C06", "C09")
@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, UnavailableError), (errno.ENOSPC, NoSpaceError)])
def test_a_disk_that_keeps_failing_ends_the_plan(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[ImgtoolError]
) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    disk = Disk(monkeypatch, pack, 1 << 30)
    disk.failing = [number] * 20
    fetcher = bench.fetcher()
    with pytest.raises(kind, match=str(pack.digest)):
        fetcher.run(all_of(pack))
    assert len(store.reads) <= 6
    assert recorded(pack) == []
    disk.failing = []
    fetcher.run(all_of(pack))
    read_back(pack, SMALL, range(40))
    assert pack.complete
