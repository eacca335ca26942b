"""Packs of the cache: when a frame may be read, when it is recorded, and what is believed of a record."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.caches import CacheBench, descriptors, digest_of
from support.disks import Disk
from support.faults import fsync_for_free

from layerstore.cache import packs as packs_module
from layerstore.cache.cache import HELD, Cache
from layerstore.cache.format import MAX_ORIGINS, FramesHeader, Origin
from layerstore.cache.framemap import MISSING, READY, UNVERIFIED, FrameMap
from layerstore.cache.packs import CachedPack
from layerstore.digest import Digest
from layerstore.errors import CorruptError, NoSpaceError, NotFoundError, UnavailableError
from layerstore.pack.format import BLOCK_SIZE, FRAME_SIZE, FrameIndexHeader, FrameRecord
from layerstore.pack.stored import Span, StoredPack


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[CacheBench]:
    before = descriptors()
    with fsync_for_free(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda file: None)
        yield CacheBench(tmp_path / "node")
    assert descriptors() == before


@pytest.fixture
def disk(bench: CacheBench) -> Iterator[Disk]:
    with Disk(random.Random(1)).mounted() as disk:
        yield disk


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline


# -- from missing to recorded -----------------------------------------------------------------------------------------


def test_a_new_pack_is_a_hole_of_the_packs_size(bench: CacheBench) -> None:
    pack = bench.make_pack(8)
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        assert (cached.digest, cached.hex) == (pack.digest, pack.digest.hex)
        assert cached.data_path == str(bench.place(pack) / "data")
        assert os.stat(cached.data_path).st_size == pack.raw_size
        assert os.stat(cached.data_path).st_blocks == 0
        assert cached.unready(range(8)) == list(range(8))
        assert cached.lacks([3])
        assert not cached.complete
        assert cache.pack(pack, bench.store) is cached is cache.known(pack.digest.hex)
        assert cached.origins == [Origin("memory:", pack)]
    assert bench.leftovers() == []


@pytest.mark.case("C09")
def test_a_frame_may_be_read_when_it_is_written_and_is_recorded_when_it_is_durable(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = bench.make_pack(8)
    calls: list[tuple[str, str]] = []
    real = os.pwrite

    def name(file: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{file}"))

    def pwrite(file: int, data: Any, offset: int) -> int:
        calls.append(("write", name(file)))
        return real(file, data, offset)

    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "fdatasync", lambda file: calls.append(("sync", name(file))))
        bench.fill(cached, [1, 2, 5])
        assert bench.assert_right(cached) == [1, 2, 5]
        assert bench.recorded(pack) == []
        assert calls == [("write", "data")] * 3
        calls.clear()
        cached.sync()
        assert bench.recorded(pack) == [1, 2, 5]
        assert calls == [("sync", "data"), ("write", "frames"), ("write", "frames"), ("sync", "frames")]
        calls.clear()
        cached.sync()
        assert calls == []
        assert not cached.complete
        bench.fill(cached)
        assert not cached.complete, "not all of it is recorded"
        cached.sync()
        assert cached.complete
        assert digest_of(cached) == pack.digest


def test_what_is_written_while_a_sync_runs_is_recorded_by_the_next(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = bench.make_pack(8)
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)

        def late(file: int) -> None:
            if os.readlink(f"/proc/self/fd/{file}").endswith("/data"):
                bench.fill(cached, [1])

        bench.fill(cached, [0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", late)
            cached.sync()
        assert bench.recorded(pack) == [0]
        assert bench.assert_right(cached) == [0, 1]
        cached.sync()
        assert bench.recorded(pack) == [0, 1]


def test_a_frame_that_is_there_is_not_written_again(bench: CacheBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be dirty again, and a failed sync would take it away though it is recorded."""
    pack = bench.make_pack(2)
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        bench.fill(cached)
        cached.sync()
        monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written"))
        cached.write(0, bench.frame(cached, 0))
        assert cached.complete


def test_writers_of_the_same_frame_take_turns(bench: CacheBench) -> None:
    pack = bench.make_pack(4, frame_size=64 * BLOCK_SIZE)
    with bench.open() as cache, ThreadPoolExecutor(8) as pool:
        cached = cache.pack(pack, bench.store)
        for job in [pool.submit(bench.fill, cached, [number % 4]) for number in range(64)]:
            job.result()
        for job in [pool.submit(cached.sync) for _ in range(8)]:
            job.result()
        assert cached.complete
        assert digest_of(cached) == pack.digest


def test_a_writer_waits_for_another_one_of_the_same_frame(bench: CacheBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second failed, it would give back the space of what the first has just written."""
    pack = bench.make_pack(2)
    started, go_on = threading.Event(), threading.Event()
    real = os.pwrite
    calls = []

    def slow(file: int, data: Any, offset: int) -> int:
        calls.append(offset)
        started.set()
        assert go_on.wait(30)
        return real(file, data, offset)

    with bench.open() as cache, ThreadPoolExecutor(2) as pool:
        cached = cache.pack(pack, bench.store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", slow)
            try:
                jobs = [pool.submit(bench.fill, cached, [1])]
                assert started.wait(30)
                jobs.append(pool.submit(bench.fill, cached, [1]))
                wait_until(lambda: cached._inside == 2)
            finally:
                go_on.set()
            for job in jobs:
                job.result(30)
        assert calls == [BLOCK_SIZE]
        assert bench.assert_right(cached) == [1]


class IndexBlob:
    """A blob that has a frame index and nothing else."""

    def __init__(self, size: int, index: bytes) -> None:
        self.size = size
        self._index = index

    def read_at(self, offset: int, length: int) -> bytes:
        return self._index

    def __enter__(self) -> IndexBlob:
        return self

    def __exit__(self, *exc: object) -> None: ...


def test_ten_gibibytes_of_packs_take_a_few_megabytes_of_memory(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 40_000
    records = b"".join(
        FrameRecord(n * 999, n * FRAME_SIZE, hashlib.sha256(b"%d" % n).digest()).pack() for n in range(count)
    )
    index = FrameIndexHeader(count * FRAME_SIZE, count).pack() + records
    end = count * 999
    spans = (Span(end + 8, len(index), Digest.of(index)), Span(end + 8 + len(index), 99, Digest.of(b"")))
    pack = StoredPack(Digest.of(b"raw"), count * FRAME_SIZE, Digest.of(b"blob"), end + len(index) + 999, *spans)
    monkeypatch.setattr(bench.store, "open", lambda digest: IndexBlob(pack.blob_size, index))
    with bench.open() as cache:
        tracemalloc.start()
        try:
            cached = cache.pack(pack, bench.store)
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(cached.index) == count
        shared = os.fstat(cached.frames.fd).st_size
        assert (used + shared) / count < 100


# -- failing disks ----------------------------------------------------------------------------------------------------


@pytest.mark.case("C06")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails_leaves_a_hole(bench: CacheBench, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    pack = bench.make_pack(4, frame_size=4 * BLOCK_SIZE)
    real = os.pwrite
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        bench.fill(cached, [0])

        def full(file: int, data: Any, offset: int) -> int:
            if offset >= 6 * BLOCK_SIZE:
                raise OSError(code, os.strerror(code))
            return real(file, memoryview(data)[:BLOCK_SIZE], offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(UnavailableError if code == errno.EIO else NoSpaceError, match=str(pack.digest)):
                bench.fill(cached, [1])
        assert cached.unready(range(4)) == [1, 2, 3]
        assert bench.is_hole(cached, 1)
        assert bench.assert_right(cached) == [0]
        cached.sync()
        assert bench.recorded(pack) == [0]
        bench.fill(cached)
        cached.sync()
        assert cached.complete and digest_of(cached) == pack.digest


@pytest.mark.case("C06")
def test_short_writes_are_continued(bench: CacheBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.make_pack(3, frame_size=4 * BLOCK_SIZE)
    real = os.pwrite
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, memoryview(data)[:1000], offset))
        bench.fill(cached)
        cached.sync()
        assert cached.complete and digest_of(cached) == pack.digest


@pytest.mark.case("C06")
@pytest.mark.parametrize("name", ["data", "frames"])
def test_a_file_system_that_takes_no_bytes_is_not_asked_for_ever(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pack = bench.make_pack(2)
    real = os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        return 0 if os.readlink(f"/proc/self/fd/{file}").endswith(name) else real(file, data, offset)

    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            with pytest.raises(UnavailableError, match="took no bytes"):
                bench.fill(cached)
                cached.sync()
        bench.fill(cached)
        cached.sync()
        assert cached.complete


@pytest.mark.case("C06", "C09")
@pytest.mark.parametrize(
    ("code", "error"),
    [(errno.EIO, UnavailableError), (errno.ENOSPC, NoSpaceError), (errno.EDQUOT, NoSpaceError)],
)
def test_after_a_failed_sync_nothing_counts_that_was_not_recorded(
    bench: CacheBench, disk: Disk, code: int, error: type[Exception]
) -> None:
    pack = bench.make_pack(6)
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        bench.fill(cached, [0, 1])
        cached.sync()
        bench.fill(cached, [2, 3])
        disk.fail_next_sync(code)
        with pytest.raises(error, match=f"{pack.digest} durable"):
            cached.sync()
        assert bench.assert_right(cached) == [0, 1]
        assert bench.recorded(pack) == [0, 1]
        assert bench.is_hole(cached, 2) and bench.is_hole(cached, 3)
        cached.sync()
        assert bench.recorded(pack) == [0, 1], "the kernel calls the lost pages clean"
        bench.fill(cached)
        cached.sync()
        assert cached.complete
        assert disk.durable(cached.data_path) == bench.raw[pack.digest.hex]


def test_what_a_reader_may_just_be_reading_is_not_punched(bench: CacheBench, disk: Disk) -> None:
    """A reader that was allowed before the sync failed reads the page cache, where the bytes still are."""
    pack = bench.make_pack(4)
    with bench.open() as cache:
        cache.use("sandbox", [pack.digest.hex])
        cached = cache.pack(pack, bench.store)
        bench.fill(cached, [0, 1])
        disk.fail_next_sync()
        with pytest.raises(UnavailableError):
            cached.sync()
        assert cached.unready(range(4)) == [0, 1, 2, 3]
        for number in (0, 1):
            assert bench.on_disk(cached, number) == bench.frame(cached, number)
        bench.fill(cached)
        cached.sync()
        assert cached.complete
        assert disk.durable(cached.data_path) == bench.raw[pack.digest.hex]


def test_a_write_that_a_failing_sync_overtakes_is_repeated(
    bench: CacheBench, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is told once: the sync that gets it has to speak for all bytes that were in the page cache then."""
    pack = bench.make_pack(4)
    real = os.pwrite
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        bench.fill(cached, [0])
        overtaken = []

        def pwrite(file: int, data: Any, offset: int) -> int:
            written = real(file, data, offset)
            if offset == BLOCK_SIZE and not overtaken:
                overtaken.append(1)
                disk.fail_next_sync()
                with pytest.raises(UnavailableError):
                    cached.sync()
            return written

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            bench.fill(cached, [1])
        assert overtaken
        assert bench.assert_right(cached) == [1]
        cached.sync()
        assert bench.recorded(pack) == [1]
        assert disk.durable(cached.data_path)[BLOCK_SIZE : 2 * BLOCK_SIZE] == bench.frame(cached, 1)


def test_those_who_waited_for_a_sync_hear_that_it_failed(bench: CacheBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.make_pack(4)
    with bench.open() as cache, ThreadPoolExecutor(1) as pool:
        cached = cache.pack(pack, bench.store)
        bench.fill(cached, [0, 1])
        waiting = threading.Event()
        jobs = []

        def fail(file: int) -> None:
            jobs.append(pool.submit(lambda: (waiting.set(), cached.sync())))
            assert waiting.wait(10)
            wait_until(lambda: cached._inside == 2)  # the other is in its call, behind the lock
            raise OSError(errno.EIO, "gone")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(UnavailableError, match="gone"):
                cached.sync()
            with pytest.raises(UnavailableError, match="gone"):
                jobs[0].result(10)


def test_data_that_are_durable_stay_when_only_their_record_fails(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = bench.make_pack(4)
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        bench.fill(cached)

        def fail(file: int) -> None:
            if os.readlink(f"/proc/self/fd/{file}").endswith("/frames"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(NoSpaceError, match="record frames"):
                cached.sync()
        assert bench.assert_right(cached) == [0, 1, 2, 3]
        assert not cached.complete
        cached.sync()
        assert cached.complete


# -- what is believed at the next start -------------------------------------------------------------------------------


def test_after_an_orderly_stop_everything_is_there_at_once(bench: CacheBench) -> None:
    pack = bench.make_pack(4)
    with bench.open() as cache:
        bench.fill(cache.pack(pack, bench.store), [0, 2])
    with bench.open() as cache:
        assert not cache.unclean
        cached = cache.known(pack.digest.hex)
        assert bench.assert_right(cached) == [0, 2]
        assert cached.origins == [Origin("memory:", pack)]


@pytest.mark.case("C09", "C10")
def test_after_a_crash_what_is_recorded_is_hashed_before_it_is_read(bench: CacheBench) -> None:
    pack = bench.make_pack(6)
    cache = bench.open()
    cached = cache.pack(pack, bench.store)
    bench.fill(cached, [0, 1, 2])
    cached.sync()
    bench.fill(cached, [3])
    cache.close(clean=False)
    bench.damage(pack, 1)
    with bench.open() as cache:
        assert cache.unclean
        assert cache.status().unverified_frames == 3
        cached = cache.known(pack.digest.hex)
        assert [cached.frames.state(n) for n in range(6)] == [UNVERIFIED] * 3 + [MISSING] * 3
        assert cached.unready(range(6)) == list(range(6))
        assert not cached.lacks([0, 1, 2]) and cached.lacks([0, 3])
        assert [cached.verify(n) for n in range(6)] == [True, False, True, False, False, False]
        assert bench.assert_right(cached) == [0, 2]
        assert bench.is_hole(cached, 1)
        assert cached.rejected == 1
        status = cache.status()
        assert (status.unverified_frames, status.rejected_frames) == (0, 1)
        assert [cached.verify(n) for n in range(3)] == [True, False, True], "it stays so"
    assert bench.recorded(pack) == [0, 2]
    with bench.open() as cache:
        assert not cache.unclean
        assert bench.assert_right(cache.known(pack.digest.hex)) == [0, 2]


def test_what_was_not_looked_at_is_not_trusted_by_the_next_owner_either(bench: CacheBench) -> None:
    """An orderly stop after a crash says nothing of frames that nobody has read in between."""
    seen, unseen, fresh = bench.make_pack(3, 1), bench.make_pack(3, 2), bench.make_pack(3, 3)
    cache = bench.open()
    for pack in (seen, unseen):
        bench.fill(cache.pack(pack, bench.store))
        cache.known(pack.digest.hex).sync()
    cache.close(clean=False)
    bench.damage(unseen, 0)
    with bench.open() as cache:
        cached = cache.known(seen.digest.hex)
        assert all(cached.verify(number) for number in range(3))
        bench.fill(cache.pack(fresh, bench.store))
    with bench.open() as cache:
        assert not cache.unclean
        assert cache.status().unverified_frames == 3
        for pack in (seen, fresh):
            assert cache.known(pack.digest.hex).complete
        cached = cache.known(unseen.digest.hex)
        assert cached.verify(1)
    with bench.open() as cache:
        cached = cache.known(unseen.digest.hex)
        assert cached.unverified == 3, "some were left"
        assert [cached.verify(number) for number in range(3)] == [False, True, True]
    with bench.open() as cache:
        assert bench.assert_right(cache.known(unseen.digest.hex)) == [1, 2]


def test_a_frame_is_written_over_what_was_not_verified(bench: CacheBench) -> None:
    pack = bench.make_pack(3)
    cache = bench.open()
    bench.fill(cache.pack(pack, bench.store))
    cache.known(pack.digest.hex).sync()
    cache.close(clean=False)
    bench.damage(pack, 1)
    with bench.open() as cache:
        cached = cache.known(pack.digest.hex)
        bench.fill(cached, [1])
        assert bench.assert_right(cached) == [1]
        cached.sync()
        assert all(cached.verify(number) for number in range(3))
        assert cached.complete
        assert digest_of(cached) == pack.digest


def test_a_frame_that_is_being_written_is_not_taken_away_by_who_verifies_it(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = bench.make_pack(2)
    cache = bench.open()
    bench.fill(cache.pack(pack, bench.store))
    cache.known(pack.digest.hex).sync()
    cache.close(clean=False)
    bench.damage(pack, 0)
    with bench.open() as cache:
        cached = cache.known(pack.digest.hex)
        real = os.pread

        def overtaken(file: int, length: int, offset: int) -> bytes:
            raw = real(file, length, offset)
            bench.fill(cached, [0])
            return raw

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", overtaken)
            assert cached.verify(0)
        assert bench.assert_right(cached) == [0]
        assert cached.rejected == 0


@pytest.mark.case("C10")
def test_a_frame_that_the_disk_can_not_read_is_fetched_again(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = bench.make_pack(2)
    cache = bench.open()
    bench.fill(cache.pack(pack, bench.store))
    cache.known(pack.digest.hex).sync()
    cache.close(clean=False)
    with bench.open() as cache:
        cached = cache.known(pack.digest.hex)

        def unreadable(code: int) -> Callable[..., bytes]:
            def pread(file: int, length: int, offset: int) -> bytes:
                raise OSError(code, os.strerror(code))

            return pread

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", unreadable(errno.ENOMEM))
            with pytest.raises(UnavailableError, match="read cached pack"):
                cached.verify(0)
            assert cached.frames.state(0) == UNVERIFIED, "that says nothing of the frame"
            patch.setattr(os, "pread", unreadable(errno.EIO))
            assert not cached.verify(0)
        assert cached.frames.state(0) == MISSING
        assert cached.verify(1)


@pytest.mark.case("C09")
@pytest.mark.parametrize("unclean", [False, True])
@pytest.mark.parametrize(("lost", "left"), [("all", []), ("one block", [0, 1, 3]), ("the end", [0, 1])])
def test_a_hole_is_missing_whatever_the_record_says(
    bench: CacheBench, lost: str, left: list[int], unclean: bool
) -> None:
    pack = bench.make_pack(4, frame_size=2 * BLOCK_SIZE)
    cache = bench.open()
    bench.fill(cache.pack(pack, bench.store))
    cache.known(pack.digest.hex).sync()
    cache.close(clean=not unclean)
    path = bench.place(pack) / "data"
    raw = path.read_bytes()
    path.unlink()
    with open(path, "wb") as out:
        if lost == "one block":
            out.write(raw[: 5 * BLOCK_SIZE])
            out.seek(6 * BLOCK_SIZE)
            out.write(raw[6 * BLOCK_SIZE :])
        elif lost == "the end":
            out.write(raw[: 4 * BLOCK_SIZE])
        out.truncate(len(raw))
    with bench.open() as cache:
        cached = cache.known(pack.digest.hex)
        assert [number for number in range(4) if cached.verify(number)] == left
        assert bench.assert_right(cached) == left
        cached.sync()
        assert bench.recorded(pack) == left
        bench.fill(cached)
        cached.sync()
        assert cached.complete and path.read_bytes() == raw


def test_a_presence_that_is_neither_yes_nor_no_is_no(bench: CacheBench) -> None:
    pack = bench.make_pack(4)
    with bench.open() as cache:
        bench.fill(cache.pack(pack, bench.store))
    path = bench.place(pack) / "frames"
    content = bytearray(path.read_bytes())
    content[-1], content[-2] = 0xFF, 0
    path.write_bytes(content)
    with bench.open() as cache:
        assert bench.assert_right(cache.known(pack.digest.hex)) == [0, 1]


def test_the_frames_file_has_the_documented_size(bench: CacheBench) -> None:
    pack = bench.make_pack(7)
    with bench.open() as cache:
        cache.pack(pack, bench.store)
    size = os.stat(bench.place(pack) / "frames").st_size
    assert size == FramesHeader.STRUCT.size + 7 * (FrameRecord.STRUCT.size + 1)


def test_a_pack_of_nothing_is_complete(bench: CacheBench) -> None:
    pack = bench.make_pack(0)
    with bench.open() as cache:
        assert cache.pack(pack, bench.store).complete
    with bench.open() as cache:
        assert cache.known(pack.digest.hex).complete


# -- from one process to the next -------------------------------------------------------------------------------------


def hand_over(cache: Cache, *packs: CachedPack) -> tuple[ExitStack, dict[str, tuple[int, int]]]:
    """What a holder keeps of packs when their process dies; it dies here."""
    stack = ExitStack()
    held = {}
    for pack in packs:
        held[pack.hex] = os.dup(pack.data_fd), os.dup(pack.frames.fd)
        for file in held[pack.hex]:
            stack.callback(os.close, file)
    cache.close(clean=False)
    return stack, held


@pytest.mark.case("C09")
def test_a_successor_goes_on_with_the_states_that_were_handed_over(bench: CacheBench, disk: Disk) -> None:
    pack, other = bench.make_pack(6, 1), bench.make_pack(2, 2)
    cache = bench.open()
    cached = cache.pack(pack, bench.store)
    bench.fill(cache.pack(other, bench.store))
    cache.known(other.digest.hex).sync()
    bench.fill(cached, [0, 1])
    cached.sync()
    bench.fill(cached, [2, 3])
    stack, held = hand_over(cache, cached)
    with stack, bench.open(held=held) as cache:
        assert cache.unclean
        assert cache.users(pack.digest.hex) == [HELD]
        cached = cache.known(pack.digest.hex)
        assert bench.assert_right(cached) == [0, 1, 2, 3]
        assert cache.known(other.digest.hex).unverified == 2, "nobody held this one"
        assert bench.recorded(pack) == [0, 1]
        before = FrameMap(os.dup(held[pack.digest.hex][1]))
        bench.fill(cached, [4])
        assert before.state(4) == READY, "front ends see the same map"
        before.close()
        cached.sync()
        assert bench.recorded(pack) == [0, 1, 2, 3, 4]
        durable = disk.durable(cached.data_path)
        assert durable[: 5 * BLOCK_SIZE] == bench.raw[pack.digest.hex][: 5 * BLOCK_SIZE]
    with bench.open() as cache:
        assert bench.assert_right(cache.known(pack.digest.hex)) == [0, 1, 2, 3, 4]


def test_a_successor_writes_again_what_its_predecessor_may_have_lost(bench: CacheBench, disk: Disk) -> None:
    """A process that is killed in a failing fdatasync takes the news along."""
    pack = bench.make_pack(4)
    cache = bench.open()
    cached = cache.pack(pack, bench.store)
    bench.fill(cached, [0, 1])
    disk.fail_next_sync()
    with pytest.raises(OSError, match="Input/output"):
        os.fdatasync(cached.data_fd)
    stack, held = hand_over(cache, cached)
    with stack, bench.open(held=held) as cache:
        cached = cache.known(pack.digest.hex)
        cached.sync()
        assert bench.recorded(pack) == [0, 1]
        assert disk.durable(cached.data_path)[: 2 * BLOCK_SIZE] == bench.raw[pack.digest.hex][: 2 * BLOCK_SIZE]


def test_a_frame_handed_over_that_is_not_what_it_should_be_is_missing(bench: CacheBench) -> None:
    pack = bench.make_pack(3)
    cache = bench.open()
    cached = cache.pack(pack, bench.store)
    bench.fill(cached)
    stack, held = hand_over(cache, cached)
    bench.damage(pack, 1)
    with stack, bench.open(held=held) as cache:
        cached = cache.known(pack.digest.hex)
        cached.sync()
        assert bench.assert_right(cached) == [0, 2] == bench.recorded(pack)
        assert cached.rejected == 1


def test_what_a_predecessor_found_wrong_is_taken_back(bench: CacheBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.make_pack(3)
    cache = bench.open()
    bench.fill(cache.pack(pack, bench.store))
    cache.known(pack.digest.hex).sync()
    cache.close(clean=False)
    bench.damage(pack, 1)
    cache = bench.open()
    cached = cache.known(pack.digest.hex)

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, "gone")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        assert [cached.verify(number) for number in (0, 1)] == [True, False]
    assert bench.recorded(pack) == [0, 1, 2], "for now"
    stack, held = hand_over(cache, cached)
    with stack, bench.open(held=held) as cache:
        cached = cache.known(pack.digest.hex)
        assert [cached.frames.state(number) for number in range(3)] == [READY, MISSING, UNVERIFIED]
    assert bench.recorded(pack) == [0, 2]


@pytest.mark.case("C09")
def test_what_was_written_over_a_record_is_not_believed_by_a_successor(bench: CacheBench, disk: Disk) -> None:
    """The record speaks of the bytes before, which are gone as soon as the new ones are written back."""
    pack = bench.make_pack(2)
    cache = bench.open()
    bench.fill(cache.pack(pack, bench.store))
    cache.known(pack.digest.hex).sync()
    cache.close(clean=False)
    bench.damage(pack, 0)
    disk.settle(bench.place(pack) / "data")
    cache = bench.open()
    cached = cache.known(pack.digest.hex)
    bench.fill(cached, [0])
    stack, held = hand_over(cache, cached)
    with stack, bench.open(held=held) as cache:
        assert bench.assert_right(cache.known(pack.digest.hex)) == [0]
    disk.crash(bench.root, luck=0)
    with bench.open() as cache:
        cached = cache.known(pack.digest.hex)
        assert [cached.verify(number) for number in (0, 1)] == [True, True]
        assert bench.assert_right(cached) == [0, 1]


def test_a_record_that_could_not_be_taken_back_is_with_the_next_sync(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = bench.make_pack(3)
    cache = bench.open()
    bench.fill(cache.pack(pack, bench.store))
    cache.known(pack.digest.hex).sync()
    cache.close(clean=False)
    bench.damage(pack, 1)
    with bench.open() as cache:
        cached = cache.known(pack.digest.hex)

        def fail(*arguments: Any) -> int:
            raise OSError(errno.EIO, "gone")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            assert [cached.verify(number) for number in range(3)] == [True, False, True]
        assert not cached.sound
        cached.sync()
        assert cached.sound
        assert bench.recorded(pack) == [0, 2]


def test_descriptors_handed_over_stay_their_owners(bench: CacheBench) -> None:
    pack = bench.make_pack(2)
    cache = bench.open()
    cached = cache.pack(pack, bench.store)
    bench.fill(cached)
    stack, held = hand_over(cache, cached)
    with stack:
        bench.open(held=held).close()
        for file in held[pack.digest.hex]:
            os.fstat(file)


# -- where a pack comes from ------------------------------------------------------------------------------------------


def test_origins_are_kept_newest_first(bench: CacheBench) -> None:
    pack = bench.make_pack(3)
    other = bench.make_pack(3, level=19)
    assert other.digest == pack.digest
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        for place in ("b", "c", "b"):
            cached.add_origin(Origin(place, pack))
        cached.add_origin(Origin("b", other))
        expected = [Origin("b", other), Origin("b", pack), Origin("c", pack), Origin("memory:", pack)]
        if other.blob == pack.blob:
            expected.pop(1)
        assert cached.origins == expected
    with bench.open() as cache:
        cached = cache.known(pack.digest.hex)
        assert cached.origins == expected
        for number in range(MAX_ORIGINS + 5):
            cached.add_origin(Origin(f"place {number}", pack))
        assert [origin.location for origin in cached.origins] == [f"place {number}" for number in range(20, 4, -1)]


def test_an_origin_that_is_the_newest_already_costs_nothing(bench: CacheBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.make_pack(3)
    with bench.open() as cache:
        cache.pack(pack, bench.store)
        monkeypatch.setattr(packs_module, "write_file", lambda *_: pytest.fail("written"))
        cache.pack(pack, bench.store)


@pytest.mark.case("C08")
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"magic":"imgtool origins","version":2,"origins":[]}', b'{"magic":"x","version":1}']
    + [b'{"magic":"imgtool origins","version":1,"origins":%s}' % text for text in (b"7", b"[7]", b'[{"location":"x"}]')]
    + [b'{"magic":"imgtool origins","version":1}', b"\xff", b"[" * 100_000],
)
def test_origins_that_can_not_be_read_count_as_none(bench: CacheBench, content: bytes) -> None:
    pack = bench.make_pack(3)
    with bench.open() as cache:
        bench.fill(cache.pack(pack, bench.store))
    (bench.place(pack) / "origins").write_bytes(content)
    with bench.open() as cache:
        assert cache.known(pack.digest.hex).origins == []
        cached = cache.pack(pack, bench.store)
        assert cached.origins == [Origin("memory:", pack)]
        assert cached.complete
    with bench.open() as cache:
        assert cache.known(pack.digest.hex).origins == [Origin("memory:", pack)]


def test_origins_of_another_pack_are_not_believed(bench: CacheBench) -> None:
    pack, other = bench.make_pack(3, 1), bench.make_pack(3, 2)
    with bench.open() as cache:
        cache.pack(pack, bench.store)
        cache.pack(other, bench.store)
    (bench.place(pack) / "origins").write_bytes((bench.place(other) / "origins").read_bytes())
    with bench.open() as cache:
        assert cache.known(pack.digest.hex).origins == []


def test_a_pack_may_come_from_two_blobs(bench: CacheBench) -> None:
    pack, other = bench.make_pack(4, frame_size=16 * BLOCK_SIZE), bench.make_pack(4, frame_size=8 * BLOCK_SIZE)
    assert pack.digest != other.digest
    same = bench.make_pack(4, frame_size=16 * BLOCK_SIZE, level=19)
    with bench.open() as cache, bench.store.open(same.blob) as blob:
        cached = cache.pack(pack, bench.store)
        index = cached.index_for(same, blob)
        assert index.raw_layout() == cached.index.raw_layout()
        assert cached.index_for(pack, blob) is cached.index


@pytest.mark.case("C08")
def test_a_blob_with_other_frames_is_refused(bench: CacheBench) -> None:
    pack = bench.make_pack(16)
    other = bench.make_pack(8, frame_size=2 * BLOCK_SIZE)
    assert other.digest == pack.digest
    with bench.open() as cache, bench.store.open(other.blob) as blob:
        cached = cache.pack(pack, bench.store)
        with pytest.raises(CorruptError, match="has other frames than cached pack"):
            cached.index_for(other, blob)


@pytest.mark.case("C11")
def test_a_blob_that_is_no_pack_makes_none(bench: CacheBench) -> None:
    pack = bench.make_pack(4)
    intact = bench.store.content[pack.blob]
    for content in (b"<html>", b"<html>".ljust(len(intact[0]))):
        bench.store.content[pack.blob] = (content, 0)
        with bench.open() as cache:
            with pytest.raises(CorruptError, match=str(pack.digest) + "|" + str(pack.blob)):
                cache.pack(pack, bench.store)
            assert not bench.place(pack).exists()
            assert bench.leftovers() == []
    bench.store.content[pack.blob] = intact
    with bench.open() as cache:
        cache.pack(pack, bench.store)


def test_a_pack_that_is_nowhere_is_not_found(bench: CacheBench) -> None:
    pack = bench.make_pack(4)
    del bench.store.content[pack.blob]
    with bench.open() as cache:
        with pytest.raises(NotFoundError, match=str(pack.blob)):
            cache.pack(pack, bench.store)
        for name in (pack.digest.hex, "..", "x" * 64, "", "\n"):
            with pytest.raises(NotFoundError, match="is not in the cache"):
                cache.known(name)


# -- damage -----------------------------------------------------------------------------------------------------------


def with_header(content: bytes, **fields: Any) -> bytes:
    header = FramesHeader.unpack(content)
    values = {name: getattr(header, name) for name in FramesHeader.__slots__}
    return FramesHeader(**{**values, **fields}).pack() + content[FramesHeader.STRUCT.size :]


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda content: None,
    "empty": lambda content: b"",
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b"\1",
    "magic": lambda content: b"X" + content[1:],
    "version": lambda content: content[:8] + b"\2" + content[9:],
    "feature": lambda content: with_header(content, incompatible=4),
    "another pack": lambda content: with_header(content, pack_sha256=b"x" * 32),
    "size": lambda content: with_header(content, raw_size=BLOCK_SIZE),
    "frames": lambda content: with_header(content, frames=2**32 - 1),
    "data end": lambda content: with_header(content, data_end=0),
    "record": lambda content: (
        content[: FramesHeader.STRUCT.size + 20] + b"\xff" + content[FramesHeader.STRUCT.size + 21 :]
    ),
    "digest of a frame": lambda content: (
        content[: FramesHeader.STRUCT.size + 30] + b"\xff\0\xff" + content[FramesHeader.STRUCT.size + 33 :]
    ),
}


def damaged(bench: CacheBench, damage: str) -> StoredPack:
    """A pack, all of it recorded, and a frames file with this damage."""
    pack = bench.make_pack(4)
    with bench.open() as cache:
        bench.fill(cache.pack(pack, bench.store))
    path = bench.place(pack) / "frames"
    content = DAMAGE[damage](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    return pack


@pytest.mark.case("C08", "C10")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pack_that_nobody_uses_is_made_anew(bench: CacheBench, damage: str) -> None:
    pack = damaged(bench, damage)
    with bench.open() as cache:
        cached = cache.pack(pack, bench.store)
        assert cached.unready(range(4)) == [0, 1, 2, 3]
        assert all(bench.is_hole(cached, number) for number in range(4))
        assert cache.status().discarded_packs == 1
        [warning] = bench.warnings
        assert f"cached pack {pack.digest} is damaged: " in warning and "thrown away" in warning
        bench.fill(cached)
        cached.sync()
        assert cached.complete
    assert bench.leftovers() == []


@pytest.mark.case("C08")
def test_without_a_store_a_damaged_pack_is_not_there(bench: CacheBench) -> None:
    pack = damaged(bench, "cut")
    with bench.open() as cache:
        with pytest.raises(NotFoundError, match="not in the cache"):
            cache.known(pack.digest.hex)
        assert not bench.place(pack).exists()


@pytest.mark.case("C08", "C10")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_frames_file_of_a_pack_in_use_is_mended(bench: CacheBench, damage: str) -> None:
    pack = damaged(bench, damage)
    data = os.stat(bench.place(pack) / "data")
    bench.damage(pack, 2)
    with bench.open() as cache:
        cache.use("sandbox", [pack.digest.hex])
        with pytest.raises(CorruptError, match=f"cached pack {pack.digest} is damaged"):
            cache.known(pack.digest.hex)
        cached = cache.pack(pack, bench.store)
        assert os.path.samestat(os.stat(cached.data_path), data), "the file that is mounted"
        assert [cached.verify(number) for number in range(4)] == [True, True, False, True]
        assert bench.recorded(pack) == []
        cached.sync()
        assert bench.recorded(pack) == [0, 1, 3]
        assert "written anew" in bench.warnings[0]
        bench.fill(cached)
    with bench.open() as cache:
        assert cache.known(pack.digest.hex).complete


@pytest.mark.case("C08", "C10")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_pack_that_was_handed_over_is_never_thrown_away(bench: CacheBench, damage: str) -> None:
    pack = bench.make_pack(4)
    cache = bench.open()
    cached = cache.pack(pack, bench.store)
    bench.fill(cached, [0, 1])
    cached.sync()
    bench.fill(cached, [2])
    stack, held = hand_over(cache, cached)
    path = bench.place(pack) / "frames"
    content = DAMAGE[damage](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with stack, bench.open(held=held) as cache:
        cache.release(HELD)
        with pytest.raises(CorruptError, match=f"cached pack {pack.digest} is damaged"):
            cache.known(pack.digest.hex)
        cached = cache.pack(pack, bench.store)
        assert bench.assert_right(cached) == [0, 1, 2]
        cached.sync()
        assert bench.recorded(pack) == [0, 1, 2]
        assert not [warning for warning in bench.warnings if "thrown away" in warning]


@pytest.mark.parametrize("damage", ["cut", "longer", "gone", "directory"])
@pytest.mark.parametrize("used", [False, True])
def test_data_of_a_wrong_size_are_thrown_away(bench: CacheBench, damage: str, used: bool) -> None:
    """Whoever has mounted them keeps the file that he has."""
    pack = bench.make_pack(4)
    with bench.open() as cache:
        bench.fill(cache.pack(pack, bench.store))
    path = bench.place(pack) / "data"
    if damage in ("cut", "longer"):
        os.truncate(path, pack.raw_size + (BLOCK_SIZE if damage == "longer" else -BLOCK_SIZE))
    else:
        path.unlink()
        if damage == "directory":
            path.mkdir()
    with bench.open() as cache:
        if used:
            cache.use("sandbox", [pack.digest.hex])
        cached = cache.pack(pack, bench.store)
        assert cached.unready(range(4)) == [0, 1, 2, 3]
        assert os.stat(path).st_size == pack.raw_size
        bench.fill(cached)
    assert bench.leftovers() == []


def test_data_that_are_not_the_ones_that_are_mounted_are_refused(bench: CacheBench) -> None:
    pack = bench.make_pack(4)
    cache = bench.open()
    cached = cache.pack(pack, bench.store)
    bench.fill(cached)
    stack, held = hand_over(cache, cached)
    path = bench.place(pack) / "data"
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)
    with stack, bench.open(held=held) as cache:
        with pytest.raises(CorruptError, match="not the file that is mounted"):
            cache.known(pack.digest.hex)
        with pytest.raises(CorruptError, match="end the sandboxes"):
            cache.pack(pack, bench.store)
        assert path.read_bytes() == raw


def test_a_pack_that_is_a_file_is_thrown_away(bench: CacheBench) -> None:
    pack = bench.make_pack(2)
    bench.open().close()
    bench.place(pack).write_bytes(b"what is this")
    with bench.open() as cache:
        bench.fill(cache.pack(pack, bench.store))
        assert cache.known(pack.digest.hex).unready([0, 1]) == []


@pytest.mark.case("C08")
def test_a_manifest_that_says_something_else_of_the_same_blob_changes_nothing(bench: CacheBench) -> None:
    pack = bench.make_pack(4)
    with bench.open() as cache:
        bench.fill(cache.pack(pack, bench.store))
    span = type(pack.frame_index)(pack.frame_index.offset, pack.frame_index.length, Digest.of(b"another"))
    forged = StoredPack(pack.digest, pack.raw_size, pack.blob, pack.blob_size, span, pack.chunk_list)
    larger = StoredPack(pack.digest, 2 * pack.raw_size, pack.blob, pack.blob_size, pack.frame_index, pack.chunk_list)
    for opened in (False, True):
        with bench.open() as cache:
            if opened:
                cache.known(pack.digest.hex)
            for wrong in (forged, larger):
                with pytest.raises(CorruptError, match=f"cached pack {pack.digest}"):
                    cache.pack(wrong, bench.store)
            assert cache.pack(pack, bench.store).complete
            assert cache.known(pack.digest.hex).origins == [Origin("memory:", pack)]
