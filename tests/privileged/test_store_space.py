"""A store on a real file system that is full."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores import DirectoryBench, all_blobs, assert_sound, image, publish, put, put_missing, unpublish

from layerstore.digest import Digest
from layerstore.errors import NoSpaceError, PermissionError_
from layerstore.store.collect import collect, plan_collection
from layerstore.store.copying import copy
from layerstore.store.directory import DirectoryStore
from layerstore.store.memory import MemoryStore
from layerstore.store.verification import verify

pytestmark = pytest.mark.privileged

MIB = 1 << 20
SIZE = 20 * MIB
_LIBC = ctypes.CDLL(None, use_errno=True)
MNT_DETACH, MS_RDONLY, MS_REMOUNT = 2, 1, 32  # linux/mount.h


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """The mount point of a tmpfs of 20 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    if _LIBC.mount(b"tmpfs", bytes(point), b"tmpfs", 0, b"size=%d" % SIZE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(point))
    try:
        yield str(point)
    finally:
        _LIBC.umount2(bytes(point), MNT_DETACH)


@pytest.fixture
def bench(small: str) -> DirectoryBench:
    return DirectoryBench(small)


def fill(bench: DirectoryBench) -> str:
    """Take every byte that is left."""
    path = os.path.join(bench.store.root, ".filler")
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (MIB, 4096, 1):
        try:
            while os.write(file, b"\0" * size):
                pass
        except OSError:
            continue
    os.close(file)
    return path


def free(bench: DirectoryBench) -> int:
    status = os.statvfs(bench.store.root)
    return status.f_bavail * status.f_frsize


@pytest.mark.case("C06", "C12")
def test_a_blob_larger_than_the_disk_leaves_nothing(bench: DirectoryBench) -> None:
    before = image(b"before" * 1000)
    publish(bench.store, "before", before)
    left = free(bench)
    piece = os.urandom(MIB)
    with pytest.raises(NoSpaceError, match="free space"), bench.store.upload() as upload:
        for _ in range(50):
            upload.write(piece)
    assert bench.leftovers() == []
    assert free(bench) == left
    assert assert_sound(bench.store) == before.blobs.keys()
    put(bench.store, piece)


@pytest.mark.case("C06")
def test_publishing_on_a_full_disk_fails_whole_and_works_after_freeing(bench: DirectoryBench) -> None:
    before, sample = image(b"before"), image(os.urandom(MIB), b"small")
    publish(bench.store, "before", before)
    filler = fill(bench)
    with pytest.raises(NoSpaceError):
        publish(bench.store, "name", sample)
    assert list(bench.store.names()) == ["before"]
    assert assert_sound(bench.store) == before.blobs.keys()
    assert bench.leftovers() == []
    assert os.listdir(bench.path("leases")) == []
    os.unlink(filler)
    publish(bench.store, "name", sample)
    assert assert_sound(bench.store) == before.blobs.keys() | sample.blobs.keys()


@pytest.mark.case("C06")
def test_a_copy_to_a_full_disk_writes_no_reference(bench: DirectoryBench) -> None:
    source = MemoryStore()
    sample = image(*(os.urandom(4 * MIB) for _ in range(8)))
    publish(source, "name", sample)
    with pytest.raises(NoSpaceError):
        copy("name", source, bench.store)
    assert list(bench.store.names()) == []
    assert bench.leftovers() == []
    assert bench.store.pinned() == frozenset()


@pytest.mark.case("G07")
def test_collection_needs_no_space(bench: DirectoryBench) -> None:
    kept = image(b"kept")
    publish(bench.store, "kept", kept)
    publish(bench.store, "dropped", image(os.urandom(2 * MIB)))
    loose = put(bench.store, os.urandom(MIB))
    filler = fill(bench)
    assert free(bench) == 0
    unpublish(bench.store, "dropped")
    plan = plan_collection(bench.store, grace=0)
    assert loose in {blob.digest for blob in plan.doomed}
    assert collect(bench.store, plan).deleted == plan.doomed
    assert free(bench) >= 3 * MIB
    assert all_blobs(bench.store) == assert_sound(bench.store) == kept.blobs.keys()
    assert list(verify(bench.store)) == []
    os.unlink(filler)


@pytest.mark.case("G07")
def test_quarantine_and_reclaim_need_no_space(bench: DirectoryBench) -> None:
    publish(bench.store, "name", image(b"layer"))
    digest = Digest.of(b"layer")
    bench.damage(digest, b"LAYER")
    Path(bench.path("blobs", "sha256", ".tmp-1-x")).write_bytes(b"x" * MIB)
    fill(bench)
    assert bench.store.reclaim(older_than=0) >= MIB
    fill(bench)
    assert digest.hex in bench.store.quarantine(digest)


def test_a_store_that_cannot_be_written_is_read_verified_and_copied(small: str, bench: DirectoryBench) -> None:
    sample = image(b"layer")
    publish(bench.store, "name", sample)
    assert _LIBC.mount(b"tmpfs", small.encode(), None, MS_REMOUNT | MS_RDONLY, None) == 0
    store = DirectoryStore(small)
    assert list(verify(store)) == []
    destination = MemoryStore()
    copy("name", store, destination)
    assert assert_sound(destination) == sample.blobs.keys()
    for attempt in (lambda: put(store, b"blob"), store.lease, lambda: unpublish(store, "name")):
        with pytest.raises(PermissionError_, match="Read-only"):
            attempt()


@pytest.mark.case("C06")
def test_making_a_store_on_a_full_disk_can_be_repeated(small: str) -> None:
    filler = os.path.join(small, ".filler")
    with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="space"):
        while True:
            file.write(b"\0" * MIB)
    with open(filler, "ab", buffering=0) as file, pytest.raises(OSError, match="space"):
        while True:
            file.write(b"\0" * 4096)
    with pytest.raises(NoSpaceError):
        DirectoryStore.create(small)
    os.unlink(filler)
    store = DirectoryStore.create(small)
    sample = image(b"layer")
    put_missing(store, sample)
    publish(store, "name", sample)
    assert assert_sound(store) == sample.blobs.keys()
