"""The wrappers of stores, each with its policy: retrying, verified, caching, single-flight, late, and all of them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.mirrors import Moody, Pauses
from support.stores import image, publish, put

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    MalformedError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    UsageError,
    about,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.store.caching import KEPT_BYTES, SMALL_BYTES, CachingStore
from layerstore.store.composition import mirrored, patient, steady
from layerstore.store.late import LateStore
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import Store
from layerstore.store.reading import stream_blob
from layerstore.store.retrying import ATTEMPTS, LONGEST_PAUSE, RetryingStore
from layerstore.store.singleflight import SingleFlightStore
from layerstore.store.verified import WHOLE_BYTES, VerifiedStore

SAMPLE = image(b"one", b"two")
LARGE = os.urandom(WHOLE_BYTES + 10)


@pytest.fixture
def memory() -> MemoryStore:
    store = MemoryStore()
    publish(store, "name", SAMPLE)
    put(store, LARGE)
    return store


@pytest.fixture
def moody(memory: MemoryStore) -> Moody:
    return Moody(memory)


# Retrying


def test_what_is_unavailable_is_asked_again_with_growing_pauses(moody: Moody) -> None:
    pauses = Pauses()
    store = RetryingStore(moody, wait=pauses)
    moody.fail(UnavailableError, "resolve", times=3)
    assert store.resolve("name") == SAMPLE.target
    assert moody.asked["resolve"] == 4
    assert len(pauses.seconds) == 3
    assert 0.1 <= pauses.seconds[0] <= 0.2 < pauses.seconds[2]


def test_attempts_end_and_the_last_error_is_said(moody: Moody) -> None:
    pauses = Pauses()
    store = RetryingStore(moody, wait=pauses)
    moody.fail(UnavailableError)
    for ask in (
        lambda: store.stat(SAMPLE.target.digest),
        lambda: store.open(SAMPLE.target.digest),
        lambda: list(store.names()),
        lambda: store.resolve("name"),
        lambda: list(store.references()),
    ):
        pauses.seconds.clear()
        with pytest.raises(UnavailableError, match="told to"):
            ask()
        assert len(pauses.seconds) == ATTEMPTS - 1
        assert max(pauses.seconds) <= LONGEST_PAUSE
    assert set(moody.asked.values()) == {ATTEMPTS}


@pytest.mark.parametrize("error", [NotFoundError, CorruptError, PermissionError_, MalformedError, UnsupportedError])
def test_no_other_failure_is_tried_again(moody: Moody, error: type[ImgtoolError]) -> None:
    store = RetryingStore(moody, wait=Pauses())
    moody.fail(error)
    with pytest.raises(error):
        store.resolve("name")
    with pytest.raises(error):
        store.open(SAMPLE.target.digest)
    assert set(moody.asked.values()) == {1}


def test_whoever_waits_may_give_up(moody: Moody) -> None:
    stop = threading.Event()
    stop.set()
    moody.fail(UnavailableError)
    with pytest.raises(UnavailableError):
        RetryingStore(moody, wait=stop.wait).resolve("name")
    assert moody.asked["resolve"] == 1


@pytest.mark.case("R02", "S06")
def test_a_blob_is_read_on_from_where_it_broke_off(moody: Moody) -> None:
    store = RetryingStore(moody, wait=Pauses())
    digest = Digest.of(LARGE)
    with store.open(digest) as blob:
        half = len(LARGE) // 2
        first = blob.read_at(0, half)
        moody.fail(UnavailableError, "read", times=3)
        assert first + blob.read_at(half, len(LARGE) - half) == LARGE
    assert moody.ranges == [(0, half)] + 4 * [(half, len(LARGE) - half)]
    assert moody.asked["open"] == 3  # from the third attempt on, it is opened anew
    assert moody.closed == 3


@pytest.mark.case("R02")
def test_a_blob_that_was_replaced_while_it_was_read_is_an_error(memory: MemoryStore, moody: Moody) -> None:
    digest = Digest.of(LARGE)
    with RetryingStore(moody, wait=Pauses()).open(digest) as blob:
        moody.fail(UnavailableError, "read", times=2)
        memory.content[digest] = (LARGE[:-1], 0)
        with pytest.raises(CorruptError, match="replaced"):
            blob.read_at(0, 10)
    assert moody.closed == 2


def test_readers_of_one_blob_may_fail_at_once(moody: Moody) -> None:
    store = RetryingStore(moody, wait=Pauses())
    failing = threading.local()

    def before(method: str) -> None:
        if method == "read" and getattr(failing, "left", 3):
            failing.left = getattr(failing, "left", 3) - 1
            raise UnavailableError("thrice in each thread")

    moody.before = before
    with store.open(Digest.of(LARGE)) as blob, ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda at: blob.read_at(at, 1000), range(0, 1 << 20, 1 << 14)))
    assert read == [LARGE[at : at + 1000] for at in range(0, 1 << 20, 1 << 14)]
    assert moody.closed == moody.asked["open"]


# Verified


@pytest.mark.case("C11", "C05")
@pytest.mark.parametrize("damage", [b"<html>", b"", b"tw", b"two!", b"twO"])
def test_a_small_blob_is_checked_before_it_is_given(memory: MemoryStore, moody: Moody, damage: bytes) -> None:
    digest = Digest.of(b"two")
    memory.content[digest] = (damage, 0)
    with pytest.raises(CorruptError, match=digest.hex):
        VerifiedStore(moody).open(digest)
    assert moody.closed == moody.asked["open"] == 1


@pytest.mark.case("C11")
@pytest.mark.parametrize("at", [0, WHOLE_BYTES, len(LARGE) - 1])
def test_a_large_blob_is_checked_at_its_end(memory: MemoryStore, at: int) -> None:
    digest = Digest.of(LARGE)
    memory.content[digest] = (LARGE[:at] + bytes([LARGE[at] ^ 1]) + LARGE[at + 1 :], 0)
    with VerifiedStore(memory).open(digest) as blob:
        blob.read_at(0, len(LARGE) - 5)
        assert len(blob.read_at(3, 100)) == 100  # here and there: not checked, and doesn't disturb
        for _ in range(2):
            with pytest.raises(CorruptError, match=digest.hex):
                blob.read_at(len(LARGE) - 5, 5)
        with pytest.raises(CorruptError, match=digest.hex):
            blob.read_at(0, 1)


def test_a_large_blob_that_is_right_is_read_in_any_order(memory: MemoryStore) -> None:
    with VerifiedStore(memory).open(Digest.of(LARGE)) as blob:
        half = len(LARGE) // 2
        last = blob.read_at(half, len(LARGE) - half)
        assert blob.read_at(0, half) + blob.read_at(half, 5) + blob.read_at(half + 5, len(LARGE) - half - 5) == LARGE
        assert last == LARGE[half:]


# Caching


def test_documents_are_read_once_and_presence_is_asked_each_time(memory: MemoryStore, moody: Moody) -> None:
    store = CachingStore(moody)
    for _ in range(3):
        assert b"".join(stream_blob(store, SAMPLE.target.digest)) == SAMPLE.blobs[SAMPLE.target.digest]
        assert store.resolve("name") == SAMPLE.target
    assert (moody.asked["open"], moody.asked["resolve"]) == (1, 3)
    with memory.collecting():
        memory.delete(SAMPLE.target.digest)
    with pytest.raises(NotFoundError):
        store.stat(SAMPLE.target.digest)


def test_what_is_wrong_or_large_is_not_remembered(memory: MemoryStore, moody: Moody) -> None:
    store = CachingStore(moody)
    digest = Digest.of(b"two")
    memory.content[digest] = (b"owt", 0)
    with store.open(digest) as blob:
        assert blob.read_at(0, 3) == b"owt"
    memory.content[digest] = (b"two", 0)
    with store.open(digest) as blob:
        assert blob.read_at(0, 3) == b"two"
    for _ in range(2):
        with store.open(Digest.of(LARGE)) as blob:
            assert blob.read_at(5, 5) == LARGE[5:10]
    assert moody.asked["open"] == moody.closed == 4


def test_what_was_wanted_least_recently_is_forgotten(memory: MemoryStore, moody: Moody) -> None:
    store = CachingStore(moody)
    blobs = [put(memory, bytes([number]) * SMALL_BYTES) for number in range(KEPT_BYTES // SMALL_BYTES + 1)]
    for digest in [blobs[0], *blobs[1:-1], blobs[0], blobs[-1], blobs[0], blobs[1]]:
        with store.open(digest) as blob:
            assert blob.size == SMALL_BYTES
    assert moody.asked["open"] == len(blobs) + 1


# Single-flight


class Gate:
    """Holds the first question until a number of threads is waiting, which it learns by asking ``waiting``."""

    def __init__(self, moody: Moody) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        moody.before = self._before

    def _before(self, method: str) -> None:
        self.entered.set()
        assert self.go.wait(30)


def _waiters(store: SingleFlightStore, kind: str) -> int:
    flights = getattr(store, kind)
    return sum(flight.waiting for flight in list(flights._under_way.values()))


def _together(store: SingleFlightStore, gate: Gate, kind: str, ask: object, count: int = 8) -> list[object]:
    """``ask`` of ``count`` threads, all before the first is answered; results, or errors."""

    def one(number: int) -> object:
        try:
            return ask()  # type: ignore[operator]
        except ImgtoolError as error:
            with pytest.raises(ImgtoolError), about(f"reader {number}"):
                raise error
            return error

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(one, number) for number in range(count)]
        assert gate.entered.wait(30)
        while _waiters(store, kind) < count - 1:
            assert not any(future.done() for future in futures)
        gate.go.set()
        return [future.result() for future in futures]


def test_who_asks_at_the_same_moment_gets_the_same_answer(moody: Moody) -> None:
    store = SingleFlightStore(moody)
    answers = _together(store, Gate(moody), "_targets", lambda: store.resolve("name"))
    assert answers == 8 * [SAMPLE.target]
    assert moody.asked["resolve"] == 1
    store.resolve("name")
    assert moody.asked["resolve"] == 2


def test_an_open_blob_is_shared_until_the_last_has_closed_it(moody: Moody) -> None:
    store = SingleFlightStore(moody)
    digest = Digest.of(LARGE)
    blobs = _together(store, Gate(moody), "_blobs", lambda: store.open(digest))
    assert moody.asked["open"] == 1
    for blob in blobs:
        assert not moody.closed
        with blob as one:  # type: ignore[attr-defined]
            assert one.read_at(7, 7) == LARGE[7:14]
        blob.close()  # type: ignore[attr-defined]
    assert moody.closed == 1


def test_an_error_is_everybodys_and_each_has_his_own(moody: Moody) -> None:
    store = SingleFlightStore(moody)
    moody.fail(CorruptError)
    gate = Gate(moody)
    moody.before = lambda method: None

    def ask() -> Descriptor:
        return store.resolve("name")

    real = moody.resolve

    def held(name: str) -> Descriptor:
        gate.entered.set()
        assert gate.go.wait(30)
        return real(name)

    moody.resolve = held  # type: ignore[method-assign]
    errors = _together(store, gate, "_targets", ask)
    assert moody.asked["resolve"] == 1
    assert len({id(error) for error in errors}) == 8
    texts = sorted(str(error) for error in errors)
    assert [text.count("reader") for text in texts] == 8 * [1]


def test_the_interrupt_of_the_first_is_not_that_of_the_others(moody: Moody) -> None:
    store = SingleFlightStore(moody)
    entered, go = threading.Event(), threading.Event()
    first = threading.Lock()

    def before(method: str) -> None:
        if first.acquire(blocking=False):
            entered.set()
            assert go.wait(30)
            raise KeyboardInterrupt

    moody.before = before
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(store.resolve, "name")
        assert entered.wait(30)
        other = pool.submit(store.resolve, "name")
        while not _waiters(store, "_targets"):
            assert not other.done()
        go.set()
        with pytest.raises(KeyboardInterrupt):
            one.result()
        assert other.result() == SAMPLE.target


# Late


def test_a_store_that_is_not_there_is_unavailable_until_it_is(memory: MemoryStore) -> None:
    found: dict[str, Store] = {}

    def opener(location: str) -> Store:
        if location not in found:
            raise NotFoundError(f"{location} is not a store")
        return found[location]

    store = LateStore("place", opener)
    for ask in (lambda: store.resolve("name"), lambda: store.names(), lambda: store.stat(SAMPLE.target.digest)):
        with pytest.raises(UnavailableError, match="place is not a store"):
            ask()
    with pytest.raises(NotFoundError):
        store.opened()
    found["place"] = memory
    assert store.resolve("name") == SAMPLE.target
    found.clear()
    assert list(store.names()) == ["name"]


def test_a_location_shows_no_credentials() -> None:
    store = LateStore("https://me:pass@host/store?X-Signature=abc", lambda location: MemoryStore())
    assert store.location == "https://host/store"
    endpoint = LateStore("s3://images/a?endpoint=http://me:pass@host:9000&region=x", lambda location: MemoryStore())
    assert endpoint.location == "s3://images/a?endpoint=http://host:9000&region=x"  # it is needed to find it again
    assert LateStore("/some/where", lambda location: MemoryStore()).location == "/some/where"


# Composed


def test_what_is_patient_or_steady_is_so_once(moody: Moody) -> None:
    once = patient(moody, wait=Pauses())
    assert patient(once) is once
    assert steady(steady(moody)) is not moody
    whole = steady(once)
    assert patient(whole) is whole
    assert steady(whole) is whole


def test_mirrors_are_opened_as_they_are_needed(memory: MemoryStore) -> None:
    asked = []

    def opener(location: str) -> Store:
        asked.append(location)
        if location == "down":
            raise UnavailableError("no connection")
        return {"empty": MemoryStore(), "full": memory}[location]

    store = mirrored(["down", "empty", "full"], opener)
    assert asked == ["down", "empty"]
    assert store.location == "down|empty|full"
    assert store.resolve("name") == SAMPLE.target
    assert asked[-1] == "full"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([NotFoundError, NotFoundError], NotFoundError),
        ([NotFoundError, UnavailableError], UnavailableError),
        ([PermissionError_, NotFoundError], PermissionError_),
        ([UnsupportedError, NotFoundError], UnsupportedError),
        ([UnavailableError, UsageError], UsageError),
    ],
)
def test_mirrors_none_of_which_opens(errors: list[type[ImgtoolError]], expected: type[ImgtoolError]) -> None:
    def opener(location: str) -> Store:
        raise errors[int(location)](f"mirror {location}")

    with pytest.raises(expected):
        mirrored(["0", "1"], opener)


def test_no_mirror_is_no_store() -> None:
    with pytest.raises(UsageError, match="no mirror"):
        mirrored([], lambda location: MemoryStore())
