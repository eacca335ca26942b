"""Mirrors: which one is asked, and what is said where none has it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.mirrors import Moody, Pauses, Raised
from support.stores import assert_sound, image, publish, put

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from layerstore.store.copying import copy
from layerstore.store.failover import AVOID_SECONDS, FailoverStore
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import Store
from layerstore.store.retrying import RetryingStore
from layerstore.store.verified import WHOLE_BYTES, VerifiedStore

LARGE = os.urandom(3 * WHOLE_BYTES)
SAMPLE = image(b"one", LARGE)
FAILURES: list[type[ImgtoolError]] = [UnavailableError, CorruptError, PermissionError_, UnsupportedError]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Mirrors:
    """Some mirrors that have the same, and a store over them."""

    def __init__(self, count: int = 2) -> None:
        self.stores = [MemoryStore() for _ in range(count)]
        for store in self.stores:
            publish(store, "name", SAMPLE)
        self.moody = [Moody(store, f"mirror{number}:") for number, store in enumerate(self.stores)]
        self.clock = Clock()
        self.store = FailoverStore([VerifiedStore(each) for each in self.moody], clock=self.clock)

    def lose(self, number: int, digest: Digest) -> None:
        del self.stores[number].content[digest]

    def damage(self, number: int, digest: Digest, data: bytes) -> None:
        self.stores[number].content[digest] = (data, 0)

    def asked(self, method: str) -> list[int]:
        return [each.asked[method] for each in self.moody]


@pytest.fixture
def mirrors() -> Mirrors:
    return Mirrors()


def test_the_first_answers_alone(mirrors: Mirrors) -> None:
    store = mirrors.store
    assert store.resolve("name") == SAMPLE.target
    assert store.stat(SAMPLE.target.digest) == SAMPLE.target.size
    assert assert_sound(_Only(store)) == SAMPLE.blobs.keys()
    assert not mirrors.moody[1].asked
    assert store.location == "mirror0:|mirror1:"


class _Only:
    """Without a list."""

    def __init__(self, store: FailoverStore) -> None:
        self.location = store.location
        self.stat = store.stat
        self.open = store.open
        self.names = store.names
        self.resolve = store.resolve

    def references(self) -> object:
        from layerstore.store.protocol import Reference

        return iter([Reference("name", self.resolve("name"))])


def test_what_is_missing_is_looked_for_at_the_next(mirrors: Mirrors) -> None:
    digest = Digest.of(b"one")
    mirrors.lose(0, digest)
    assert mirrors.store.stat(digest) == 3
    with mirrors.store.open(digest) as blob:
        assert blob.read_at(0, 3) == b"one"
    assert mirrors.asked("stat") == [1, 1]
    mirrors.lose(1, digest)
    with pytest.raises(NotFoundError, match=f"{digest.hex} is not in mirror0:.mirror1:"):
        mirrors.store.open(digest)
    with pytest.raises(NotFoundError, match="other"):
        mirrors.store.resolve("other")


@pytest.mark.case("S10")
@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_failure_elsewhere_never_looks_like_missing(mirrors: Mirrors, error: type[ImgtoolError], which: int) -> None:
    mirrors.moody[which].fail(error)
    absent = Digest.of(b"absent")
    for ask in (
        lambda: mirrors.store.stat(absent),
        lambda: mirrors.store.open(absent),
        lambda: mirrors.store.resolve("absent"),
    ):
        with pytest.raises(error, match=f"mirror{which}"):
            ask()


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ((CorruptError, UnavailableError), UnavailableError),
        ((PermissionError_, CorruptError), PermissionError_),
        ((UnavailableError, UnavailableError), UnavailableError),
    ],
)
def test_where_all_fail(mirrors: Mirrors, errors: tuple[Raised, Raised], expected: type[ImgtoolError]) -> None:
    for moody, error in zip(mirrors.moody, errors, strict=True):
        moody.fail(error)
    with pytest.raises(expected):
        mirrors.store.resolve("name")


@pytest.mark.parametrize("error", FAILURES)
def test_the_next_answers_for_one_that_fails(mirrors: Mirrors, error: type[ImgtoolError]) -> None:
    mirrors.moody[0].fail(error)
    assert mirrors.store.resolve("name") == SAMPLE.target
    with mirrors.store.open(SAMPLE.target.digest) as blob:
        assert blob.read_at(0, blob.size) == SAMPLE.blobs[SAMPLE.target.digest]


def test_a_bad_name_is_bad_everywhere(mirrors: Mirrors) -> None:
    with pytest.raises(UsageError):
        mirrors.store.resolve("../name")
    assert mirrors.asked("resolve") == [1, 0]


def test_an_unavailable_mirror_is_asked_last_for_a_while(mirrors: Mirrors) -> None:
    mirrors.moody[0].fail(UnavailableError)
    for _ in range(5):
        mirrors.store.resolve("name")
    assert mirrors.asked("resolve") == [1, 5]
    mirrors.moody[1].fail(UnavailableError)
    mirrors.moody[0].mend()
    assert mirrors.store.resolve("name") == SAMPLE.target
    assert mirrors.asked("resolve") == [2, 6]
    mirrors.moody[1].mend()
    mirrors.clock.now += AVOID_SECONDS + 1
    mirrors.store.resolve("name")
    assert mirrors.asked("resolve") == [3, 6]


def test_the_list_is_that_of_all_or_none(mirrors: Mirrors) -> None:
    publish(mirrors.stores[1], "another", image(b"x"))
    assert list(mirrors.store.names()) == ["another", "name"]
    assert [each.name for each in mirrors.store.references()] == ["another", "name"]
    for moody in mirrors.moody:
        moody.fail(UnavailableError)
        with pytest.raises(UnavailableError):
            list(mirrors.store.names())
        with pytest.raises(UnavailableError):
            list(mirrors.store.references())
        moody.mend()


@pytest.mark.case("R02")
def test_a_blob_that_breaks_off_is_read_on_elsewhere(mirrors: Mirrors) -> None:
    digest = Digest.of(LARGE)
    with mirrors.store.open(digest) as blob:
        first = blob.read_at(0, WHOLE_BYTES)
        mirrors.moody[0].fail(UnavailableError)
        assert first + blob.read_at(WHOLE_BYTES, 2 * WHOLE_BYTES) == LARGE
        mirrors.moody[1].fail(UnavailableError)
        with pytest.raises(UnavailableError, match="2 mirrors"):
            blob.read_at(0, 1)
        mirrors.moody[0].mend()
        assert blob.read_at(5, 5) == LARGE[5:10]
    assert [each.closed for each in mirrors.moody] == [each.opened for each in mirrors.moody]


@pytest.mark.parametrize("data", [LARGE[:-1], LARGE + b"x"])
def test_a_blob_of_another_size_is_no_continuation(mirrors: Mirrors, data: bytes) -> None:
    digest = Digest.of(LARGE)
    mirrors.damage(1, digest, data)
    with mirrors.store.open(digest) as blob:
        mirrors.moody[0].fail(UnavailableError)
        with pytest.raises(CorruptError, match="mirror1: has another size"):
            blob.read_at(0, 1)
    mirrors.moody[0].mend()
    mirrors.damage(0, digest, data)
    mirrors.damage(1, digest, LARGE)
    with mirrors.store.open_sized(digest, len(LARGE)) as blob:
        assert blob.read_at(0, 5) == LARGE[:5]


@pytest.mark.case("C10")
def test_a_mirror_whose_blob_is_damaged_is_found_out_and_avoided_for_it(mirrors: Mirrors) -> None:
    digest = Digest.of(LARGE)
    mirrors.damage(0, digest, LARGE[:-1] + bytes([LARGE[-1] ^ 1]))
    with mirrors.store.open(digest) as blob:
        blob.read_at(0, WHOLE_BYTES)
        with pytest.raises(CorruptError, match="mirror0"):
            blob.read_at(WHOLE_BYTES, 2 * WHOLE_BYTES)
    with mirrors.store.open(digest) as blob:
        assert blob.read_at(0, len(LARGE)) == LARGE
    assert mirrors.asked("open") == [1, 1]
    assert mirrors.store.resolve("name") == SAMPLE.target
    assert mirrors.asked("resolve") == [1, 0]


@pytest.mark.case("C05", "C11")
@pytest.mark.parametrize("victim", [Digest.of(b"one"), Digest.of(LARGE), SAMPLE.target.digest])
@pytest.mark.parametrize("how", ["flip", "cut", "grow", "missing"])
def test_a_copy_takes_from_each_mirror_what_is_right_there(mirrors: Mirrors, victim: Digest, how: str) -> None:
    data = SAMPLE.blobs[victim]
    if how == "missing":
        mirrors.lose(0, victim)
    else:
        mirrors.damage(0, victim, {"flip": b"\0" + data[1:], "cut": data[:-1], "grow": data + b"x"}[how])
    destination = MemoryStore()
    copy("name", mirrors.store, destination)
    assert assert_sound(destination) == SAMPLE.blobs.keys()


def test_a_copy_survives_mirrors_that_come_and_go(mirrors: Mirrors) -> None:
    """Of eight questions each mirror answers four in turn."""
    turn = 0
    mutex = threading.Lock()

    def before(number: int, method: str) -> None:
        nonlocal turn
        with mutex:
            turn += 1
            if turn // 4 % 2 == number:
                raise UnavailableError("not now")

    for number, moody in enumerate(mirrors.moody):
        moody.before = lambda method, number=number: before(number, method)  # type: ignore[misc]
    source: Store = RetryingStore(mirrors.store, wait=Pauses())
    destination = MemoryStore()
    copy("name", source, destination)
    assert assert_sound(destination) == SAMPLE.blobs.keys()


def test_many_readers_of_one_blob_change_mirrors_together(mirrors: Mirrors) -> None:
    with mirrors.store.open(Digest.of(LARGE)) as blob, ThreadPoolExecutor(8) as pool:
        places = range(0, len(LARGE), 50_000)
        mirrors.moody[0].fail(UnavailableError, after=20)
        read = list(pool.map(lambda at: blob.read_at(at, 10), places))
    assert read == [LARGE[at : at + 10] for at in places]
    assert [each.closed for each in mirrors.moody] == [each.opened for each in mirrors.moody]


def test_many_blobs_that_are_damaged_are_not_remembered_for_ever(
    mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerstore.store.failover.DISTRUSTED", 2)
    digests = [put(mirrors.stores[1], b"%d" % number) for number in range(4)]
    for digest in digests:
        mirrors.damage(0, digest, b"x")
        mirrors.store.open(digest)
    assert mirrors.asked("open") == [4, 4]
    mirrors.store.open(digests[3])
    assert mirrors.asked("open") == [4, 5]
    mirrors.store.open(digests[0])
    assert mirrors.asked("open") == [5, 6]
