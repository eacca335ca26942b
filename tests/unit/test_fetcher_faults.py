"""Stores that answer wrongly, late, or not at all: what is tried, for how long, and that nothing wrong gets in."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.fetchers import (
    FRAME,
    SMALL,
    Bench,
    a_bench,
    all_of,
    numbers_read,
    raised,
    want,
)
from support.fetching import (
    Fault,
    SmallPack,
    Stall,
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

from layerstore.cache.framemap import MISSING, UNVERIFIED
from layerstore.cache.packs import CachedPack
from layerstore.errors import (
    CorruptError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
)
from prefetch.attempts import ANSWERS
from prefetch.backlog import ROUNDS
from prefetch.fetcher import THREADS_FACTOR
from prefetch.origins import AVOID_SECONDS


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with a_bench(tmp_path) as bench:
        yield bench


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
