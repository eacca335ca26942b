"""Locks and leases between processes: who owns what is up to the kernel alone."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.children import Child
from support.faults import fsync_for_free
from support.stores import DAY, DirectoryBench, all_blobs, assert_sound, image, publish, put

from layerstore.digest import Digest
from layerstore.errors import ConflictError, CorruptError, UnavailableError, UnsupportedError
from layerstore.store.directory import DirectoryStore
from layerstore.store.format import LEASE_BYTES
from layerstore.store.locks import FileLock


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


@pytest.fixture
def bench(tmp_path: Path) -> DirectoryBench:
    return DirectoryBench(str(tmp_path / "store"))


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "lock").touch()
    return str(tmp_path / "lock")


def hold(child: Child, lock: FileLock) -> None:
    with lock.exclusive():
        child.tell()
        child.hear()


@pytest.mark.case("C07")
def test_exactly_one_of_many_takers_owns_the_lock(path: str, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")

    def take(child: Child) -> None:
        child.hear()
        for _ in range(25):
            with FileLock(path).exclusive():
                value = int(counter.read_text())
                counter.write_text(str(value + 1))

    with Child(take) as one, Child(take) as two, Child(take) as three:
        children = (one, two, three)
        for child in children:
            child.tell()
        assert [child.wait() for child in children] == [0, 0, 0]
    assert counter.read_text() == "75"


@pytest.mark.case("C07")
def test_a_killed_owner_leaves_no_stale_lock(path: str) -> None:
    with Child(lambda child: hold(child, FileLock(path))) as owner:
        owner.hear()
        with pytest.raises(UnavailableError, match="locked"), FileLock(path, seconds=0).exclusive():
            pass
        with pytest.raises(UnavailableError, match="locked"), FileLock(path, seconds=0.01).shared():
            pass
        owner.kill()
        with FileLock(path, seconds=0).exclusive():
            pass


@pytest.mark.case("C07")
def test_a_stopped_owner_still_owns(path: str) -> None:
    with Child(lambda child: hold(child, FileLock(path))) as owner:
        owner.hear()
        owner.stop()
        with pytest.raises(UnavailableError), FileLock(path, seconds=0).exclusive():
            pass
        owner.go_on()
        owner.tell()
        assert owner.wait() == 0
        with FileLock(path, seconds=0).exclusive():
            pass


@pytest.mark.case("C07")
def test_what_a_lock_file_says_decides_nothing(path: str) -> None:
    """Pids of the dead and names of other hosts, as other tools leave them; or nothing."""
    for content in ("1\n", "999999 elsewhere\n", f"{os.getpid()}\n", ""):
        Path(path).write_text(content)
        lock = FileLock(path, seconds=0)
        with lock.exclusive(), pytest.raises(UnavailableError), lock.exclusive():
            pass
        assert Path(path).read_text() == content


def test_sharers_exclude_only_the_exclusive(path: str) -> None:
    lock = FileLock(path, seconds=0)
    with lock.shared(), lock.shared(), pytest.raises(UnavailableError), lock.exclusive():
        pass
    with lock.exclusive(), pytest.raises(UnavailableError), lock.shared():
        pass


def test_a_deleted_lock_file_stops_everybody_else(path: str) -> None:
    with FileLock(path).exclusive():
        os.unlink(path)
        with pytest.raises(CorruptError, match="missing"), FileLock(path).shared():
            pass
    assert not os.path.exists(path)


def test_a_lock_file_replaced_while_waiting_is_not_the_lock(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator who removes a lock file and makes another: only the one with the name counts."""
    real = os.open
    opened: list[str] = []

    def replace_after(name: str, *args: int, **keywords: int) -> int:
        file = real(name, *args, **keywords)
        if name == path and not opened:
            os.unlink(path)
            Path(path).touch()
        opened.append(name)
        return file

    monkeypatch.setattr(os, "open", replace_after)
    with FileLock(path).exclusive():
        assert opened.count(path) == 2


def test_a_file_system_without_locks_is_unsupported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UnsupportedError, match="no locks"), FileLock(path).shared():
        pass


def test_a_child_that_inherits_a_lock_does_not_prolong_it(path: str) -> None:
    with FileLock(path).exclusive():
        bystander = Child(lambda child: child.hear())
    with bystander, FileLock(path, seconds=0).exclusive():
        bystander.tell()
        assert bystander.wait() == 0


@pytest.mark.case("C07")
def test_a_killed_collector_blocks_nobody(bench: DirectoryBench) -> None:
    def collect(child: Child) -> None:
        with bench.store.collecting():
            child.tell()
            child.hear()

    impatient = DirectoryStore(bench.store.root, lock_seconds=0)
    with Child(collect) as collector:
        collector.hear()
        with pytest.raises(UnavailableError):
            put(impatient, b"blob")
        collector.kill()
        publish(impatient, "name", image(b"layer"))


def test_eight_processes_publish_one_digest(bench: DirectoryBench) -> None:
    data = os.urandom(300_000)
    digest = Digest.of(data)

    def work(child: Child) -> None:
        with bench.store.upload() as upload:
            upload.write(data)
            child.tell()
            child.hear()
            upload.commit(digest, len(data))

    children = [Child(work) for _ in range(8)]
    try:
        for child in children:
            child.hear()
        assert not all_blobs(bench.store)
        assert len(bench.leftovers()) == 8
        for child in children:
            child.tell()
        assert [child.wait() for child in children] == [0] * 8
    finally:
        for child in children:
            child.__exit__(None, None, None)
    assert all_blobs(bench.store) == {digest}
    with bench.store.open(digest) as blob:
        assert blob.read_at(0, blob.size) == data
    assert bench.leftovers() == []


def test_eight_processes_make_one_store(tmp_path: Path) -> None:
    path = str(tmp_path / "store")

    def work(child: Child) -> None:
        child.hear()
        publish(DirectoryStore.create(path), f"name{os.getpid()}", image(b"%d" % os.getpid()))

    children = [Child(work) for _ in range(8)]
    try:
        for child in children:
            child.tell()
        assert [child.wait() for child in children] == [0] * 8
    finally:
        for child in children:
            child.__exit__(None, None, None)
    assert set(DirectoryStore(path).names()) == {f"name{child.pid}" for child in children}


@pytest.mark.case("M06")
def test_parallel_processes_lose_no_tag(bench: DirectoryBench) -> None:
    def work(child: Child) -> None:
        child.hear()
        for number in range(10):
            publish(bench.store, f"{os.getpid()}/{number}", image(b"shared", b"%d" % number))

    with Child(work) as one, Child(work) as two:
        for child in (one, two):
            child.tell()
        assert (one.wait(), two.wait()) == (0, 0)
        assert set(bench.store.names()) == {f"{each.pid}/{n}" for each in (one, two) for n in range(10)}
    assert_sound(bench.store)


# Leases on disk


@pytest.mark.case("C07")
def test_a_lease_outlives_its_holder_until_it_expires(bench: DirectoryBench) -> None:
    digest = put(bench.store, b"blob")

    def work(child: Child) -> None:
        bench.store.lease(seconds=DAY).pin([digest])
        child.tell()
        child.hear()

    with Child(work) as holder:
        holder.hear()
        holder.kill()
    assert bench.store.pinned() == {digest}
    bench.clock.advance(2 * DAY)
    assert bench.store.pinned() == frozenset()
    assert bench.store.reclaim(older_than=2 * DAY) == 0
    assert len(os.listdir(bench.path("leases"))) == 1
    assert bench.store.reclaim(older_than=0) > 0
    assert os.listdir(bench.path("leases")) == []


def test_a_lease_removed_by_hand_is_over(bench: DirectoryBench) -> None:
    sample = image(b"layer")
    with bench.store.lease() as lease:
        lease.pin(sample.blobs)
        for data in sample.blobs.values():
            put(bench.store, data)
        os.unlink(bench.path("leases", lease.identifier))
        for attempt in (
            lease.renew,
            lambda: lease.pin([]),
            lambda: bench.store.set_reference("x", sample.target, expected=None, lease=lease, reaches=sample.blobs),
        ):
            with pytest.raises(ConflictError, match="expired"):
                attempt()
    assert os.listdir(bench.path("leases")) == []


@pytest.mark.case("G05")
def test_the_clock_is_the_file_systems(bench: DirectoryBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose own clock is two hours off agrees with the others."""
    real = time.time_ns()
    monkeypatch.setattr(time, "time", lambda: real / 1e9 + 7200)
    monkeypatch.setattr(time, "time_ns", lambda: real + 7200 * 10**9)
    store = DirectoryStore(bench.store.root)
    digest = put(store, b"blob")
    with store.lease(seconds=3600) as lease:
        lease.pin([digest])
        assert store.pinned() == bench.store.pinned() == {digest}
    (blob,) = store.blobs()
    assert blob.age < 3600


@pytest.mark.case("G04")
@pytest.mark.parametrize("data", [b"", b"{}", b"{", b"x" * 100, b"\0" * 4096])
def test_a_damaged_lease_is_an_error_not_nothing(bench: DirectoryBench, data: bytes) -> None:
    lease = bench.store.lease()
    path = Path(bench.path("leases", lease.identifier))
    good = path.read_bytes()
    path.write_bytes(data)
    for attempt in (bench.store.pinned, lambda: bench.store.reclaim(older_than=0)):
        with pytest.raises(CorruptError, match=lease.identifier):
            attempt()
    path.write_bytes(good)
    os.rename(path, bench.path("leases", "other"))
    with pytest.raises(CorruptError, match="other"):
        bench.store.pinned()
    assert len(good) < LEASE_BYTES
