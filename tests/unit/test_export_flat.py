"""The flat form: the same tree in one file, with nothing in it that the layer doesn't use."""

from __future__ import annotations

import stat
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.erofs_images import Packs, Source, attrs, directory, image_bytes
from support.exports import flat_of
from support.tars import directory as tar_directory
from support.tars import file, hardlink, sparse_pax, symlink, whiteout
from support.trees import Row, manifest

from layerstore.convert import Report
from layerstore.erofs.checker import require_sound
from layerstore.erofs.format import BLOCK_SIZE
from layerstore.erofs.layout import Chunked, address
from layerstore.erofs.reader import Image
from layerstore.erofs.tree import load_tree
from layerstore.errors import CorruptError, MalformedError
from layerstore.export import gather as gather_module
from layerstore.export.flat import write_flat
from layerstore.export.gather import Gatherer, Piece, runs_of
from layerstore.image import Layer, Role
from layerstore.opened import FileSource, OpenLayer, StoreDevices
from layerstore.pack.reader import PackReader
from layerstore.progress import SILENT

SHARED = noise(60 << 14, 7)
"""60 chunks of 16 KiB."""
OWN = noise(300_000, 8)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def source(site: Site) -> str:
    return site.tar(
        tar_directory("d", mode=0o750, mtime=-7),
        file("d/shared", SHARED[20 << 14 : 45 << 14]),
        file("d/own", OWN, mode=0o4755, pax={"mtime": "5.000000001", "SCHILY.xattr.user.a": "1"}),
        file("d/again", OWN),
        hardlink("d/link", "d/own"),
        symlink("d/symlink", "own"),
        file("small", b"small"),
        sparse_pax("sparse", 5_000_000, [(1_000_000, OWN[:100_000])], "1.0"),
    )


def rows_of_flat(data: bytes) -> dict[bytes, Row]:
    image = Image(Source(data))
    assert image.slots == ()
    assert image.superblock.blocks * BLOCK_SIZE == len(data)
    require_sound(image)
    return manifest(load_tree(image))


def test_the_flat_form_is_the_same_tree(site: Site) -> None:
    report = site.convert(source(site))
    assert rows_of_flat(flat_of(site.store, report.layer)) == site.rows(report)


def test_it_depends_on_the_tree_alone(site: Site, tmp_path: Path) -> None:
    """A store that has some of the data already makes another layer, and the same flat form."""
    site.convert(site.tar(file("other", SHARED)), tag="other")
    shared = site.convert(source(site))
    assert len(shared.layer.packs) == 2
    alone = Site(tmp_path / "alone")
    own = alone.convert(source(alone))
    assert own.layer.metadata != shared.layer.metadata
    assert flat_of(site.store, shared.layer, jobs=1) == flat_of(alone.store, own.layer, jobs=3)


def test_only_what_is_used_is_there_and_once(site: Site) -> None:
    site.convert(site.tar(file("other", SHARED)), tag="other")
    layer = site.convert(source(site)).layer
    data = flat_of(site.store, layer)
    used = (25 << 14) + 300_000 + 100_000
    assert used < len(data) < used + 80_000
    assert sum(pack.raw_size for pack in layer.packs) > 1_100_000
    assert data.count(OWN[150_000:150_100]) == 1


def test_whiteouts_and_opaque_marks_stay(site: Site) -> None:
    site.convert(site.tar(file("d/gone", b"g"), file("d/kept", b"k"), file("o/old", b"o")), tag="base")
    over = site.tar(whiteout("d/gone"), file("o/.wh..wh..opq"), file("o/new", noise(50_000, 1)))
    report = site.convert(over, Role.WORKSPACE, base="base")
    rows = rows_of_flat(flat_of(site.store, report.layer))
    assert rows == site.rows(report)
    assert rows[b"d/gone"].type == "Whiteout"
    assert rows[b"o"].opaque


def test_an_image_without_data(site: Site) -> None:
    report = site.convert(site.tar(file("a", b"inline")))
    data = flat_of(site.store, report.layer)
    assert len(data) == report.layer.metadata_size
    assert rows_of_flat(data) == site.rows(report)


def test_a_damaged_frame_is_never_written(site: Site) -> None:
    layer = site.convert(source(site)).layer
    site.flip(layer.packs[0].blob, 5000)
    with pytest.raises(CorruptError, match="frame"):
        flat_of(site.store, layer)


def test_chunks_that_lie_over_each_other_are_refused(site: Site, tmp_path: Path) -> None:
    """Every chunk of a gigabyte one block behind the last: a small image would make a large file."""
    packs = Packs(1)
    packs.add(1, bytes(64 * BLOCK_SIZE))
    made = packs.file(attrs(stat.S_IFREG), [b"x" * BLOCK_SIZE])
    made.size = 40 * 16 * BLOCK_SIZE
    made.chunks = Chunked(4, array("Q", [address(1, block) for block in range(40)]))
    data = image_bytes(directory({b"bomb": made}), packs.devices)
    path = tmp_path / "image"
    path.write_bytes(data)
    stored = site.convert(site.tar(file("f", noise(65 * BLOCK_SIZE, 1)))).layer
    with path.open("rb") as opened_file, ThreadPoolExecutor(1) as pool:
        layer = OpenLayer.__new__(OpenLayer)  # as an image would be whose packs are what its device table says
        layer.layer = stored
        layer.image = Image(FileSource(opened_file.fileno(), "image"))
        layer.devices = StoreDevices(site.store, stored.packs)
        layer.used = require_sound(layer.image)
        with Gatherer(site.store, stored.packs, pool) as data_of, pytest.raises(MalformedError, match="over each"):
            write_flat(layer, data_of, [].append, scratch=str(tmp_path), progress=SILENT)


# ---- gathering


def gathered(site: Site, layer: Layer, pieces: list[Piece]) -> bytes:
    with ThreadPoolExecutor(2) as pool, Gatherer(site.store, layer.packs, pool) as gatherer:
        return b"".join(gatherer.read(pieces))


@pytest.fixture
def two(site: Site) -> Report:
    """A layer with two packs of several frames."""
    site.convert(site.tar(file("a", noise(1_500_000, 1))), tag="first")
    return site.convert(site.tar(file("a", noise(1_500_000, 1)), file("b", noise(1_200_000, 2))), tag="second")


@pytest.mark.parametrize("batch", [None, 1])
def test_pieces_come_in_their_order(
    site: Site, two: Report, monkeypatch: pytest.MonkeyPatch, batch: int | None
) -> None:
    """From both packs, back and forth, over the borders of frames and batches."""
    if batch:
        monkeypatch.setattr(gather_module, "_BATCH_FRAMES", batch)
    sizes = [pack.raw_size for pack in two.layer.packs]
    assert len(sizes) == 2
    pieces = [Piece(1 + n % 2, (n * 77_777) % (min(sizes) - 300_000), 1 + (n * 12_345) % 300_000) for n in range(60)]
    expected = bytearray()
    for device, at, length in pieces:
        with site.store.open(two.layer.packs[device - 1].blob) as blob:
            expected += PackReader(two.layer.packs[device - 1], blob).read_at(at, length)
    assert gathered(site, two.layer, pieces) == expected
    assert gathered(site, two.layer, []) == b""


@pytest.mark.parametrize("piece", [Piece(3, 0, 1), Piece(0, 0, 1), Piece(1, 1 << 30, 1), Piece(1, -1, 1)])
def test_pieces_outside_of_the_packs(site: Site, two: Report, piece: Piece) -> None:
    with pytest.raises(CorruptError, match=r"lie outside pack|device"):
        gathered(site, two.layer, [Piece(1, 0, 10), piece])


def test_frames_are_read_once(site: Site, two: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces in order need each frame once, though batches end inside of frames."""
    frames: list[int] = []
    real: Callable[..., list[bytes]] = gather_module._decoded

    def counted(blob: object, index: object, numbers: range) -> list[bytes]:
        frames.extend(numbers)
        return real(blob, index, numbers)

    monkeypatch.setattr(gather_module, "_decoded", counted)
    monkeypatch.setattr(gather_module, "_BATCH_BYTES", 100_000)
    size = two.layer.packs[0].raw_size
    gathered(site, two.layer, [Piece(1, at, min(4096, size - at)) for at in range(0, size, 4096)])
    assert sorted(frames) == list(range(-(-size // (256 << 10))))


def test_runs_join_neighbours() -> None:
    packs = Packs(1)
    made = packs.file(attrs(stat.S_IFREG), [b"a" * 4096, b"b" * 4096, None, None, b"c" * 10])
    assert [tuple(run) for run in runs_of(made)] == [(1, 0, 8192), (0, 0, 8192), (1, 8192, 10)]
