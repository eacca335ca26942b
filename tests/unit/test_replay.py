"""Replays: what is fetched, for whom, how much at a time, and what ends it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fetchers import FRAME, OTHER, SMALL, Bench, a_bench, numbers_read, want
from support.fetching import (
    PATIENCE,
    FaultyStore,
    Gate,
    Stall,
    down,
    flipped,
    missing,
    read_back,
    until,
)
from support.httpstore import Exchange, Fault, StoreServer, status
from support.stores import put
from support.tools import CHECKOUT

from layerstore.cache.packs import CachedPack
from layerstore.errors import PermissionError_
from layerstore.store.directory import DirectoryStore
from layerstore.store.http import HttpStore
from prefetch.fetcher import Fetcher
from prefetch.plans import replay as module
from prefetch.plans.match import Coverage, Matched, PlannedFrame
from prefetch.plans.replay import FAILURES, GULP_SECONDS, Pace, Replay, Replays, State
from prefetch.readahead import ReadAhead


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with a_bench(tmp_path) as bench:
        yield bench
        until(lambda: not any(thread.name == "replay" for thread in threading.enumerate()))


def matched(pack: CachedPack, *numbers: int, apart: int = 0) -> Matched:
    """These frames, due in this order: at once, or ``apart`` microseconds from one to the next."""
    return Matched(tuple(PlannedFrame(pack, n, at * apart, 10_000) for at, n in enumerate(numbers)), Coverage())


def a_pack(bench: Bench) -> tuple[FaultyStore, CachedPack]:
    store = bench.store(SMALL)
    return store, bench.pack(SMALL, store)


def ended(replay: Replay) -> State:
    assert replay.wait(PATIENCE), replay.stats()
    return replay.state


# -- what is fetched -------------------------------------------------------------------------------------------------


def test_frames_come_in_the_order_in_which_they_are_due_with_their_neighbours(bench: Bench) -> None:
    store, pack = a_pack(bench)
    store.gate = gate = Gate()
    planned = [30, 4, 20, 5, 31, 11]
    replay = Replays(bench.fetcher(threads=1)).join("box", matched(pack, *planned, apart=1000))
    until(lambda: len(replay._wants) == 6)
    gate.open()
    assert ended(replay) is State.DONE
    assert numbers_read(store, pack) in ([[30], [4, 5], [20], [31], [11]], [[30, 31], [4, 5], [20], [11]])
    read_back(pack, SMALL, planned)
    stats = replay.stats()
    assert (stats.planned, stats.brought, stats.present, stats.failed, stats.left) == (6, 6, 0, 0, 0)
    assert (stats.late, stats.used, stats.requests, stats.raw) == (0, 0, len(store.reads), 6 * FRAME)
    assert stats.compressed == sum(pack.index.compressed_size(number) for number in planned)
    assert stats.seconds >= 0
    assert stats.error is None


def test_what_is_there_is_not_fetched(bench: Bench) -> None:
    store, pack = a_pack(bench)
    fetcher = bench.fetcher()
    assert want(fetcher, pack, 3, 4, 5).wait() is None
    replay = Replays(fetcher).join("box", matched(pack, 3, 4, 5, 6))
    assert ended(replay) is State.DONE
    assert numbers_read(store, pack) == [[3, 4, 5], [6]]
    assert (replay.stats().brought, replay.stats().present, replay.stats().requests) == (1, 3, 1)


def test_a_plan_without_frames_is_done(bench: Bench) -> None:
    replay = Replays(bench.fetcher()).join("box", Matched((), Coverage()))
    assert replay.wait(0)
    assert (replay.state, replay.stats().planned, replay.stats().seconds) == (State.DONE, 0, 0)


def test_what_readers_asked_for_is_told_from_what_they_did_not(bench: Bench) -> None:
    """Late is what a reader waited for, used what it found there; what a reader fetched is not the plan's."""
    store, pack = a_pack(bench)
    store.gate = gate = Gate()
    fetcher = bench.fetcher(threads=1)
    pack.frames.touch(range(30, 31))
    first = want(fetcher, pack, 30)
    until(lambda: store.concurrent == 1)
    replay = Replays(fetcher).join("box", matched(pack, 30, 1, 10, 20, apart=1000))
    until(lambda: len(replay._wants) == 4)
    pack.frames.touch(range(1, 2))
    joined = want(fetcher, pack, 1)
    gate.open()
    assert (ended(replay), first.wait(), joined.wait()) == (State.DONE, None, None)
    pack.frames.touch(range(10, 11))
    stats = replay.stats()
    assert (stats.brought, stats.present, stats.late, stats.used) == (2, 2, 0, 1)
    assert stats.raw == 2 * FRAME
    assert fetcher.stats().demand.frames == 2


def test_a_reader_joins_what_is_under_way(bench: Bench) -> None:
    store, pack = a_pack(bench)
    store.gate = gate = Gate()
    fetcher = bench.fetcher()
    replay = Replays(fetcher).join("box", matched(pack, 7))
    until(lambda: store.concurrent == 1)
    pack.frames.touch(range(7, 8))
    reader = want(fetcher, pack, 7)
    gate.open()
    assert (reader.wait(), ended(replay)) == (None, State.DONE)
    assert numbers_read(store, pack) == [[7]]
    assert fetcher.stats().demand.requests == 0
    assert fetcher.stats().demand_waits == 1
    assert (replay.stats().brought, replay.stats().late, replay.stats().used) == (1, 1, 0)


def test_what_a_plan_is_about_to_bring_is_not_read_around(bench: Bench) -> None:
    store, pack = a_pack(bench)
    store.gate = gate = Gate()
    fetcher = bench.fetcher(threads=1, ahead=ReadAhead())
    replay = Replays(fetcher).join("box", matched(pack, 10, 12, 14, 16))
    until(lambda: len(replay._wants) == 4)
    readers = [want(fetcher, pack, number) for number in (10, 12, 14, 16)]
    gate.open()
    assert [reader.wait() for reader in readers] == [None] * 4
    assert ended(replay) is State.DONE
    surprises = [want(fetcher, pack, number) for number in (30, 32)]
    assert [reader.wait() for reader in surprises] == [None] * 2
    until(lambda: fetcher.stats().waiting == 0)
    assert sorted(number for read in numbers_read(store, pack) for number in read) == [10, 12, 14, 16, 30, 31, 32, 33]


# -- for whom --------------------------------------------------------------------------------------------------------


def test_sandboxes_share_a_replay_and_the_last_one_that_leaves_stops_it(bench: Bench) -> None:
    store, pack = a_pack(bench)
    store.gate = gate = Gate()
    replays = Replays(bench.fetcher(threads=2))
    one = replays.join("one", matched(pack, *range(0, 40, 2)))
    assert replays.join("two", matched(pack, *range(0, 40, 2))) is one
    other = replays.join("two", matched(pack, *range(1, 40, 2)))
    assert other is not one
    assert (replays.of("one"), replays.of("two"), replays.of("three")) == ([one], [one, other], [])
    assert replays.all() == [one, other]
    until(lambda: store.concurrent == 1)
    replays.leave("one")
    assert one.state is State.RUNNING
    replays.leave("two")
    assert (one.state, other.state, replays.all()) == (State.STOPPED, State.STOPPED, [])
    gate.open()
    replays.leave("two")
    until(lambda: not store.concurrent)
    stats = one.stats()
    assert stats.brought + stats.left == stats.planned
    assert stats.left >= 18, "what is under way comes, and nothing else"
    assert one.wait(0)
    again = replays.join("one", matched(pack, *range(0, 40, 2)))
    assert again is not one
    assert ended(again) is State.DONE


def test_what_was_given_up_is_tried_again_for_the_next_sandbox(bench: Bench) -> None:
    store, pack = a_pack(bench)
    store.fault = missing
    replays = Replays(bench.fetcher())
    first = replays.join("one", matched(pack, *range(40)))
    assert ended(first) is State.GAVE_UP
    store.fault = None
    second = replays.join("two", matched(pack, *range(40)))
    assert ended(second) is State.DONE
    assert replays.join("three", matched(pack, *range(40))) is second
    for user in ("one", "two", "three"):
        replays.leave(user)
    assert second.state is State.DONE
    assert not replays._shared


def test_replays_of_several_packs_at_once(bench: Bench) -> None:
    store = bench.store(SMALL, OTHER)
    one, two = bench.pack(SMALL, store), bench.pack(OTHER, store)
    fetches = [PlannedFrame(pack, number, number, 1) for number in range(40) for pack in (one, two)]
    replay = Replays(bench.fetcher()).join("box", Matched(tuple(fetches), Coverage()))
    assert ended(replay) is State.DONE
    read_back(one, SMALL, range(40))
    read_back(two, OTHER, range(40))


# -- how much at a time ----------------------------------------------------------------------------------------------


def test_few_frames_are_wanted_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 6)
    store, pack = a_pack(bench)
    store.gate = gate = Gate()
    fetcher = bench.fetcher(threads=1)
    replay = Replays(fetcher).join("box", matched(pack, *range(40)))
    until(lambda: fetcher.stats().waiting == 6)
    assert replay.stats().left == 40
    gate.open()
    assert ended(replay) is State.DONE
    read_back(pack, SMALL, range(40))


def test_bandwidth_is_bounded_for_all_together() -> None:
    pace = Pace(1000)
    assert pace.gulp == 1000 * GULP_SECONDS
    assert [pace.reserve(100, 50.0) for _ in range(3)] == pytest.approx([50.0, 50.1, 50.2])
    assert pace.reserve(500, 50.25) == pytest.approx(50.3)
    assert pace.reserve(1, 90.0) == 90.0, "what was not used is lost"


def test_a_replay_keeps_to_its_bandwidth_and_neighbours_stay_together(bench: Bench) -> None:
    store, pack = a_pack(bench)
    bandwidth = int(3.5 * pack.index.compressed_size(0) / GULP_SECONDS)  # four frames, the last of them not whole
    replays = Replays(bench.fetcher(stepped=True), bandwidth=bandwidth, clock=bench.clock)
    replay = replays.join("box", matched(pack, *range(40)))
    for gulp in range(1, 11):
        until(lambda gulp=gulp: replay.stats().brought == 4 * gulp)  # type: ignore[misc]
        assert sum(map(len, numbers_read(store, pack))) == 4 * gulp, "the next ones have to wait"
        bench.clock.advance(1.2 * GULP_SECONDS)
    assert ended(replay) is State.DONE
    assert len(store.reads) <= 20


def test_who_is_stopped_gives_back_the_bandwidth_that_he_waited_for(bench: Bench) -> None:
    _, pack = a_pack(bench)
    size = pack.index.compressed_size(0)
    replays = Replays(bench.fetcher(), bandwidth=int(size / 2), clock=bench.clock)  # two seconds for a frame
    assert ended(replays.join("first", matched(pack, 0))) is State.DONE
    for number in range(1, 10):
        replays.join("box", matched(pack, number))
        replays.leave("box")
    last = replays.join("last", matched(pack, 10))
    bench.clock.advance(4)
    until(lambda: not last.active)
    assert last.stats().brought == 1


# -- what ends it ----------------------------------------------------------------------------------------------------


def refused(offset: int, length: int, right: bytes) -> bytes:
    raise PermissionError_("403")


@pytest.mark.parametrize("fault", [missing, refused, flipped, down], ids=["404", "403", "corrupt", "down"])
def test_a_store_that_fails_is_given_up_soon(bench: Bench, fault: Callable[..., bytes]) -> None:
    store, pack = a_pack(bench)
    store.fault = fault
    fetcher = bench.fetcher(threads=2, stepped=True)
    replay = Replays(fetcher, clock=bench.clock).join("box", matched(pack, *range(0, 40, 2)))
    bench.elapse(lambda: not replay.active)
    stats = replay.stats()
    assert replay.state is State.GAVE_UP
    assert FAILURES <= stats.failed <= FAILURES + 1, "one was under way"
    assert (stats.brought, stats.left) == (0, 20 - stats.failed)
    assert stats.error is not None
    tried = len(store.reads)
    assert tried <= 20 * module.ROUNDS
    bench.clock.advance(60)
    until(lambda: fetcher.stats().waiting == 0)
    assert (len(store.reads), fetcher.stats().resting) == (tried, 0), "it is over"
    store.fault = None
    assert want(fetcher, pack, *range(40), deadline=bench.clock.now() + 10).wait() is None
    read_back(pack, SMALL, range(40))


def test_some_frames_that_fail_do_not_end_it(bench: Bench) -> None:
    store, pack = a_pack(bench)
    bad = {pack.index.blob_range(range(n, n + 1))[0] for n in range(0, 40, 4)}

    def fault(offset: int, length: int, right: bytes) -> bytes:
        return flipped(offset, length, right) if offset in bad else right

    store.fault = fault
    replay = Replays(bench.fetcher(threads=2)).join("box", matched(pack, *range(0, 40, 2), apart=1))
    assert ended(replay) is State.DONE
    stats = replay.stats()
    assert (stats.brought, stats.failed, stats.left) == (10, 10, 0)
    assert stats.error is not None
    assert "publish it again" in stats.error


def test_a_store_that_says_nothing_is_given_up(bench: Bench) -> None:
    store, pack = a_pack(bench)
    store.fault = stall = Stall()
    fetcher = bench.fetcher(stepped=True, attempt_timeout=100.0)
    replay = Replays(fetcher, patience=20.0, clock=bench.clock).join("box", matched(pack, 1, 9))
    until(lambda: stall.waiting == 2)
    bench.clock.advance(19)
    assert replay.state is State.RUNNING
    bench.elapse(lambda: not replay.active, 0.5)
    assert replay.state is State.GAVE_UP
    assert replay.stats().error == "nothing has come for 20 s"
    stall.end()


def test_what_failed_for_a_plan_does_not_count_against_a_reader(bench: Bench) -> None:
    """A frame that rests between attempts is tried at once for a reader, as if nobody had tried before."""
    store, pack = a_pack(bench)
    store.faults = [down, down]
    fetcher = bench.fetcher(stepped=True)
    replay = Replays(fetcher, clock=bench.clock).join("box", matched(pack, 5))
    until(lambda: fetcher.stats().resting == 1)
    reader = want(fetcher, pack, 5, deadline=bench.clock.now() + 10)
    until(lambda: len(store.reads) == 2)
    bench.elapse(lambda: reader.given, 0.05)
    assert reader.wait() is None
    bench.elapse(lambda: not replay.active)
    assert (replay.state, replay.stats().present) == (State.DONE, 1)


def test_a_reader_does_not_wait_for_a_plans_read_that_hangs(bench: Bench) -> None:
    store, pack = a_pack(bench)
    stall = Stall()
    store.faults = [stall]
    fetcher = bench.fetcher(stepped=True, attempt_timeout=100.0)
    replay = Replays(fetcher, clock=bench.clock).join("box", matched(pack, 5, 6))
    until(lambda: stall.waiting == 1)
    bench.clock.advance(2.0)
    assert want(fetcher, pack, 5).wait() is None
    stall.end()
    assert ended(replay) is State.DONE
    assert replay.stats().planned == replay.stats().brought + replay.stats().present
    read_back(pack, SMALL, [5, 6])


def test_a_pack_that_was_evicted_is_no_mistake(bench: Bench) -> None:
    store, pack = a_pack(bench)
    assert bench.cache.make_room(1 << 40) > 0
    replay = Replays(bench.fetcher()).join("box", matched(pack, 1, 2))
    assert ended(replay) is State.DONE
    assert (replay.stats().failed, replay.stats().left, store.reads) == (2, 0, [])


def test_what_was_used_is_remembered_when_a_pack_is_evicted(bench: Bench) -> None:
    _, pack = a_pack(bench)
    replay = Replays(bench.fetcher()).join("box", matched(pack, 1, 2))
    assert ended(replay) is State.DONE
    pack.frames.touch(range(1, 2))
    assert replay.stats().used == 1
    until(lambda: bench.cache.make_room(1 << 40))
    assert replay.stats().used == 1


def test_closing_ends_all_whoever_is_closed_first(bench: Bench) -> None:
    store, pack = a_pack(bench)
    store.gate = gate = Gate()
    fetcher = bench.fetcher()
    replays = Replays(fetcher)
    one = replays.join("one", matched(pack, *range(10)))
    until(lambda: store.concurrent > 0)
    gate.open()
    fetcher.close()
    assert ended(one) in (State.GAVE_UP, State.DONE)
    two = replays.join("two", matched(pack, *range(40)))
    assert ended(two) is State.GAVE_UP
    replays.close()
    assert ended(replays.join("three", matched(pack, *range(20)))) is State.STOPPED


def test_without_threads_there_is_no_replay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    _, pack = a_pack(bench)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    replay = Replays(bench.fetcher()).join("box", matched(pack, 1))
    assert (replay.state, replay.stats().left) == (State.GAVE_UP, 1)
    monkeypatch.undo()


# -- a backend that fails the plan, and readers beside it ------------------------------------------------------------


class Backend:
    """A store behind HTTP that answers what is planned by a fault, and all else as it should."""

    def __init__(self, path: Path, fault: Fault, planned: Iterable[int]) -> None:
        self.directory = DirectoryStore.create(str(path / "store"))
        put(self.directory, SMALL.blob)
        self.server = StoreServer(str(path / "store"))
        self.bad = 0
        starts = set(planned)

        def decide(exchange: Exchange) -> None:
            first = exchange.headers.get("range", "").removeprefix("bytes=").partition("-")[0]
            if first and int(first) in starts:
                self.bad += 1
                fault(exchange)
            else:
                exchange.answer()

        self.server.misbehave(decide, SMALL.stored.blob.hex)
        self.store = HttpStore(self.server.url)

    def close(self) -> None:
        self.store.close()
        self.server.close()


def slow(exchange: Exchange) -> None:
    """10 KiB a second."""
    data = exchange.head() + exchange.body
    for at in range(0, len(data), 1024):
        exchange.send(data[at : at + 1024])
        if exchange.server.closing.wait(0.1):
            raise ConnectionAbortedError


FAULTS: dict[str, Any] = {"404": status(404), "403": status(403), "429": status(429, Retry_After="1"), "slow": slow}


@pytest.mark.case("P05")
@pytest.mark.parametrize("name", FAULTS)
def test_readers_do_not_suffer_from_a_plan_that_fails(tmp_path: Path, bench: Bench, name: str) -> None:
    planned = list(range(1, 40, 3))
    fetcher: Fetcher | None = None
    probe = bench.pack(SMALL, bench.store(SMALL))
    backend = Backend(tmp_path, FAULTS[name], (probe.index.blob_range(range(n, n + 1))[0] for n in planned))
    try:
        probe.add_origin(type(probe.origins[0])(backend.store.location, SMALL.stored))
        probe.origins = probe.origins[:1]
        fetcher = Fetcher(lambda location: backend.store, lambda wanted, hex: 0, threads=4)
        replays = Replays(fetcher)
        replay = replays.join("box", matched(probe, *planned))
        until(lambda: backend.bad > 0)
        for number in range(0, 40, 3):  # neighbours of what is planned, one after the other
            assert want(fetcher, probe, number, deadline=fetcher._clock.now() + 5.0).wait() is None
        read_back(probe, SMALL, range(0, 40, 3))
        stats = fetcher.stats()
        assert stats.demand.frames == 14
        assert stats.demand_seconds / stats.demand_waits < 1.0, "nobody waited for the plan"
        if name == "slow":
            assert replay.state in (State.RUNNING, State.DONE)
        else:
            assert ended(replay) is State.GAVE_UP
            assert backend.bad <= len(planned) * module.ROUNDS
        assert threading.active_count() < 40
        replays.close()
    finally:
        if fetcher is not None:
            fetcher.close()
        backend.close()
    assert not replay.active


@pytest.mark.case("P05")
def test_a_process_ends_while_a_replay_runs(tmp_path: Path) -> None:
    """Whoever forgets to close it is held up by nobody."""
    program = """
import sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.fetchers import Bench, SMALL
from support.fetching import Stall, until
from prefetch.fetcher import Fetcher
from prefetch.plans.match import Coverage, Matched, PlannedFrame
from prefetch.plans.replay import Replays
bench = Bench(Path({root!r}))
store = bench.store(SMALL)
pack = bench.pack(SMALL, store)
store.fault = stall = Stall()
replays = Replays(Fetcher(bench.open_store, lambda wanted, hex: 0))
replays.join("box", Matched(tuple(PlannedFrame(pack, n, n, 1) for n in range(40)), Coverage()))
until(lambda: stall.waiting > 0)
if {close!r}:
    replays.close()
print("over", flush=True)
"""
    for close in (True, False):
        source = program.format(tests=str(CHECKOUT / "tests"), root=str(tmp_path / str(close)), close=close)
        run = subprocess.run(
            [sys.executable, "-c", source], cwd=CHECKOUT, capture_output=True, timeout=PATIENCE, check=False
        )
        assert (run.returncode, run.stdout, run.stderr) == (0, b"over\n", b"")
