"""Fetching: what is asked of stores, in which order, and when those who wait are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.fetchers import (
    FRAME,
    OTHER,
    SMALL,
    Bench,
    a_bench,
    all_of,
    background,
    numbers_read,
    raised,
    recorded,
    want,
)
from support.fetching import (
    PATIENCE,
    Answer,
    Gate,
    Stall,
    Watching,
    flipped,
    read_back,
    small_pack,
    until,
)

from layerstore.cache.framemap import MISSING
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    UnavailableError,
)
from layerstore.pack.format import BLOCK_SIZE
from prefetch.backlog import RAW_PER_READ, Want
from prefetch.fetcher import Fetched, Priority
from prefetch.origins import IDLE_SECONDS
from prefetch.plan import FRAMES_PER_READ, FrameRange, PackFetch
from prefetch.readahead import ReadAhead


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with a_bench(tmp_path) as bench:
        yield bench


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


def test_of_the_background_what_is_due_first_comes_first(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=1, stepped=True)
    now = bench.clock.now()
    answers = [background(fetcher, pack, 0)]
    until(lambda: store.concurrent == 1)
    for number, due in ((10, 3.0), (20, 1.0), (30, 2.0), (5, 0.0)):
        answers.append(Answer())
        fetcher.submit(Want(pack, answers[-1], Priority.BACKGROUND, None, now, due=now + due), [number])
    answers.append(Answer())
    fetcher.submit(Want(pack, answers[-1], Priority.BACKGROUND, None, now, due=now + 0.5), [10])  # wanted earlier now
    gate.open()
    assert [answer.wait() for answer in answers] == [None] * 6
    assert numbers_read(store, pack) == [[0], [5], [10], [20], [30]]


def test_a_frame_that_is_being_read_is_as_urgent_as_its_most_urgent_reader(bench: Bench) -> None:
    store = bench.store(SMALL)
    store.gate = gate = Gate()
    pack = bench.pack(SMALL, store)
    fetcher = bench.fetcher(threads=2)
    plan = background(fetcher, pack, *range(8))
    until(lambda: store.concurrent == 1)
    order: list[int] = []
    waiting = []
    for number in (6, 3):
        waiting.append(threading.Event())
        fetcher.want(pack, [number], lambda error, n=number, told=waiting[-1]: (order.append(n), told.set()))  # type: ignore[misc]
    before = fetcher.stats()
    gate.open()
    assert all(told.wait(PATIENCE) for told in waiting) and plan.wait() is None
    assert order == [6, 3], "both before the rest, in the order in which they were asked for"
    assert len(store.reads) == 1
    assert fetcher.stats().demand == before.demand == Fetched()
    assert fetcher.stats().demand_waits == 2


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
