"""The cache on real file systems that are full, and under real mounts."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.caches import CacheBench
from support.conversions import Site, noise
from support.mounts import erofs_mounted, require_file_backed_erofs
from support.tars import file
from support.tools import need_root, need_tool

from layerstore.cache.cache import Cache
from layerstore.cache.framemap import MISSING
from layerstore.cache.packs import CachedPack
from layerstore.errors import NoSpaceError
from layerstore.pack.format import FRAME_SIZE

pytestmark = pytest.mark.privileged

MIB = 1 << 20
SIZE = 24 * MIB


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The mount point of a file system of 24 MiB."""
    need_root()
    point = tmp_path / "small"
    point.mkdir()
    mount = [need_tool("mount"), "-t", request.param]
    if request.param == "ext4":
        image = tmp_path / "image"
        image.touch()
        os.truncate(image, SIZE)
        subprocess.run([need_tool("mkfs.ext4"), "-q", "-m", "0", "-O", "^has_journal", image], check=True)
        subprocess.run([*mount, "-o", "loop", image, point], check=True)
    else:
        subprocess.run([*mount, "-o", f"size={SIZE}", "tmpfs", point], check=True)
    try:
        yield point
    finally:
        subprocess.run([need_tool("umount"), point], check=True)


@pytest.fixture
def bench(small: Path) -> CacheBench:
    return CacheBench(small / "node")


def fill_disk(small: Path) -> Path:
    """Take every byte that is left."""
    path = small / "filler"
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (MIB, 4096, 512, 1):
        try:
            while os.write(out, bytes(size)):
                pass
        except OSError:
            continue
    try:
        os.fsync(out)
    finally:
        os.close(out)
    return path


def free(small: Path) -> int:
    status = os.statvfs(small)
    return status.f_bavail * status.f_frsize


def fill_until_full(bench: CacheBench, cached: CachedPack) -> int:
    """Write frames until the disk is full; the first that did not fit."""
    for number in range(len(cached.index)):
        try:
            bench.fill(cached, [number])
        except NoSpaceError:
            return number
    raise AssertionError("the disk did not fill up")


@pytest.mark.case("C06")
def test_a_frame_that_does_not_fit_is_missing_and_room_lets_it_in(bench: CacheBench, small: Path) -> None:
    old = bench.make_pack(32, 1, frame_size=FRAME_SIZE)
    new = bench.make_pack(80, 2, frame_size=FRAME_SIZE)
    with bench.open() as cache:
        bench.fill(cache.pack(old, bench.store))
        cache.known(old.digest.hex).sync()
        cache.use("sandbox", [new.digest.hex])
        cached = cache.pack(new, bench.store)
        stuck = fill_until_full(bench, cached)
        assert cached.frames.state(stuck) == MISSING
        assert bench.is_hole(cached, stuck), "what was written of it is given back"
        assert bench.assert_right(cached) == list(range(stuck))
        with cached.busy():
            freed = cache.make_room(FRAME_SIZE, keep=[new.digest.hex])
        assert freed >= old.raw_size
        assert free(small) >= old.raw_size - FRAME_SIZE
        bench.fill(cached)
        cached.sync()
        assert cached.complete
        assert bench.recorded(new) == list(range(80))
    with bench.open() as cache:
        assert len(bench.assert_right(cache.known(new.digest.hex))) == 80


@pytest.mark.case("C06")
def test_on_a_full_disk_everything_but_writing_works(bench: CacheBench, small: Path) -> None:
    packs = [bench.make_pack(8, seed, frame_size=FRAME_SIZE) for seed in range(2)]
    late = bench.make_pack(4, 9)
    with bench.open() as cache:
        for pack in packs:
            bench.fill(cache.pack(pack, bench.store), range(6))
        filler = fill_disk(small)
        with pytest.raises(NoSpaceError, match=str(late.digest)):
            cache.pack(late, bench.store)
        assert bench.leftovers() == []
        cache.use("sandbox", [packs[0].digest.hex])
        assert cache.status().packs == 2
        cached = cache.known(packs[0].digest.hex)
        assert bench.assert_right(cached) == list(range(6))
        with pytest.raises(NoSpaceError):
            bench.fill(cached, [6])
        assert bench.assert_right(cached) == list(range(6))
        # The record has its place since the pack was made.
        cached.sync()
        assert bench.recorded(packs[0]) == list(range(6))
        assert cache.make_room(1) >= 6 * FRAME_SIZE
        assert not bench.place(packs[1]).exists()
        bench.fill(cached)
        bench.fill(cache.pack(late, bench.store))
        filler.unlink()
    with bench.open() as cache:
        assert not cache.unclean
        assert cache.known(packs[0].digest.hex).complete and cache.known(late.digest.hex).complete


@pytest.mark.case("C06", "C09")
def test_an_owner_that_ends_on_a_full_disk_leaves_nothing_unsaid(bench: CacheBench, small: Path) -> None:
    """There is no room for the mark of an orderly stop: then everything is verified."""
    pack = bench.make_pack(8, frame_size=FRAME_SIZE)
    cache = bench.open()
    bench.fill(cache.pack(pack, bench.store))
    filler = fill_disk(small)
    try:
        cache.close()
        unclean = False
    except NoSpaceError:
        unclean = True
    assert bench.recorded(pack) == list(range(8))
    assert bench.leftovers() == []
    filler.unlink()
    with bench.open() as cache:
        assert cache.unclean == unclean
        cached = cache.known(pack.digest.hex)
        assert all(cached.verify(number) for number in range(8))
        assert cached.complete


def test_sparse_packs_count_for_what_they_take(bench: CacheBench, small: Path) -> None:
    pack = bench.make_pack(400, frame_size=FRAME_SIZE)
    assert pack.raw_size > SIZE
    with bench.open() as cache:
        before = free(small)
        cached = cache.pack(pack, bench.store)
        bench.fill(cached, [0, 200, 399])
        cached.sync()
        taken = before - free(small)
        assert 3 * FRAME_SIZE <= cached.allocated <= taken + 64 * 1024
        assert cached.allocated < 4 * FRAME_SIZE
        assert cache.make_room(1) >= 3 * FRAME_SIZE
        assert free(small) >= before - 64 * 1024


def test_a_pack_that_is_mounted_is_never_evicted(tmp_path: Path) -> None:
    """Whether somebody has told of the mount or not: the kernel knows."""
    require_file_backed_erofs()
    site = Site(tmp_path / "site")
    data = noise(2 * MIB, 1)
    layer = site.convert(site.tar(file("a", data))).image.layers[0]
    [pack] = layer.packs
    with Cache(str(tmp_path / "node")) as cache:
        image = Path(cache.metadata.ensure(layer, site.store))
        cached = cache.pack(pack, site.store)
        with site.store.open(pack.blob) as blob:
            for number in range(len(cached.index)):
                start, length = cached.index.blob_range(range(number, number + 1))
                cached.write(number, cached.index.decode(number, blob.read_at(start, length)))
        cached.sync()
        assert not cached.is_open_elsewhere()
        with erofs_mounted(image, [Path(cached.data_path)], tmp_path / "mounted") as root:
            reader = os.fdopen(os.open(root / "a", os.O_RDONLY), "rb")
        with reader:  # the mount is detached, and lives on
            assert cached.is_open_elsewhere()
            assert cache.make_room(1 << 40) == 0
            assert reader.read() == data
        deadline = time.monotonic() + 10
        while cached.is_open_elsewhere():
            assert time.monotonic() < deadline
        assert cache.make_room(1 << 40) > pack.raw_size
        assert cache.status().packs == cache.status().metadata_images == 0
