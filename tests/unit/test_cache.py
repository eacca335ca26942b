"""The node's cache: what is fetched, what counts as there, and what never gets in."""

from __future__ import annotations

import json
import os
import random
import select
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.children import Child
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.tars import directory, file, hardlink, sparse_gnu, symlink, tar

from layerstore.cache.format import FramesHeader
from layerstore.cache.metadata import MetadataCache
from layerstore.cache.packs import CachedPack, PackCache
from layerstore.digest import Digest
from layerstore.errors import CorruptError, NotFoundError
from layerstore.image import Image, Layer, Role
from layerstore.pack import writer as pack_writer
from layerstore.pack.format import BLOCK_SIZE, FRAME_SIZE, FrameRecord
from layerstore.pack.stored import StoredPack
from layerstore.progress import SILENT
from layerstore.staging import StagedFile
from layerstore.store.protocol import Blob, Store
from prefetch.fetch import Fetched, fetch
from prefetch.plan import FRAMES_PER_READ, FrameRange, PackFetch, plan_eager, ranges

MIB = 1 << 20


class Node:
    """A cache beside the store, filled as a sandbox needs it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.metadata = MetadataCache(str(site.path / "cache" / "meta"))
        self.packs = PackCache(str(site.path / "cache" / "packs"))

    def plan(self, image: Image, store: Store | None = None) -> list[PackFetch]:
        store = store or self.site.store
        for layer in image.layers:
            self.metadata.ensure(layer, store)
        return plan_eager(image.layers, store, self.metadata, self.packs)

    def fetch(self, image: Image, store: Store | None = None, **fields: Any) -> Fetched:
        store = store or self.site.store
        plan = self.plan(image, store)
        return fetch(plan, store, self.packs, **{"jobs": 2, "progress": SILENT, **fields})

    def directory(self, pack: StoredPack) -> Path:
        return self.site.path / "cache" / "packs" / "sha256" / pack.digest.hex

    def present(self, pack: StoredPack) -> list[bool]:
        with CachedPack(str(self.directory(pack)), pack) as cached:
            missing = set(cached.missing(range(len(cached.index))))
            return [number not in missing for number in range(len(cached.index))]

    def leftovers(self) -> list[str]:
        return [
            name
            for _, directories, files in os.walk(self.site.path / "cache")
            for name in (*directories, *files)
            if name.startswith(".tmp-")
        ]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(os, "fdatasync", lambda file: None)
    with fsync_for_free():
        yield Node(Site(tmp_path))


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


# -- what is fetched --------------------------------------------------------------------------------------------------


def test_a_layer_is_fetched_whole_and_raw(node: Node) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    fetched = node.fetch(image)
    assert (node.directory(pack) / "data").read_bytes() == raw_of(node.site, pack)
    assert Digest.of(Path(node.packs.data_path(pack)).read_bytes()) == pack.digest
    path = node.metadata.ensure(image.layers[0], node.site.store)
    assert Digest.of(Path(path).read_bytes()) == image.layers[0].metadata
    assert fetched.raw == pack.raw_size
    assert fetched.compressed == pack.data_end
    assert fetched.requests == -(-(pack.raw_size // FRAME_SIZE) // FRAMES_PER_READ)
    assert all(node.present(pack))
    assert node.leftovers() == []


def test_what_is_there_is_not_fetched_again(node: Node) -> None:
    image = some_image(node.site)
    node.fetch(image)
    nowhere: Any = Elsewhere()
    assert node.plan(image, nowhere) == []
    assert node.fetch(image, nowhere) == Fetched()


@pytest.mark.case("P03")
def test_only_the_frames_that_a_layer_refers_to_are_fetched(node: Node) -> None:
    site = node.site
    site.convert(site.tar(*(file(f"f{n}", noise(FRAME_SIZE, n)) for n in range(8))), tag="all")
    some = site.convert(site.tar(file("x", noise(FRAME_SIZE, 3)), file("y", noise(FRAME_SIZE, 6))), tag="some").image
    [pack] = some.layers[0].packs
    assert pack.raw_size == 8 * FRAME_SIZE
    counting: Any = Counting(site.store)
    [item] = node.plan(some, counting)
    assert item.ranges == (FrameRange(3, 1), FrameRange(6, 1))
    counting.reads.clear()
    fetched = node.fetch(some, counting)
    reads = counting.reads[pack.blob]
    with node.packs.open(pack, site.store) as cached:
        wanted = [cached.index.blob_range(span.numbers) for span in item.ranges]
    assert sorted(reads) == wanted
    assert (fetched.requests, fetched.compressed) == (2, sum(length for _, length in reads))
    assert fetched.raw == 2 * FRAME_SIZE
    assert node.present(pack) == [False, False, False, True, False, False, True, False]
    assert os.stat(node.directory(pack) / "data").st_blocks * 512 < 4 * FRAME_SIZE


@pytest.mark.case("P02")
def test_layers_without_data_need_no_pack(node: Node) -> None:
    site = node.site
    for layer in (tar(), tar(directory("d"), symlink("l", "d"), file("empty")), tar(sparse_gnu("h", 1 << 30, []))):
        image = site.convert(site.raw_tar(layer)).image
        assert image.layers[0].packs == ()
        assert node.plan(image) == []
        assert node.fetch(image) == Fetched()
        assert node.metadata.uses(image.layers[0]) == []


@pytest.mark.case("P06")
def test_hard_links_and_shared_chunks_are_used_once(node: Node) -> None:
    site = node.site
    data = noise(10 * BLOCK_SIZE, 1)
    image = site.convert(site.tar(file("a", data), hardlink("b", "a"), file("c", data), file("d", data[:-5]))).image
    [use] = node.metadata.uses(image.layers[0]) if node.plan(image) else []
    assert use.runs == ((0, image.layers[0].packs[0].blocks),)


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
    assert item.pack == second.layers[0].packs[0]


# -- what counts as there ---------------------------------------------------------------------------------------------


@pytest.mark.case("C09")
def test_a_frame_counts_only_once_its_data_is_durable(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    calls: list[tuple[str, str]] = []
    real = os.pwrite

    def name(file: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{file}"))

    def pwrite(file: int, data: Any, offset: int) -> int:
        calls.append(("write", name(file)))
        return real(file, data, offset)

    plan = node.plan(image)
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", lambda file: calls.append(("sync", name(file))))
    fetch(plan, node.site.store, node.packs, jobs=2, progress=SILENT)
    frames = len(node.present(pack))
    assert calls == [
        *[("write", "data")] * frames,
        ("sync", "data"),
        *[("write", "frames")] * frames,
        ("sync", "frames"),
    ]


@pytest.mark.case("C09")
def test_a_fetch_that_stops_before_the_record_starts_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs

    def stop(self: CachedPack, numbers: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CachedPack, "record", stop)
        with pytest.raises(KeyboardInterrupt):
            node.fetch(image)
    assert not any(node.present(pack))
    assert node.fetch(image).raw == pack.raw_size
    assert Digest.of((node.directory(pack) / "data").read_bytes()) == pack.digest


@pytest.mark.case("C09")
def test_killed_at_any_time_nothing_is_present_that_is_not_there(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetch.fetch.READS_PER_SYNC", 1)
    monkeypatch.setattr("prefetch.plan.FRAMES_PER_READ", 1)
    image = some_image(node.site, 8 * MIB)
    [pack] = image.layers[0].packs
    raw = raw_of(node.site, pack)
    rng = random.Random(0)
    found = 0
    for _ in range(25):
        with Child(lambda child: node.fetch(image, jobs=1)) as child:
            select.select([child.report], [], [], rng.uniform(0, 0.02))
            child.kill()
        if not (node.directory(pack) / "frames").exists():
            continue
        content = (node.directory(pack) / "data").read_bytes()
        present = node.present(pack)
        for number, there in enumerate(present):
            part = slice(number * FRAME_SIZE, (number + 1) * FRAME_SIZE)
            assert not there or content[part] == raw[part]
        assert sum(present) >= found, "what was there stays"
        found = sum(present)
    node.fetch(image)
    assert (node.directory(pack) / "data").read_bytes() == raw


@pytest.mark.case("C09")
@pytest.mark.parametrize("lost", ["all", "one block", "the end"])
def test_a_hole_is_missing_whatever_the_presence_says(node: Node, lost: str) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    node.fetch(image)
    path = node.directory(pack) / "data"
    raw = path.read_bytes()
    path.unlink()
    with open(path, "wb") as out:
        if lost == "one block":
            out.write(raw[: 5 * BLOCK_SIZE])
            out.seek(6 * BLOCK_SIZE)
            out.write(raw[6 * BLOCK_SIZE :])
        elif lost == "the end":
            out.write(raw[: 2 * FRAME_SIZE])
        out.truncate(len(raw))
    expected = {"all": set(), "one block": set(range(1, 12)), "the end": {0, 1}}[lost]
    assert {number for number, there in enumerate(node.present(pack)) if there} == expected
    node.fetch(image)
    assert path.read_bytes() == raw
    assert all(node.present(pack))


def with_header(content: bytes, **fields: Any) -> bytes:
    header = FramesHeader.unpack(content)
    values = {name: getattr(header, name) for name in FramesHeader.__slots__}
    return FramesHeader(**{**values, **fields}).pack() + content[FramesHeader.STRUCT.size :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
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
}


@pytest.mark.case("C08", "C10")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_frames_file_is_refused_and_named(node: Node, damage: str) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    node.fetch(image)
    path = node.directory(pack) / "frames"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(CorruptError, match=f"cached pack {pack.digest}: .*; remove {node.directory(pack)}$"):
        node.fetch(image)
    for name in os.listdir(node.directory(pack)):
        (node.directory(pack) / name).unlink()
    node.fetch(image)
    assert Digest.of((node.directory(pack) / "data").read_bytes()) == pack.digest


def test_a_presence_that_is_neither_yes_nor_no_is_no(node: Node) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    node.fetch(image)
    path = node.directory(pack) / "frames"
    content = bytearray(path.read_bytes())
    content[-1], content[-2] = 0xFF, 0
    path.write_bytes(content)
    assert node.present(pack)[-3:] == [True, False, False]


@pytest.mark.parametrize("damage", ["cut", "longer", "gone"])
def test_data_of_a_wrong_size_is_refused_and_named(node: Node, damage: str) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    node.fetch(image)
    path = node.directory(pack) / "data"
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, pack.raw_size + (BLOCK_SIZE if damage == "longer" else -BLOCK_SIZE))
    with pytest.raises(CorruptError, match=f"remove {node.directory(pack)}$"):
        node.fetch(image)


def test_data_without_a_frames_file_is_fetched_anew(node: Node) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    node.fetch(image)
    (node.directory(pack) / "frames").unlink()
    with open(node.directory(pack) / "data", "r+b") as out:
        out.write(b"damage")
    assert node.fetch(image).raw == pack.raw_size
    assert Digest.of((node.directory(pack) / "data").read_bytes()) == pack.digest


def test_fillers_at_the_same_time_fetch_everything_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetch.fetch.READS_PER_SYNC", 1)
    image = some_image(node.site, 12 * MIB)
    [pack] = image.layers[0].packs
    plan = node.plan(image)
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(
                fetch, plan, node.site.store, PackCache(str(node.site.path / "cache/packs")), jobs=2, progress=SILENT
            )
            for _ in range(3)
        ]
        done = [job.result() for job in jobs]
    assert sum(each.raw for each in done) == pack.raw_size
    assert Digest.of((node.directory(pack) / "data").read_bytes()) == pack.digest


# -- what never gets in -----------------------------------------------------------------------------------------------


@pytest.mark.case("C10", "C11")
@pytest.mark.parametrize("damage", ["flip", "html"])
def test_a_bad_frame_never_enters_the_cache(node: Node, damage: str) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    plan = node.plan(image)
    with node.packs.open(pack, node.site.store) as cached:
        start, length = cached.index.blob_range(range(5, 6))
    path = node.site.blob_path(pack.blob)
    intact = path.read_bytes()
    page = b"<html>502 Bad Gateway</html>".ljust(length)
    bad = page if damage == "html" else bytes([intact[start + 100] ^ 1])
    at = start if damage == "html" else start + 100
    path.write_bytes(intact[:at] + bad + intact[at + len(bad) :])
    with pytest.raises(CorruptError, match=f"frame 5 of pack {pack.digest}"):
        fetch(plan, node.site.store, node.packs, jobs=2, progress=SILENT)
    assert not node.present(pack)[5]
    content = (node.directory(pack) / "data").read_bytes()
    assert not any(content[5 * FRAME_SIZE : 6 * FRAME_SIZE])
    path.write_bytes(intact)
    node.fetch(image)
    assert Digest.of((node.directory(pack) / "data").read_bytes()) == pack.digest


@pytest.mark.case("C11")
def test_a_blob_of_another_size_is_not_even_opened_for_frames(node: Node) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    node.metadata.ensure(image.layers[0], node.site.store)
    node.site.blob_path(pack.blob).write_bytes(b"<html>")
    with pytest.raises(CorruptError, match=str(pack.blob)):
        node.fetch(image)
    assert not node.directory(pack).exists()


@pytest.mark.case("C05", "C11")
@pytest.mark.parametrize("damage", ["flip", "cut", "html"])
def test_a_bad_metadata_image_never_enters_the_cache(node: Node, damage: str) -> None:
    image = some_image(node.site)
    layer = image.layers[0]
    path = node.site.blob_path(layer.blob)
    intact = path.read_bytes()
    changed = {"cut": intact[:-9], "html": b"<html>".ljust(len(intact))}.get(damage)
    if changed is None:
        node.site.flip(layer.blob, 40)
    else:
        path.write_bytes(changed)
    with pytest.raises(CorruptError):
        node.metadata.ensure(layer, node.site.store)
    assert not os.path.exists(node.metadata.path(layer))
    assert node.leftovers() == []
    path.write_bytes(intact)
    assert os.path.exists(node.metadata.ensure(layer, node.site.store))


def test_a_missing_pack_is_missing(node: Node) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    node.metadata.ensure(image.layers[0], node.site.store)
    node.site.blob_path(pack.blob).unlink()
    with pytest.raises(NotFoundError, match=str(pack.blob)):
        node.fetch(image)


# -- one pack in two blobs --------------------------------------------------------------------------------------------


def test_a_pack_may_come_from_two_blobs(node: Node, tmp_path: Path) -> None:
    other = Site(tmp_path / "other")
    source = node.site.tar(file("a", (b"text %d " * 40 % tuple(range(40))) * 9000))
    fast = node.site.convert(source, level=1).image
    small = other.convert(source, level=15).image
    [one], [two] = fast.layers[0].packs, small.layers[0].packs
    assert one.digest == two.digest and one.blob != two.blob
    first, rest = node.plan(fast), node.plan(small, other.store)
    half = one.raw_size // FRAME_SIZE // 2
    fetch([PackFetch(one, (FrameRange(0, half),))], node.site.store, node.packs, jobs=2, progress=SILENT)
    assert sum(node.present(two)) == half
    fetch(rest, other.store, node.packs, jobs=2, progress=SILENT)
    assert Digest.of((node.directory(one) / "data").read_bytes()) == one.digest
    assert all(node.present(one)) and all(node.present(two))
    assert first[0].pack == one


@pytest.mark.case("C08")
def test_a_blob_with_other_frames_is_refused(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = node.site.tar(file("a", noise(MIB, 1)))
    node.fetch(node.site.convert(source).image)
    monkeypatch.setattr(pack_writer, "FRAME_SIZE", 2 * FRAME_SIZE)
    other = Site(tmp_path / "other")
    image = other.convert(source).image
    [pack] = image.layers[0].packs
    plan = [PackFetch(pack, (FrameRange(0, 1),))]
    with pytest.raises(CorruptError, match="has other frames than cached pack"):
        fetch(plan, other.store, node.packs, jobs=1, progress=SILENT)


# -- metadata images --------------------------------------------------------------------------------------------------


@pytest.mark.case("C08")
@pytest.mark.parametrize("damage", ["gone", "not JSON", "version", "magic", "beyond", "shape"])
def test_what_a_layer_uses_is_found_out_anew_if_it_is_not_known(node: Node, damage: str) -> None:
    image = some_image(node.site)
    layer = image.layers[0]
    node.plan(image)
    expected = node.metadata.uses(layer)
    path = Path(node.metadata.path(layer) + ".uses")
    document = json.loads(path.read_bytes())
    changes: dict[str, Any] = {
        "version": {**document, "version": 2},
        "magic": {**document, "magic": "other"},
        "beyond": {**document, "packs": [[document["packs"][0][0], [[0, 10**9]]]]},
        "shape": {**document, "packs": [[1]]},
    }
    path.unlink()
    if damage == "not JSON":
        path.write_bytes(b"{")
    elif damage != "gone":
        path.write_bytes(json.dumps(changes[damage]).encode())
    with pytest.raises(CorruptError, match="fetch the layer again"):
        node.metadata.uses(layer)
    node.metadata.ensure(layer, node.site.store)
    assert node.metadata.uses(layer) == expected


def test_a_cached_metadata_image_is_not_taken_with_other_packs(node: Node) -> None:
    """A manifest that lists another pack in a device's place would make its bytes another file's."""
    site = node.site
    image = some_image(site)
    node.fetch(image)
    stranger = site.convert(site.tar(file("other", noise(3 * MIB, 9))), Role.BASE, dedup=False).layer.packs[0]
    layer = image.layers[0]
    forged = Layer(layer.role, layer.metadata, layer.metadata_size, layer.blob, layer.blob_size, (stranger,))
    for _ in range(2):
        with pytest.raises(CorruptError, match="manifest"):
            node.metadata.ensure(forged, site.store)
        fresh = MetadataCache(str(site.path / "cache" / "fresh"))
        with pytest.raises(CorruptError, match="device table"):
            fresh.ensure(forged, site.store)


def test_what_dead_writers_left_is_reclaimed_and_nothing_else(node: Node) -> None:
    node.fetch(some_image(node.site))
    cached = [Path(folder, name) for folder, _, names in os.walk(node.site.path / "cache") for name in names]
    places = {path.parent for path in cached}
    for place in places:
        Path(place, ".tmp-1-dead").write_bytes(b"half" * 2000)
    living = StagedFile(str(min(places)))
    living.write(b"on its way")
    freed = node.metadata.reclaim() + node.packs.reclaim()
    assert freed >= 8000 * len(places)
    assert len(node.leftovers()) == 1
    living.discard()
    assert not node.leftovers()
    assert all(path.exists() for path in cached)


def test_the_frames_file_has_the_documented_size(node: Node) -> None:
    image = some_image(node.site)
    [pack] = image.layers[0].packs
    node.fetch(image)
    frames = pack.raw_size // FRAME_SIZE
    size = os.stat(node.directory(pack) / "frames").st_size
    assert size == FramesHeader.STRUCT.size + frames * (FrameRecord.STRUCT.size + 1)
