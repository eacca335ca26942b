"""Where files lie: pack ranges of paths, and paths of pack ranges."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.placed import BLOCK, WHITEOUT, At, Inline, at, placed_file, places, tree
from support.tars import directory, file, hardlink, sparse_gnu, symlink, tar, whiteout

from layerstore.convert import Report
from layerstore.erofs.layout import HOLE
from layerstore.errors import MalformedError
from layerstore.image import Image, Role, load_image
from layerstore.pack.reader import PackReader
from prefetch.trace.places import Found, ImagePlaces, Place, Range, open_places, traced_layers


def found(here: ImagePlaces, path: bytes) -> Found:
    result = here.find(path)
    assert result is not None
    return result


def test_a_file_lies_in_one_piece_where_its_chunks_follow_each_other() -> None:
    here = places(tree({"a": 5000, "b": 12_289}))
    assert here.ranges(found(here, b"a")) == [Place(Range(0, 1, 0, 8192), b"a", 0)]
    assert here.ranges(found(here, b"b")) == [Place(Range(0, 1, 8192, 16_384), b"b", 0)]


def test_chunks_that_do_not_follow_each_other_are_pieces() -> None:
    scattered = At(4 * BLOCK, (at(1, 5), at(1, 6), at(2, 7), at(1, 0)))
    here = places(tree({"f": scattered}))
    assert here.ranges(found(here, b"f")) == [
        Place(Range(0, 1, 5 * BLOCK, 2 * BLOCK), b"f", 0),
        Place(Range(0, 2, 7 * BLOCK, BLOCK), b"f", 2 * BLOCK),
        Place(Range(0, 1, 0, BLOCK), b"f", 3 * BLOCK),
    ]


def test_chunks_that_follow_each_other_over_a_hole_are_two_pieces() -> None:
    here = places(tree({"f": At(3 * BLOCK, (at(1, 5), HOLE, at(1, 6)))}))
    assert [place.file_offset for place in here.ranges(found(here, b"f"))] == [0, 2 * BLOCK]


def test_the_last_chunk_takes_only_the_blocks_that_it_has() -> None:
    here = places(tree({"f": At(16_384 + 4097, (at(1, 8), at(1, 100)), bits=2)}))
    assert here.ranges(found(here, b"f")) == [
        Place(Range(0, 1, 8 * BLOCK, 16_384), b"f", 0),
        Place(Range(0, 1, 100 * BLOCK, 8192), b"f", 16_384),
    ]


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, None, [(0, 12_288)]),
        (0, 1, [(0, 4096)]),
        (4095, 1, [(0, 4096)]),
        (4095, 2, [(0, 8192)]),
        (4096, 4096, [(4096, 4096)]),
        (8192, 4096, [(8192, 4096)]),
        (9999, 1, [(8192, 4096)]),
        (0, 1 << 53, [(0, 12_288)]),
        (0, 0, []),
        (5000, 0, []),
        (10_000, 10, []),
        (10_001, 10, []),
        (1 << 53, 1, []),
    ],
)
def test_bytes_of_a_file_are_whole_blocks_and_never_more_than_it_has(
    offset: int, length: int | None, expected: list[tuple[int, int]]
) -> None:
    here = places(tree({"first": 8192, "f": 10_000}))
    ranges = here.ranges(found(here, b"f"), offset, length)
    assert [(place.file_offset, place.range.length) for place in ranges] == expected
    assert all(place.range.offset == 8192 + place.file_offset for place in ranges)


def test_what_is_in_the_metadata_image_or_a_hole_has_no_range() -> None:
    here = places(tree({"small": Inline(100), "empty": Inline(0), "holes": At(8192, (HOLE, HOLE))}))
    for name in (b"small", b"empty", b"holes"):
        assert here.ranges(found(here, name)) == []


def test_links_lead_to_the_file_and_its_own_path() -> None:
    here = places(tree({"usr/bin/sh": 10, "bin": "/usr/bin", "usr/lib": "../bin", "l": "bin/sh"}))
    for path in (b"bin/sh", b"/bin/sh", b"l", b"usr/lib/sh", b"./usr/../bin/sh"):
        assert found(here, path).path == b"usr/bin/sh"
    for path in (b"bin", b"", b"/", b"usr/bin/sh/x", b"nothing", b"usr/bin/nothing"):
        assert here.find(path) is None


def test_links_in_a_circle_are_an_error() -> None:
    here = places(tree({"a": "b", "b": "a"}))
    with pytest.raises(MalformedError, match="loop"):
        here.find(b"a")


def test_a_range_names_the_parts_of_files_that_it_holds() -> None:
    here = places(tree({"a": 5000, "b": 12_289, "c": 1}))
    assert here.at(Range(0, 1, 4096, 8192)) == [
        Place(Range(0, 1, 4096, 4096), b"a", 4096),
        Place(Range(0, 1, 8192, 4096), b"b", 0),
    ]
    assert here.at(Range(0, 1, 0, 1 << 40)) == [
        Place(Range(0, 1, 0, 8192), b"a", 0),
        Place(Range(0, 1, 8192, 16_384), b"b", 0),
        Place(Range(0, 1, 24_576, 4096), b"c", 0),
    ]


def test_a_range_that_no_file_has_names_nothing() -> None:
    here = places(tree({"a": At(4096, (at(1, 10),))}))
    for range in (Range(0, 1, 0, 40_960), Range(0, 1, 45_056, 4096), Range(0, 2, 40_960, 4096), Range(7, 1, 0, 4096)):
        assert here.at(range) == []
    assert here.at(Range(0, 1, 36_864, 12_288)) == [Place(Range(0, 1, 40_960, 4096), b"a", 0)]


def test_of_files_that_share_data_the_first_by_path_is_named_once() -> None:
    shared = (at(1, 3), at(1, 4))
    here = places(tree({"z": At(8192, shared), "b": At(8192, shared), "m": At(12_288, (at(1, 2), *shared))}))
    assert here.at(Range(0, 1, 0, 40_960)) == [
        Place(Range(0, 1, 8192, 12_288), b"m", 0),
    ]
    assert here.at(Range(0, 1, 16_384, 4096)) == [Place(Range(0, 1, 16_384, 4096), b"m", 8192)]
    only = places(tree({"z": At(8192, shared), "b": At(8192, shared)}))
    assert [place.path for place in only.at(Range(0, 1, 0, 40_960))] == [b"b"]


def test_data_that_overlap_are_cut_not_named_twice() -> None:
    here = places(
        tree(
            {
                "long": At(5 * BLOCK, tuple(at(1, n) for n in range(5))),
                "inside": At(BLOCK, (at(1, 1),)),
                "over": At(3 * BLOCK, tuple(at(1, n) for n in range(3, 6))),
            }
        )
    )
    assert here.at(Range(0, 1, 0, 1 << 20)) == [
        Place(Range(0, 1, 0, 5 * BLOCK), b"long", 0),
        Place(Range(0, 1, 5 * BLOCK, BLOCK), b"over", 2 * BLOCK),
    ]


def test_hard_links_are_one_file_under_each_name() -> None:
    inode = placed_file(4096, (at(1, 0),))
    here = places(tree({"b": inode, "a": inode}))
    assert [item.path for item in here.files()] == [b"a", b"b"]
    assert {found(here, name).file for name in (b"a", b"b")} == {inode}
    assert [place.path for place in here.at(Range(0, 1, 0, 4096))] == [b"a"]


def test_layers_of_a_stack_have_their_own_devices() -> None:
    base = tree({"etc/os": 4096, "etc/gone": 4096, "bin/sh": 8192})
    work = tree({"etc/os": 12_288, "etc/gone": WHITEOUT, "src/a": 4096})
    here = places(base, work)
    assert [(item.path, item.layer) for item in here.files()] == [(b"bin/sh", 0), (b"etc/os", 1), (b"src/a", 1)]
    assert here.ranges(found(here, b"etc/os"))[0].range == Range(1, 1, 0, 12_288)
    assert here.ranges(found(here, b"bin/sh"))[0].range == Range(0, 1, 8192, 8192)
    assert here.find(b"etc/gone") is None
    # What is hidden is named all the same: a recorder sees packs, and the base's are mounted as they are.
    assert [place.path for place in here.at(Range(0, 1, 0, 8192))] == [b"etc/os", b"etc/gone"]


BASE = tar(
    directory("etc"),
    file("etc/config", noise(20_000, 1)),
    symlink("config", "etc/config"),
    file("bin/tool", noise(300_000, 2)),
    hardlink("bin/same", "bin/tool"),
    file("bin/copy", noise(300_000, 2)),
    sparse_gnu("sparse", (1 << 20) + 5000, [(0, noise(4096, 3)), (1 << 20, noise(5000, 4))]),
    file("small", b"s"),
    file("gone", noise(10_000, 5)),
)
WORK = tar(whiteout("gone"), file("etc/config", noise(30_000, 6)), file("src/data", noise(300_000, 2)))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def both(site: Site) -> tuple[Report, Report]:
    with fsync_for_free():
        base = site.convert(site.image([BASE]), tag="base")
        work = site.convert(site.image([BASE, WORK]), Role.WORKSPACE, base="base", tag="work")
    return base, work


def contents(site: Site, image: Image, where: Range) -> bytes:
    pack = image.layers[where.layer].packs[where.device - 1]
    with site.store.open(pack.blob) as blob:
        reader = PackReader(pack, blob)
        return reader.read_at(where.offset, min(where.length, pack.raw_size - where.offset))


def test_the_places_of_a_converted_image_hold_what_its_files_do(site: Site) -> None:
    both(site)
    image = load_image(site.store, "base")
    with open_places(site.store, image) as here:
        assert here.layers == traced_layers(image)
        expected = {
            b"etc/config": noise(20_000, 1),
            b"bin/tool": noise(300_000, 2),
            b"bin/same": noise(300_000, 2),
            b"bin/copy": noise(300_000, 2),
            b"gone": noise(10_000, 5),
        }
        for path, data in expected.items():
            whole = bytearray(-(-len(data) // BLOCK) * BLOCK)
            for place in here.ranges(found(here, path)):
                part = contents(site, image, place.range)
                whole[place.file_offset : place.file_offset + len(part)] = part
            assert whole.rstrip(b"\0") == data.rstrip(b"\0")
        assert found(here, b"config").path == b"etc/config"
        assert here.ranges(found(here, b"small")) == []
        sparse = here.ranges(found(here, b"sparse"))
        assert sum(place.range.length for place in sparse) < 100_000
        assert {
            place.path for item in here.files() for place in here.ranges(item) for place in here.at(place.range)
        } <= {item.path for item in here.files()}


def test_every_block_of_a_pack_belongs_to_a_file(site: Site) -> None:
    base, _ = both(site)
    image = base.image
    with open_places(site.store, image) as here:
        for device, pack in enumerate(image.layers[0].packs, 1):
            named = here.at(Range(0, device, 0, pack.raw_size))
            assert sum(place.range.length for place in named) == pack.raw_size
            for before, after in itertools.pairwise(named):
                assert before.range.offset + before.range.length == after.range.offset


def test_a_workspace_refers_to_the_packs_of_its_base(site: Site) -> None:
    both(site)
    base, work = (load_image(site.store, name) for name in ("base", "work"))
    stack = Image((*base.layers, *work.layers), work.config)
    with open_places(site.store, stack) as here:
        shared = here.ranges(found(here, b"src/data"))
        assert {place.range.layer for place in shared} == {1}
        pack = stack.layers[1].packs[shared[0].range.device - 1]
        assert pack.digest in {pack.digest for pack in base.layers[0].packs}
        assert contents(site, stack, shared[0].range)[:4096] == noise(300_000, 2)[:4096]
        assert here.find(b"gone") is None
        assert found(here, b"etc/config").layer == 1
