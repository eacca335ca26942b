"""Copying between stores: what is missing, verified, reference last."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.children import Child, die_at_call
from support.faults import fsync_for_free
from support.stores import (
    Bench,
    DirectoryBench,
    MemoryBench,
    all_blobs,
    assert_sound,
    descriptor,
    document,
    image,
    index,
    publish,
    put,
    unpublish,
)

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UsageError,
)
from layerstore.store.collect import collect, plan_collection
from layerstore.store.copying import copy
from layerstore.store.memory import MemoryStore, MemoryUpload
from layerstore.store.protocol import Store
from layerstore.store.reading import CHUNK

SAMPLE = index(image(b"one", b"two"), index(image(b"two", b"three", config=b'{"x":1}')))


class Counter:
    """Progress that adds up."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int | None]] = []
        self.bytes = 0

    def start(self, step: str, total: int | None) -> None:
        self.steps.append((step, total))

    def advance(self, count: int) -> None:
        self.bytes += count


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


@pytest.fixture(params=["memory to directory", "directory to memory", "directory to directory"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Bench, Bench]:
    make: dict[str, Callable[[str], Bench]] = {
        "memory": lambda name: MemoryBench(),
        "directory": lambda name: DirectoryBench(str(tmp_path / name)),
    }
    source, _, destination = request.param.partition(" to ")
    return make[source]("source"), make[destination]("destination")


def test_a_copy_is_the_same_image(pair: tuple[Bench, Bench]) -> None:
    source, destination = (bench.store for bench in pair)
    publish(source, "name", SAMPLE)
    put(source, b"not reached")
    counter = Counter()
    copied = copy("name", source, destination, progress=counter)
    total = sum(map(len, SAMPLE.blobs.values()))
    assert (copied.target, copied.blobs, copied.bytes, copied.present) == (SAMPLE.target, len(SAMPLE.blobs), total, 0)
    assert counter.steps == [("copy name", total)]
    assert counter.bytes == total
    assert destination.resolve("name") == source.resolve("name")
    assert assert_sound(destination) == all_blobs(destination) == SAMPLE.blobs.keys()
    assert source.pinned() == destination.pinned() == frozenset()


def test_only_what_is_missing_is_copied(pair: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = (bench.store for bench in pair)
    publish(source, "name", SAMPLE)
    copy("name", source, destination, rename="first")
    new = image(b"one", b"four")
    publish(source, "name", new)
    copied = copy("name", source, destination, jobs=1)
    assert (copied.blobs, copied.present) == (2, 2)
    assert copied.bytes == len(b"four") + new.target.size
    again = copy("name", source, destination)
    assert (again.blobs, again.bytes, again.present) == (0, 0, 4)
    assert list(destination.names()) == ["first", "name"]


def test_blobs_of_many_pieces_and_other_algorithms(pair: tuple[Bench, Bench]) -> None:
    source, destination = (bench.store for bench in pair)
    data = os.urandom(2 * CHUNK + 5)
    long = Digest("sha512", hashlib.sha512(b"x").hexdigest())
    layers = [descriptor(data).to_json(), {"mediaType": "x", "digest": str(long), "size": 1}]
    sample = document({"layers": layers}, [data])
    with source.upload("sha512") as upload:
        upload.write(b"x")
        upload.commit(long, 1)
    publish(source, "name", sample)
    copy("name", source, destination)
    assert assert_sound(destination) == {long, *sample.blobs}


def test_a_name_is_replaced_only_on_demand(pair: tuple[Bench, Bench]) -> None:
    source, destination = (bench.store for bench in pair)
    other = image(b"other")
    publish(source, "name", SAMPLE)
    publish(destination, "name", other)
    with pytest.raises(ConflictError, match="another name"):
        copy("name", source, destination)
    assert all_blobs(destination) == other.blobs.keys()
    copy("name", source, destination, rename="new/name")
    assert destination.resolve("name") == other.target
    copy("name", source, destination, replace=True)
    assert destination.resolve("name") == destination.resolve("new/name") == SAMPLE.target
    unpublish(destination, "name")
    copy("name", source, destination, replace=True)
    assert_sound(destination)


@pytest.mark.parametrize("when", ["appears", "changes"])
def test_a_name_taken_meanwhile_is_a_conflict(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = MemoryStore(), MemoryStore()
    publish(source, "name", SAMPLE)
    if when == "changes":
        publish(destination, "name", image(b"before"))
    real = destination.upload

    def interrupted(algorithm: str) -> MemoryUpload:
        monkeypatch.setattr(destination, "upload", real)
        publish(destination, "name", image(b"other"))
        return real(algorithm)

    monkeypatch.setattr(destination, "upload", interrupted)
    with pytest.raises(ConflictError, match="name"):
        copy("name", source, destination, jobs=1, replace=True)
    assert destination.resolve("name") == image(b"other").target


def test_wrong_requests(pair: tuple[Bench, Bench]) -> None:
    source, destination = (bench.store for bench in pair)
    publish(source, "name", SAMPLE)
    with pytest.raises(NotFoundError, match="other"):
        copy("other", source, destination)
    with pytest.raises(UsageError, match="jobs"):
        copy("name", source, destination, jobs=0)
    with pytest.raises(UsageError):
        copy("name", source, destination, rename="../name")
    assert list(destination.names()) == []


@pytest.mark.case("C05", "C11")
@pytest.mark.parametrize("victim", [b"two", b'{"x":1}', None])
@pytest.mark.parametrize("how", ["flip", "cut", "grow", "missing"])
def test_what_is_damaged_at_the_source_is_named_and_not_copied(
    pair: tuple[Bench, Bench], victim: bytes | None, how: str
) -> None:
    source, destination = pair
    publish(source.store, "name", SAMPLE)
    digest = SAMPLE.target.digest if victim is None else Digest.of(victim)
    data = SAMPLE.blobs[digest]
    if how == "missing":
        with source.store.collecting():
            source.store.delete(digest)
    else:
        source.damage(digest, {"flip": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "grow": data + b"\0"}[how])
    with pytest.raises(CorruptError, match=digest.hex):
        copy("name", source.store, destination.store)
    assert list(destination.store.names()) == []
    assert digest not in all_blobs(destination.store)
    assert destination.store.pinned() == source.store.pinned() == frozenset()


@pytest.mark.case("C05")
def test_a_blob_of_the_wrong_size_at_the_destination_is_replaced(pair: tuple[Bench, Bench]) -> None:
    source, destination = pair
    publish(source.store, "name", SAMPLE)
    put(destination.store, b"two")
    destination.damage(Digest.of(b"two"), b"tw")
    copy("name", source.store, destination.store)
    assert_sound(destination.store)


def test_the_first_error_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [b"%d" % number for number in range(200)]
    sample = image(*layers)
    source, destination = MemoryStore(), MemoryStore()
    publish(source, "name", sample)
    uploads = 0
    real = destination.upload

    def failing(algorithm: str) -> MemoryUpload:
        nonlocal uploads
        uploads += 1
        if uploads > 3:
            raise UnavailableError("503")
        return real(algorithm)

    monkeypatch.setattr(destination, "upload", failing)
    with pytest.raises(UnavailableError, match="503"):
        copy("name", source, destination, jobs=2)
    assert uploads < 200
    assert list(destination.names()) == []


def test_an_interrupt_stops_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = MemoryStore(), MemoryStore()
    publish(source, "name", image(*(b"%d" % number for number in range(50))))

    class Interrupting(Counter):
        def advance(self, count: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy("name", source, destination, progress=Interrupting())
    assert list(destination.names()) == []
    assert destination.pinned() == source.pinned() == frozenset()


def test_documents_are_written_after_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries refuse a manifest whose blobs they don't have."""
    source, destination = MemoryStore(), MemoryStore()
    publish(source, "name", SAMPLE)
    order: list[Digest] = []
    real = MemoryUpload.commit

    def commit(self: MemoryUpload, digest: Digest, size: int) -> None:
        order.append(digest)
        real(self, digest, size)

    monkeypatch.setattr(MemoryUpload, "commit", commit)
    copy("name", source, destination, jobs=4)
    assert len(order) == len(SAMPLE.blobs)
    assert order[-1] == SAMPLE.target.digest
    for digest, data in SAMPLE.blobs.items():
        for other in SAMPLE.blobs:
            if str(other).encode() in data:
                assert order.index(other) < order.index(digest)


def test_source_and_destination_are_leased_meanwhile(pair: tuple[Bench, Bench]) -> None:
    source, destination = (bench.store for bench in pair)
    publish(source, "name", SAMPLE)
    publish(source, "other", image(b"other"))
    publish(destination, "other", image(b"other"))

    class Sweeping(Counter):
        """The reference goes and collectors come, on both sides, before anything is copied."""

        def start(self, step: str, total: int | None) -> None:
            if not self.steps:
                unpublish(source, "name")
                for store in (source, destination):
                    assert SAMPLE.blobs.keys() <= store.pinned()
                    collect(store, plan_collection(store, grace=0))
            super().start(step, total)

    copy("name", source, destination, progress=Sweeping())
    assert SAMPLE.blobs.keys() <= assert_sound(destination)


class ReadOnly:
    """Only what a Store has."""

    def __init__(self, store: MemoryStore) -> None:
        self.location = store.location
        self.stat = store.stat
        self.open = store.open
        self.names = store.names
        self.resolve = store.resolve
        self.references = store.references


def test_a_source_that_cannot_be_leased_is_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    publish(store, "name", SAMPLE)
    readable: Store = ReadOnly(store)
    destination = MemoryStore()
    copy("name", readable, destination)
    assert assert_sound(destination) == SAMPLE.blobs.keys()

    def refuse(*, seconds: int) -> None:
        raise PermissionError_("read-only file system")

    monkeypatch.setattr(store, "lease", refuse)
    destination = MemoryStore()
    copy("name", store, destination)
    assert assert_sound(destination) == SAMPLE.blobs.keys()


def test_long_copies_renew_their_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    source, destination = MemoryBench(), MemoryBench()
    publish(source.store, "name", SAMPLE)

    class Slow(Counter):
        """Eight hours a piece: all of it takes days."""

        def advance(self, count: int) -> None:
            nonlocal now
            now += 8 * 3600
            for bench in (source, destination):
                bench.clock.advance(8 * 3600)

    copy("name", source.store, destination.store, jobs=1, progress=Slow())
    assert now > 2 * 86_400
    assert assert_sound(destination.store) == SAMPLE.blobs.keys()


@pytest.mark.case("C03")
def test_a_copy_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    source = MemoryStore()
    publish(source, "name", SAMPLE)
    bench = DirectoryBench(str(tmp_path / "store"))
    for calls in range(1, 300, 15):

        def work(child: Child, calls: int = calls) -> None:
            die_at_call(calls)
            copy("name", source, bench.store, replace=True)

        with Child(work) as child:
            child.wait()
        assert_sound(bench.store)
    copy("name", source, bench.store)
    assert assert_sound(bench.store) == SAMPLE.blobs.keys()
    bench.store.reclaim(older_than=0)
    assert bench.leftovers() == []
