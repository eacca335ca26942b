"""Plans at work: what is fetched ahead for a start, whatever is wrong with plans and stores; and for whom it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.conversions import Site
from support.keepers import until
from support.planned import plan_of
from support.reading import expected

from layerstore.cache.cache import Cache
from layerstore.digest import Digest
from layerstore.errors import CorruptError, NotFoundError, UnavailableError
from layerstore.image import Image, load_image
from layerstore.store.protocol import Store
from overlay import planned as planned_module
from overlay.errands import Errands
from overlay.planned import PlannedStart, PlannedStarts
from prefetch.fetcher import Fetcher
from prefetch.plans import published
from prefetch.plans.format import Plan
from prefetch.plans.published import publish


class Bench:
    """A node's cache over a store with two images that share no layer, and its plans."""

    def __init__(self, path: Path) -> None:
        self.site = Site(path)
        for name in ("one", "two"):
            (path / name).mkdir()
            for number in range(2):
                (path / name / f"f{number}").write_bytes(expected(f"{name} {number}", 0, 600_000))
            self.site.convert(f"tree:{path}/{name}", tag=name)
        self.store = self.site.store
        self.root = str(path / "node")
        self.cache = Cache(self.root)
        self.fetcher = Fetcher(lambda location: self.store, lambda wanted, keep: 0)
        self.warnings: list[str] = []
        self.starts = PlannedStarts(
            self.root, self.fetcher, uses=self.cache.metadata.uses_of, warn=self.warnings.append
        )

    def image(self, name: str) -> Image:
        return load_image(self.store, name)

    def begin(self, choice: str = "auto", name: str = "one", *, store: Store | None = None) -> PlannedStart:
        image = self.image(name)
        for layer in image.layers:
            self.cache.metadata.ensure(layer, self.store)
        packs = [self.cache.pack(pack, self.store) for layer in image.layers for pack in layer.packs]
        return self.starts.begin(choice, [layer.metadata for layer in image.layers], packs, store)

    def plan(self, name: str, image: str = "one") -> Plan:
        return plan_of(self.image(image), name=name)

    def close(self) -> None:
        self.starts.close()
        self.fetcher.close()
        self.cache.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    try:
        yield bench
    finally:
        bench.close()


def whole(start: PlannedStart) -> bool:
    """Whether all of its plan is here, after a wait."""
    start.wait()
    document = start.document()
    return document["state"] == "done" and document["planned"] == document["brought"] + document["present"] > 0


def test_the_plan_of_the_layers_is_found_and_followed(bench: Bench) -> None:
    saved = bench.plan("tests")
    bench.starts.shelf.save(saved)
    start = bench.begin()
    assert whole(start)
    document = start.document()
    assert (document["asked"], document["plan"], document["problems"]) == ("auto", "tests", [])
    assert document["plans"] == [{"name": "tests", "digest": str(saved.digest)}]
    assert document["planned_bytes"] == document["matched_bytes"] == sum(part.bytes for part in saved.parts)
    assert document["requests"] > 0 and document["left"] == document["failed"] == 0
    assert document["raw"] > document["compressed"] > 0 or document["raw"] > 0
    other = bench.begin(name="two")
    other.wait()
    assert (other.document()["state"], other.document()["plan"]) == ("none", None)
    bench.starts.end(start)
    status = bench.starts.status()
    assert (status["replays"], status["brought"], status["raw"]) == (0, document["brought"], document["raw"])


def test_a_plan_is_followed_by_its_name(bench: Bench) -> None:
    bench.starts.shelf.save(bench.plan("first"))
    bench.starts.shelf.save(bench.plan("second"))
    start = bench.begin("second")
    assert whole(start)
    assert start.document()["plan"] == "second"
    bench.starts.check("second")
    bench.starts.check("auto")
    bench.starts.check("none")
    with pytest.raises(NotFoundError, match="no plan 'third'"):
        bench.starts.check("third")


def test_those_for_whom_the_same_is_decided_share_it_until_the_last_has_gone(bench: Bench) -> None:
    bench.starts.shelf.save(bench.plan("tests"))
    starts = [bench.begin() for _ in range(5)]
    assert all(map(whole, starts))
    once = starts[0].document()
    assert all(start.document() == once for start in starts)
    assert bench.starts.status()["brought"] == once["brought"], "each frame is counted once"
    for start in starts:
        bench.starts.end(start)
        bench.starts.end(start)  # repeatable
    assert bench.starts.status()["brought"] == once["brought"]
    again = bench.begin()
    assert whole(again)
    assert (again.document()["brought"], again.document()["present"]) == (0, once["brought"])


def test_a_plan_that_is_replaced_is_followed_at_once(bench: Bench) -> None:
    bench.starts.shelf.save(bench.plan("tests"))
    assert bench.begin().plans[0][0] == "tests"
    bench.starts.shelf.remove("tests")
    assert bench.begin().plans == ()
    bench.starts.shelf.save(bench.plan("better"))
    assert bench.begin().plans[0][0] == "better"


def test_plans_that_can_not_be_used_are_counted_once_and_stop_nothing(bench: Bench) -> None:
    plans = Path(bench.root, "plans")
    bench.starts.shelf.save(bench.plan("tests"))
    (plans / "broken.json").write_bytes(b"\x00" * 100)
    (plans / "cut.json").write_bytes((plans / "tests.json").read_bytes()[:200])
    start = bench.begin()
    assert whole(start)
    assert len(start.document()["problems"]) == 2
    bench.starts.shelf.save(bench.plan("foreign", "two"))
    foreign = bench.begin("foreign")
    foreign.wait()
    document = foreign.document()
    assert (document["state"], document["plan"], document["planned"]) == ("none", "foreign", 0)
    assert (document["matched_bytes"], document["planned_bytes"] > 0) == (0, True)
    assert "pack not in this image" in document["problems"][0]
    for name in ("broken", "cut", "gone"):
        start = bench.begin(name)
        start.wait()
        assert (start.document()["state"], len(start.document()["problems"])) == ("none", 1)
    for _ in range(3):
        bench.begin()
    assert bench.starts.status()["problems"] == {"damaged": 3, "unmatched": 1, "failed": 0}
    assert len(bench.warnings) == 4


def test_what_the_node_lacks_the_store_is_asked_for_once_and_followed_late(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Digest] = []

    def counted(store: Store, layer: Digest) -> Plan | None:
        asked.append(layer)
        return published_fetch(store, layer)

    published_fetch = published.fetch
    monkeypatch.setattr(published, "fetch", counted)
    publish(bench.store, bench.plan("published"))
    starts = [bench.begin(store=bench.store) for _ in range(3)]
    assert all(map(whole, starts))
    assert {start.document()["plan"] for start in starts} == {"published"}
    none = bench.begin(name="two", store=bench.store)
    none.wait()
    assert (none.document()["plan"], none.document()["problems"]) == (None, [])
    before = list(asked)
    again = [bench.begin(store=bench.store), bench.begin(name="two", store=bench.store)]
    assert whole(again[0])
    again[1].wait()
    assert asked == before, "it is remembered, also that there is none"
    assert bench.starts.status()["problems"] == {"damaged": 0, "unmatched": 0, "failed": 0}


def test_a_store_that_does_not_answer_holds_up_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    entered = threading.Semaphore(0)

    def hanging(store: Store, layer: Digest) -> Plan | None:
        entered.release()
        assert answer.wait(30)
        return None

    monkeypatch.setattr(published, "fetch", hanging)
    monkeypatch.setattr(planned_module, "STORE_SECONDS", 0.05)
    starts = [bench.begin(store=bench.store) for _ in range(3)]
    assert entered.acquire(timeout=20)
    for start in starts:
        assert start.document()["state"] == "looking"
        start.wait()  # who waits for it gives up
    bench.starts.shelf.save(bench.plan("two", "two"))
    assert whole(bench.begin(name="two", store=bench.store)), "others find theirs meanwhile"
    bench.starts.end(starts[0])
    assert starts[0].document()["state"] == "none"
    answer.set()
    until(lambda: starts[1].document()["state"] == "none", "the store has answered")
    assert not entered.acquire(blocking=False), "those alike are one question"


@pytest.mark.parametrize(
    ("error", "kind"),
    [(UnavailableError("the store is away"), "failed"), (CorruptError("bytes differ"), "damaged")],
)
def test_a_store_that_fails_is_left_alone_for_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str
) -> None:
    asked = []

    def failing(store: Store, layer: Digest) -> Plan | None:
        asked.append(layer)
        raise error

    monkeypatch.setattr(published, "fetch", failing)
    first = bench.begin(store=bench.store)
    first.wait()
    assert (first.document()["state"], first.document()["problems"]) == ("none", [str(error)])
    second = bench.begin(store=bench.store)
    second.wait()
    assert len(asked) == 1
    assert bench.starts.status()["problems"][kind] == 1


def test_a_mistake_of_ours_settles_the_start_all_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: reported.append(arguments.exc_value))

    def wrong(store: Store, layer: Digest) -> Plan | None:
        raise ZeroDivisionError

    monkeypatch.setattr(published, "fetch", wrong)
    start = bench.begin(store=bench.store)
    until(lambda: start.document()["state"] == "none", "it is settled")
    monkeypatch.setattr(bench.starts.shelf, "find", lambda layers, packs: 1 / 0)
    bench.starts.shelf.save(bench.plan("tests"))  # what was remembered is no longer believed
    other = bench.begin()
    until(lambda: other.document()["state"] == "none", "it is settled")
    until(lambda: len(reported) == 2, "both are reported")
    assert all(isinstance(error, ZeroDivisionError) for error in reported)


def test_what_comes_too_late_is_not_followed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def slow(store: Store, layer: Digest) -> Plan | None:
        assert answer.wait(30)
        return bench.plan("late")

    monkeypatch.setattr(published, "fetch", slow)
    start = bench.begin(store=bench.store)
    bench.starts.end(start)
    answer.set()
    until(lambda: bench.starts.shelf.find([bench.image("one").layers[0].metadata]) != [], "it is kept")
    assert (start.document()["planned"], bench.starts.status()["replays"]) == (0, 0)


def test_a_look_up_that_takes_long_goes_on_beside_the_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.starts.shelf.save(bench.plan("tests"))
    may = threading.Event()
    find = bench.starts.shelf.find

    def slow(layers: list[Digest], packs: list[Digest]) -> list[Plan]:
        assert may.wait(30)
        return find(layers, packs)

    monkeypatch.setattr(bench.starts.shelf, "find", slow)
    start = bench.begin()
    assert (start.document()["state"], start.plans) == ("looking", ())
    may.set()
    assert whole(start)


def test_a_name_of_any_length_leaves_room_in_receipts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(bench.plan("x"), name="x" * 2_000_000)
    monkeypatch.setattr(published, "fetch", lambda store, layer: plan)
    bench.begin(store=bench.store).wait()
    start = bench.begin(store=bench.store)
    assert whole(start)
    [(name, _)] = start.plans
    assert name == "x" * 250


def test_nobody_waits_while_the_node_is_about_to_stop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def hanging(store: Store, layer: Digest) -> Plan | None:
        assert answer.wait(30)
        return None

    monkeypatch.setattr(published, "fetch", hanging)
    start = bench.begin(store=bench.store)
    waiting = threading.Thread(target=start.wait)
    waiting.start()
    bench.starts.hurry(True)
    waiting.join(5)
    assert not waiting.is_alive()
    assert start.document()["state"] == "looking"
    bench.starts.hurry(False)
    answer.set()
    start.wait()
    assert start.document()["state"] == "none"


def test_after_the_end_nothing_begins(bench: Bench) -> None:
    bench.starts.shelf.save(bench.plan("tests"))
    running = bench.begin()
    bench.starts.close()
    assert running.document()["state"] in ("stopped", "done")
    late = bench.begin().document()
    assert (late["state"], late["brought"]) in (("stopped", 0), ("none", 0))


def test_progress_is_told_of_what_comes(bench: Bench) -> None:
    told: list[object] = []

    class Told:
        def start(self, step: str, total: int | None) -> None:
            told.append(step)

        def advance(self, count: int) -> None:
            told.append(count)

    bench.starts.shelf.save(bench.plan("tests"))
    start = bench.begin()
    start.wait(Told())
    assert told[0] == "prefetch"
    assert sum(each for each in told[1:] if isinstance(each, int)) == start.document()["raw"]


# --- errands


def test_errands_are_done_by_few_threads_which_a_mistake_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: reported.append(arguments.exc_value))
    done: list[str] = []

    def mistaken() -> None:
        raise ZeroDivisionError

    errands = Errands("test", 2)
    for _ in range(3):
        errands.send(mistaken)
    for _ in range(100):
        errands.send(lambda: done.append(threading.current_thread().name))
    until(lambda: len(done) == 100 and len(reported) == 3, "all are done")
    assert set(done) == {"test"}
    assert sum(thread.name == "test" for thread in threading.enumerate()) <= 2
    errands.close()
    errands.send(lambda: done.append("late"))
    until(lambda: not any(thread.name == "test" for thread in threading.enumerate()), "they end")
    assert len(done) == 100


def test_an_errand_that_hangs_holds_up_what_is_behind_it_and_no_end(bench: Bench) -> None:
    gate = threading.Event()
    done: list[int] = []
    errands = Errands("hanging", 1)
    errands.send(lambda: gate.wait(30) and None)
    errands.send(lambda: done.append(1))
    began = threading.active_count()
    errands.close()
    gate.set()
    until(lambda: not any(thread.name == "hanging" for thread in threading.enumerate()), "it ends")
    assert (done, began >= 2) == ([], True)


def test_nothing_of_it_waits_for_the_clock(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is believed for a time, by the monotonic clock."""
    bench.starts.shelf.save(bench.plan("tests"))
    decided = []
    decide: Callable[..., object] = bench.starts._decide

    def counted(*arguments: object) -> object:
        decided.append(arguments)
        return decide(*arguments)

    monkeypatch.setattr(bench.starts, "_decide", counted)
    assert whole(bench.begin())
    for _ in range(3):
        bench.begin()
    assert len(decided) == 1
    later = time.monotonic() + 61
    monkeypatch.setattr(planned_module.time, "monotonic", lambda: later)
    assert whole(bench.begin())
    assert len(decided) == 2


def test_two_plans_may_have_parts_of_one_image(bench: Bench) -> None:
    saved = Plan((*bench.plan("tests").parts, *bench.plan("x", "two").parts), "both")
    bench.starts.shelf.save(saved)
    assert whole(bench.begin())
    assert whole(bench.begin(name="two"))


def test_a_plan_of_another_build_serves_by_what_both_share(bench: Bench) -> None:
    """Nobody has re-mapped it, and its layer isn't this one: what both refer to lies in the same pack."""
    bench.starts.shelf.save(bench.plan("old"))
    tree = bench.site.path / "one"
    (tree / "f1").write_bytes(expected("another", 0, 600_000))
    bench.site.convert(f"tree:{tree}", tag="next")
    assert bench.image("next").layers[0].metadata != bench.image("one").layers[0].metadata
    start = bench.begin(name="next")
    try:
        assert whole(start)
        document = start.document()
        assert document["plan"] == "old"
        planned, matched = start.coverage()
        assert 0 < matched < planned  # f0 is where it was, f1 is elsewhere
        assert any("not of this image" in problem for problem in document["problems"])
    finally:
        bench.starts.end(start)
    assert bench.begin(name="two").document()["plan"] is None  # which shares nothing
