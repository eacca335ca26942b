"""Buckets of fsspec: what its file systems differ in."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from support.stores import all_blobs, image, publish, put

from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
)
from layerstore.store.anywhere import FsspecBucket
from layerstore.store.bucket import ABSENT, PROBE
from layerstore.store.collect import plan_collection
from layerstore.store.objects import ObjectStore

SECRET = "pass-phrase"


class Moody(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's own, with failures. Each test has its own objects."""

    protocol = "moody"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    failing: dict[str, Exception] = {}  # noqa: RUF012
    skew: float | None = 0.0
    calls: list[str] = []  # noqa: RUF012

    def _fail(self, operation: str, path: str) -> None:
        self.calls.append(operation)
        for key, error in self.failing.items():
            called, _, where = key.partition(" ")
            if called == operation and where in path:
                raise error

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._fail("ls", path)
        return [self._dated(info) for info in super().ls(path, detail=True)]

    def info(self, path: str, **kwargs: Any) -> Any:
        self._fail("info", path)
        return self._dated(super().info(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._fail("cat", path)
        data: bytes = super().cat_file(path, start, end)
        return data[:-1] if "short" in path else data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._fail("pipe", path)
        super().pipe_file(path, value)

    def _dated(self, info: dict[str, Any]) -> dict[str, Any]:
        created = info.pop("created", None)
        if created is not None and self.skew is not None:
            if isinstance(created, float):  # as its listings have it
                created = datetime.fromtimestamp(created, UTC)
            info["mtime"] = (created + timedelta(seconds=self.skew)).isoformat().replace("+00:00", "Z")
        return info


@pytest.fixture
def moody() -> Iterator[type[Moody]]:
    fsspec.register_implementation("moody", Moody, clobber=True)
    for mutable in (Moody.store, Moody.failing, Moody.calls):
        mutable.clear()
    Moody.pseudo_dirs[:] = [""]
    Moody.skew = 0.0
    yield Moody


def test_nothing_is_said_of_credentials(tmp_path: Path) -> None:
    bucket = FsspecBucket(f"memory://user:{SECRET}@host{tmp_path}?token={SECRET}")
    assert SECRET not in bucket.location
    with pytest.raises(NotFoundError) as caught:
        bucket.head("x")
    assert SECRET not in str(caught.value)
    with pytest.raises(UnsupportedError) as unsupported:
        FsspecBucket(f"nobodys://{SECRET}@host/")
    assert SECRET not in str(unsupported.value)


@pytest.mark.case("S13")
def test_every_bucket_has_a_file_system_of_its_own(tmp_path: Path) -> None:
    one, two = FsspecBucket(f"file://{tmp_path}"), FsspecBucket(f"file://{tmp_path}")
    assert one._system is not two._system


@pytest.mark.case("S07")
def test_what_another_process_wrote_is_seen_at_once(tmp_path: Path) -> None:
    one, two = FsspecBucket(f"file://{tmp_path}/a"), FsspecBucket(f"file://{tmp_path}/a")
    assert list(one.entries("refs/")) == []
    two.write("refs/x", b"short")
    assert [entry.size for entry in one.entries("refs/")] == [5]
    two.write("refs/x", b"and longer")
    assert one.head("refs/x").size == 10
    assert one.read("refs/x", 0, 100).data == b"and longer"


@pytest.mark.case("G04", "S10")
@pytest.mark.parametrize(
    "error", [PermissionError(13, "denied"), OSError(5, "I/O"), RuntimeError("429"), TimeoutError()]
)
def test_a_listing_that_fails_anywhere_fails(moody: type[Moody], error: Exception) -> None:
    """``find`` of fsspec leaves out what it can't read, and says nothing."""
    store = ObjectStore.create(FsspecBucket("moody://here"))
    publish(store, "name", image(b"layer"))
    for where in ("refs", "leases", "blobs", "blobs/sha256"):
        moody.failing[f"ls /here/{where}"] = error
        with pytest.raises((UnavailableError, PermissionError_)):
            plan_collection(store, grace=0, force=True)
        moody.failing.clear()


def test_a_directory_that_vanishes_while_it_is_listed_is_no_end(moody: type[Moody]) -> None:
    store = ObjectStore.create(FsspecBucket("moody://here"))
    put(store, b"blob")
    moody.failing["ls /here/blobs/sha256"] = FileNotFoundError()
    with pytest.raises(UnavailableError, match="has gone while it was listed"):
        all_blobs(store)


@pytest.mark.case("G05")
@pytest.mark.parametrize("skew", [-7200.0, 0.0, 7200.0])
def test_ages_are_by_the_clock_of_the_service(moody: type[Moody], skew: float) -> None:
    moody.skew = skew
    bucket = FsspecBucket("moody://here")
    store = ObjectStore.create(bucket)
    put(store, b"blob")
    assert abs(bucket.now() / 1e9 - time.time() - skew) < 30
    [blob] = store.blobs()
    assert 0 <= blob.age < 30
    assert [entry.key for entry in bucket.entries(PROBE)] == [PROBE + "clock"]
    store.reclaim(older_than=0)


@pytest.mark.case("G05")
def test_without_dates_nothing_is_old(moody: type[Moody]) -> None:
    moody.skew = None
    store = ObjectStore.create(FsspecBucket("moody://here"))
    put(store, b"blob")
    assert [blob.age < 30 for blob in store.blobs()] == [True]


def test_who_may_not_write_has_this_machines_clock(moody: type[Moody]) -> None:
    ObjectStore.create(FsspecBucket("moody://here"))
    moody.failing["pipe /"] = PermissionError(13, "denied")
    bucket = FsspecBucket("moody://here")
    assert abs(bucket.now() / 1e9 - time.time()) < 30


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("2026-01-02T03:04:05Z", 1_767_323_045),
        ("2026-01-02T03:04:05+00:00", 1_767_323_045),
        (datetime(2026, 1, 2, 3, 4, 5), 1_767_323_045),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), 1_767_323_045),
        (1_767_323_045.0, 1_767_323_045),
        ("yesterday", None),
        (None, None),
    ],
)
def test_dates_as_they_come(moody: type[Moody], said: object, seconds: int | None) -> None:
    entry = FsspecBucket("moody://here")._entry("x", {"size": 1, "mtime": said})
    if seconds is None:
        assert abs(entry.modified / 1e9 - time.time()) < 30
    else:
        assert entry.modified == seconds * 10**9


def test_an_open_blob_costs_one_call_a_read(moody: type[Moody]) -> None:
    store = ObjectStore.create(FsspecBucket("moody://here"))
    data = os.urandom(100_000)
    digest = put(store, data)
    blob = store.open(digest)
    moody.calls.clear()
    assert blob.read_at(50_000, 10) == data[50_000:50_010]
    assert moody.calls == ["cat"]


def test_bytes_that_do_not_come_are_corrupt(moody: type[Moody]) -> None:
    bucket = FsspecBucket("moody://here")
    bucket.write("short", b"12345")
    with pytest.raises(CorruptError, match="4 of 5 bytes at 0 came"):
        bucket.read("short", 0, 100)


def test_what_fsspec_can_not_do_is_unsupported(moody: type[Moody]) -> None:
    moody.failing["pipe /"] = NotImplementedError()
    with pytest.raises(UnsupportedError, match="fsspec can't do that there"):
        FsspecBucket("moody://here").write("x", b"1")


def test_conditions_are_looked_at(tmp_path: Path) -> None:
    bucket = FsspecBucket(f"memory:/{tmp_path}")
    etag = bucket.write("refs/x", b"1", expected=ABSENT)
    with pytest.raises(ConflictError):
        bucket.write("refs/x", b"2", expected=ABSENT)
    with pytest.raises(ConflictError):
        bucket.delete("refs/x", expected="other")
    assert bucket.delete("refs/x", expected=etag)
    assert bucket.delete("refs/x", expected=etag)
    with pytest.raises(ConflictError):
        bucket.write("refs/x", b"2", expected=etag)


def test_on_file_systems_nothing_is_seen_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = FsspecBucket(f"file://{tmp_path}/b")
    bucket.write("refs/x", b"before")
    monkeypatch.setattr(LocalFileSystem, "mv", _broken)
    with pytest.raises(ImgtoolError):
        bucket.write("refs/x", b"after")
    assert bucket.read("refs/x", 0, 100).data == b"before"
    assert os.listdir(tmp_path / "b/refs") == ["x"], "what failed cleans up"
    (tmp_path / "b/refs/y.staged-0123").write_bytes(b"killed")
    assert [entry.key for entry in bucket.entries("refs/")] == ["refs/x"]
    assert bucket.abort_uploads(before=0, keep=(), dry_run=False) == 0
    assert bucket.abort_uploads(before=1 << 62, keep={"refs/y"}, dry_run=False) == 0
    assert bucket.abort_uploads(before=1 << 62, keep=(), dry_run=False) == 6
    assert os.listdir(tmp_path / "b/refs") == ["x"]


def _broken(*arguments: object, **named: object) -> None:
    raise OSError(5, "Input/output error")
