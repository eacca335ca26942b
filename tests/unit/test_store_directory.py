"""What a directory store leaves on disk, and what it does when the disk fails it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import failing, short_writes
from support.stores import DAY, DirectoryBench, all_blobs, assert_sound, image, publish, put, put_missing, unpublish

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from layerstore.store.directory import DirectoryStore
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import LocalStore


@pytest.fixture
def bench(tmp_path: Path) -> DirectoryBench:
    return DirectoryBench(str(tmp_path / "store"))


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def tree(path: str) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(directory, name), path)
        for directory, directories, files in os.walk(path)
        for name in (*directories, *files)
    )


# Making and opening


def test_the_layout(bench: DirectoryBench) -> None:
    sample = image(b"layer")
    publish(bench.store, "a/b", sample)
    long = Digest("sha512", hashlib.sha512(b"x").hexdigest())
    with bench.store.upload("sha512") as upload:
        upload.write(b"x")
        upload.commit(long, 1)
    with bench.store.lease() as lease, bench.store.scratch() as scratch:
        base = os.path.dirname(scratch)
        assert tree(bench.store.root) == sorted(
            [
                "blobs",
                "blobs/sha256",
                *(f"blobs/sha256/{digest.hex}" for digest in sample.blobs),
                "blobs/sha512",
                f"blobs/sha512/{long.hex}",
                "clock",
                "leases",
                f"leases/{lease.identifier}",
                "lock",
                "quarantine",
                "refs",
                "refs.lock",
                "refs/a%2Fb",
                "store.json",
                "tmp",
                *(os.path.relpath(os.path.join(base, name), bench.store.root) for name in ("", "lock", "work")),
            ]
        )
    assert bench.leftovers() == []


def test_blobs_are_files_whose_paths_can_be_had(bench: DirectoryBench) -> None:
    store = bench.store
    assert isinstance(store, LocalStore)
    assert not isinstance(MemoryStore(), LocalStore)
    digest = put(store, b"blob")
    assert Path(store.local_path(digest)).read_bytes() == b"blob"
    absent = Path(store.local_path(Digest.of(b"absent")))
    assert absent.is_absolute()
    assert not absent.exists()


@pytest.mark.case("Z11")
def test_modes_do_not_depend_on_the_umask(umask: None, tmp_path: Path) -> None:
    store = DirectoryStore.create(str(tmp_path / "store"))
    publish(store, "name", image(b"layer"))
    with store.upload("sha512"):
        pass
    paths = [store.root, *(os.path.join(store.root, name) for name in tree(store.root))]
    modes = {(stat.S_ISDIR(mode), stat.S_IMODE(mode)) for mode in (os.stat(path).st_mode for path in paths)}
    assert modes == {(True, 0o755), (False, 0o644)}


def test_creating_twice_opens(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "er" / "store")
    publish(DirectoryStore.create(path), "name", image(b"layer"))
    marker = Path(path, "store.json").read_bytes()
    assert list(DirectoryStore.create(path).names()) == ["name"]
    assert list(DirectoryStore(path).names()) == ["name"]
    assert Path(path, "store.json").read_bytes() == marker


def test_a_half_made_store_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "store"
    (path / "blobs").mkdir(parents=True)
    (path / "lock").touch()
    (path / ".tmp-1-x").touch()
    (path / "lost+found").mkdir()
    store = DirectoryStore.create(str(path))
    publish(store, "name", image(b"layer"))
    assert assert_sound(store)


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = DirectoryStore.create("store")
    monkeypatch.chdir("/")
    digest = put(store, b"blob")
    assert store.root == store.location == str(tmp_path / "store")
    assert store.stat(digest) == 4


def test_messages_are_one_line_whatever_the_path(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/a\nb\xff"
    store = DirectoryStore.create(os.fsdecode(path))
    publish(store, "name", image(b"layer"))
    assert store.location.endswith("/a\\x0ab\\xff")
    os.unlink(os.path.join(store.root, "lock"))
    for attempt in (lambda: store.resolve("x"), lambda: unpublish(store, "name")):
        with pytest.raises(ImgtoolError) as caught:
            attempt()
        assert str(caught.value).isprintable()


@pytest.mark.case("G06")
@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"")])
def test_a_path_that_is_no_store_is_not_found(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "store")
    with pytest.raises(NotFoundError, match=r"is not a store.*create"):
        DirectoryStore(str(tmp_path / "store"))


def test_a_store_is_not_made_among_other_things(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConflictError, match=r"thesis\.tex"):
        DirectoryStore.create(str(tmp_path))
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(ImgtoolError, match="thesis"):
        DirectoryStore.create(str(tmp_path / "thesis.tex"))


@pytest.mark.case("G06")
def test_a_store_without_its_marker_is_not_made_anew(bench: DirectoryBench) -> None:
    put(bench.store, b"blob")
    os.unlink(bench.path("store.json"))
    with pytest.raises(ConflictError, match="damaged"):
        DirectoryStore.create(bench.store.root)
    with pytest.raises(NotFoundError, match="not a store"):
        DirectoryStore(bench.store.root)


@pytest.mark.case("C08")
def test_a_store_of_another_version_or_with_unknown_features_is_refused(bench: DirectoryBench) -> None:
    marker = Path(bench.path("store.json"))
    document = json.loads(marker.read_bytes())
    for change, words in (({"version": 2}, "version 2"), ({"incompatible": ["sharded-blobs"]}, "sharded-blobs")):
        marker.write_text(json.dumps({**document, **change}))
        for attempt in (DirectoryStore, DirectoryStore.create):
            with pytest.raises(UnsupportedError, match=words):
                attempt(bench.store.root)
    marker.write_text("{}")
    with pytest.raises(CorruptError, match=r"store\.json"):
        DirectoryStore(bench.store.root)


# References on disk


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"\0" * 4096, b"x" * (2 << 20)])
def test_a_damaged_reference_is_named_and_never_skipped(bench: DirectoryBench, data: bytes) -> None:
    publish(bench.store, "good", image(b"1"))
    publish(bench.store, "worse", image(b"2"))
    Path(bench.path("refs", "worse")).write_bytes(data)
    with pytest.raises(CorruptError, match="worse"):
        bench.store.resolve("worse")
    with pytest.raises(CorruptError, match="worse"):
        list(bench.store.references())
    with pytest.raises(CorruptError, match="worse"):
        publish(bench.store, "worse", image(b"3"))
    assert list(bench.store.names()) == ["good", "worse"]


def test_a_renamed_reference_is_noticed(bench: DirectoryBench) -> None:
    publish(bench.store, "name", image(b"1"))
    os.rename(bench.path("refs", "name"), bench.path("refs", "other"))
    with pytest.raises(CorruptError, match="says that it is 'name'"):
        bench.store.resolve("other")


@pytest.mark.case("C08")
def test_a_reference_of_another_version_is_refused(bench: DirectoryBench) -> None:
    publish(bench.store, "name", image(b"1"))
    path = Path(bench.path("refs", "name"))
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "version": 3}))
    with pytest.raises(UnsupportedError, match="version 3"):
        bench.store.resolve("name")


def test_foreign_files_stop_listings_and_hidden_ones_do_not(bench: DirectoryBench) -> None:
    publish(bench.store, "name", image(b"1"))
    Path(bench.path("refs", ".nfs0001")).touch()
    assert list(bench.store.names()) == ["name"]
    Path(bench.path("refs", "name~")).touch()
    with pytest.raises(CorruptError, match="name~"):
        list(bench.store.names())


def test_foreign_files_among_blobs_are_no_blobs(bench: DirectoryBench) -> None:
    digest = put(bench.store, b"blob")
    for name in ("README", digest.hex[:-1], digest.hex.upper(), ".nfs01"):
        Path(bench.path("blobs", "sha256", name)).touch()
    os.mkdir(bench.path("blobs", "blake3"))
    Path(bench.path("blobs", "blake3", "0" * 64)).touch()
    Path(bench.path("blobs", "notes")).touch()
    before = tree(bench.store.root)
    assert all_blobs(bench.store) == {digest}
    bench.clock.advance(DAY)
    assert bench.store.reclaim(older_than=0) == 0
    assert tree(bench.store.root) == before


@pytest.mark.case("G06")
def test_a_store_that_went_away_is_unavailable_not_empty(bench: DirectoryBench) -> None:
    sample = image(b"layer")
    publish(bench.store, "name", sample)
    os.rename(bench.store.root, bench.store.root + ".elsewhere")
    os.mkdir(bench.store.root)
    for attempt in (
        lambda: bench.store.resolve("name"),
        lambda: bench.store.stat(sample.target.digest),
        lambda: bench.store.open(sample.target.digest),
    ):
        with pytest.raises(UnavailableError, match="mounted"):
            attempt()
    for listing in (bench.store.names, bench.store.references):
        with pytest.raises(CorruptError, match="mounted"):
            list(listing())
    for writing in (
        bench.store.pinned,
        bench.store.lease,
        lambda: put(bench.store, b"blob"),
        lambda: list(bench.store.blobs()),
        lambda: bench.store.reclaim(older_than=0),
        lambda: bench.store.scratch().__enter__(),
    ):
        with pytest.raises((CorruptError, UnavailableError), match=r"mounted|missing"):
            writing()
    assert os.listdir(bench.store.root) == []


def test_an_unfinished_blob_that_somebody_removed_is_a_failure(bench: DirectoryBench) -> None:
    """By a collector on a host that shares no locks."""
    with bench.store.upload() as upload, pytest.raises(UnavailableError, match="write blob"):
        upload.write(b"blob")
        os.unlink(bench.leftovers()[0])
        upload.commit(Digest.of(b"blob"), 4)
    assert not all_blobs(bench.store)


def test_the_present_is_read_from_a_store_that_cannot_be_written(bench: DirectoryBench, tmp_path: Path) -> None:
    sample = image(b"layer")
    publish(bench.store, "name", sample)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("store.json", "blobs", "refs"):  # nothing that is needed for writing
        source = bench.path(name)
        shutil.copytree(source, copy / name) if os.path.isdir(source) else shutil.copy(source, copy / name)
    store = DirectoryStore(str(copy))
    assert assert_sound(store) == sample.blobs.keys()
    with pytest.raises(CorruptError, match="lock"):
        unpublish(store, "name")


# Failing disks


@pytest.mark.case("C06")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("call", "after"), [("write", 0), ("write", 1), ("fsync", 0), ("close", 0)])
def test_no_space_leaves_nothing_of_a_blob(bench: DirectoryBench, call: str, after: int, code: int) -> None:
    publish(bench.store, "before", image(b"before"))
    before = tree(bench.store.root)
    data = b"piece" * 1000
    digest = Digest.of(data * 2)
    with (
        failing(call, code, after=after),
        pytest.raises(NoSpaceError, match="free space"),
        bench.store.upload() as upload,
    ):
        upload.write(data)
        upload.write(data)
        upload.commit(digest, 2 * len(data))
    assert tree(bench.store.root) == before
    put(bench.store, data * 2)
    assert_sound(bench.store)


@pytest.mark.case("C06")
@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_no_space_for_a_reference_keeps_the_old_one(bench: DirectoryBench, call: str) -> None:
    old, new = image(b"old"), image(b"new")
    publish(bench.store, "name", old)
    put_missing(bench.store, new)
    with bench.store.lease() as lease:
        lease.pin(new.blobs)
        before = tree(bench.store.root)
        with failing(call, errno.ENOSPC), pytest.raises(NoSpaceError):
            bench.store.set_reference("name", new.target, expected=old.target, lease=lease, reaches=new.blobs)
        with failing(call, errno.ENOSPC), pytest.raises(NoSpaceError):
            bench.store.set_reference("other", new.target, expected=None, lease=lease, reaches=new.blobs)
        assert tree(bench.store.root) == before
        assert bench.store.resolve("name") == old.target
        bench.store.set_reference("name", new.target, expected=old.target, lease=lease, reaches=new.blobs)
    assert bench.store.resolve("name") == new.target


@pytest.mark.case("C06")
@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_no_space_for_a_lease_keeps_what_it_pinned(bench: DirectoryBench, call: str) -> None:
    first, second = Digest.of(b"1"), Digest.of(b"2")
    with bench.store.lease() as lease:
        lease.pin([first])
        with failing(call, errno.EDQUOT), pytest.raises(NoSpaceError):
            lease.pin([second])
        assert bench.store.pinned() == {first}
        with failing(call, errno.EDQUOT), pytest.raises(NoSpaceError):
            bench.store.lease()
        lease.pin([second])
        assert bench.store.pinned() == {first, second}
    assert bench.leftovers() == []


@pytest.mark.case("C06")
def test_an_error_of_the_disk_is_not_a_missing_blob(bench: DirectoryBench) -> None:
    with failing("fsync", errno.EIO), pytest.raises(UnavailableError, match=r"Input/output"):
        put(bench.store, b"blob")
    assert not all_blobs(bench.store)
    assert bench.leftovers() == []


@pytest.mark.case("C06")
@pytest.mark.parametrize("limit", [1, 7, 4096])
def test_short_writes_are_finished(bench: DirectoryBench, limit: int) -> None:
    sample = image(os.urandom(10_000))
    with short_writes(limit):
        publish(bench.store, "name", sample)
    assert assert_sound(bench.store) == sample.blobs.keys()


def test_a_file_system_that_takes_nothing_does_not_loop(bench: DirectoryBench) -> None:
    with short_writes(0), pytest.raises(UnavailableError, match="no bytes"):
        put(bench.store, b"blob")
    assert bench.leftovers() == []


@pytest.mark.case("C05")
def test_a_blob_cut_off_while_open_is_corrupt(bench: DirectoryBench) -> None:
    digest = put(bench.store, b"payload")
    with bench.store.open(digest) as blob:
        os.truncate(bench.path("blobs", "sha256", digest.hex), 3)
        with pytest.raises(CorruptError, match=digest.hex):
            blob.read_at(0, 7)


# What dead writers leave


@pytest.mark.case("C12", "C03")
def test_everything_unfinished_lies_inside_the_store(
    bench: DirectoryBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with bench.store.upload() as upload, bench.store.scratch() as scratch:
        upload.write(b"x")
        assert os.stat(scratch).st_dev == os.stat(bench.store.root).st_dev
        assert len(bench.leftovers()) == 2
        assert os.path.dirname(bench.leftovers()[0]) == bench.path("blobs", "sha256")
        assert os.path.dirname(bench.leftovers()[1]) == bench.path("tmp")
        assert all(f"-{os.getpid()}-" in name.replace(".tmp", "") for name in bench.leftovers())
    assert bench.leftovers() == []


def test_what_is_alive_is_not_reclaimed_whatever_its_age(bench: DirectoryBench) -> None:
    data = b"x" * 10_000
    with bench.store.upload() as upload, bench.store.scratch() as scratch:
        upload.write(data)
        Path(scratch, "file").write_bytes(data)
        bench.clock.advance(30 * DAY)
        assert bench.store.reclaim(older_than=0) == 0
        assert bench.store.reclaim(older_than=DAY) == 0
        assert Path(scratch, "file").read_bytes() == data
        upload.commit(Digest.of(data), len(data))
    assert all_blobs(bench.store) == {Digest.of(data)}


def test_what_is_dead_is_reclaimed_when_it_is_old(bench: DirectoryBench) -> None:
    names = [
        bench.path(".tmp-1-a"),
        bench.path("refs", ".tmp-1-b"),
        bench.path("leases", ".tmp-1-c"),
        bench.path("blobs", "sha256", ".tmp-1-d"),
    ]
    for name in names:
        Path(name).write_bytes(b"x" * 4096)
    scratch = Path(bench.path("tmp", ".tmp-1-e"))
    (scratch / "work" / "deep").mkdir(parents=True)
    (scratch / "lock").touch()
    (scratch / "work" / "deep" / "file").write_bytes(b"x" * 4096)
    Path(bench.path("tmp", ".tmp-1-f")).mkdir()  # its maker died before the lock was made
    bench.clock.advance(DAY)
    assert bench.store.reclaim(older_than=2 * DAY) == 0
    assert len(bench.leftovers()) == 6
    would = bench.store.reclaim(older_than=DAY / 2, dry_run=True)
    assert len(bench.leftovers()) == 6
    assert bench.store.reclaim(older_than=DAY / 2) == would >= 5 * 4096
    assert bench.leftovers() == []
    assert bench.store.reclaim(older_than=0) == 0


def test_a_scratch_directory_in_use_on_another_host_is_young(bench: DirectoryBench) -> None:
    base = Path(bench.path("tmp", ".tmp-1-e"))
    (base / "work").mkdir(parents=True)
    (base / "lock").touch()
    for path in (base / "lock", base / "work", base):
        os.utime(path, (0, 0))
    (base / "work" / "growing").touch()
    bench.clock.advance(60)
    assert bench.store.reclaim(older_than=DAY) == 0
    assert (base / "work" / "growing").exists()


@pytest.mark.case("G05")
def test_an_mtime_in_the_past_makes_no_blob_old(bench: DirectoryBench) -> None:
    digest = put(bench.store, b"blob")
    os.utime(bench.path("blobs", "sha256", digest.hex), (0, 0))
    (blob,) = bench.store.blobs()
    assert blob.age < DAY
    with bench.store.collecting():
        assert not bench.store.delete(digest, older_than=DAY)


@pytest.mark.case("G05")
def test_an_mtime_in_the_future_makes_no_age_negative(bench: DirectoryBench) -> None:
    digest = put(bench.store, b"blob")
    os.utime(bench.path("blobs", "sha256", digest.hex), (1 << 33, 1 << 33))
    (blob,) = bench.store.blobs()
    assert blob.age == 0


@pytest.mark.case("C05")
def test_quarantine_keeps_the_bytes(bench: DirectoryBench) -> None:
    digest = put(bench.store, b"payload")
    bench.damage(digest, b"damaged")
    place = bench.store.quarantine(digest)
    assert os.path.dirname(place) == bench.path("quarantine")
    assert Path(place).read_bytes() == b"damaged"
    bench.clock.advance(DAY)
    bench.store.reclaim(older_than=0)
    assert Path(place).exists()


def test_quarantine_spares_a_blob_that_was_replaced_meanwhile(bench: DirectoryBench) -> None:
    digest = put(bench.store, b"payload")
    bench.damage(digest, b"damaged")
    real = bench.store.open

    def replaced(each: Digest) -> object:
        blob = real(each)
        put(bench.store, b"payload")
        return blob

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.store, "open", replaced)
        with pytest.raises(ConflictError, match="replaced"):
            bench.store.quarantine(digest)
    assert bench.store.stat(digest) == 7
    assert os.listdir(bench.path("quarantine")) == []


def test_a_thousand_references_are_listed(bench: DirectoryBench) -> None:
    publish(bench.store, "name", image(b"1"))
    document = json.loads(Path(bench.path("refs", "name")).read_bytes())
    for number in range(1000):
        name = f"n{number}"
        with open(bench.path("refs", name), "w") as file:
            json.dump({**document, "name": name}, file)
    assert sum(1 for _ in bench.store.references()) == 1001
