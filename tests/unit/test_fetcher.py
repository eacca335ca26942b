"""Fetching: what is asked of stores, in which order, what becomes of bad answers, and when those who wait are told."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.faults import fsync_for_free
from support.fetching import (
    PATIENCE,
    Answer,
    Fault,
    FaultyStore,
    Gate,
    SmallPack,
    Stall,
    SteppedClock,
    Watching,
    another_frame,
    cut_short,
    down,
    ends_early,
    flipped,
    ignores_ranges,
    missing,
    pack_frames,
    page,
    read_back,
    small_pack,
    until,
    zeros,
)

from layerstore.cache.cache import Cache
from layerstore.cache.framemap import MISSING, UNVERIFIED
from layerstore.cache.packs import CachedPack
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    NoSpaceError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
)
from layerstore.pack.format import BLOCK_SIZE
from layerstore.store.protocol import Store
from prefetch.attempts import ANSWERS, ROUNDS
from prefetch.backlog import RAW_PER_READ
from prefetch.commits import SYNC_BYTES, SYNC_SECONDS
from prefetch.fetcher import THREADS_FACTOR, Fetched, Fetcher, Priority
from prefetch.origins import AVOID_SECONDS, IDLE_SECONDS
from prefetch.plan import FRAMES_PER_READ, FrameRange, PackFetch
from prefetch.readahead import ReadAhead
from prefetch.schedule import BACKGROUND_BESIDE_DEMAND, QUIET_SECONDS
from prefetch.turns import Turns


class Bench:
    """A cache, and a fetcher over it whose stores are the test's."""

    def __init__(self, path: Path) -> None:
        self.cache = Cache(str(path))
        self.stores: dict[str, FaultyStore] = {}
        self.clock = SteppedClock()
        self.watching = Watching()
        self.room: Callable[[int, str], int] = lambda wanted, hex: 0
        self._fetchers: list[Fetcher] = []

    def open_store(self, location: str) -> Store:
        try:
            return self.stores[location]
        except KeyError:
            raise NotFoundError(f"no store at {location}") from None

    def store(self, *packs: SmallPack, location: str = "here") -> FaultyStore:
        self.stores[location] = FaultyStore(*packs, location=location)
        return self.stores[location]

    def pack(self, small: SmallPack, *stores: FaultyStore) -> CachedPack:
        """The pack in the cache; the first store is its first origin."""
        for store in reversed(stores):
            cached = self.cache.pack(small.stored, store)
        for store in stores:
            store.opened = store.closed = 0
        return cached

    def fetcher(self, *, stepped: bool = False, **fields: Any) -> Fetcher:
        """``stepped``: time goes by only by :meth:`elapse`."""
        fetcher = Fetcher(
            self.open_store,
            lambda wanted, hex: self.room(wanted, hex),
            observer=self.watching,
            clock=self.clock if stepped else None,
            **fields,
        )
        self._fetchers.append(fetcher)
        return fetcher

    def elapse(self, condition: Callable[[], object], step: float = 0.1) -> None:
        """Let time go by until something holds."""

        def then() -> bool:
            if condition():
                return True
            self.clock.advance(step)
            return False

        until(then)

    def close(self) -> None:
        for fetcher in self._fetchers:
            closing = threading.Thread(target=fetcher.close)
            closing.start()
            self.elapse(lambda thread=closing: not thread.is_alive())  # type: ignore[misc]
        until(lambda: not any(thread.name.startswith("fetch") for thread in threading.enumerate()))
        for store in self.stores.values():
            assert store.opened == store.closed, "a blob stays open"
        self.cache.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(os, "fdatasync", lambda file: None)
    with fsync_for_free():
        bench = Bench(tmp_path)
        yield bench
        bench.close()


SMALL = small_pack(40)
FRAME = len(SMALL.frames[0])
OTHER = small_pack(40, seed=1)


def want(fetcher: Fetcher, pack: CachedPack, *numbers: int, **fields: Any) -> Answer:
    answer = Answer()
    fetcher.want(pack, numbers, answer, **fields)
    return answer


def background(fetcher: Fetcher, pack: CachedPack, *numbers: int) -> Answer:
    return want(fetcher, pack, *numbers, priority=Priority.BACKGROUND)


def all_of(pack: CachedPack) -> list[PackFetch]:
    return [PackFetch(pack, (FrameRange(0, len(pack.index)),))]


def numbers_read(store: FaultyStore, pack: CachedPack) -> list[list[int]]:
    """The frames of each read, by offset."""
    starts = {pack.index.blob_range(range(n, n + 1))[0]: n for n in range(len(pack.index))}
    found = []
    for _, offset, length in store.reads:
        found.append([n for at, n in sorted(starts.items()) if offset <= at < offset + length])
    return found


def raised(answer: Answer, kind: type[ImgtoolError]) -> str:
    error = answer.wait()
    assert type(error) is kind, repr(error)
    text = str(error)
    assert text.isprintable()
    return text


# -- one fetch, however many wait ------------------------------------------------------------------------------------


def test_a_wanted_frame_is_there_when_it_is_said_to_be(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher()
    seen: list[int] = []
    told = threading.Event()

    def done(error: ImgtoolError | None) -> None:
        assert error is None
        read_back(pack, SMALL, [7])
        seen.append(pack.frames.state(8))
        told.set()

    fetcher.want(pack, [7], done)
    assert told.wait(PATIENCE)
    assert seen == [MISSING]
    assert numbers_read(store, pack) == [[7]]


def test_what_is_there_costs_nothing(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher()
    assert want(fetcher, pack, 3, 4).wait() is None
    before = list(store.reads)
    answer = want(fetcher, pack, 4, 3, 4)
    assert answer.given, "told at once"
    assert answer.wait() is None
    assert want(fetcher, pack).wait() is None
    assert store.reads == before
    assert fetcher.stats().demand_waits == 1


def test_fifty_who_want_the_same_cost_one_read(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher()
    answers = [Answer() for _ in range(50)]
    with ThreadPoolExecutor(10) as pool:
        for answer in answers:
            pool.submit(fetcher.want, pack, [1, 2, 3], answer)
    gate.open()
    assert [answer.wait() for answer in answers] == [None] * 50
    assert numbers_read(store, pack) == [[1, 2, 3]]
    assert store.opened == 1
    assert fetcher.stats().demand.frames == 3


def test_a_demand_joins_what_is_under_way_and_pulls_forward_what_is_queued(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=1)
    first = background(fetcher, pack, 0)
    until(lambda: store.concurrent == 1)
    later = [background(fetcher, pack, n) for n in (10, 20, 30)]
    joined = want(fetcher, pack, 0)
    pulled = want(fetcher, pack, 30, 31)
    gate.open()
    assert [answer.wait() for answer in (first, joined, pulled, *later)] == [None] * 6
    assert numbers_read(store, pack) == [[0], [30, 31], [10], [20]]


def test_a_want_is_done_when_the_last_of_its_frames_is_there(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    stall = Stall()
    store.faults = [None, stall]
    fetcher = bench.fetcher(threads=2)
    answer = want(fetcher, pack, 3, 20)
    until(lambda: pack.frames.is_ready(range(3, 4)) and stall.waiting)
    assert not answer.given
    stall.end()
    assert answer.wait() is None
    read_back(pack, SMALL, [3, 20])


def test_packs_do_not_mix(bench: Bench) -> None:
    store = bench.store(SMALL, OTHER)
    one, two = bench.pack(SMALL, store), bench.pack(OTHER, store)
    fetcher = bench.fetcher()
    answers = [want(fetcher, pack, n) for n in range(40) for pack in (one, two)]
    assert [answer.wait() for answer in answers] == [None] * 80
    read_back(one, SMALL, range(40))
    read_back(two, OTHER, range(40))


# -- what comes first ------------------------------------------------------------------------------------------------


def test_demand_comes_first_and_in_order_of_arrival(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=1)
    answers = [background(fetcher, pack, 0)]
    until(lambda: store.concurrent == 1)
    answers += [background(fetcher, pack, n) for n in (2, 4)]
    answers += [want(fetcher, pack, n) for n in (38, 6, 30, 8)]
    gate.open()
    assert [answer.wait() for answer in answers] == [None] * 7
    assert numbers_read(store, pack) == [[0], [38], [6], [30], [8], [2], [4]]


def test_background_leaves_threads_for_demand(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=4)
    answers = [background(fetcher, pack, n) for n in range(0, 40, 2)]
    until(lambda: store.concurrent == 3)
    answers.append(want(fetcher, pack, 39))
    until(lambda: store.concurrent == 4)
    assert numbers_read(store, pack)[-1] == [39]
    answers.append(want(fetcher, pack, 37))
    gate.open()
    assert all(answer.wait() is None for answer in answers)
    assert numbers_read(store, pack)[4] == [37]
    assert store.most == 4


def test_while_readers_demand_background_holds_back(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=8, stepped=True)
    answers = [want(fetcher, pack, 39)]
    until(lambda: store.concurrent == 1)
    answers += [background(fetcher, pack, n) for n in range(0, 36, 2)]
    until(lambda: store.concurrent == 1 + BACKGROUND_BESIDE_DEMAND)
    assert fetcher.stats().in_flight == 1 + BACKGROUND_BESIDE_DEMAND
    bench.clock.advance(QUIET_SECONDS)
    answers.append(background(fetcher, pack, 37))
    until(lambda: store.concurrent == 1 + 6)
    gate.open()
    assert all(answer.wait() is None for answer in answers)
    assert store.most == 7


def test_no_read_takes_long(bench: Bench) -> None:
    """So that a demand waits for little, whatever is under way."""
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher()
    assert background(fetcher, pack, *range(40)).wait() is None
    assert max(map(len, numbers_read(store, pack))) == FRAMES_PER_READ
    large = small_pack(10, size=RAW_PER_READ // 3 // BLOCK_SIZE * BLOCK_SIZE)
    store = bench.store(large, location="large")
    pack = bench.pack(large, store)
    assert want(fetcher, pack, *range(10)).wait() is None
    assert sorted(map(len, numbers_read(store, pack))) == [1, 3, 3, 3]


def test_frames_larger_than_a_read_come_alone(bench: Bench) -> None:
    large = small_pack(3, size=2 * RAW_PER_READ)
    store = bench.store(large)
    pack = bench.pack(large, store)
    assert want(bench.fetcher(), pack, 0, 1, 2).wait() is None
    assert sorted(numbers_read(store, pack)) == [[0], [1], [2]]


def test_while_a_reader_has_its_turn_background_waits() -> None:
    turns = Turns(2)
    order: list[str] = []

    def work(name: str) -> None:
        with turns.take(Priority.BACKGROUND):
            order.append(name)
            gate.__enter__()

    gate = Gate()
    with ThreadPoolExecutor(3) as pool:
        with turns.take(Priority.DEMAND):
            order.append("demand")
            jobs = [pool.submit(work, "one"), pool.submit(work, "two"), pool.submit(work, "three")]
            until(lambda: turns._waiting == 3)
            with turns.take(Priority.DEMAND):
                order.append("another")
        until(lambda: len(order) == 4)
        assert order[:2] == ["demand", "another"]
        assert turns._waiting == 1, "no more than there are processors"
        gate.open()
        for job in jobs:
            job.result(PATIENCE)
    assert len(order) == 5
    assert turns._demand == turns._background == turns._waiting == 0


# -- neighbours ------------------------------------------------------------------------------------------------------


def test_neighbours_come_in_one_read(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=1)
    answers = [want(fetcher, pack, 39)]
    until(lambda: store.concurrent == 1)
    answers += [want(fetcher, pack, n) for n in (10, 20, 11, 9, 12, 14)]
    answers.append(background(fetcher, pack, 13, 21))
    gate.open()
    assert all(answer.wait() is None for answer in answers)
    assert numbers_read(store, pack) == [[39], [9, 10, 11, 12], [20], [14], [13], [21]]
    stats = fetcher.stats()
    assert stats.coalesced == 3
    assert (stats.demand.requests, stats.background.requests) == (4, 2)
    read_back(pack, SMALL, [9, 10, 11, 12, 13, 14, 20, 21, 39])


def test_the_more_was_demanded_nearby_the_more_is_read_around(bench: Bench) -> None:
    pack = bench.pack(SMALL, bench.store(SMALL))
    ahead = ReadAhead(reach=5, most=3)
    assert ahead.around(pack, [20]) == []
    assert ahead.around(pack, [20]) == [], "the same again is no neighbour"
    assert ahead.around(pack, [30]) == [], "nor is what is far away"
    assert ahead.around(pack, [25]) == [26, 27, 23, 24]
    assert ahead.around(pack, [27, 28]) == [29, 30, 25, 26]
    assert ahead.around(pack, [26]) == [27, 28, 29, 23, 24, 25]
    assert ahead.around(pack, [24]) == [25, 26, 27, 21, 22, 23], "no more than that"
    assert ahead.around(pack, [0]) == []
    assert ahead.around(pack, [1]) == [2, 0]
    assert ahead.around(pack, [38]) == []
    assert ahead.around(pack, [39]) == [38], "and not beyond the ends"


def test_what_is_read_ahead_comes_after_demand_and_before_plans(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=1, ahead=ReadAhead())
    assert want(fetcher, pack, 10).wait() is None
    store.gate = gate = Gate()
    answers = [background(fetcher, pack, 0)]
    until(lambda: store.concurrent == 1)
    answers += [background(fetcher, pack, 38), want(fetcher, pack, 12), want(fetcher, pack, 30)]
    gate.open()
    assert all(answer.wait() is None for answer in answers)
    until(lambda: not fetcher.stats().in_flight)
    assert numbers_read(store, pack) == [[10], [0], [12], [30], [13], [11], [38]]
    assert fetcher.stats().demand.frames == 3
    read_back(pack, SMALL, [0, 10, 11, 12, 13, 30, 38])


# -- what is there already, perhaps ----------------------------------------------------------------------------------


def unverified(pack: CachedPack, small: SmallPack, right: Sequence[int], wrong: Sequence[int]) -> None:
    """As after an unclean stop."""
    for number in (*right, *wrong):
        raw = small.frames[number] if number in right else bytes(len(small.frames[number]))
        os.pwrite(pack.data_fd, raw, pack.index.raw_range(number)[0])
        pack.frames.set(number, UNVERIFIED)


@pytest.mark.case("C09", "C10")
def test_what_an_unclean_stop_left_is_verified_before_it_is_read_and_fetched_if_it_is_wrong(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    unverified(pack, SMALL, range(10), [10, 11])
    fetcher = bench.fetcher()
    assert want(fetcher, pack, *range(9, 13)).wait() is None
    read_back(pack, SMALL, range(9, 13))
    assert sorted(n for read in numbers_read(store, pack) for n in read) == [10, 11, 12]
    assert fetcher.stats().verified == 1
    fetched = fetcher.run(all_of(pack))
    assert fetched.frames == 40 - 13
    assert fetcher.stats().verified == 10
    read_back(pack, SMALL, range(40))


# -- wrong answers ---------------------------------------------------------------------------------------------------

WRONG: dict[str, Fault] = {
    "cut short": cut_short,
    "ends early": ends_early,
    "flipped": flipped,
    "page": page,
    "zeros": zeros,
    "ranges ignored": ignores_ranges(SMALL),
    "another frame": another_frame(SMALL),
    "nothing": lambda offset, length, right: b"",
    "longer": lambda offset, length, right: b"\0" + right,
}


@pytest.mark.case("C10", "C11", "D01")
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_answer_is_asked_for_once_more(bench: Bench, fault: str) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    store.faults = [WRONG[fault]]
    fetcher = bench.fetcher()
    assert want(fetcher, pack, 5).wait() is None
    read_back(pack, SMALL, [5])
    assert numbers_read(store, pack) == [[5], [5]]
    assert store.opened == 2, "a blob that was wrong is opened anew: it may have been mended"
    assert fetcher.stats().retries == 1
    assert [numbers for numbers, _ in bench.watching.failures] == [(5,)]


@pytest.mark.case("C10", "C11", "D01")
@pytest.mark.parametrize("fault", WRONG)
def test_what_stays_wrong_fails_soon_and_never_gets_in(bench: Bench, fault: str) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    store.fault = WRONG[fault]
    fetcher = bench.fetcher()
    text = raised(want(fetcher, pack, 5, 6), CorruptError)
    until(lambda: not fetcher.stats().in_flight)
    digests = [pack.index.sha256(number).hex() for number in (5, 6)]
    assert any(f"frame {n} of pack {pack.digest}" in text and digests[n - 5] in text for n in (5, 6))
    assert "here" in text
    assert len(store.reads) <= 1 + 2 * ANSWERS
    assert pack.frames.state(6) == MISSING
    if pack.unready([5]):
        assert not any(os.pread(pack.data_fd, 2 * FRAME, pack.index.raw_range(5)[0]))
    else:
        read_back(pack, SMALL, [5])  # not all of the answer was wrong
    store.fault = None
    assert want(fetcher, pack, 5, 6).wait() is None, "once the store is well again"
    read_back(pack, SMALL, [5, 6])


@pytest.mark.case("C10")
@pytest.mark.parametrize("fault", WRONG)
def test_then_the_next_place_is_asked(bench: Bench, fault: str) -> None:
    bad, good = bench.store(SMALL, location="bad"), bench.store(SMALL, location="good")
    pack = bench.pack(SMALL, bad, good)
    bad.fault = WRONG[fault]
    fetcher = bench.fetcher()
    assert want(fetcher, pack, 5).wait() is None
    assert (len(bad.reads), len(good.reads)) == (ANSWERS, 1)
    read_back(pack, SMALL, [5])


def test_one_wrong_frame_does_not_keep_its_neighbours_back(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    start = pack.index.blob_range(range(7, 8))[0]

    def fault(offset: int, count: int, right: bytes) -> bytes:
        if not offset <= start < offset + count:
            return right
        return right[: start - offset + 20] + b"\xff\xfe\xfd" + right[start - offset + 23 :]

    store.fault = fault
    fetcher = bench.fetcher()
    others = [want(fetcher, pack, n) for n in range(10) if n != 7]
    text = raised(want(fetcher, pack, *range(10)), CorruptError)
    assert f"frame 7 of pack {pack.digest}" in text
    assert all(answer.wait() is None for answer in others)
    read_back(pack, SMALL, [n for n in range(10) if n != 7])
    assert pack.frames.state(7) == MISSING


def test_a_blob_that_ends_early_gives_what_it_has(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    end = pack.index.blob_range(range(5, 6))[0]

    def fault(offset: int, length: int, right: bytes) -> bytes:
        if offset + length > end:
            raise CorruptError("blob was cut off while open")
        return right

    store.fault = fault
    fetcher = bench.fetcher(threads=1)
    answers = {n: want(fetcher, pack, n) for n in range(8)}
    assert [n for n, answer in answers.items() if answer.wait() is None] == [0, 1, 2, 3, 4]
    assert len(store.reads) < 30
    for number in (5, 6, 7):
        assert f"frame {number} of pack {pack.digest}" in raised(answers[number], CorruptError)


def test_another_blob_of_the_pack_is_as_good(bench: Bench) -> None:
    repacked = small_pack(40, level=19)
    assert repacked.stored.digest == SMALL.stored.digest and repacked.stored.blob != SMALL.stored.blob
    first, second = bench.store(SMALL, location="first"), bench.store(repacked, location="second")
    pack = bench.pack(SMALL, first)
    bench.cache.pack(repacked.stored, second)
    second.opened = second.closed = 0
    fetcher = bench.fetcher()
    assert want(fetcher, pack, *range(20)).wait() is None, "from the newest origin, by its own index"
    assert (len(first.reads), second.opened) == (0, 1)
    second.fault = flipped
    assert want(fetcher, pack, *range(20, 40)).wait() is None
    assert first.reads
    read_back(pack, SMALL, range(40))


@pytest.mark.case("C08")
def test_a_blob_cut_in_other_frames_is_not_used(bench: Bench) -> None:
    raw = SMALL.raw
    halved = pack_frames([raw[at : at + 2 * FRAME] for at in range(0, len(raw), 2 * FRAME)])
    assert halved.stored.digest == SMALL.stored.digest
    good, odd = bench.store(SMALL, location="good"), bench.store(halved, location="odd")
    pack = bench.pack(SMALL, good)
    bench.cache.pack(halved.stored, odd)
    odd.opened = odd.closed = 0
    fetcher = bench.fetcher()
    assert want(fetcher, pack, 3).wait() is None
    assert odd.reads == [] and len(good.reads) == 1
    good.fault = missing
    assert "other frames" in raised(want(fetcher, pack, 4), CorruptError)


@pytest.mark.case("C11")
def test_a_blob_of_another_size_is_not_read(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    store.blobs[SMALL.stored.blob] = SMALL.blob + b"<html>"
    text = raised(want(bench.fetcher(), pack, 4), CorruptError)
    assert store.reads == []
    assert str(SMALL.stored.blob) in text and f"frame 4 of pack {pack.digest}" in text and "expected" in text


# -- missing, refused, unreachable -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["open", "read"])
def test_what_is_missing_in_one_place_is_asked_for_at_the_next(bench: Bench, where: str) -> None:
    lacking, having = bench.store(SMALL, location="lacking"), bench.store(SMALL, location="having")
    pack = bench.pack(SMALL, lacking, having)
    if where == "open":
        lacking.blobs.clear()
    else:
        lacking.fault = missing
    fetcher = bench.fetcher()
    assert want(fetcher, pack, 1).wait() is None
    having.blobs.clear()
    having.fault = missing
    lacking.fault = missing
    text = raised(want(fetcher, pack, 2), NotFoundError)
    assert "404" in text or str(SMALL.stored.blob) in text
    assert len(lacking.reads) + len(having.reads) <= 4


def test_missing_in_one_place_and_wrong_in_the_other_is_not_missing(bench: Bench) -> None:
    one, two = bench.store(SMALL, location="one"), bench.store(SMALL, location="two")
    pack = bench.pack(SMALL, one, two)
    one.fault, two.fault = flipped, missing
    raised(want(bench.fetcher(), pack, 1), CorruptError)


def test_missing_in_one_place_and_unreachable_in_the_other_is_not_missing(bench: Bench) -> None:
    one, two = bench.store(SMALL, location="one"), bench.store(SMALL, location="two")
    pack = bench.pack(SMALL, one, two)
    one.fault, two.fault = missing, down
    fetcher = bench.fetcher(stepped=True)
    answer = want(fetcher, pack, 1, deadline=bench.clock.now() + 3)
    bench.elapse(lambda: answer.given)
    assert "connection refused" in raised(answer, UnavailableError)
    assert len(one.reads) == 1 and len(two.reads) > 1


def test_a_store_that_is_gone_is_unavailable_and_not_missing(bench: Bench) -> None:
    pack = bench.pack(SMALL, bench.store(SMALL))
    del bench.stores["here"]
    fetcher = bench.fetcher(stepped=True)
    answer = want(fetcher, pack, 1, deadline=bench.clock.now() + 3)
    bench.elapse(lambda: answer.given)
    assert "no store at here" in raised(answer, UnavailableError)


def test_a_pack_with_no_origin_is_not_found(bench: Bench) -> None:
    pack = bench.pack(SMALL, bench.store(SMALL))
    pack.origins = []
    assert str(pack.digest) in raised(want(bench.fetcher(), pack, 1), NotFoundError)


def test_a_refusal_is_told_as_it_is(bench: Bench) -> None:
    def refuse(offset: int, length: int, right: bytes) -> bytes:
        raise PermissionError_("403")

    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    store.fault = refuse
    assert "403" in raised(want(bench.fetcher(), pack, 1), PermissionError_)
    assert len(store.reads) == 1


@pytest.mark.case("D01")
@pytest.mark.parametrize("raw", [False, True], ids=["mapped", "OSError"])
def test_an_unreachable_store_is_tried_until_the_deadline(bench: Bench, raw: bool) -> None:
    def fault(offset: int, length: int, right: bytes) -> bytes:
        if raw:
            raise OSError(errno.ENOENT, "gone for now")
        return down(offset, length, right)

    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    store.fault = fault
    fetcher = bench.fetcher(stepped=True)
    start = bench.clock.now()
    answer = want(fetcher, pack, 1, 2, deadline=start + 20)
    bench.elapse(lambda: answer.given)
    text = raised(answer, UnavailableError)
    assert ("gone for now" if raw else "connection refused") in text
    assert "2 frames from 1 on" in text and str(pack.digest) in text
    assert 20 <= bench.clock.now() - start < 25
    assert 5 <= len(store.reads) <= 25, "pauses double up to two seconds"
    assert fetcher.stats().waiting == fetcher.stats().resting == 0


def test_an_unreachable_store_that_comes_back_in_time_is_not_noticed(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    store.faults = [down] * 5
    fetcher = bench.fetcher(stepped=True)
    answer = want(fetcher, pack, *range(10), deadline=bench.clock.now() + 30)
    bench.elapse(lambda: answer.given)
    assert answer.wait() is None
    assert numbers_read(store, pack) == [[*range(10)]] * 6, "neighbours stay together"
    read_back(pack, SMALL, range(10))


def test_without_a_deadline_attempts_are_counted(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    store.fault = down
    fetcher = bench.fetcher(stepped=True)
    waits = want(fetcher, pack, 1, deadline=bench.clock.now() + 1000)
    answer = want(fetcher, pack, 1)
    bench.elapse(lambda: answer.given)
    assert raised(answer, UnavailableError) == "connection refused"
    assert len(store.reads) == ROUNDS
    store.fault = None
    bench.elapse(lambda: waits.given)
    assert waits.wait() is None, "one with a deadline waits on"


def test_a_place_that_failed_is_asked_last_for_a_while(bench: Bench) -> None:
    bad, good = bench.store(SMALL, location="bad"), bench.store(SMALL, location="good")
    pack = bench.pack(SMALL, bad, good)
    bad.fault = down
    fetcher = bench.fetcher(stepped=True)
    for number in range(0, 10, 2):
        assert want(fetcher, pack, number).wait() is None
    assert (len(bad.reads), len(good.reads)) == (1, 5)
    bench.clock.advance(AVOID_SECONDS)
    bad.fault = None
    assert want(fetcher, pack, 20).wait() is None
    assert len(bad.reads) == 2


# -- deadlines -------------------------------------------------------------------------------------------------------


def test_a_deadline_that_has_passed_is_told_at_once(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(stepped=True)
    answer = want(fetcher, pack, 1, deadline=bench.clock.now())
    assert answer.given
    raised(answer, UnavailableError)
    assert store.reads == []
    assert want(fetcher, pack, 2, deadline=bench.clock.now() + 1).wait() is None


def test_who_waits_too_long_is_told_and_what_nobody_waits_for_is_not_read(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=1, stepped=True)
    now = bench.clock.now()
    reading = want(fetcher, pack, 0, deadline=now + 2)
    until(lambda: store.concurrent == 1)
    queued = want(fetcher, pack, 10, deadline=now + 1)
    shared = [want(fetcher, pack, 20, deadline=now + 1), background(fetcher, pack, 20)]
    patient = want(fetcher, pack, 30, deadline=now + 100)
    bench.elapse(lambda: queued.given and shared[0].given)
    assert not reading.given
    assert "frame 10" in raised(queued, UnavailableError)
    raised(shared[0], UnavailableError)
    bench.elapse(lambda: reading.given)
    assert "here has not answered for" in raised(reading, UnavailableError)
    assert bench.clock.now() < now + 5
    gate.open()
    assert patient.wait() is None and shared[1].wait() is None
    assert numbers_read(store, pack) == [[0], [30], [20]], "demand first: what lost its reader is background again"
    read_back(pack, SMALL, [0, 20, 30])


def test_deadlines_hold_in_any_order(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=1, stepped=True)
    now = bench.clock.now()
    seconds = [5, 1, 3, 0.5, 4, 2]
    answers = {each: want(fetcher, pack, number, deadline=now + each) for number, each in enumerate(seconds)}
    for each in sorted(seconds):
        bench.elapse(lambda each=each: answers[each].given, step=0.1)  # type: ignore[misc]
        assert now + each <= bench.clock.now()
        assert not any(answers[later].given for later in seconds if later > bench.clock.now() - now)
    gate.open()
    assert all(type(answer.wait()) is UnavailableError for answer in answers.values())


# -- stores that don't answer ----------------------------------------------------------------------------------------


@pytest.mark.case("D01")
def test_a_read_that_stalls_is_given_up_and_made_again(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    stall = Stall()
    store.faults = [stall]
    fetcher = bench.fetcher(threads=1, stepped=True)
    answer = want(fetcher, pack, 3, 4)
    until(lambda: stall.waiting)
    bench.elapse(lambda: answer.given)
    assert answer.wait() is None
    read_back(pack, SMALL, [3, 4])
    assert numbers_read(store, pack) == [[3, 4], [3, 4]]
    stats = fetcher.stats()
    assert (stats.stalled, stats.in_flight, stats.threads) == (1, 0, 2)
    assert "here did not answer within 10 s" in str(bench.watching.failures[0][1])
    assert want(fetcher, pack, 5).wait() is None, "others go on meanwhile"
    stall.end()
    until(lambda: fetcher.stats().threads == 1)


def test_a_late_right_answer_is_used_and_a_late_wrong_one_is_not(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    stalls = [Stall(), Stall(), Stall()]
    store.faults = [
        stalls[0],
        lambda offset, length, right: flipped(offset, length, stalls[1](offset, length, right)),
        stalls[2],
    ]
    fetcher = bench.fetcher(threads=2, stepped=True)
    answer = want(fetcher, pack, 3, deadline=bench.clock.now() + 100)
    for stall in stalls:
        bench.elapse(lambda stall=stall: stall.waiting)  # type: ignore[misc]
    stalls[1].end()
    until(lambda: store.concurrent == 2)
    assert not answer.given
    stalls[0].end()
    assert answer.wait() is None
    read_back(pack, SMALL, [3])
    assert fetcher.stats().waiting == 0
    stalls[2].end()
    until(lambda: not fetcher.stats().in_flight)
    read_back(pack, SMALL, [3])


@pytest.mark.case("D01")
def test_every_want_is_answered_when_every_thread_is_stuck(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    store.fault = stall = Stall()
    fetcher = bench.fetcher(threads=2, stepped=True)
    now = bench.clock.now()
    timed = [want(fetcher, pack, n, deadline=now + 60) for n in (0, 2, 4)]
    endless = [want(fetcher, pack, n) for n in range(10, 40, 2)]
    bench.elapse(lambda: all(answer.given for answer in (*timed, *endless)), step=0.5)
    assert bench.clock.now() < now + 100
    assert all(type(answer.wait()) is UnavailableError for answer in (*timed, *endless))
    assert fetcher.stats().threads == stall.waiting == THREADS_FACTOR * 2
    late = want(fetcher, pack, 1, deadline=bench.clock.now() + 1)
    bench.elapse(lambda: late.given)
    raised(late, UnavailableError)
    store.fault = None
    stall.end()
    until(lambda: fetcher.stats().threads <= 2)
    assert want(fetcher, pack, *range(40)).wait() is None
    read_back(pack, SMALL, range(40))


def test_a_stalled_place_does_not_hold_up_the_others(bench: Bench) -> None:
    stuck, good = bench.store(SMALL, location="stuck"), bench.store(SMALL, location="good")
    pack = bench.pack(SMALL, stuck, good)
    stuck.fault = stall = Stall()
    fetcher = bench.fetcher(threads=2, stepped=True)
    answer = want(fetcher, pack, 0)
    bench.elapse(lambda: answer.given)
    assert answer.wait() is None
    assert want(fetcher, pack, 2).wait() is None
    assert (len(stuck.reads), len(good.reads)) == (1, 2)
    stall.end()


def test_opening_a_blob_may_stall_too(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    stall = Stall()
    opened = []

    def on_open() -> None:
        opened.append(1)
        if len(opened) == 1:
            stall(0, 0, b"")

    store.on_open = on_open
    fetcher = bench.fetcher(threads=4, stepped=True)
    answers = [want(fetcher, pack, n) for n in range(0, 8, 2)]
    bench.elapse(lambda: all(answer.given for answer in answers))
    assert all(answer.wait() is None for answer in answers)
    stall.end()


# -- a full disk -----------------------------------------------------------------------------------------------------


class Disk:
    """Takes so many more bytes of a pack's data; ``failing``: what the next syncs of it raise."""

    def __init__(self, patch: pytest.MonkeyPatch, pack: CachedPack, free: int) -> None:
        self.free = free
        self.failing: list[int] = []
        real = os.pwrite

        def pwrite(file: int, data: Any, offset: int) -> int:
            if file == pack.data_fd:
                if len(data) > self.free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.free -= len(data)
            return real(file, data, offset)

        def fdatasync(file: int) -> None:
            if file == pack.data_fd and self.failing:
                number = self.failing.pop(0)
                raise OSError(number, os.strerror(number))

        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(os, "fdatasync", fdatasync)


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


def recorded(pack: CachedPack) -> list[int]:
    return [number for number, there in enumerate(pack._file.recorded) if there]


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


# -- plans -----------------------------------------------------------------------------------------------------------


class Counted:
    def __init__(self) -> None:
        self.steps: list[tuple[str, int | None]] = []
        self.count = 0
        self._lock = threading.Lock()

    def start(self, step: str, total: int | None) -> None:
        self.steps.append((step, total))

    def advance(self, count: int) -> None:
        with self._lock:
            self.count += count


def test_a_plan_is_fetched_whole_and_durable(bench: Bench) -> None:
    store = bench.store(SMALL, OTHER)
    one, two = bench.pack(SMALL, store), bench.pack(OTHER, store)
    fetcher = bench.fetcher()
    assert want(fetcher, one, 0).wait() is None
    progress = Counted()
    plan = [PackFetch(one, (FrameRange(0, 10), FrameRange(30, 10))), PackFetch(two, (FrameRange(20, 20),))]
    fetched = fetcher.run(plan, progress=progress)
    size = one.index.blob_range(range(1, 10))[1] + one.index.blob_range(range(30, 40))[1]
    size += two.index.blob_range(range(20, 40))[1]
    assert fetched == Fetched(4, size, 39 * FRAME, 39)
    assert (progress.steps, progress.count) == ([("fetch", size)], size)
    assert recorded(one) == [*range(10), *range(30, 40)]
    assert recorded(two) == [*range(20, 40)]
    assert fetcher.run(plan) == fetcher.run([]) == Fetched()


def test_plans_at_the_same_time_fetch_everything_once(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher()
    with ThreadPoolExecutor(10) as pool:
        done = [pool.submit(fetcher.run, all_of(pack)) for _ in range(50)]
        total = sum((job.result(PATIENCE) for job in done), Fetched())
    assert total == Fetched(3, SMALL.stored.data_end, 40 * FRAME, 40)
    assert len(store.reads) == 3
    assert pack.complete


def test_long_plans_take_turns(bench: Bench) -> None:
    small = [small_pack(600, size=4096, seed=seed) for seed in (1, 2)]
    store = bench.store(*small)
    store.gate = gate = Gate()
    packs = [bench.pack(each, store) for each in small]
    fetcher = bench.fetcher(threads=2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(fetcher.run, all_of(packs[0]))]
        until(lambda: store.concurrent == 1)
        jobs.append(pool.submit(fetcher.run, all_of(packs[1])))
        until(lambda: fetcher.stats().queued_background == (2 * 4 - 1) * FRAMES_PER_READ)
        gate.open()
        for job in jobs:
            job.result(PATIENCE)
    order = [blob for blob, _, _ in store.reads]
    assert order[: len(order) // 2].count(small[1].stored.blob) > len(order) // 8


def test_the_first_error_ends_a_plan_and_what_was_fetched_stays(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    start = pack.index.blob_range(range(20, 21))[0]
    store.fault = lambda offset, length, right: flipped(offset, length, right) if offset >= start else right
    fetcher = bench.fetcher(threads=1)
    with pytest.raises(CorruptError, match="frame 39 of"):
        fetcher.run(all_of(pack))
    assert 0 < len(pack.unready(range(40))) < 40
    assert fetcher.stats().waiting == fetcher.stats().queued_background == 0
    read_back(pack, SMALL, set(range(40)) - set(pack.unready(range(40))))
    store.fault = None
    fetcher.run(all_of(pack))
    assert pack.complete


def test_a_plan_that_is_interrupted_wants_nothing_more(bench: Bench) -> None:
    class Interrupting(Counted):
        def start(self, step: str, total: int | None) -> None:
            raise KeyboardInterrupt

    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=1)
    with pytest.raises(KeyboardInterrupt):
        fetcher.run(all_of(pack), progress=Interrupting())
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(fetcher.run, all_of(pack))
        until(lambda: store.concurrent == 1)
        closing = pool._threads and threading.Thread(target=fetcher.close)
        assert closing
        closing.start()
        with pytest.raises(UnavailableError, match="fetching has ended"):
            job.result(PATIENCE)
        gate.open()
        closing.join(PATIENCE)
    assert len(store.reads) == 1


@pytest.mark.parametrize("how", ["want", "plan"])
def test_who_waits_keeps_the_pack_from_eviction(bench: Bench, how: str) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher()
    with ThreadPoolExecutor(1) as pool:
        if how == "want":
            answer = want(fetcher, pack, 1)
        else:
            job = pool.submit(fetcher.run, all_of(pack))
        until(lambda: store.concurrent)
        assert bench.cache.make_room(1 << 30) == 0
        gate.open()
        if how == "want":
            assert answer.wait() is None
        else:
            job.result(PATIENCE)
    until(lambda: not fetcher.stats().in_flight)
    until(lambda: bench.cache.make_room(1 << 30) > 0)
    assert "evicted" in raised(want(fetcher, pack, 1, 2), UnavailableError)
    with pytest.raises(UnavailableError, match="evicted"):
        fetcher.run(all_of(pack))


# -- the rest --------------------------------------------------------------------------------------------------------


def test_closing_answers_everybody_and_makes_everything_durable(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    stall, slow = Stall(), Gate()
    store.faults = [None, stall]
    fetcher = bench.fetcher(threads=2, stepped=True)
    assert want(fetcher, pack, 0).wait() is None
    stuck = want(fetcher, pack, 2)
    until(lambda: stall.waiting)
    store.gate = slow
    answered = want(fetcher, pack, 10)
    until(lambda: store.concurrent == 2)
    queued = [want(fetcher, pack, n) for n in range(20, 40, 2)]
    closing = threading.Thread(target=fetcher.close)
    closing.start()
    assert all("fetching has ended" in raised(answer, UnavailableError) for answer in queued)
    slow.open()
    assert answered.wait() is None, "what comes in time is taken"
    bench.elapse(lambda: not closing.is_alive())
    raised(stuck, UnavailableError)
    assert recorded(pack) == [0, 10]
    raised(want(fetcher, pack, 5), UnavailableError)
    assert want(fetcher, pack, 0).wait() is None
    stall.end()
    until(lambda: fetcher.stats().threads == 0)
    assert pack.frames.state(2) == MISSING, "what comes later is not"
    fetcher.close()


def test_blobs_are_closed_when_nobody_reads_them_for_a_while(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(stepped=True)
    for number in range(0, 10, 2):
        assert want(fetcher, pack, number).wait() is None
    assert (store.opened, store.closed) == (1, 0)
    start = bench.clock.now()
    bench.elapse(lambda: store.closed == 1, step=1.0)
    assert bench.clock.now() - start >= IDLE_SECONDS - 1
    assert want(fetcher, pack, 20).wait() is None
    assert store.opened == 2


def test_reads_are_told_to_the_observer_and_counted(bench: Bench) -> None:
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)
    store.faults = [flipped]
    fetcher = bench.fetcher()
    assert want(fetcher, pack, 3).wait() is None
    assert background(fetcher, pack, 10, 11, 12).wait() is None
    until(lambda: len(bench.watching.reads) == 2)
    one, three = pack.index.blob_range(range(3, 4))[1], pack.index.blob_range(range(10, 13))[1]
    assert bench.watching.reads == [((3,), Priority.DEMAND, one), ((10, 11, 12), Priority.BACKGROUND, three)]
    [(numbers, error)] = bench.watching.failures
    assert numbers == (3,) and type(error) is CorruptError
    stats = fetcher.stats()
    assert stats.demand == Fetched(2, 2 * one, FRAME, 1)
    assert stats.background == Fetched(1, three, 3 * FRAME, 3)
    assert (stats.retries, stats.failures, stats.stalled, stats.coalesced, stats.verified) == (1, 0, 0, 2, 0)
    assert (stats.queued_demand, stats.queued_background, stats.resting, stats.waiting) == (0, 0, 0, 0)
    assert stats.demand_waits == 1 and stats.demand_seconds > 0


def test_mistakes_of_those_who_are_told_harm_nobody_else(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mistaken(Watching):
        def fetched(self, *args: Any) -> None:
            raise RuntimeError("fetched")

        def failed(self, *args: Any) -> None:
            raise RuntimeError("failed")

    reported: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(str(args.exc_value)))
    bench.watching = Mistaken()
    store = bench.store(SMALL)
    pack = bench.pack(SMALL, store)

    def crash(offset: int, length: int, right: bytes) -> bytes:
        raise ZeroDivisionError("a mistake of the store")

    def done(error: ImgtoolError | None) -> None:
        raise RuntimeError("done")

    store.faults = [flipped, None, crash]
    fetcher = bench.fetcher(threads=1)
    fetcher.want(pack, [1], done)
    until(lambda: len(reported) == 3)
    assert sorted(reported) == ["done", "failed", "fetched"]
    assert "a mistake of the store" in raised(want(fetcher, pack, 2), UnavailableError)
    assert want(fetcher, pack, 3).wait() is None
    with pytest.raises(IndexError):
        fetcher.want(pack, [40], done)
    assert bench.cache.make_room(1) > 0, "nothing of it keeps the pack"
