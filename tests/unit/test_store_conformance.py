"""What every store does. A new store is a bench in ``support/stores.py`` and a line in ``BENCHES``."""

from __future__ import annotations

import hashlib
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.buckets import BucketBench, MemoryBucket
from support.faults import fsync_for_free
from support.httpstore import HttpBench
from support.mirrors import WRAPPERS, WrappedBench
from support.registries import DockerBench, DockerRegistry, FakeRegistry, RegistryBench
from support.servers import S3Server
from support.sharedfs import shared
from support.stores import (
    DAY,
    Bench,
    DirectoryBench,
    MemoryBench,
    Sample,
    all_blobs,
    assert_sound,
    image,
    publish,
    put,
    put_missing,
    unpublish,
)
from support.tools import need_root

from layerstore.digest import Digest
from layerstore.errors import ConflictError, CorruptError, NotFoundError, UnavailableError, UsageError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.anywhere import FsspecBucket
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import ALGORITHMS, Lease, PruneStore, WriteStore
from layerstore.store.reading import CHUNK, read_blob, stream_blob

MakeBench = Callable[[float], Bench]
BENCHES: dict[str, Callable[[Path, float], Bench]] = {
    "memory": lambda _, seconds: MemoryBench(seconds),
    "directory": lambda path, seconds: DirectoryBench(str(path / "store"), seconds),
    "http": lambda path, seconds: HttpBench(str(path / "store"), seconds),
    "bucket": lambda _, seconds: BucketBench(MemoryBucket(), seconds),
    "fsspec memory": lambda path, seconds: BucketBench(FsspecBucket(f"memory:/{path}"), seconds),
    "fsspec file": lambda path, seconds: BucketBench(FsspecBucket(f"file://{path}/bucket"), seconds),
    "registry": lambda _, seconds: RegistryBench(FakeRegistry()),
    "docker registry": lambda path, seconds: DockerBench(DockerRegistry(path / "registry")),
    **{name: lambda _, seconds, name=name: WrappedBench(name, seconds) for name in WRAPPERS},  # type: ignore[misc]
}
SERVERS = ("moto", "seaweedfs")
"""Fixtures of the session: servers whose buckets are benches, too."""
SHARED = "directory on FUSE"
"""A directory store on a file system of FUSE, as nodes of 3FS have it."""
EXEMPT = {"registry": RegistryBench.EXEMPT, "docker registry": DockerBench.EXEMPT}
"""Tests of what a store is not: a ``WriteStore`` on its bench has no collector, for one."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "make" in metafunc.fixturenames:
        benches = [*sorted(BENCHES), *SERVERS, SHARED]
        chosen = [name for name in benches if metafunc.function.__name__ not in EXEMPT.get(name, ())]
        metafunc.parametrize("make", chosen, indirect=True)


def test_only_tests_that_there_are_exempt() -> None:
    assert all(name in globals() for names in EXEMPT.values() for name in names)


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeBench]:
    with ExitStack() as stack:

        def make(seconds: float) -> Bench:
            if request.param in SERVERS:
                server: S3Server = request.getfixturevalue(request.param)
                return stack.enter_context(closing(BucketBench(server.open(), seconds)))
            if request.param == SHARED:
                need_root()
                place = stack.enter_context(shared("fuse", tmp_path)).path
                return stack.enter_context(closing(DirectoryBench(str(place / "store"), seconds)))
            return stack.enter_context(closing(BENCHES[request.param](tmp_path, seconds)))

        yield make


@pytest.fixture
def bench(make: MakeBench) -> Bench:
    return make(60.0)


@pytest.fixture
def store(bench: Bench) -> PruneStore:
    return bench.store


def test_it_has_all_capabilities(store: PruneStore) -> None:
    assert isinstance(store, PruneStore)
    assert isinstance(store, WriteStore)
    assert store.location


# Blobs


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK + 1])
def test_a_blob_reads_as_it_was_written(store: PruneStore, size: int) -> None:
    data = os.urandom(size)
    digest = Digest.of(data)
    with store.upload() as upload:
        for start in range(0, size, 100_000):
            upload.write(data[start : start + 100_000])
        upload.commit(digest, size)
    assert store.stat(digest) == size
    with store.open(digest) as blob:
        assert blob.size == size
        assert blob.read_at(0, size) == data
        assert blob.read_at(size // 2, size - size // 2) == data[size // 2 :]
        assert blob.read_at(size, 0) == b""
    assert b"".join(stream_blob(store, digest, size)) == data


@pytest.mark.case("M11")
def test_sha512_is_another_name_space(store: PruneStore) -> None:
    data = b"both ways"
    long = Digest("sha512", hashlib.sha512(data).hexdigest())
    short = put(store, data)
    with store.upload("sha512") as upload:
        upload.write(data)
        upload.commit(long, len(data))
    assert all_blobs(store) == {short, long}
    assert b"".join(stream_blob(store, long)) == data
    with store.collecting():
        assert store.delete(short)
    assert store.stat(long) == len(data)


def test_uploads_take_the_algorithms_that_digests_have(store: PruneStore) -> None:
    for algorithm in ALGORITHMS:
        assert Digest.parse(f"{algorithm}:{hashlib.new(algorithm).hexdigest()}").algorithm == algorithm
    for name in ("md5", "blake3", "../sha256", ""):
        with pytest.raises(UsageError, match="sha256 or sha512"):
            store.upload(name)


def test_an_upload_of_one_algorithm_is_not_committed_under_another(store: PruneStore) -> None:
    digest = Digest("sha512", hashlib.sha512(b"x").hexdigest())
    with store.upload() as upload, pytest.raises(UsageError, match="sha256"):
        upload.write(b"x")
        upload.commit(digest, 1)
    assert not all_blobs(store)


def test_uploads_take_any_buffer(store: PruneStore) -> None:
    words = array("I", range(1000))
    data = bytearray(b"ab") + words.tobytes() + b"cd"
    with store.upload() as upload:
        upload.write(bytearray(b"ab"))
        upload.write(words)
        upload.write(memoryview(b"-cd-")[1:3])
        upload.write(b"")
        upload.commit(Digest.of(data), len(data))
    assert read_blob(store, Descriptor("x", Digest.of(data), len(data)), limit=10_000) == data


def test_what_is_not_there_is_not_found(store: PruneStore) -> None:
    for digest in (Digest.of(b"nowhere"), Digest("sha512", "0" * 128)):
        with pytest.raises(NotFoundError, match=digest.hex):
            store.stat(digest)
        with pytest.raises(NotFoundError, match=digest.hex):
            store.open(digest)
    with pytest.raises(NotFoundError, match="nowhere"):
        store.resolve("nowhere")
    assert list(store.blobs()) == []
    assert list(store.references()) == []
    assert list(store.names()) == []


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (10, 1), (1 << 62, 1), (0, 1 << 62), (-1, 1), (0, -1)])
def test_reading_outside_a_blob_is_corrupt_and_allocates_nothing(store: PruneStore, offset: int, length: int) -> None:
    digest = put(store, b"ten bytes.")
    with store.open(digest) as blob, pytest.raises(CorruptError, match=digest.hex):
        blob.read_at(offset, length)


def test_an_open_blob_outlives_its_name(bench: Bench) -> None:
    store = bench.store
    digest = put(store, b"first")
    with store.open(digest) as blob:
        put(store, b"first")
        assert blob.read_at(0, 5) == b"first"
        with store.collecting():
            store.delete(digest)
        assert blob.read_at(0, 5) == b"first"


@pytest.mark.case("C11")
@pytest.mark.parametrize(
    ("written", "size"), [(b"<html>!", 7), (b"payloa", 7), (b"payloadd", 8), (b"payload", 6), (b"payload", 8)]
)
def test_bytes_that_are_not_their_digest_are_refused(store: PruneStore, written: bytes, size: int) -> None:
    digest = Digest.of(b"payload")
    with store.upload() as upload, pytest.raises(CorruptError, match=digest.hex):
        upload.write(written)
        upload.commit(digest, size)
    assert not all_blobs(store)


def test_what_is_not_committed_is_gone(store: PruneStore) -> None:
    with store.upload() as upload:
        upload.write(b"half")
    with pytest.raises(ZeroDivisionError), store.upload() as upload:
        upload.write(b"half")
        raise ZeroDivisionError
    assert not all_blobs(store)
    assert store.reclaim(older_than=0, dry_run=True) == 0


def test_committing_twice_succeeds(store: PruneStore) -> None:
    assert put(store, b"again") == put(store, b"again")
    assert len(all_blobs(store)) == 1


@pytest.mark.case("C05")
@pytest.mark.parametrize("damage", [b"damaged", b"", b"payload and more"])
def test_a_damaged_blob_is_named_and_replaced(bench: Bench, damage: bytes) -> None:
    digest = put(bench.store, b"payload")
    bench.damage(digest, damage)
    for size in (7, None):
        with pytest.raises(CorruptError, match=digest.hex):
            list(stream_blob(bench.store, digest, size))
    put(bench.store, b"payload")
    assert b"".join(stream_blob(bench.store, digest)) == b"payload"


def test_many_threads_commit_the_same_and_other_blobs(store: PruneStore) -> None:
    def work(number: int) -> None:
        for each in range(10):
            put(store, b"the same" * 1000)
            put(store, b"%d %d" % (number, each))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(all_blobs(store)) == 41
    for blob in store.blobs():
        assert len(b"".join(stream_blob(store, blob.digest))) == blob.size


# References


def test_references_are_listed_by_name(store: PruneStore) -> None:
    names = ["b", "a/b:1", "localhost:5000/x", "A", "a-b", "a.b", "a/a"]
    for number, name in enumerate(names):
        publish(store, name, image(b"%d" % number))
    assert list(store.names()) == sorted(names)
    assert [reference.name for reference in store.references()] == sorted(names)
    for number, name in enumerate(names):
        assert store.resolve(name).digest == image(b"%d" % number).target.digest


def test_a_target_keeps_annotations_and_unknown_fields(store: PruneStore) -> None:
    sample = image(b"layer")
    target = Descriptor(
        sample.target.media_type,
        sample.target.digest,
        sample.target.size,
        {"b": "ü", "a": "1"},
        {"artifactType": "x/y", "platform": {"os": "linux"}},
    )
    publish(store, "name", Sample(target, sample.blobs))
    assert store.resolve("name") == target


@pytest.mark.parametrize("name", ["", "a//b", "../a", "a/..", "/a", "a/", "a@b", "a b", "a\n", "ä", ".a", "x" * 256])
def test_bad_names_are_refused(store: PruneStore, name: str) -> None:
    sample = image(b"layer")
    publish(store, "good", sample)
    with pytest.raises(UsageError):
        store.resolve(name)
    with pytest.raises(UsageError):
        store.delete_reference(name, expected=sample.target)
    with store.lease() as lease, pytest.raises(UsageError):
        store.set_reference(name, sample.target, expected=None, lease=lease, reaches=())
    assert list(store.names()) == ["good"]


@pytest.mark.case("M06")
def test_a_second_tag_keeps_the_first_and_a_retag_replaces_only_its_own(store: PruneStore) -> None:
    first, second, third = image(b"1"), image(b"2"), image(b"3")
    publish(store, "tag1", first)
    publish(store, "tag2", second)
    publish(store, "tag1", third)
    assert [(each.name, each.target) for each in store.references()] == [
        ("tag1", third.target),
        ("tag2", second.target),
    ]


@pytest.mark.case("M06")
def test_parallel_writers_lose_no_tag(store: PruneStore) -> None:
    samples = {f"writer{number}/{each}": image(b"%d %d" % (number, each)) for number in range(4) for each in range(10)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: publish(store, *item), samples.items()))
    assert {each.name: each.target for each in store.references()} == {
        name: sample.target for name, sample in samples.items()
    }


def test_of_writers_that_expect_the_same_one_wins(store: PruneStore) -> None:
    samples = [image(b"%d" % number) for number in range(8)]
    publish(store, "name", image(b"before"))
    before = store.resolve("name")
    barrier = threading.Barrier(len(samples))

    def race(sample: Sample) -> bool:
        with store.lease() as lease:
            lease.pin(sample.blobs)
            put_missing(store, sample)
            barrier.wait()
            try:
                store.set_reference("name", sample.target, expected=before, lease=lease, reaches=sample.blobs)
            except ConflictError:
                return False
            return True

    with ThreadPoolExecutor(len(samples)) as pool:
        wins = list(pool.map(race, samples))
    assert wins.count(True) == 1
    assert store.resolve("name") == samples[wins.index(True)].target


def test_references_change_only_from_what_was_expected(store: PruneStore) -> None:
    old, new = image(b"old"), image(b"new")
    publish(store, "name", old)
    put_missing(store, new)
    with store.lease() as lease:
        with pytest.raises(ConflictError, match="name"):
            store.set_reference("name", new.target, expected=None, lease=lease, reaches=new.blobs)
        with pytest.raises(ConflictError, match="name"):
            store.set_reference("name", new.target, expected=new.target, lease=lease, reaches=new.blobs)
        with pytest.raises(ConflictError, match="other"):
            store.set_reference("other", new.target, expected=old.target, lease=lease, reaches=new.blobs)
        store.set_reference("name", new.target, expected=old.target, lease=lease, reaches=new.blobs)
    with pytest.raises(ConflictError, match="name"):
        store.delete_reference("name", expected=old.target)
    assert list(store.names()) == ["name"]
    store.delete_reference("name", expected=new.target)
    assert list(store.names()) == []
    with pytest.raises(NotFoundError, match="name"):
        store.delete_reference("name", expected=new.target)


def test_no_reference_to_a_blob_that_is_not_there(store: PruneStore) -> None:
    sample = image(b"layer", b"other")
    for absent in sample.blobs:
        for digest, data in sample.blobs.items():
            if digest != absent:
                put(store, data)
        with store.lease() as lease, pytest.raises(ConflictError, match=absent.hex):
            store.set_reference("name", sample.target, expected=None, lease=lease, reaches=sample.blobs)
        with store.collecting():
            for digest in sample.blobs:
                store.delete(digest)
    assert list(store.names()) == []


def test_no_reference_to_a_target_of_another_size(bench: Bench) -> None:
    sample = image(b"layer")
    put_missing(bench.store, sample)
    bench.damage(sample.target.digest, b"{}")
    with bench.store.lease() as lease, pytest.raises(CorruptError, match=sample.target.digest.hex):
        bench.store.set_reference("name", sample.target, expected=None, lease=lease, reaches=sample.blobs)
    assert list(bench.store.names()) == []


# Leases


def test_leases_pin_until_they_are_released(store: PruneStore) -> None:
    first, second, third = (Digest.of(data) for data in (b"1", b"2", b"3"))
    with store.lease() as one, store.lease() as two:
        assert one.identifier != two.identifier
        one.pin([first])
        one.pin([second, first])
        one.pin([])
        two.pin(each for each in (second, third))
        assert store.pinned() == {first, second, third}
        store.reclaim(older_than=0)
        assert store.pinned() == {first, second, third}
    assert store.pinned() == frozenset()


@pytest.mark.case("G05")
def test_a_lease_expires_by_the_stores_clock_and_stays_expired(bench: Bench) -> None:
    store = bench.store
    sample = image(b"layer")
    put_missing(store, sample)
    with store.lease(seconds=100) as lease:
        lease.pin(sample.blobs)
        bench.clock.advance(90)
        lease.renew()
        bench.clock.advance(90)
        assert store.pinned() == sample.blobs.keys()
        bench.clock.advance(11)
        assert store.pinned() == frozenset()
        attempts: list[Callable[[], None]] = [
            lambda: lease.pin(sample.blobs),
            lease.renew,
            lambda: store.set_reference("x", sample.target, expected=None, lease=lease, reaches=sample.blobs),
        ]
        for attempt in attempts:
            with pytest.raises(ConflictError, match="expired"):
                attempt()
    assert list(store.names()) == []


def test_a_released_lease_protects_and_permits_nothing(store: PruneStore) -> None:
    sample = image(b"layer")
    put_missing(store, sample)
    with store.lease() as lease:
        lease.pin(sample.blobs)
    with pytest.raises(ConflictError, match="expired"):
        lease.renew()
    with pytest.raises(ConflictError, match="expired"):
        store.set_reference("x", sample.target, expected=None, lease=lease, reaches=sample.blobs)


def test_leases_of_another_store_and_of_no_time_are_refused(store: PruneStore) -> None:
    sample = image(b"layer")
    put_missing(store, sample)
    with MemoryStore().lease() as lease, pytest.raises(UsageError, match="lease"):
        store.set_reference("x", sample.target, expected=None, lease=lease, reaches=sample.blobs)
    for seconds in (0, -1):
        with pytest.raises(UsageError, match="protects nothing"):
            store.lease(seconds=seconds)


def test_reclaim_forgets_leases_some_time_after_they_expired(bench: Bench) -> None:
    store = bench.store
    lease = store.lease(seconds=100)
    bench.clock.advance(50)
    store.reclaim(older_than=0)
    lease.renew()
    bench.clock.advance(150)
    store.reclaim(older_than=1000)
    store.reclaim(older_than=0, dry_run=True)
    store.reclaim(older_than=0)
    with pytest.raises(ConflictError, match="expired"):
        lease.renew()


# Pruning


def test_listing_tells_size_and_age(bench: Bench) -> None:
    first = put(bench.store, b"first")
    bench.clock.advance(DAY)
    second = put(bench.store, b"second blob")
    bench.stamp(second)
    bench.clock.advance(DAY)
    listed = list(bench.store.blobs())
    assert [blob.digest for blob in listed] == sorted([first, second])
    assert {blob.digest: blob.size for blob in listed} == {first: 5, second: 11}
    ages = {blob.digest: blob.age for blob in listed}
    assert ages[first] >= 2 * DAY
    assert DAY <= ages[second] < 2 * DAY


def test_deletion_is_idempotent_and_looks_at_the_age(bench: Bench) -> None:
    store = bench.store
    digest = put(store, b"blob")
    with store.collecting():
        assert not store.delete(digest, older_than=DAY)
    bench.clock.advance(2 * DAY)
    with store.collecting():
        assert store.delete(digest, older_than=DAY)
        assert not store.delete(digest, older_than=DAY)
        assert not store.delete(Digest.of(b"never there"))
    assert not all_blobs(store)


def test_deletion_needs_the_lock(store: PruneStore) -> None:
    digest = put(store, b"blob")
    with pytest.raises(RuntimeError, match="collecting"):
        store.delete(digest)
    with store.collecting():
        pass
    with pytest.raises(RuntimeError, match="collecting"):
        store.delete(digest)
    with store.collecting(), ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="collecting"):
        pool.submit(store.delete, digest).result()
    assert all_blobs(store) == {digest}


def test_collecting_excludes_publishers_and_collectors(make: MakeBench) -> None:
    store = make(0.0).store
    sample = image(b"layer")
    publish(store, "name", sample)

    def commit() -> None:
        put(store, b"blob")

    def set_reference(lease: Lease) -> None:
        store.set_reference("other", sample.target, expected=None, lease=lease, reaches=sample.blobs)

    def collecting() -> None:
        with store.collecting():
            pass

    with store.lease() as lease, ThreadPoolExecutor(1) as pool:
        attempts: list[Callable[[], object]] = [
            commit,
            lambda: lease.pin([Digest.of(b"x")]),
            lease.renew,
            lambda: set_reference(lease),
            lambda: unpublish(store, "name"),
            collecting,
        ]
        with store.collecting():
            for attempt in attempts:
                with pytest.raises(UnavailableError, match="locked"):
                    pool.submit(attempt).result()
        assert list(store.names()) == ["name"]
        for attempt in attempts:
            pool.submit(attempt).result()
    assert list(store.names()) == ["other"]


def test_the_lock_is_released_when_a_collector_fails(make: MakeBench) -> None:
    store = make(0.0).store
    with pytest.raises(ZeroDivisionError), store.collecting():
        raise ZeroDivisionError
    with store.collecting():
        pass
    assert put(store, b"blob") in all_blobs(store)


@pytest.mark.case("C05")
def test_quarantine_takes_only_what_is_corrupt(bench: Bench) -> None:
    store = bench.store
    digest = put(store, b"payload")
    with pytest.raises(ConflictError, match="intact"):
        store.quarantine(digest)
    bench.damage(digest, b"damaged")
    assert digest.hex in store.quarantine(digest)
    with pytest.raises(NotFoundError, match=digest.hex):
        store.stat(digest)
    with pytest.raises(NotFoundError, match=digest.hex):
        store.quarantine(digest)
    put(store, b"payload")
    assert b"".join(stream_blob(store, digest)) == b"payload"
    bench.damage(digest, b"again")
    store.quarantine(digest)
    assert not all_blobs(store)


def test_scratch_is_private_and_goes(store: PruneStore) -> None:
    with store.scratch() as one, store.scratch() as two:
        assert one != two
        assert os.listdir(one) == []
        assert os.stat(one).st_mode & 0o077 == 0
        Path(one, "file").write_bytes(b"x")
        Path(one, "directory").mkdir()
        store.reclaim(older_than=0)
        assert sorted(os.listdir(one)) == ["directory", "file"]
    assert not os.path.exists(one)
    assert not os.path.exists(two)
    with pytest.raises(ZeroDivisionError), store.scratch() as three:
        raise ZeroDivisionError
    assert not os.path.exists(three)


def test_published_images_are_sound(store: PruneStore) -> None:
    samples = [image(b"shared", b"%d" % number) for number in range(3)]
    for number, sample in enumerate(samples):
        publish(store, f"image{number}", sample)
    assert assert_sound(store) == set().union(*(sample.blobs for sample in samples))
