"""What is fetched of real layers: eager plans, and what is in the cache after them, whenever somebody is killed."""

from __future__ import annotations

import itertools
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.children import Child
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.tars import directory, file, hardlink, sparse_gnu, symlink, tar

from layerstore.cache.cache import Cache
from layerstore.cache.packs import CachedPack
from layerstore.digest import Digest
from layerstore.errors import CorruptError, NotFoundError
from layerstore.image import Image
from layerstore.pack import writer as pack_writer
from layerstore.pack.format import BLOCK_SIZE, FRAME_SIZE
from layerstore.pack.stored import StoredPack
from layerstore.store.protocol import Blob, Store
from prefetch.fetcher import Fetched, Fetcher
from prefetch.plan import FRAMES_PER_READ, FrameRange, PackFetch, plan_eager, ranges

MIB = 1 << 20


class Node:
    """A cache beside a store, filled as sandboxes need it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.cache = Cache(str(site.path))

    def plan(self, image: Image, store: Store | None = None) -> list[PackFetch]:
        store = store or self.site.store
        for layer in image.layers:
            self.cache.metadata.ensure(layer, store)
        return plan_eager(image.layers, self.cache, store)

    def fetch(self, image: Image, store: Store | None = None, **fields: Any) -> Fetched:
        return self.run(self.plan(image, store), store, **fields)

    def run(self, plan: list[PackFetch], store: Store | None = None, **fields: Any) -> Fetched:
        stores = {self.site.store.location: self.site.store, **({store.location: store} if store else {})}
        with Fetcher(stores.__getitem__, lambda wanted, hex: 0, **{"threads": 2, **fields}) as fetcher:
            return fetcher.run(plan)

    def pack(self, pack: StoredPack) -> CachedPack:
        return self.cache.known(pack.digest.hex)

    def present(self, pack: StoredPack) -> list[bool]:
        unready = set(self.pack(pack).unready(range(len(self.pack(pack).index))))
        return [number not in unready for number in range(len(self.pack(pack).index))]

    def raw(self, pack: StoredPack) -> bytes:
        return Path(self.pack(pack).data_path).read_bytes()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(os, "fdatasync", lambda file: None)
    with fsync_for_free():
        node = Node(Site(tmp_path))
        yield node
        node.cache.close()


def raw_of(site: Site, pack: StoredPack) -> bytes:
    with open(site.blob_path(pack.blob), "rb") as source:
        return zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True).read()


class Counting:
    """A store that counts what is read of each blob."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reads: dict[Digest, list[tuple[int, int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, digest: Digest) -> Blob:
        blob = self._store.open(digest)
        real = blob.read_at
        reads = self.reads.setdefault(digest, [])

        def read_at(offset: int, length: int) -> bytes:
            reads.append((offset, length))
            return real(offset, length)

        blob.read_at = read_at  # type: ignore[method-assign]
        return blob


class Elsewhere:
    """A store that has nothing."""

    location = "elsewhere"

    def open(self, digest: Digest) -> Blob:
        raise NotFoundError(f"blob {digest} is not in elsewhere")


def some_image(site: Site, size: int = 3 * MIB) -> Image:
    return site.convert(site.tar(file("a", noise(size, 1)), file("b", b"small")), tag="it").image


def test_a_layer_is_fetched_whole_and_raw(node: Node) -> None:
    image = some_image(node.site, 9 * MIB)
    [pack] = image.layers[0].packs
    fetched = node.fetch(image)
    assert node.raw(pack) == raw_of(node.site, pack)
    assert Digest.of(node.raw(pack)) == pack.digest
    frames = -(-pack.raw_size // FRAME_SIZE)
    assert fetched == Fetched(fetched.requests, pack.data_end, pack.raw_size, frames)
    assert -(-frames // FRAMES_PER_READ) <= fetched.requests < frames / 2, "it begins with short reads"
    assert node.pack(pack).complete


def test_what_is_there_is_not_fetched_again(node: Node) -> None:
    image = some_image(node.site)
    plan = node.plan(image)
    node.run(plan)
    nowhere: Any = Elsewhere()
    assert node.plan(image, nowhere) == []
    assert node.run(plan, nowhere) == Fetched()


@pytest.mark.case("P03")
def test_only_the_frames_that_a_layer_refers_to_are_fetched(node: Node) -> None:
    site = node.site
    site.convert(site.tar(*(file(f"f{n}", noise(FRAME_SIZE, n)) for n in range(8))), tag="all")
    some = site.convert(site.tar(file("x", noise(FRAME_SIZE, 3)), file("y", noise(FRAME_SIZE, 6))), tag="some").image
    [pack] = some.layers[0].packs
    assert pack.raw_size == 8 * FRAME_SIZE
    counting: Any = Counting(site.store)
    [item] = node.plan(some, counting)
    assert item == PackFetch(node.pack(pack), (FrameRange(3, 1), FrameRange(6, 1)))
    counting.reads.clear()
    fetched = node.run([item], counting)
    reads = counting.reads[pack.blob]
    assert sorted(reads) == [item.pack.index.blob_range(span.numbers) for span in item.ranges]
    assert fetched == Fetched(2, sum(length for _, length in reads), 2 * FRAME_SIZE, 2)
    assert node.present(pack) == [False, False, False, True, False, False, True, False]
    assert os.stat(item.pack.data_path).st_blocks * 512 < 4 * FRAME_SIZE


@pytest.mark.case("P02")
def test_layers_without_data_need_no_pack(node: Node) -> None:
    site = node.site
    for layer in (tar(), tar(directory("d"), symlink("l", "d"), file("empty")), tar(sparse_gnu("h", 1 << 30, []))):
        image = site.convert(site.raw_tar(layer)).image
        assert image.layers[0].packs == ()
        assert node.plan(image) == []
        assert node.fetch(image) == Fetched()


@pytest.mark.case("P06")
def test_hard_links_and_shared_chunks_are_planned_once(node: Node) -> None:
    site = node.site
    data = noise(10 * BLOCK_SIZE, 1)
    image = site.convert(site.tar(file("a", data), hardlink("b", "a"), file("c", data), file("d", data[:-5]))).image
    [item] = node.plan(image)
    assert item.ranges == (FrameRange(0, 1),)


def test_neighbours_are_read_together() -> None:
    assert ranges([], most=4) == []
    assert ranges([0, 1, 2, 3, 4, 6, 9, 8], most=4) == [
        FrameRange(0, 4),
        FrameRange(4, 1),
        FrameRange(6, 1),
        FrameRange(9, 1),
        FrameRange(8, 1),
    ]


def test_images_share_packs(node: Node) -> None:
    site = node.site
    first = some_image(site)
    node.fetch(first)
    second = site.convert(site.tar(file("moved", noise(3 * MIB, 1)), file("new", noise(100_000, 2)))).image
    assert first.layers[0].packs[0] in second.layers[0].packs
    [item] = node.plan(second)
    assert item.pack.digest == second.layers[0].packs[0].digest


def test_two_layers_that_use_one_pack_have_one_part_of_a_plan(node: Node) -> None:
    image = some_image(node.site)
    node.cache.metadata.ensure(image.layers[0], node.site.store)
    assert plan_eager([*image.layers, *image.layers], node.cache, node.site.store) == node.plan(image)


def test_a_missing_pack_is_missing(node: Node) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    plan = node.plan(image)
    node.site.blob_path(pack.blob).unlink()
    with pytest.raises(NotFoundError, match=str(pack.blob)):
        node.run(plan)


@pytest.mark.case("C10", "C11")
@pytest.mark.parametrize("damage", ["flip", "html"])
def test_a_bad_frame_never_enters_the_cache(node: Node, damage: str) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    plan = node.plan(image)
    start, length = plan[0].pack.index.blob_range(range(5, 6))
    path = node.site.blob_path(pack.blob)
    intact = path.read_bytes()
    page = b"<html>502 Bad Gateway</html>".ljust(length)
    bad = page if damage == "html" else bytes([intact[start + 100] ^ 1])
    at = start if damage == "html" else start + 100
    path.write_bytes(intact[:at] + bad + intact[at + len(bad) :])
    with pytest.raises(CorruptError, match=f"frame 5 of pack {pack.digest}"):
        node.run(plan)
    assert not node.present(pack)[5]
    assert not any(node.raw(pack)[5 * FRAME_SIZE : 6 * FRAME_SIZE])
    path.write_bytes(intact)
    node.fetch(image)
    assert Digest.of(node.raw(pack)) == pack.digest


def test_a_pack_may_come_from_two_blobs(node: Node, tmp_path: Path) -> None:
    other = Site(tmp_path / "other")
    source = node.site.tar(file("a", (b"text %d " * 40 % tuple(range(40))) * 9000))
    fast = node.site.convert(source, level=1).image
    small = other.convert(source, level=15).image
    [one], [two] = fast.layers[0].packs, small.layers[0].packs
    assert one.digest == two.digest and one.blob != two.blob
    half = one.raw_size // FRAME_SIZE // 2
    [item] = node.plan(fast)
    node.run([PackFetch(item.pack, (FrameRange(0, half),))])
    rest = node.plan(small, other.store)
    fetched = node.run(rest, other.store)
    first = -(-one.raw_size // FRAME_SIZE) - half
    assert fetched.frames == first
    assert Digest.of(node.raw(one)) == one.digest
    assert all(node.present(two))


@pytest.mark.case("C08")
def test_a_store_with_other_frames_does_not_help(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = node.site.tar(file("a", noise(MIB, 1)))
    image = node.site.convert(source).image
    node.plan(image)
    monkeypatch.setattr(pack_writer, "FRAME_SIZE", 2 * FRAME_SIZE)
    other = Site(tmp_path / "other")
    doubled = other.convert(source).image
    plan = node.plan(doubled, other.store)
    [pack] = image.layers[0].packs
    node.site.blob_path(pack.blob).unlink()
    with pytest.raises(CorruptError, match="has other frames than cached pack"):
        node.run(plan, other.store)


def killed_at_write(node: Node, image: Image, count: int) -> None:
    """A process fetches all of an image, and is killed in the middle of its ``count``th write into the cache."""
    node.cache.close()

    def work(child: Child) -> None:
        left = itertools.count(count - 1, -1)
        real = os.pwrite

        def pwrite(file: int, data: Any, offset: int) -> int:
            if next(left) == 0:
                real(file, memoryview(data)[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(file, data, offset)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            node.cache = Cache(str(node.site.path))
            node.fetch(image)
            node.cache.close()

    with Child(work) as child:
        select.select([child.report], [], [], 60)
    node.cache = Cache(str(node.site.path))


@pytest.mark.case("C09")
def test_killed_at_any_write_nothing_is_present_that_is_not_there(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetch.commits.SYNC_BYTES", 1)
    image = some_image(node.site, 8 * MIB)
    [pack] = image.layers[0].packs
    raw = raw_of(node.site, pack)
    node.plan(image)
    recorded = 0
    for count in range(1, 20):
        killed_at_write(node, image, count)
        cached = node.pack(pack)
        content = Path(cached.data_path).read_bytes()
        for frame, there in enumerate(cached._file.recorded):
            part = slice(frame * FRAME_SIZE, (frame + 1) * FRAME_SIZE)
            assert not there or content[part] == raw[part]
        recorded += sum(cached._file.recorded)
    assert recorded, "the test sees what it is about"
    node.fetch(image)
    assert node.raw(pack) == raw
    assert all(node.present(pack))
