"""The cache as a whole: who owns it, what stays, and what goes when room is needed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.caches import CacheBench, descriptors
from support.children import Child, die_at_call
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.tars import file

from layerstore.cache import cache as cache_module
from layerstore.cache import directories
from layerstore.cache.cache import HELD, Cache
from layerstore.cache.directories import directory_size
from layerstore.cache.openers import is_open_elsewhere, is_path_open
from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from layerstore.image import Layer
from layerstore.pack.stored import StoredPack
from layerstore.store.memory import MemoryBlob

KIB = 1024


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[CacheBench]:
    before = descriptors()
    with fsync_for_free(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda file: None)
        yield CacheBench(tmp_path / "node")
    assert descriptors() == before


def packs_of(bench: CacheBench, cache: Cache, count: int, *, blocks: int = 16) -> list[StoredPack]:
    """Complete packs, each last used later than the one before."""
    packs = [bench.make_pack(2, seed, frame_size=blocks * 4096) for seed in range(count)]
    for number, pack in enumerate(packs):
        cached = cache.pack(pack, bench.store)
        bench.fill(cached)
        cached.sync()
        used(bench, pack, number)
    return packs


def used(bench: CacheBench, pack: StoredPack, minute: int) -> None:
    """Make a minute of long ago the time of its last use."""
    time = (1_000_000_000 + minute * 60) * 10**9
    os.utime(bench.place(pack) / "frames", ns=(time, time))


def there(bench: CacheBench, packs: list[StoredPack]) -> list[int]:
    """The numbers of the packs that are in the cache."""
    return [number for number, pack in enumerate(packs) if bench.place(pack).exists()]


def names(*packs: StoredPack) -> list[str]:
    return [pack.digest.hex for pack in packs]


def image_of(site: Site, cache: Cache, seed: int) -> Layer:
    """A layer whose metadata image is cached."""
    layer = site.convert(site.tar(file("a", noise(40_000, seed)), file("b", b"small")), dedup=False).image.layers[0]
    cache.metadata.ensure(layer, site.store)
    return layer


# -- who owns it ------------------------------------------------------------------------------------------------------


@pytest.mark.case("C07")
def test_one_process_owns_a_cache(bench: CacheBench) -> None:
    with bench.open():
        with pytest.raises(ConflictError, match=r"in use by another process.*fuser"):
            bench.open()

        def other(child: Child) -> None:
            with pytest.raises(ConflictError):
                bench.open()

        with Child(other) as child:
            assert child.wait() == 0
    bench.open().close()


@pytest.mark.case("C07")
def test_a_dead_owners_cache_is_free(bench: CacheBench) -> None:
    pack = bench.make_pack(2)

    def own(child: Child) -> None:
        cache = bench.open()
        bench.fill(cache.pack(pack, bench.store))
        cache.known(pack.digest.hex).sync()
        child.tell()
        signal.pause()

    with Child(own) as child:
        child.hear()
        with pytest.raises(ConflictError):
            bench.open()
        child.kill()
        with bench.open() as cache:
            assert cache.unclean
            assert cache.known(pack.digest.hex).verify(0)


def test_a_closed_cache_serves_nobody(bench: CacheBench) -> None:
    pack = bench.make_pack(2)
    cache = bench.open()
    cached = cache.pack(pack, bench.store)
    bench.fill(cached, [0])
    cache.close()
    cache.close()
    for call in (
        lambda: cache.pack(pack, bench.store),
        lambda: cache.known(pack.digest.hex),
        lambda: cache.use("x", []),
        lambda: cache.pin("x", []),
    ):
        with pytest.raises(ConflictError, match="is closed"):
            call()
    for late in (
        lambda: cached.write(1, bench.frame(cached, 1)),
        lambda: cached.verify(0),
        lambda: cached.unready([0]),
        cached.sync,
        cached.is_open_elsewhere,
        cached.busy().__enter__,
    ):
        with pytest.raises(UnavailableError, match="evicted or closed"):
            late()
    assert cache.make_room(1 << 40) == 0
    assert not cached.complete
    assert bench.place(pack).exists()


def test_the_mark_of_an_orderly_stop_is_gone_before_anything_is_served(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = bench.make_pack(2)
    clean = Path(bench.root, "cache", "clean")
    with bench.open() as cache:
        assert not cache.unclean, "there is nothing to doubt"
        assert not clean.exists()
        bench.fill(cache.pack(pack, bench.store))
    assert json.loads(clean.read_bytes()) == {"magic": "imgtool clean", "version": 1, "doubted": []}
    synced: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "sync_directory", synced.append)
        cache = bench.open()
    assert not clean.exists() and synced == [str(clean.parent)]
    assert not cache.unclean
    cache.close(clean=False)
    assert not clean.exists()
    with bench.open() as cache:
        assert cache.unclean
    assert clean.exists()


@pytest.mark.case("C08")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"clean",
        b"[]",
        b'{"magic":"imgtool clean","version":2,"doubted":[]}',
        b'{"magic":"imgtool clean","version":1}',
        b'{"magic":"imgtool clean","version":1,"doubted":["../../x"]}',
        b'{"magic":"imgtool clean","version":true,"doubted":[]}',
        b'{"magic":"other","version":1,"doubted":[]}',
    ],
)
def test_a_mark_that_can_not_be_read_is_none(bench: CacheBench, content: bytes) -> None:
    pack = bench.make_pack(2)
    with bench.open() as cache:
        bench.fill(cache.pack(pack, bench.store))
    Path(bench.root, "cache", "clean").write_bytes(content)
    with bench.open() as cache:
        assert cache.unclean
        assert cache.known(pack.digest.hex).unverified == 2


def test_a_stop_that_could_not_make_everything_durable_is_not_orderly(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = bench.make_pack(2, 1), bench.make_pack(2, 2)
    cache = bench.open()
    for pack in (good, bad):
        bench.fill(cache.pack(pack, bench.store))
    path = cache.known(bad.digest.hex).data_path

    def fail(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}") == path:
            raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(NoSpaceError):
            cache.close()
    assert bench.recorded(good) == [0, 1] and bench.recorded(bad) == []
    with bench.open() as cache:
        assert cache.unclean


def test_caches_of_before_this_file_existed_are_verified(bench: CacheBench) -> None:
    pack = bench.make_pack(2)
    with bench.open() as cache:
        bench.fill(cache.pack(pack, bench.store))
    for path in (Path(bench.root, "cache", "clean"), Path(bench.root, "cache", "lock"), bench.place(pack) / "origins"):
        path.unlink()
    with bench.open() as cache:
        assert cache.unclean
        cached = cache.pack(pack, bench.store)
        assert cached.verify(0) and cached.verify(1)
        assert cached.complete


# -- what stays -------------------------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first(bench: CacheBench) -> None:
    with bench.open() as cache:
        packs = packs_of(bench, cache, 5)
        size = directory_size(str(bench.place(packs[0])))
        assert size >= 128 * KIB
        used(bench, packs[1], -1)
        assert cache.make_room(1) == size
        assert there(bench, packs) == [0, 2, 3, 4]
        cache.use("sandbox", names(packs[0]))
        cache.release("sandbox")
        assert cache.make_room(size + 1) == 2 * size
        assert there(bench, packs) == [0, 4]
        assert cache.make_room(0) == 0
        assert cache.status().evicted_bytes == 3 * size
        assert bench.leftovers() == []
    with bench.open() as cache:
        assert cache.make_room(1) == size
        assert there(bench, packs) == [0], "the order outlives a restart"
        with pytest.raises(NotFoundError):
            cache.known(packs[4].digest.hex)
        assert cache.pack(packs[4], bench.store).unready([0, 1]) == [0, 1]


def test_what_somebody_uses_stays(bench: CacheBench) -> None:
    with bench.open() as cache:
        packs = packs_of(bench, cache, 4)
        cache.use("one", names(packs[0], packs[1]))
        cache.use("two", names(packs[1]))
        cache.use("two", names(packs[1], packs[2]))
        assert cache.users(packs[1].digest.hex) == ["one", "two"]
        assert cache.known(packs[0].digest.hex).in_use
        cache.make_room(1 << 40)
        assert there(bench, packs) == [0, 1, 2]
        cache.release("one")
        cache.release("one")
        cache.release("nobody")
        assert not cache.known(packs[0].digest.hex).in_use and cache.known(packs[1].digest.hex).in_use
        cache.make_room(1 << 40)
        assert there(bench, packs) == [1, 2]
        cache.release("two")
        cache.make_room(1 << 40)
        assert there(bench, packs) == []


def test_what_is_not_there_yet_can_be_used(bench: CacheBench) -> None:
    pack = bench.make_pack(2)
    with bench.open() as cache:
        cache.use("sandbox", names(pack))
        cached = cache.pack(pack, bench.store)
        assert cached.in_use
        bench.fill(cached)
        assert cache.make_room(1 << 40) == 0
        cache.release("sandbox")
        assert cache.make_room(1 << 40) > 0


def test_what_is_pinned_stays_over_restarts(bench: CacheBench) -> None:
    with bench.open() as cache:
        packs = packs_of(bench, cache, 4)
        cache.pin("golden", names(packs[0], packs[1], packs[1]))
        cache.pin("other:1.2/x é", names(packs[2]))
        cache.pin("golden", names(packs[0]))
    with bench.open() as cache:
        assert cache.pins() == {"golden": names(packs[0]), "other:1.2/x é": names(packs[2])}
        cache.make_room(1 << 40)
        assert there(bench, packs) == [0, 2]
        assert cache.unpin("golden") and not cache.unpin("golden")
    with bench.open() as cache:
        cache.make_room(1 << 40)
        assert there(bench, packs) == [2]


def test_documents_have_the_fields_described(bench: CacheBench) -> None:
    pack = bench.make_pack(2)
    with bench.open() as cache:
        cache.pack(pack, bench.store)
        cache.pin("golden", names(pack))
    origins = json.loads((bench.place(pack) / "origins").read_bytes())
    described = [{"location": "memory:", "pack": pack.descriptor().to_json()}]
    assert origins == {"magic": "imgtool origins", "version": 1, "origins": described}
    pins = json.loads(Path(bench.root, "cache", "pins.json").read_bytes())
    assert pins == {"magic": "imgtool pins", "version": 1, "pins": {"golden": names(pack)}}


def test_pins_of_what_is_not_there_or_nothing_are_kept(bench: CacheBench) -> None:
    with bench.open() as cache:
        cache.pin("empty", [])
        cache.pin("later", ["a" * 64])
        pins = cache.pins()
    with bench.open() as cache:
        assert cache.pins() == pins == {"empty": [], "later": ["a" * 64]}


@pytest.mark.parametrize(
    ("name", "hexes"),
    [("", []), ("a\nb", []), ("x" * 1025, []), ("\ud800", []), ("a", ["../../etc"]), ("a", ["A" * 64]), ("a", ["ab"])],
)
def test_names_that_are_none_pin_nothing(bench: CacheBench, name: str, hexes: list[str]) -> None:
    with bench.open() as cache:
        with pytest.raises(UsageError):
            cache.pin(name, hexes)
        assert cache.pins() == {}


@pytest.mark.case("C08")
@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", CorruptError),
        (b"{", CorruptError),
        (b'{"magic":"imgtool pins","version":2,"pins":{}}', UnsupportedError),
        (b'{"magic":"imgtool pins","version":1,"pins":[]}', CorruptError),
        (b'{"magic":"imgtool pins","version":1,"pins":{"a":"b"}}', CorruptError),
        (b'{"magic":"imgtool pins","version":1,"pins":{"a":[7]}}', CorruptError),
    ],
)
def test_pins_that_can_not_be_read_are_refused(bench: CacheBench, content: bytes, error: type[Exception]) -> None:
    """Evicting what was to stay can't be undone; the mark of an orderly stop stays too."""
    bench.open().close()
    path = Path(bench.root, "cache", "pins.json")
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(error):
            bench.open()
    path.unlink()
    with bench.open() as cache:
        assert not cache.unclean


def test_what_is_being_fetched_stays_and_nobody_waits_for_it(bench: CacheBench) -> None:
    with bench.open() as cache:
        packs = packs_of(bench, cache, 3)
        with cache.known(packs[0].digest.hex).busy():
            cache.make_room(1)
            assert there(bench, packs) == [0, 2]
        cache.make_room(1)
        assert there(bench, packs) == [2]


def test_what_is_being_opened_stays_and_nobody_waits_for_it(bench: CacheBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may stall for as long as it likes: whoever asks for the state of things gets an answer."""
    pack = bench.make_pack(2)
    started, go_on = threading.Event(), threading.Event()
    real = MemoryBlob.read_at

    def stalled(self: MemoryBlob, offset: int, length: int) -> bytes:
        started.set()
        assert go_on.wait(30)
        return real(self, offset, length)

    monkeypatch.setattr(MemoryBlob, "read_at", stalled)
    with bench.open() as cache, ThreadPoolExecutor(2) as pool:
        try:
            jobs = [pool.submit(cache.pack, pack, bench.store) for _ in range(2)]
            assert started.wait(30)
            cache.use("sandbox", names(pack))
            assert cache.status().packs == 0
            cache.pin("x", names(pack))
            assert cache.make_room(1 << 40) == 0
            cache.release("sandbox")
        finally:
            go_on.set()
        first, second = (job.result(30) for job in jobs)
        assert first is second


def test_what_is_to_be_kept_for_a_moment_stays(bench: CacheBench) -> None:
    with bench.open() as cache:
        packs = packs_of(bench, cache, 3)
        cache.make_room(1, keep=names(packs[0]))
        assert there(bench, packs) == [0, 2]


def test_what_somebody_has_open_stays(bench: CacheBench) -> None:
    """A mount that nobody has told of, for one."""
    with bench.open() as cache:
        packs = packs_of(bench, cache, 2)
        with open(bench.place(packs[0]) / "data", "rb"):
            assert cache.known(packs[0].digest.hex).is_open_elsewhere()
            cache.make_room(1 << 40)
            assert there(bench, packs) == [0]
        assert not cache.known(packs[0].digest.hex).is_open_elsewhere()
    with bench.open() as cache:
        with open(bench.place(packs[0]) / "data", "rb"):
            assert cache.make_room(1 << 40) == 0
        assert cache.make_room(1 << 40) > 0


def test_who_has_a_file_open_is_asked_of_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    assert not is_path_open(str(path))
    assert not is_path_open(str(tmp_path / "nothing"))
    file = os.open(path, os.O_RDWR)
    copy = os.dup(file)
    try:
        assert not is_open_elsewhere(file), "a copy is the same"
        for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            other = os.open(path, mode)
            assert is_open_elsewhere(file)
            os.close(other)
        assert not is_open_elsewhere(file)
    finally:
        os.close(file)
        os.close(copy)
    pipe = os.pipe()
    assert is_open_elsewhere(pipe[1]), "no leases, no answer"
    for end in pipe:
        os.close(end)


def test_packs_that_were_handed_over_stay_until_somebody_says_who_uses_them(bench: CacheBench) -> None:
    cache = bench.open()
    packs = packs_of(bench, cache, 2)
    cached = cache.known(packs[0].digest.hex)
    held = {cached.hex: (os.dup(cached.data_fd), os.dup(cached.frames.fd))}
    cache.close(clean=False)
    with bench.open(held=held) as cache:
        for each in held[cached.hex]:
            os.close(each)
        cache.make_room(1 << 40)
        assert there(bench, packs) == [0]
        cache.release(HELD)
        cache.make_room(1 << 40)
        assert there(bench, packs) == []


def test_metadata_images_go_with_what_belongs_to_them(bench: CacheBench, tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    with bench.open() as cache:
        layers = [image_of(site, cache, seed) for seed in range(3)]
        hexes = [layer.metadata.hex for layer in layers]
        for number, hex in enumerate(hexes):
            time = (1_000_000_000 + number) * 10**9
            os.utime(cache.metadata.path_of(hex), ns=(time, time))
        assert cache.metadata.hexes() == sorted(hexes)
        assert cache.metadata.packs_of(hexes[0]) == names(*layers[0].packs)
        assert cache.metadata.uses_of(hexes[0]) == cache.metadata.uses(layers[0])
        assert cache.metadata.has(layers[0])
        size = cache.metadata.size(hexes[1])
        assert size >= layers[1].metadata_size
        cache.use("sandbox", hexes[:1])
        cache.pin("golden", hexes[2:])
        used_bytes = cache.metadata.size(hexes[0])
        status = cache.status()
        assert (status.metadata_images, status.in_use_bytes) == (3, used_bytes)
        assert cache.make_room(1 << 40) == size
        assert cache.metadata.hexes() == sorted([hexes[0], hexes[2]])
        assert not os.path.exists(cache.metadata.path_of(hexes[1]) + ".uses")
        assert not cache.metadata.has(layers[1])
        with pytest.raises(NotFoundError):
            cache.metadata.packs_of(hexes[1])
        cache.release("sandbox")
        with open(cache.metadata.path_of(hexes[0]), "rb"):
            assert cache.make_room(1 << 40) == 0
        assert cache.make_room(1 << 40) == used_bytes
        cache.metadata.ensure(layers[1], site.store)
        assert cache.metadata.packs_of(hexes[1]) == names(*layers[1].packs)


@pytest.mark.case("C08")
@pytest.mark.parametrize("content", [None, b"{", b'{"magic":"imgtool uses","version":1,"packs":[["../x",[]]]}'])
def test_packs_of_an_image_that_are_not_known_are_not_guessed(
    bench: CacheBench, tmp_path: Path, content: bytes | None
) -> None:
    site = Site(tmp_path / "site")
    with bench.open() as cache:
        layer = image_of(site, cache, 1)
        path = Path(cache.metadata.path(layer) + ".uses")
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CorruptError, match="fetch the layer again"):
            cache.metadata.packs_of(layer.metadata.hex)


# -- how much there is ------------------------------------------------------------------------------------------------


def test_the_status_counts_what_is_allocated(bench: CacheBench) -> None:
    with bench.open(limit=1 << 30) as cache:
        packs = packs_of(bench, cache, 3)
        sparse = bench.make_pack(1000, 9)
        bench.fill(cache.pack(sparse, bench.store), [5])
        cache.use("a", names(packs[0]))
        cache.use("b", names(packs[0], packs[1]))
        cache.pin("c", names(packs[0]))
        sizes = [cache.known(pack.digest.hex).allocated for pack in (*packs, sparse)]
        status = cache.status()
        assert status.bytes == sum(sizes)
        assert sizes[3] < 100 * KIB < sizes[0]
        assert (status.limit, status.packs, status.metadata_images) == (1 << 30, 4, 0)
        assert (status.in_use_bytes, status.pinned_bytes) == (sizes[0] + sizes[1], sizes[0])
        assert (status.evicted_bytes, status.unverified_frames, status.rejected_frames) == (0, 0, 0)
        assert sizes[0] == directory_size(str(bench.place(packs[0])))


def test_trimming_goes_down_to_the_limit_and_no_further(bench: CacheBench) -> None:
    with bench.open() as cache:
        packs = packs_of(bench, cache, 5)
        assert cache.trim() == 0, "without a limit"
        size = directory_size(str(bench.place(packs[0])))
    with bench.open(limit=3 * size) as cache:
        cache.use("sandbox", names(packs[0]))
        assert cache.trim() == 2 * size
        assert there(bench, packs) == [0, 3, 4]
        assert cache.trim() == 0
    with bench.open(limit=size // 2) as cache:
        cache.use("sandbox", names(*packs))
        assert cache.trim() == 0, "what is used is more than the limit"
        assert cache.status().bytes > size


class Watched:
    """A lock that tells of those who come for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.came = threading.Semaphore(0)

    def __enter__(self) -> None:
        self.came.release()
        self.lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


def test_those_who_make_room_at_once_do_not_evict_for_each_other(
    bench: CacheBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench.open() as cache, ThreadPoolExecutor(4) as pool:
        packs = packs_of(bench, cache, 8)
        size = directory_size(str(bench.place(packs[0])))
        watched = Watched()
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_evicting", watched)
            with watched.lock:
                jobs = [pool.submit(cache.make_room, size // 8) for _ in range(4)]
                for _ in jobs:
                    assert watched.came.acquire(timeout=30)
            assert [job.result(30) for job in jobs] == [size] * 4
        assert there(bench, packs) == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_gone_is_not_doubted(bench: CacheBench) -> None:
    cache = bench.open()
    packs_of(bench, cache, 2)
    cache.close(clean=False)
    with bench.open() as cache:
        assert cache.status().unverified_frames == 4
        cache.make_room(1)
        assert cache.status().unverified_frames == 2


def test_what_is_being_made_is_not_reclaimed(bench: CacheBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.make_pack(2)
    real = directories.write_file
    with bench.open() as cache:

        def write_file(target: str, data: bytes) -> None:
            assert cache.reclaim() == 0
            real(target, data)

        with monkeypatch.context() as patch:
            patch.setattr(directories, "write_file", write_file)
            bench.fill(cache.pack(pack, bench.store))
        assert bench.assert_right(cache.known(pack.digest.hex)) == [0, 1]


def test_a_pack_that_was_evicted_is_not_written_any_more(bench: CacheBench) -> None:
    """Its descriptors' numbers may be another file's by then."""
    with bench.open() as cache:
        [pack] = packs_of(bench, cache, 1)
        old = cache.known(pack.digest.hex)
        cache.make_room(1)
        new = cache.pack(pack, bench.store)
        assert new is not old
        with pytest.raises(UnavailableError, match="ask the cache for it again"):
            bench.fill(old, [0])
        bench.fill(new)
        assert bench.assert_right(new) == [0, 1]


# -- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("C03")
def test_an_owner_that_is_killed_anywhere_leaves_a_cache_that_works(bench: CacheBench) -> None:
    """Packs are made, filled, evicted and pinned, and each round ends before another system call."""
    packs = [bench.make_pack(3, seed) for seed in range(3)]
    rng = random.Random(3)

    def work(child: Child) -> None:
        die_at_call(rng.randrange(1, 160))
        with bench.open() as cache:
            for pack in packs:
                cached = cache.pack(pack, bench.store)
                for number in cached.unready(range(3)):
                    if not cached.verify(number):
                        bench.fill(cached, [number])
                cached.sync()
                cache.pin("all", names(pack))
                cache.unpin("all")
                cache.make_room(1)

    for round in range(60):
        rng = random.Random(round)
        with Child(work) as child:
            assert child.wait() in (0, -signal.SIGKILL)
    for _ in range(2):
        with bench.open() as cache:
            for pack in packs:
                cached = cache.pack(pack, bench.store)
                for number in range(3):
                    if not cached.verify(number):
                        bench.fill(cached, [number])
                assert bench.assert_right(cached) == [0, 1, 2]
            cache.reclaim()
            assert bench.leftovers() == []
            assert cache.reclaim() == 0
    assert not bench.warnings, "no pack was found half made"


def test_what_dead_owners_left_is_reclaimed_and_nothing_else(bench: CacheBench) -> None:
    with bench.open() as cache:
        packs = packs_of(bench, cache, 2)
    top = bench.place(packs[0]).parent
    half = top / ".tmp-1-half"
    half.mkdir()
    (half / "data").write_bytes(bytes(50_000))
    for place in (bench.place(packs[0]), Path(bench.root, "cache")):
        (place / ".tmp-1-dead").write_bytes(b"half" * 5000)
    with bench.open() as cache:
        assert cache.reclaim() >= 90_000
        assert bench.leftovers() == []
        assert cache.reclaim() == 0
        assert there(bench, packs) == [0, 1]
        half.mkdir()
        (half / "data").write_bytes(b"x" * 50_000)
        assert cache.make_room(1) >= 50_000, "room that costs nothing comes first"
        assert there(bench, packs) == [0, 1]


def test_what_cannot_be_made_leaves_nothing(bench: CacheBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.make_pack(2)
    with bench.open() as cache:

        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        for name in ("write_file", "sync_directory"):
            with monkeypatch.context() as patch:
                patch.setattr(directories, name, full)
                with pytest.raises(NoSpaceError, match=str(pack.digest)):
                    cache.pack(pack, bench.store)
            assert bench.leftovers() == []
        assert cache.status().packs == 1, "it has its name, and nothing is open"
        bench.fill(cache.pack(pack, bench.store))
    assert Digest.of((bench.place(pack) / "data").read_bytes()) == pack.digest
