"""Conversions that are told what is read first: the same trees, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.relays import hot, pack_bytes, padded, same
from support.tars import directory, file, hardlink, sparse_pax, symlink, tar, whiteout

from layerstore.audit import ContentCheck
from layerstore.convert import Hot, Report
from layerstore.errors import CorruptError
from layerstore.hot import HotFile
from layerstore.image import Role, load_image
from layerstore.pack.chunks import CHUNK_SIZE
from layerstore.pack.format import BLOCK_SIZE, FRAME_SIZE
from layerstore.rawpacks import is_raw
from layerstore.store.verification import verify

A, B, C = noise(5 * CHUNK_SIZE + 100, 1), noise(70_000, 2), noise(3 * FRAME_SIZE, 3)
LAYER = tar(
    directory("lib", mtime=10),
    file("a", A, mode=0o4755, uid=1000, mtime=5),
    file("b", B),
    file("lib/big", C),
    hardlink("lib/b", "b"),
    sparse_pax("holes", 300_000, [(0, noise(5000, 5)), (200_000, noise(9000, 6))], "1.0"),
    file("small", b"inline"),
    symlink("link", "a"),
    directory("empty"),
)
WANTED = (
    HotFile(b"lib/big", 700_000, 40_000),
    HotFile(b"lib/b", 0, 1 << 40),
    HotFile(b"a", CHUNK_SIZE, 1),
    HotFile(b"lib/big", 0, 1),
)
FIRST = C[688_128:753_664] + padded(B) + A[CHUNK_SIZE : 2 * CHUNK_SIZE] + C[:CHUNK_SIZE]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fsync_for_free():
        yield Site(tmp_path)


def planned(site: Site, source: str, tag: str, **fields: object) -> tuple[Report, Hot]:
    report = site.convert(source, tag=tag, **{"hot": WANTED, **fields})
    assert report.hot is not None
    return report, report.hot


def sound(site: Site) -> None:
    assert list(verify(site.store, check=ContentCheck())) == []
    assert site.leftovers() == []


@pytest.mark.case("P06")
def test_the_tree_is_that_without_a_plan_and_the_pack_begins_with_what_is_hot(site: Site) -> None:
    plain = site.convert(site.image([LAYER]), tag="plain")
    other = Site(site.path / "other")
    report, what = planned(other, other.image([LAYER]), "hot")
    assert other.rows("hot") == site.rows("plain")
    (pack,) = report.layer.packs
    data = pack_bytes(other.store, pack)
    assert data[: len(FIRST)] == FIRST
    # Nothing is stored twice, for hard links neither: it is the same set of chunks.
    assert pack.raw_size == plain.layer.packs[0].raw_size == report.data_size == report.new_size
    # The rest follows by path.
    rest = data[len(FIRST) :]
    assert rest.startswith(A[:CHUNK_SIZE] + padded(A[2 * CHUNK_SIZE :]))
    assert what == Hot(len(FIRST), len(FIRST) // CHUNK_SIZE + 1, 1, 0, 4, {})
    sound(other)


def test_the_digests_depend_on_source_and_plan_alone(site: Site) -> None:
    one, two = Site(site.path / "one"), Site(site.path / "two")
    first, _ = planned(one, one.image([LAYER]), "x", jobs=1)
    second, _ = planned(two, two.image([LAYER]), "y", jobs=4)
    assert first.manifest == second.manifest
    another, _ = planned(two, two.image([LAYER]), "z", hot=WANTED[::-1], dedup=False)
    assert another.manifest != first.manifest


@pytest.mark.case("P06")
def test_what_names_nothing_is_counted_and_left_out(site: Site) -> None:
    wanted = (
        HotFile(b"missing", 0, 10),
        HotFile(b"a/b", 0, 10),
        HotFile(b"link", 0, 10),  # a plan names files, not links to them
        HotFile(b"empty", 0, 10),
        HotFile(b"small", 0, 6),
        HotFile(b"holes", 100_000, 10),
        HotFile(b"a", 1 << 50, 10),
        HotFile(b"a", 0, 0),
        HotFile(b"", 0, 10),
    )
    plain = site.convert(site.image([LAYER]), tag="plain", dedup=False)
    report, what = planned(site, site.image([LAYER]), "hot", hot=wanted, dedup=False)
    assert what.unmatched == {
        "no such file": 4,
        "without a path": 1,
        "in the metadata image": 1,
        "beyond the file's data": 2,
    }
    assert (what.matched, what.chunks) == (1, 1)  # no bytes are the chunk that they are in
    assert report.manifest == plain.manifest  # the first chunk of the first file is first anyway


@pytest.mark.case("P06")
def test_a_path_that_a_layer_has_whited_out(site: Site) -> None:
    layers = [LAYER, tar(whiteout("a"), file("lib/big", B))]
    report, what = planned(site, site.image(layers), "hot")
    assert what.unmatched == {"no such file": 1, "beyond the file's data": 1}
    site.convert(site.image(layers), tag="plain", dedup=False)
    same(site, "plain", "hot")
    assert pack_bytes(site.store, report.layer.packs[0]).startswith(padded(B))


@pytest.mark.case("P02")
@pytest.mark.parametrize("layer", [tar(directory("d"), symlink("l", "d"), file("e")), tar(file("s", b"x"))])
def test_a_layer_without_data(site: Site, layer: bytes) -> None:
    plain = site.convert(site.tar(layer), tag="plain")
    report, what = planned(site, site.tar(layer), "hot", hot=(HotFile(b"e", 0, 10), HotFile(b"s", 0, 1)))
    assert report.manifest == plain.manifest
    assert report.layer.packs == ()
    assert (what.size, what.chunks, what.frames, what.matched) == (0, 0, 0, 0)
    assert sum(what.unmatched.values()) == 2
    sound(site)


@pytest.mark.case("P02")
def test_no_plan_and_an_empty_one_are_the_same(site: Site) -> None:
    report = site.convert(site.image([LAYER]), hot=())
    assert report.hot is None
    assert report.manifest == site.convert(site.image([LAYER]), dedup=False).manifest


def test_hot_chunks_are_written_though_other_packs_have_them_scattered(site: Site) -> None:
    plain = site.convert(site.image([LAYER]), tag="plain")
    scattered = (*WANTED, HotFile(b"lib/big", 300_000, 1))
    first = FIRST + C[294_912:311_296]
    report, what = planned(site, site.image([LAYER]), "hot", hot=scattered)
    same(site, "plain", "hot")
    new, old = report.layer.packs
    assert old == plain.layer.packs[0]
    assert pack_bytes(site.store, new) == first
    assert what.copied_size == what.size == report.new_size == len(first)
    sound(site)


def test_where_a_pack_has_them_together_they_are_referred_to_there(site: Site) -> None:
    report, _ = planned(site, site.image([LAYER]), "hot")
    blobs = site.blobs()
    again, what = planned(site, site.image([LAYER]), "again")
    assert again.manifest == report.manifest
    assert (again.new_size, what.copied_size) == (0, 0)
    assert site.blobs() == blobs
    # Another build, whose hot part is the same.
    build = tar(file("new", noise(100_000, 9)), file("a", A), file("b", B), file("lib/big", C), hardlink("lib/b", "b"))
    third, what = planned(site, site.image([build]), "next")
    assert what.copied_size == 0
    assert third.new_size == len(padded(noise(100_000, 9)))
    assert report.layer.packs[0] in third.layer.packs


def test_a_pack_that_is_damaged_is_no_place_for_them(site: Site) -> None:
    report, _ = planned(site, site.image([LAYER]), "hot")
    site.flip(report.layer.packs[0].blob, 1000)
    heard: list[str] = []
    again, _ = planned(site, site.image([LAYER]), "again", warn=heard.append)
    assert any("not reusing pack" in text for text in heard)
    # The same pack again, so the damaged blob is replaced.
    assert again.manifest == report.manifest
    sound(site)


def test_over_a_base(site: Site) -> None:
    site.convert(site.image([LAYER]), tag="base")
    work = tar(file("src/a", A), file("src/new", noise(60_000, 7)), whiteout("b"))
    wanted = (HotFile(b"src/new", 20_000, 1), HotFile(b"src/a", 0, 20_000), HotFile(b"lib/big", 0, 10))
    source = site.image([LAYER, work])
    report, what = planned(site, source, "work", role=Role.WORKSPACE, base="base", hot=wanted)
    assert what.unmatched == {"no such file": 1}  # that is the base's
    assert what.copied_size == 2 * CHUNK_SIZE
    site.convert(source, Role.WORKSPACE, base="base", tag="plain")
    same(site, "plain", "work")
    ranges = hot(site.store, report.layer, (b"src/new", 20_000, 1), (b"src/a", 0, 20_000))
    assert [(each.device, each.offset) for each in ranges] == [(1, 0), (1, CHUNK_SIZE), (1, 2 * CHUNK_SIZE)]


def test_raw(site: Site) -> None:
    report, _ = planned(site, site.image([LAYER]), "hot", raw=True)
    (pack,) = report.layer.packs
    assert is_raw(site.store, pack)
    assert Path(site.store.local_path(pack.digest)).read_bytes() == pack_bytes(site.store, pack)


def test_a_huge_file_moves_in_its_larger_chunks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerstore.pack.chunks.CHUNKS_PER_FILE", 8)
    report, what = planned(site, site.image([LAYER]), "hot", hot=(HotFile(b"lib/big", 500_000, 1),))
    assert what.chunks == 1 and what.size == 128 << 10
    assert pack_bytes(site.store, report.layer.packs[0]).startswith(C[3 * (128 << 10) : 4 * (128 << 10)])
    assert site.rows("hot")[b"lib/big"].value == C


def test_a_source_that_is_damaged(site: Site) -> None:
    source = site.image([LAYER])
    directory = Path(source.split(":")[1])
    layer = max((path for path in (directory / "blobs/sha256").iterdir()), key=lambda path: path.stat().st_size)
    data = bytearray(layer.read_bytes())
    data[len(data) // 2] ^= 1
    layer.write_bytes(data)
    with pytest.raises(CorruptError):
        site.convert(source, tag="hot", hot=WANTED)
    assert list(site.store.names()) == []
    assert site.leftovers() == []


def test_what_is_published_names_no_block_twice(site: Site) -> None:
    planned(site, site.image([LAYER]), "hot")
    (layer,) = load_image(site.store, "hot").layers
    ranges = hot(site.store, layer, b"a", b"b", b"lib/big", b"holes")
    assert sum(each.length for each in ranges) == layer.packs[0].raw_size
    assert len({each.offset for each in ranges}) == len(ranges)
    assert all(each.offset % BLOCK_SIZE == 0 for each in ranges)
