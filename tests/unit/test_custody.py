"""The worker's links: to the holder, over its deaths, and to front ends, whether or not they read."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.caches import CacheBench
from support.holders import Holders
from support.keepers import until

from layerstore.errors import ImgtoolError, NotFoundError, UnavailableError
from overlay.lazy import custody as custody_module
from overlay.lazy.custody import Custody
from overlay.lazy.demand import Demand
from overlay.lazy.link import Link
from overlay.lazy.rendezvous import FUSE, HOLDER, KEEPER
from prefetch.fetcher import Fetcher


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Holders]:
    with Holders(tmp_path) as node:
        yield node


class Heard:
    """What a custody says; ``on`` is called with it, in the custody's thread or beside it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.links: list[Link] = []
        self.on: Callable[[str], object] = lambda line: None

    def peer(self, front: str, link: Link) -> None:
        self.links.append(link)
        self.add(f"peer {front}")

    def add(self, line: str) -> None:
        self.lines.append(line)
        self.on(line)

    def log(self, event: str, **fields: object) -> None:
        self.lines.append(f"log {event} {fields.get('error', '')}")


@contextmanager
def custody_of(node: Holders, heard: Heard) -> Iterator[Custody]:
    custody = Custody(
        str(node.directory),
        on_peer=heard.peer,
        on_lost=lambda front: heard.add(f"lost {front}"),
        on_stop=lambda: heard.add("stop"),
        orphaned=lambda: heard.add("orphaned"),
        log=heard.log,
    )
    try:
        yield custody
    finally:
        custody._closed = True
        until(lambda: heard.links or not node.processes()[KEEPER], "it has met the keeper")
        node.end_all()  # with its holder, the custody ends
        until(lambda: all(thread.name != "custody" for thread in threading.enumerate()), "its thread has ended")
        for link in heard.links:
            link.close()


def test_requests_are_answered_over_deaths_of_the_holder(node: Holders) -> None:
    node.start()
    heard = Heard()
    with custody_of(node, heard) as custody:
        packs = [node.pack(number) for number in range(4)]
        node.settle()
        over = threading.Event()

        def ask(pack: Any) -> int:
            count = 0
            while not over.is_set():
                custody.hold(pack.hex, KEEPER, *pack.fds)
                custody.drop(pack.hex, KEEPER)
                count += 1
            custody.hold(pack.hex, KEEPER, *pack.fds)
            return count

        with ThreadPoolExecutor(len(packs)) as pool:
            asking = [pool.submit(ask, pack) for pack in packs]
            for role in (HOLDER, KEEPER, HOLDER):
                node.kill(role)
                node.pid(role)
            over.set()
            assert all(done.result() > 0 for done in asking)
        node.kill(KEEPER)
        node.settle()
        until(lambda: len(node.notes.lines("keeper")[-1].split()) == 2 + len(packs), "it guards what is held")
        assert custody.status()["pids"][HOLDER] == node.pid(HOLDER)
        assert "orphaned" not in heard.lines


def test_what_is_refused_or_not_answered_is_an_error_and_forgotten(
    node: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    heard = Heard()
    with custody_of(node, heard) as custody:
        pack = node.pack()
        node.settle()
        node.notes.let("keeper refuses")
        with pytest.raises(UnavailableError, match="hold: told so"):
            custody.hold(pack.hex, KEEPER, *pack.fds)
        with pytest.raises(UnavailableError, match="no FUSE server"):
            custody.hold(pack.hex, FUSE, *pack.fds)
        node.notes.let("keeper refuses", so=False)
        node.notes.let("keeper waits")
        with pytest.raises(UnavailableError, match="doesn't answer"):
            custody._request({"drop": 0, "pack": pack.hex, "with": KEEPER}, patience=0.2)
        node.notes.let("keeper waits", so=False)
        custody.hold(pack.hex, KEEPER, *pack.fds)
        assert custody._pending == {}


def test_a_holder_that_hangs_holds_up_nobody_beyond_his_patience(
    node: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when it has been asked more than its link has room for."""
    monkeypatch.setattr(custody_module, "_GLANCE", 0.5)
    node.start()
    heard = Heard()
    with custody_of(node, heard) as custody:
        custody.status()
        holder = node.pid(HOLDER)
        os.kill(holder, signal.SIGSTOP)

        def look() -> float:
            began = time.monotonic()
            with pytest.raises(UnavailableError, match="doesn't answer"):
                custody._request({"status": 0}, patience=0.5)
            return time.monotonic() - began

        with ThreadPoolExecutor(100) as pool:
            assert max(done.result() for done in [pool.submit(look) for _ in range(600)]) < 10
        os.kill(holder, signal.SIGCONT)
        until(lambda: "pids" in custody.status(), "it goes on")
        assert custody._pending == {}


def test_what_is_heard_may_ask_in_turn(node: Holders) -> None:
    """The one who is told of a loss makes requests, for whose answers nobody else would listen."""
    node.start()
    heard = Heard()
    with custody_of(node, heard) as custody:
        directory = f"{node.directory}/packs/1"
        assert custody.start_fuse(directory) == directory
        assert custody.start_fuse(f"{node.directory}/packs/2") == directory
        answers: list[Any] = []
        heard.on = lambda line: line.startswith("lost") and answers.append(custody.status())
        node.kill(FUSE)
        until(lambda: answers, "it was told, and has asked")
        assert KEEPER in answers[0]["pids"]


def test_errors_of_those_who_are_told_end_nothing(node: Holders) -> None:
    holder = node.start()
    heard = Heard()

    def fail(line: str) -> None:
        raise AttributeError(f"no {line}")

    heard.on = fail
    with custody_of(node, heard) as custody:
        node.settle()
        os.kill(holder, signal.SIGTERM)
        until(lambda: any("no stop" in line for line in heard.lines), "it was told to stop")
        assert custody.status()
        heard.on = lambda line: None


def test_without_anybody_one_is_started_and_found(node: Holders) -> None:
    node.start()
    heard = Heard()

    def start(line: str) -> None:
        if line == "orphaned":
            if heard.lines.count("orphaned") == 1:
                raise OSError("not at the first try")
            node.start(found=True)

    heard.on = start
    with custody_of(node, heard) as custody:
        pack = node.pack()
        custody.hold(pack.hex, KEEPER, *pack.fds)
        keeper, holder = node.pid(KEEPER), node.pid(HOLDER)
        os.kill(keeper, signal.SIGKILL)
        os.kill(holder, signal.SIGKILL)
        until(lambda: not set(node.processes()[HOLDER]) & {holder}, "they have ended")
        until(lambda: heard.lines.count("orphaned") >= 2, "it is noticed")
        custody.hold(pack.hex, KEEPER, *pack.fds)
        assert custody.status()["pids"][HOLDER] == node.pid(HOLDER) != holder


def test_the_end_is_said_to_a_successor_too(node: Holders) -> None:
    """Else it would start a worker, which finds the sandboxes again that were to be stopped."""
    node.start()

    def work() -> None:
        heard = Heard()
        custody = Custody(
            str(node.directory),
            on_peer=heard.peer,
            on_lost=heard.add,
            on_stop=lambda: None,
            orphaned=lambda: None,
            log=heard.log,
        )
        custody.status()
        node.notes.add("working")
        node.notes.wait_while("not yet")
        custody.stopped()

    node.notes.let("not yet")
    worker = node.fork(work)
    until(lambda: node.notes.lines("working"), "it works")
    node.settle()
    node.notes.let("successors are slow")
    node.kill(HOLDER)
    node.notes.let("not yet", so=False)
    node.notes.let("successors are slow", so=False)
    assert os.waitpid(worker, 0)[1] == 0
    until(lambda: not any(node.processes().values()), "everything ends")
    node.reap()
    assert not node.directory.exists()


# --- front ends


class FakeFetcher:
    """Remembers what is wanted, and by whom."""

    def __init__(self) -> None:
        self.wants: list[tuple[Any, list[int], Callable[[ImgtoolError | None], None], float]] = []

    def want(self, pack: Any, numbers: Any, done: Any, *, priority: Any, deadline: float) -> None:
        self.wants.append((pack, list(numbers), done, deadline))


@contextmanager
def attached(known: Callable[[str], Any]) -> Iterator[tuple[Demand, FakeFetcher, Link, list[Any]]]:
    """A Demand, its fetcher, the front end's side of a link, and what was observed."""
    fetcher, observed = FakeFetcher(), list[Any]()
    demand = Demand(cast(Fetcher, fetcher), known, lambda *fields: observed.append(fields))
    ours, its = Link.pair()
    with ours:
        ours.settimeout(20)
        demand.attach(KEEPER, its)
        yield demand, fetcher, ours, observed
        ours._socket.shutdown(2)
    until(lambda: not any(thread.name.startswith("demand") for thread in threading.enumerate()), "its thread ends")


def want(number: object, pack: object = "p", first: object = 0, count: object = 1) -> dict[str, Any]:
    return {"want": number, "pack": pack, "first": first, "count": count, "deadline": 1.5, "pid": 7}


def answer(link: Link) -> dict[str, Any]:
    received = link.receive()
    assert received is not None
    return received[0]


def test_wants_are_handed_on_and_answered(tmp_path: Path) -> None:
    bench = CacheBench(tmp_path)
    with bench.open() as cache:
        pack = cache.pack(bench.make_pack(8), bench.store)
        with attached(cache.known) as (_, fetcher, link, observed):
            link.send(want(1, pack.hex, 2, 3))
            until(lambda: fetcher.wants, "it is wanted")
            assert fetcher.wants[0][:2] == (pack, [2, 3, 4]) and fetcher.wants[0][3] == 1.5
            fetcher.wants[0][2](None)
            assert answer(link) == {"got": 1}
            link.send(want(2, pack.hex))
            until(lambda: len(fetcher.wants) == 2, "so is the next")
            fetcher.wants[1][2](NotFoundError("x" * 5000))
            assert answer(link) == {"failed": 2, "why": "x" * 1000}
            until(lambda: len(observed) == 2, "both are observed")
            assert [fields[0] for fields in observed] == [7, 7] and observed[1][4] is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"pack": "unknown"},
        {"first": -1},
        {"first": 8},
        {"count": 0},
        {"count": 9},
        {"count": 1 << 40},
        {"first": None},
        {"count": "x"},
    ],
)
def test_wants_of_what_there_is_not_fail(tmp_path: Path, fields: dict[str, Any]) -> None:
    bench = CacheBench(tmp_path)
    with bench.open() as cache:
        pack = cache.pack(bench.make_pack(8), bench.store)
        with attached(cache.known) as (_, fetcher, link, _observed):
            link.send({**want(3, pack.hex), **fields})
            assert answer(link)["failed"] == 3
            link.send({**want(4), "pack": 5, "deadline": []})
            assert answer(link)["failed"] == 4
            link._socket.send(b"nonsense")
            link.send({"else": 1})
            link.send(want(5, "p" * 64))
            assert answer(link)["failed"] == 5
            assert fetcher.wants == []


def test_a_front_end_that_does_not_read_holds_up_nobody_who_brings_data() -> None:
    pack = SimpleNamespace(hex="p", frames=[0] * 8)
    with attached(lambda hex: pack) as (demand, fetcher, link, observed):
        for number in range(2000):
            link.send(want(number))
        until(lambda: len(fetcher.wants) == 2000, "all are wanted")
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda asked: asked[2](None), fetcher.wants))
        assert demand.stats(KEEPER) == {}
        assert time.monotonic() - began < 10
        until(lambda: len(observed) == 2000, "all are observed")
        taken = answer(link)["got"]  # it goes on: what there was room for has come, and what comes now does
        link.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while True:
                assert answer(link)["got"] > taken - 2000
        link.settimeout(20)
        fetcher.wants[0][2](None)
        assert answer(link) == {"got": 0}


def test_counters_are_asked_of_the_front_end_that_is_there() -> None:
    with attached(lambda hex: None) as (demand, _, link, _observed):
        assert demand.stats(FUSE) == {}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(demand.stats, KEEPER, patience=20.0)
            assert answer(link) == {"stats": 0}
            link.send({"stats": 0, "events": 5})
            assert asked.result()["events"] == 5
        assert demand.stats(KEEPER, patience=0.01) == {}
        demand.detach(KEEPER)
        assert demand.stats(KEEPER) == {}
