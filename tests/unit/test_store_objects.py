"""Stores in buckets: what collectors and publishers do to each other at every point, and what an operation costs."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.buckets import HONOURED, BucketBench, Hook, MemoryBucket
from support.stores import (
    DAY,
    MANIFEST,
    Sample,
    SteppedClock,
    all_blobs,
    assert_sound,
    descriptor,
    image,
    publish,
    put,
    put_missing,
    unpublish,
)

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    MalformedError,
    NoSpaceError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from layerstore.store import collector as collector_module
from layerstore.store.bucket import PROBE, Guarantees
from layerstore.store.collect import collect, plan_collection
from layerstore.store.collector import KEY, VOID_SECONDS
from layerstore.store.format import CollectorDocument
from layerstore.store.objectblob import SMALL_BYTES, blob_key
from layerstore.store.objects import START_BYTES, ObjectStore
from layerstore.store.protocol import BulkPruneStore, PruneStore, SizedStore
from layerstore.store.reach import present_target
from layerstore.store.remembered import SETTLED_SECONDS

OTHER, SAMPLE = image(b"other"), image(b"layer", b"second")
FOUND = descriptor(b"layer").digest
"""Of the sample: it lies in the store as garbage when the publisher comes."""


class Scene:
    """A store with an image and some garbage; a publisher and a collector, each by a view of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, guarantees: Guarantees = HONOURED) -> None:
        base = MemoryBucket()
        self.clock = SteppedClock(base.now)
        shared = MemoryBucket(self.clock, guarantees=guarantees)
        awake = 0.0
        self.asleep = lambda: awake
        self._awake = awake
        monkeypatch.setattr(collector_module, "elapsed", lambda: self._awake)
        self.views = {
            who: MemoryBucket(self.clock, guarantees=guarantees, shared=shared)
            for who in ("owner", "publisher", "collector")
        }
        self.owner = ObjectStore.create(self.views["owner"], threads=1)
        self.publisher = self._store("publisher")
        self.collector = self._store("collector")
        publish(self.owner, "other", OTHER)
        put(self.owner, b"layer")
        for number in range(3):
            put(self.owner, b"garbage %d" % number)

    def _store(self, who: str) -> ObjectStore:
        return ObjectStore(self.views[who], lock_seconds=0, threads=1)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._awake += seconds

    def publish(self) -> None:
        publish(self.publisher, "name", SAMPLE)

    def collect(self) -> None:
        collect(self.collector, plan_collection(self.collector, grace=0))

    def at(self, who: str, number: int, act: Callable[[], None], when: str = "before") -> None:
        """``act``, once, around the ``number``th operation of somebody. Its own operations don't count."""
        bucket = self.views[who]
        left = number

        def hook(operation: str, key: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                act()

        setattr(bucket, when, hook)

    def operations(self, who: str, work: Callable[[], None]) -> int:
        before = self.views[who].counts.total()
        work()
        return self.views[who].counts.total() - before

    def finish(self) -> None:
        """What failed is repeated some time later; then all is as if nothing had happened."""
        for bucket in self.views.values():
            bucket.before = bucket.after = lambda operation, key: None
        assert_sound(self.owner)
        self.pass_time(2 * DAY)
        if present_target(self.owner, "name") is None:
            self.publish()
        self.collect()
        assert assert_sound(self.owner) == all_blobs(self.owner) == OTHER.blobs.keys() | SAMPLE.blobs.keys()
        assert list(self.owner.names()) == ["name", "other"]


def operations(scene: Scene, who: str, work: Callable[[], None]) -> int:
    return scene.operations(who, work)


def test_it_has_all_capabilities() -> None:
    store = ObjectStore.create(MemoryBucket())
    assert isinstance(store, PruneStore)
    assert isinstance(store, BulkPruneStore)
    assert isinstance(store, SizedStore)


# Collectors and publishers


def count(monkeypatch: pytest.MonkeyPatch, who: str) -> int:
    scene = Scene(monkeypatch)
    return scene.operations(who, scene.collect if who == "collector" else scene.publish)


@pytest.mark.case("G01", "G05", "C07")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_publisher_at_any_point_of_a_collection(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The whole of publishing between two requests of the collector: it succeeds, or finds the store locked."""
    outcomes = set()
    for number in range(1, count(monkeypatch, "collector") + 1):
        scene = Scene(monkeypatch)

        def act(scene: Scene = scene) -> None:
            try:
                scene.publish()
                outcomes.add("published")
                assert scene.owner.resolve("name") == SAMPLE.target
            except UnavailableError as error:
                assert "locked by a collector" in str(error)
                outcomes.add("locked")

        scene.at("collector", number, act, when)
        scene.collect()
        scene.finish()
    assert outcomes == {"published", "locked"}


@pytest.mark.case("G01", "C07")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_collection_at_any_point_of_publishing(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    for number in range(1, count(monkeypatch, "publisher") + 1):
        scene = Scene(monkeypatch)
        scene.at("publisher", number, scene.collect, when)
        with suppress(ConflictError):  # a blob that it saw before it pinned can be gone; it says so
            scene.publish()
        scene.finish()


@pytest.mark.case("G01", "C07")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_collector_that_hangs_at_any_point(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """For two minutes and more: publishers go on without it, and what it does then hurts nobody.

    Also just before the request that deletes leaves it, when it has made sure that it may.
    """
    outcomes = []
    for number in range(1, count(monkeypatch, "collector") + 1):
        scene = Scene(monkeypatch)

        def act(scene: Scene = scene) -> None:
            scene.pass_time(VOID_SECONDS + 1)
            try:
                scene.publish()
                outcomes.append("published")
            except UnavailableError as error:
                assert "was broken off and may still delete blob" in str(error)
                outcomes.append("in doubt")

        scene.at("collector", number, act, when)
        try:
            scene.collect()
            outcomes.append("collected")
        except UnavailableError as error:
            assert "takes too long at a time" in str(error)
            outcomes.append("gave up")
        assert_sound(scene.owner)
        scene.finish()
    assert set(outcomes) == {"published", "in doubt", "collected", "gave up"}


@pytest.mark.case("G07")
def test_a_collector_that_dies_at_any_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    for number in range(1, count(monkeypatch, "collector") + 1):
        scene = Scene(monkeypatch)

        def killed(operation: str, key: str, scene: Scene = scene) -> None:
            raise Killed

        def act(scene: Scene = scene) -> None:
            scene.views["collector"].before = killed  # it does nothing any more, not even to say that it is done
            die()

        scene.at("collector", number, act)
        with pytest.raises(Killed):
            scene.collect()
        scene.pass_time(VOID_SECONDS + 1)
        with suppress(UnavailableError):
            scene.publish()
        scene.finish()


@pytest.mark.case("G01", "C03")
def test_a_publisher_that_stops_at_any_point_past_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """It succeeds with all its blobs, or fails and there is no reference."""
    outcomes = set()
    for number in range(1, count(monkeypatch, "publisher") + 1):
        for when in ("before", "after"):
            scene = Scene(monkeypatch)

            def act(scene: Scene = scene) -> None:
                scene.pass_time(2 * DAY)
                scene.collect()

            scene.at("publisher", number, act, when)
            try:
                scene.publish()
                outcomes.add("published")
                assert scene.owner.resolve("name") == SAMPLE.target
            except ConflictError:
                outcomes.add("failed")
                assert list(scene.owner.names()) == ["other"]
            scene.finish()
    assert outcomes == {"published", "failed"}


def test_a_publisher_waits_for_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    waiting = ObjectStore(scene.views["publisher"], lock_seconds=30, threads=1)
    digest = put(scene.owner, b"garbage")
    looked = threading.Event()

    def hook(operation: str, key: str) -> None:
        if (operation, key) == ("read", KEY):
            looked.set()

    scene.views["publisher"].after = hook
    with waiting.lease() as lease, ThreadPoolExecutor(1) as pool:
        with scene.collector.collecting():
            pinned = pool.submit(lease.pin, [digest])
            assert looked.wait(30)
            assert not pinned.done()
            assert scene.collector.delete(digest)
        pinned.result(30)
        with pytest.raises(NotFoundError):
            waiting.stat(digest)


def test_two_collectors_exclude_each_other_at_any_point(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, count(monkeypatch, "collector") + 1):
        scene = Scene(monkeypatch)
        second = ObjectStore(scene.views["publisher"], lock_seconds=0, threads=1)

        def act(second: ObjectStore = second) -> None:
            with suppress(UnavailableError):
                collect(second, plan_collection(second, grace=0))

        scene.at("collector", number, act)
        scene.collect()
        scene.finish()


def test_a_delete_that_was_not_answered_leaves_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take effect when the blob has been published again."""
    scene = Scene(monkeypatch)
    bucket = scene.views["collector"]
    real = bucket.delete
    monkeypatch.setattr(bucket, "delete", lambda key, *, expected=None: real(key, expected=expected) and False)
    scene.collect()
    with pytest.raises(UnavailableError, match=f"may still delete blob {FOUND}: publish again in"):
        scene.publish()
    with scene.publisher.lease() as lease:
        lease.pin([Digest.of(b"nobody deletes this")])
        with pytest.raises(UnavailableError, match="may still delete"):
            lease.pin([FOUND])
        with pytest.raises(UnavailableError, match="may still delete"):
            lease.pin([FOUND])
    with pytest.raises(UnavailableError, match="may still delete"):
        put(scene.publisher, b"layer")
    scene.finish()


def test_a_delete_that_failed_leaves_a_doubt_and_the_next_collector_passes_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)

    def fail(operation: str, key: str) -> None:
        if (operation, key) == ("delete", blob_key(FOUND)):
            raise UnavailableError("503")

    scene.views["collector"].before = fail
    with pytest.raises(UnavailableError, match="503"):
        scene.collect()
    scene.views["collector"].before = lambda operation, key: None
    scene.pass_time(60)
    scene.collect()
    with pytest.raises(UnavailableError, match=r"in 8[0-9][0-9] s"):
        scene.publish()
    scene.finish()


def test_a_collection_that_can_not_say_that_it_is_done_blocks_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    with scene.collector.collecting():
        scene.views["collector"].before = _raise(UnavailableError("503"), "write", KEY)
    with pytest.raises(UnavailableError, match="locked by a collector for 0 s"):
        scene.publish()
    scene.pass_time(VOID_SECONDS + 1)
    scene.publish()
    scene.views["collector"].before = lambda operation, key: None
    scene.finish()


def _raise(error: Exception, operation: str, key: str, *, times: int = 1 << 30) -> Hook:
    left = times

    def hook(called: str, on: str) -> None:
        nonlocal left
        if called == operation and on.startswith(key) and left:
            left -= 1
            raise error

    return hook


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", CorruptError),
        (b"{}", CorruptError),
        (CollectorDocument("x", False).to_bytes().replace(b'"version":1', b'"version":2'), UnsupportedError),
        (CollectorDocument("x", False).to_bytes().replace(b'"dooms":[]', b'"dooms":[1]'), CorruptError),
        (CollectorDocument("x", False).to_bytes().replace(b'"doubted_until":0', b'"doubted_until":-1'), CorruptError),
    ],
)
def test_a_mark_that_can_not_be_read_stops_everybody(data: bytes, error: type[ImgtoolError]) -> None:
    store = ObjectStore.create(MemoryBucket(), threads=1)
    digest = put(store, b"blob")
    store.bucket.write(KEY, data)
    with pytest.raises(error, match="collector"), store.collecting():
        pass
    with pytest.raises(error, match="collector"), store.lease() as lease:
        lease.pin([digest])


def test_marks_read_as_they_were_written() -> None:
    mark = CollectorDocument("id", True, frozenset([FOUND]), frozenset(SAMPLE.blobs), 1_800_000_000)
    assert CollectorDocument.parse(mark.to_bytes(), "mark") == mark
    with pytest.raises(MalformedError, match="imgtool collector"):
        CollectorDocument.parse(b'{"magic":"imgtool lease"}', "mark")


# Writes whose outcome is unknown


@pytest.mark.case("G01", "S09")
def test_a_reference_that_is_written_late_finds_its_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher has given up, and a collector has run, when the service writes it after all."""
    scene = Scene(monkeypatch)
    held: list[tuple[str, tuple[bytes, int, str]]] = []

    def lose(operation: str, key: str) -> None:
        if operation == "write" and key.startswith("refs/"):
            bucket = scene.views["publisher"]
            held.append((key, bucket.objects.pop(key)))
            raise UnavailableError("no answer")

    scene.views["publisher"].after = lose
    with pytest.raises(UnavailableError, match="no answer"):
        scene.publish()
    scene.collect()
    for key, item in held:
        scene.views["owner"].objects[key] = item
    assert SAMPLE.blobs.keys() <= assert_sound(scene.owner)
    scene.finish()
    assert [entry.key for entry in scene.views["owner"].entries("leases/")] == []


def test_a_lease_that_somebody_else_wrote_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    put_missing(scene.owner, SAMPLE)
    with scene.publisher.lease() as lease:
        lease.pin(SAMPLE.blobs)
        key = f"leases/{lease.identifier}"
        document = json.loads(scene.owner.bucket.read(key, 0, 1 << 20).data)
        scene.owner.bucket.write(key, json.dumps({**document, "pins": []}).encode())
        attempts: list[Callable[[], object]] = [
            lease.renew,
            lambda: lease.pin(SAMPLE.blobs),
            lambda: lease.pin([Digest.of(b"x")]),
            lambda: scene.publisher.set_reference(
                "name", SAMPLE.target, expected=None, lease=lease, reaches=SAMPLE.blobs
            ),
        ]
        for attempt in attempts:
            with pytest.raises(ConflictError, match="has expired"):
                attempt()
    assert list(scene.owner.names()) == ["other"]


# In doubt, nothing is deleted


Fault = Callable[[BucketBench, Sample], object]


def overwritten(key: str, data: bytes) -> Fault:
    return lambda bench, sample: bench.store.bucket.write(key.format(sample.target.digest.hex), data)


def reference_later(bench: BucketBench, sample: Sample) -> None:
    data = bench.store.bucket.read("refs/name", 0, 1 << 20).data
    bench.store.bucket.write("refs/name", data.replace(b'"version":1', b'"version":2'))


def references_gone(bench: BucketBench, sample: Sample) -> None:
    for entry in list(bench.store.bucket.entries("refs/")):
        bench.store.bucket.delete(entry.key)


def manifest_gone(bench: BucketBench, sample: Sample) -> None:
    bench.store.bucket.delete(blob_key(sample.target.digest))


def prefix_gone(bench: BucketBench, sample: Sample) -> None:
    """As when the listing of leases and references is of another, empty place."""
    for entry in list(bench.store.bucket.entries("")):
        if not entry.key.startswith("blobs/"):
            bench.store.bucket.delete(entry.key)


def fails(error: ImgtoolError, operation: str, key: str) -> Fault:
    def fault(bench: BucketBench, sample: Sample) -> None:
        memory: Any = bench.bucket
        memory._bucket.before = _raise(error, operation, key.format(sample.target.digest.hex))

    return fault


FORBIDDEN, BUSY = PermissionError_("403"), UnavailableError("503")
FAULTS = [
    pytest.param(overwritten("refs/name", b""), CorruptError, id="reference unreadable"),
    pytest.param(reference_later, UnsupportedError, id="reference of a later version"),
    pytest.param(overwritten("refs/name.bak~", b""), CorruptError, id="stray object"),
    pytest.param(references_gone, ConflictError, id="no references"),
    pytest.param(prefix_gone, ConflictError, id="half of it is gone"),
    pytest.param(overwritten("leases/" + "0" * 32, b"{}"), CorruptError, id="lease unreadable"),
    pytest.param(manifest_gone, CorruptError, id="manifest missing"),
    pytest.param(overwritten("blobs/sha256/{}", b"{}"), CorruptError, id="manifest damaged"),
    pytest.param(fails(FORBIDDEN, "read", "blobs/sha256/{}"), PermissionError_, id="manifest 403"),
    pytest.param(fails(FORBIDDEN, "read", "refs/name"), PermissionError_, id="reference 403"),
    pytest.param(fails(FORBIDDEN, "list", "refs/"), PermissionError_, id="listing 403"),
    pytest.param(fails(FORBIDDEN, "list", "leases/"), PermissionError_, id="leases 403"),
    pytest.param(fails(BUSY, "read", "blobs/sha256/{}"), UnavailableError, id="manifest 503"),
    pytest.param(fails(BUSY, "list", "refs/"), UnavailableError, id="listing 503"),
    pytest.param(fails(BUSY, "read", "refs/"), UnavailableError, id="reference 503"),
    pytest.param(fails(BUSY, "list", "leases/"), UnavailableError, id="leases 503"),
]


@pytest.mark.case("G04", "G06", "S08", "S10")
@pytest.mark.parametrize(("fault", "error"), FAULTS)
@pytest.mark.parametrize("after_plan", [False, True])
def test_any_error_while_marking_deletes_nothing(fault: Fault, error: type[ImgtoolError], after_plan: bool) -> None:
    bench = BucketBench(MemoryBucket(), threads=1)
    sample = image(b"layer")
    publish(bench.store, "another", image(b"another"))
    publish(bench.store, "name", sample)
    put(bench.store, b"garbage")
    plan = plan_collection(bench.store, grace=0)
    fault(bench, sample)
    before = {entry.key for entry in bench.store.bucket.entries("blobs/")}
    with pytest.raises(error):
        collect(bench.store, plan) if after_plan else plan_collection(bench.store, grace=0)
    memory: Any = bench.bucket
    memory._bucket.before = lambda operation, key: None
    assert {entry.key for entry in bench.store.bucket.entries("blobs/")} == before


@pytest.mark.case("G05")
def test_a_blob_of_the_future_is_young_and_one_of_the_past_is_leased() -> None:
    """Times come from the service: one whose clock was set back meanwhile lists blobs of the future."""
    bench = BucketBench(MemoryBucket(), threads=1)
    publish(bench.store, "other", OTHER)
    future, past = put(bench.store, b"of the future"), put(bench.store, b"restored with an old date")
    bench.bucket.stamps[blob_key(future)] = bench.clock() + DAY * 10**9
    bench.bucket.stamps[blob_key(past)] = 0
    assert {blob.digest: blob.age for blob in bench.store.blobs()}[future] == 0
    with bench.store.lease() as lease:
        lease.pin([past])
        assert not collect(bench.store, plan_collection(bench.store, grace=3600)).deleted
    gone = collect(bench.store, plan_collection(bench.store, grace=3600)).deleted
    assert [blob.digest for blob in gone] == [past]


@pytest.mark.case("S08", "S10")
def test_only_missing_is_missing() -> None:
    bucket = MemoryBucket()
    store = ObjectStore.create(bucket, threads=1)
    publish(store, "name", SAMPLE)
    for error in (FORBIDDEN, BUSY):
        for operation in ("head", "read", "write", "list"):
            bucket.before = _raise(error, operation, "")
            attempts: dict[str, Callable[[], object]] = {
                "head": lambda: store.stat(SAMPLE.target.digest),
                "read": lambda: store.resolve("nowhere"),
                "write": store.lease,
                "list": lambda: list(store.names()),
            }
            with pytest.raises(type(error)):
                attempts[operation]()
            if operation != "list":
                with pytest.raises(type(error)):
                    publish(store, "name2", image(b"something else"))
    bucket.before = lambda operation, key: None
    assert list(store.names()) == ["name"]


def test_a_store_that_is_gone_is_unavailable() -> None:
    bucket = MemoryBucket()
    store = ObjectStore.create(bucket, threads=1)
    publish(store, "name", SAMPLE)
    store = ObjectStore(bucket)
    bucket.objects.clear()
    attempts: list[Callable[[], object]] = [
        lambda: store.stat(FOUND),
        lambda: store.open(FOUND),
        lambda: store.resolve("name"),
    ]
    for attempt in attempts:
        with pytest.raises(UnavailableError, match="is not there any more"):
            attempt()
    with pytest.raises(NotFoundError, match="is not a store"):
        ObjectStore(bucket)


# Making one


def test_a_store_is_made_once_however_many_try() -> None:
    bucket = MemoryBucket()
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: ObjectStore.create(bucket), range(8)))
    assert list(bucket.objects) == ["store.json"]
    assert put(stores[0], b"blob") in all_blobs(stores[7])


def test_a_prefix_with_something_else_is_no_place_for_a_store() -> None:
    bucket = MemoryBucket()
    bucket.write("a/file", b"somebody's")
    with pytest.raises(ConflictError, match=r"such as 'a/file'.*choose an empty prefix"):
        ObjectStore.create(bucket)
    bucket.delete("a/file")
    bucket.write(PROBE + "1", b"left by one who looked what the service does")
    store = ObjectStore.create(bucket)
    put(store, b"blob")
    bucket.delete("store.json")
    with pytest.raises(ConflictError, match="restore that object"):
        ObjectStore.create(bucket)


@pytest.mark.case("S09")
def test_without_conditions_the_last_writer_wins_and_it_is_said() -> None:
    assert ObjectStore.create(MemoryBucket()).exclusive
    store = ObjectStore.create(MemoryBucket(guarantees=Guarantees(False, False)))
    assert not store.exclusive


# Uploads, and where they wait


@pytest.mark.case("C12")
def test_a_full_or_missing_spool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "missing")
    store = ObjectStore.create(MemoryBucket(), spool=missing)
    with store.upload() as upload, pytest.raises(UsageError, match=f"{missing}.*TMPDIR"):
        upload.write(bytes(SMALL_BYTES + 1))
    with pytest.raises(UsageError, match=f"{missing}.*TMPDIR"), store.scratch():
        pass
    store = ObjectStore.create(MemoryBucket(), spool=str(tmp_path))
    put(store, b"small blobs need no disk")

    class Full(tempfile.SpooledTemporaryFile):  # type: ignore[type-arg]
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", Full)
    with store.upload() as upload, pytest.raises(NoSpaceError, match=f"in {tmp_path}"):
        upload.write(b"x")
    assert os.listdir(tmp_path) == []


@pytest.mark.case("C12")
def test_the_spool_is_where_it_was_asked_for(tmp_path: Path) -> None:
    store = ObjectStore.create(MemoryBucket(), spool=str(tmp_path))
    data = bytes(SMALL_BYTES) + b"more than is kept in memory"
    with store.upload() as upload, store.scratch() as scratch:
        upload.write(data)
        assert os.path.dirname(scratch) == str(tmp_path)
        upload.commit(Digest.of(data), len(data))
    assert store.stat(Digest.of(data)) == len(data)
    assert os.listdir(tmp_path) == []


def test_uploads_of_dead_publishers_are_reclaimed_but_for_what_is_pinned() -> None:
    bucket = MemoryBucket()
    clock = SteppedClock(bucket.now)
    store = ObjectStore.create(bucket, clock=clock, threads=1)
    publish(store, "other", OTHER)
    for data in (b"dead", b"slow"):
        bucket.uploads[blob_key(Digest.of(data))] = bucket.now()
    bucket.write(PROBE + "1", b"1")
    clock.advance(2 * 3600)
    with store.lease() as lease:
        lease.pin([Digest.of(b"slow")])
        assert plan_collection(store).leftovers == 2
        assert collect(store, plan_collection(store)).leftovers == 2
        assert list(bucket.uploads) == [blob_key(Digest.of(b"slow"))]
    assert list(bucket.entries(PROBE)) == []
    store.reclaim(older_than=0)
    assert not bucket.uploads


@pytest.mark.case("C05")
def test_a_damaged_blob_of_the_right_size_is_quarantined_unless_it_has_been_replaced() -> None:
    bucket = MemoryBucket()
    store = ObjectStore.create(bucket, threads=1)
    digest = put(store, b"payload")
    bucket.write(blob_key(digest), b"pAyload")

    def repair(operation: str, key: str) -> None:
        if operation == "copy":
            bucket.before = lambda operation, key: None
            put(store, b"payload")

    bucket.before = repair
    with pytest.raises(ConflictError, match="replaced or deleted meanwhile"):
        store.quarantine(digest)
    assert store.open(digest).read_at(0, 7) == b"payload"
    assert list(bucket.entries("quarantine/")) == []


# What it costs


def test_opening_a_store_or_a_blob_is_one_request_and_so_is_a_frame() -> None:
    bucket = MemoryBucket()
    writer = ObjectStore.create(bucket)
    data = os.urandom(3 * START_BYTES)
    digest = put(writer, data)
    bucket.counts.clear()
    store = ObjectStore(bucket)
    assert bucket.counts == {"read": 1}
    blob = store.open(digest)
    assert blob.read_at(10, 1000) == data[10:1010]
    assert bucket.counts == {"read": 2}
    assert blob.read_at(START_BYTES, START_BYTES) == data[START_BYTES : 2 * START_BYTES]
    assert bucket.counts == {"read": 3}
    sized = store.open_sized(digest, len(data))
    assert bucket.counts == {"read": 3}
    assert sized.read_at(START_BYTES, 5) == data[START_BYTES : START_BYTES + 5]
    assert sized.read_at(0, 5) == data[:5]
    assert bucket.counts == {"read": 5}


def test_a_blob_of_a_known_size_is_what_it_is_when_it_is_read() -> None:
    bucket = MemoryBucket()
    store = ObjectStore.create(bucket)
    digest = put(store, b"payload")
    with pytest.raises(NotFoundError, match=FOUND.hex):
        store.open_sized(FOUND, 5).read_at(0, 5)
    with pytest.raises(CorruptError, match="expected 8 bytes, got 7"):
        store.open_sized(digest, 8).read_at(0, 5)
    blob = store.open_sized(digest, 7)
    assert blob.read_at(0, 3) == b"pay"
    bucket.write(blob_key(digest), b"other..")
    with pytest.raises(UnavailableError, match="replaced or deleted while it was read"):
        blob.read_at(3, 3)
    bucket.delete(blob_key(digest))
    with pytest.raises(UnavailableError, match="replaced or deleted while it was read"):
        blob.read_at(3, 3)


def test_publishing_what_is_there_costs_a_handful_of_requests() -> None:
    bucket = MemoryBucket()
    sample = image(*(b"layer %d" % number for number in range(40)))
    publish(ObjectStore.create(bucket), "first", sample)
    store = ObjectStore(bucket)
    bucket.counts.clear()
    with store.lease() as lease:
        lease.pin(sample.blobs)
        for digest in sample.blobs:
            store.stat(digest)
        looks = bucket.counts.pop("head")
        store.set_reference("second", sample.target, expected=None, lease=lease, reaches=sample.blobs)
    assert looks == len(sample.blobs)
    assert bucket.counts.total() <= 10, bucket.counts
    bucket.counts.clear()
    unpublish(store, "second")
    assert bucket.counts.total() <= 4, bucket.counts


def test_ten_thousand_references_are_listed_and_only_what_changed_is_read_again() -> None:
    bucket = MemoryBucket()
    clock = SteppedClock(bucket.now)
    store = ObjectStore.create(bucket, clock=clock)
    for number in range(9):
        publish(store, f"image{number}", SAMPLE)
    for number in range(10_000):
        data = bucket.objects["refs/image0"][0].replace(b'"image0"', b'"many/%d"' % number)
        bucket.write(f"refs/many%2F{number}", data)
    clock.advance(SETTLED_SECONDS + 1)
    assert len(list(store.references())) == 10_009
    assert plan_collection(store, grace=0).references == 10_009
    bucket.counts.clear()
    publish(store, "image1", OTHER)
    before = bucket.counts["read"]
    targets = {reference.name: reference.target for reference in store.references()}
    assert bucket.counts["read"] == before + 1
    assert targets["image1"] == OTHER.target
    assert targets["many/9999"] == SAMPLE.target
    assert list(store.names()) == sorted(targets)


def test_a_young_reference_is_read_again_though_it_looks_the_same() -> None:
    """A service's etag can be no more than a time in seconds and a size."""

    class Coarse(MemoryBucket):
        def _listed(self, key: str) -> Any:
            entry = super()._listed(key)
            return entry._replace(etag=f"{entry.size}-{entry.modified // 10**9}")

        def write(self, key: str, data: bytes, *, expected: object = None) -> str:
            super().write(key, data)
            return self.head(key).etag

    now = 1_800_000_000 * 10**9
    bucket = Coarse(lambda: now)
    clock = SteppedClock(bucket.now)
    store = ObjectStore.create(bucket, clock=clock, threads=1)
    publish(store, "name", SAMPLE)
    assert [each.target for each in store.references()] == [SAMPLE.target]
    data = bucket.objects["refs/name"][0].replace(SAMPLE.target.digest.hex.encode(), OTHER.target.digest.hex.encode())
    bucket.write("refs/name", data)
    assert [each.target.digest for each in store.references()] == [OTHER.target.digest]


def test_collecting_many_blobs_announces_them_together() -> None:
    bucket = MemoryBucket()
    store = ObjectStore.create(bucket)
    publish(store, "other", OTHER)
    for number in range(300):
        put(store, b"garbage %d" % number)
    plan = plan_collection(store, grace=0)
    bucket.counts.clear()
    assert len(collect(store, plan).deleted) == 300
    assert bucket.counts["delete"] == bucket.counts["head"] == 300
    assert bucket.counts["write"] == 4, "taken, announced twice, given back"


def test_a_document_of_unknown_content_stops_marking() -> None:
    data = b'{"layers":[{"mediaType":"x","digest":"blake3:00","size":1}]}'
    store = ObjectStore.create(MemoryBucket())
    publish(store, "name", Sample(descriptor(data, MANIFEST), {Digest.of(data): data}))
    with pytest.raises(UnsupportedError, match="blake3"):
        plan_collection(store, grace=0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody sleeps here: what waits for something that never comes is to fail at once."""
    monkeypatch.setattr(collector_module.secrets, "randbelow", lambda limit: 0)
    yield
