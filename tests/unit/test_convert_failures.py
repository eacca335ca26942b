"""Conversions that fail or are stopped: the right error, and a store that is as it was."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.conversions import PHASES, Calling, Interrupting, Site, Stop, noise
from support.faults import failing, fsync_for_free
from support.layouts import Layer as StoredLayer
from support.layouts import Layout, compress, digest_of
from support.stores import DAY, SteppedClock
from support.tars import BLOCK, END, Trickle, file, hardlink, header, number, sparse_gnu, tar

from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    LimitError,
    MalformedError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from layerstore.image import Role
from layerstore.limits import Limits
from layerstore.pack.format import SKIPPABLE_MAGIC, skippable
from layerstore.publish import current
from layerstore.store.clock import FileClock
from layerstore.store.collect import collect, plan_collection
from layerstore.tar import archive
from layerstore.tar.pump import Readable

MIB = 1 << 20
LAYER = tar(file("a", noise(100_000, 1)), file("b", b"small"), hardlink("c", "a"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A store with one image under the names ``it`` and ``other``."""
    with fsync_for_free():
        site = Site(tmp_path)
        source = site.tar(file("before", noise(200_000, 2)))
        for tag in ("it", "other"):
            site.convert(source, tag=tag)
        yield site


def refused(
    site: Site, source: str, error: type[Exception], text: str, role: Role = Role.BASE, **fields: Any
) -> Exception:
    """The conversion fails so, and nothing of it stays."""
    before = site.snapshot()
    with pytest.raises(error, match=text) as caught:
        site.convert(source, role, tag="it", **fields)
    assert site.snapshot() == before
    assert site.leftovers() == []
    assert "\n" not in str(caught.value)
    return caught.value


# -- bytes that are not what they should be ---------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.case("M12", "M13")
@pytest.mark.parametrize("damage", [flip, cut, extend])
@pytest.mark.parametrize("what", ["manifest", "config", "first layer", "last layer"])
@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
def test_bytes_that_are_not_their_digest(
    site: Site, what: str, compression: str, damage: Callable[[Path], None]
) -> None:
    layout = site.layout()
    layers = [layout.layer(LAYER, compression), layout.layer(tar(file("d", noise(70_000, 3))), compression)]
    manifest = layout.image(layers, tag="it")
    names = {
        "manifest": manifest["digest"],
        "config": _config_of(layout, manifest),
        "first layer": layers[0].descriptor["digest"],
        "last layer": layers[1].descriptor["digest"],
    }
    damage(layout.blob_path(names[what]))
    error = refused(site, layout.name("it"), CorruptError, "expected")
    assert names[what] in str(error) or damage is not flip
    if "layer" in what:
        assert f"layer {what == 'last layer':d}" in str(error)


def _config_of(layout: Layout, manifest: dict[str, Any]) -> str:
    digest: str = json.loads(layout.blob_path(manifest["digest"]).read_bytes())["config"]["digest"]
    return digest


@pytest.mark.case("M13")
@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
def test_a_layer_with_another_diff_id(site: Site, compression: str) -> None:
    layout = site.layout()
    layer = layout.layer(LAYER, compression)
    wrong = digest_of(b"something else")
    layout.image([layer], tag="it", config={"rootfs": {"type": "layers", "diff_ids": [wrong]}})
    error = refused(site, layout.name("it"), CorruptError, r"diff ID of layer 0 \(sha256:")
    assert wrong in str(error) and layer.diff_id in str(error)


@pytest.mark.case("M10")
def test_a_layer_that_is_missing(site: Site) -> None:
    layout = site.layout()
    layer = layout.layer(LAYER)
    layout.image([layer], tag="it")
    layout.blob_path(layer.descriptor["digest"]).unlink()
    refused(site, layout.name("it"), NotFoundError, layer.descriptor["digest"])


# -- archives that are not whole --------------------------------------------------------------------------------------


def faulty_archives() -> dict[str, bytes]:
    members = [file(f"f{number}", bytes([number]) * 700) for number in range(4)]
    bad = bytearray(members[2])
    bad[100] ^= 1
    return {
        "cut inside a body": tar(*members)[: len(members[0]) + BLOCK + 300],
        "cut inside a header": tar(*members)[: len(members[0]) + 100],
        "a flipped byte in a header": tar(*members[:2], bytes(bad), members[3]),
        "a lone zero block": tar(*members[:2], bytes(BLOCK), *members[2:]),
        "a size that is no number": tar(members[0], file("x", b"1", pax={"size": "abc"}), members[1]),
        "a negative time": tar(members[0], file("x", pax={"mtime": "1e400"}), members[1]),
        "no tar at all": b"<html>" * 200,
    }


@pytest.mark.case("T41", "T42", "T43", "T61")
@pytest.mark.parametrize("fault", faulty_archives())
@pytest.mark.parametrize("compression", ["", "gzip"])
def test_a_broken_archive_publishes_nothing(site: Site, fault: str, compression: str) -> None:
    data = faulty_archives()[fault]
    refused(site, site.raw_tar(compress(data, compression)), MalformedError, "layer|tar|member")
    layout = site.layout()
    layout.image([tar(file("fine")), layout.layer(data, compression)], tag="it")
    refused(site, layout.name("it"), MalformedError, r"^layer 1 \(sha256:")


@pytest.mark.case("T41", "Z01")
@pytest.mark.parametrize("compression", ["gzip", "zstd", "xz", "bzip2"])
def test_a_compressed_stream_that_ends_early(site: Site, compression: str) -> None:
    data = compress(LAYER, compression)
    refused(site, site.raw_tar(data[:-20]), MalformedError, "layer|stream")
    layout = site.layout()
    layer = layout.blob(data[:-20], "application/vnd.oci.image.layer.v1.tar+gzip")
    layout.image([StoredLayer(layer, digest_of(LAYER), data)], tag="it")
    refused(site, layout.name("it"), MalformedError, "^layer 0")


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("Z10")
@pytest.mark.parametrize("where", ["inside a member", "behind the end", "in nested frames"])
def test_bombs_stop_at_the_limit(site: Site, where: str) -> None:
    zeros = bytes(64 * MIB)
    if where == "inside a member":
        blob = gzip.compress(tar(file("zeros", zeros)), 1, mtime=0)
    elif where == "behind the end":
        blob = gzip.compress(tar(file("a", b"a")) + zeros, 1, mtime=0)
    else:
        blob = skippable(b"x", SKIPPABLE_MAGIC) + compress(tar(file("zeros", zeros)), "zstd")
    limits = Limits(layer_bytes=8 * MIB)
    for source in (site.raw_tar(blob), _image_of(site, blob)):
        refused(site, source, LimitError, f"{8 * MIB} bytes when decompressed", limits=limits)


def _image_of(site: Site, blob: bytes) -> str:
    layout = site.layout()
    descriptor = layout.blob(blob, "application/vnd.oci.image.layer.v1.tar+gzip")
    layout.image([StoredLayer(descriptor, digest_of(b""), blob)], tag="it")
    return layout.name("it")


@pytest.mark.case("Z10", "T46", "T62")
def test_entries_and_file_sizes_are_bounded(site: Site) -> None:
    many = site.tar(*(file(f"d/{number}") for number in range(100)))
    refused(site, many, LimitError, "50", limits=Limits(entries=50))
    layers = site.image([tar(*(file(f"{layer}-{number}") for number in range(30))) for layer in range(2)])
    refused(site, layers, LimitError, "50", limits=Limits(entries=50))
    sparse = site.tar(sparse_gnu("lastlog", 300 << 30, [(0, b"x" * 512)]))
    refused(site, sparse, LimitError, "lastlog", limits=Limits(file_bytes=1 << 30))


@pytest.mark.case("Z18", "T46")
def test_a_terabyte_tar_is_refused_before_it_is_read(site: Site) -> None:
    path = site.path / "huge.tar"
    size = 3 << 40
    with open(path, "wb") as out:
        out.write(header("disk.img", size=size, raw={"size": number(size, 12)}))
        out.truncate(BLOCK + size + len(END))
    refused(site, f"tar:{path}", LimitError, "limit")
    refused(site, f"tar:{path}", LimitError, "disk.img", limits=Limits(layer_bytes=1 << 50, file_bytes=1 << 40))


@pytest.mark.case("Z18")
def test_a_file_beyond_32_bit_block_addresses_is_refused(site: Site) -> None:
    size = 1 << 54
    source = site.tar(sparse_gnu("disk.img", size, [(0, b"x" * 512)]))
    refused(site, source, LimitError, "disk.img")
    refused(site, source, LimitError, f"a file of {size} bytes", limits=Limits(file_bytes=1 << 60))


@pytest.mark.case("T46")
def test_many_files_of_holes_are_bounded_together(site: Site) -> None:
    source = site.tar(*(sparse_gnu(f"disk{number}", 15 << 40, [(0, b"x" * 512)]) for number in range(5)))
    refused(site, source, LimitError, "chunk indexes")


# -- requests that can't be met ---------------------------------------------------------------------------------------


def test_requests_that_cannot_be_met(site: Site) -> None:
    (site.path / "file").write_bytes(b"")
    for source, error, text in (
        (f"tar:{site.path}/nothing", NotFoundError, "nothing"),
        (f"tar:{site.path}", UsageError, "directory"),
        (f"tree:{site.path}/nothing", NotFoundError, "nothing"),
        (f"tree:{site.path}/file", UsageError, "not a directory"),
        (f"oci:{site.path}/nothing", ImgtoolError, "nothing"),
        (f"oci-archive:{site.path}/nothing", NotFoundError, "nothing"),
    ):
        refused(site, source, error, text)
    source = site.tar(file("a"))
    before = site.snapshot()
    for tag in ("", "../up", "a b", "sha256:" + "0" * 64):
        with pytest.raises(UsageError):
            site.convert(source, tag=tag)
    assert site.snapshot() == before


def test_a_tree_that_changes_meanwhile(site: Site) -> None:
    top = site.path / "tree"
    top.mkdir()
    (top / "log").write_bytes(noise(MIB, 4))

    def grow() -> None:
        with open(top / "log", "ab") as out:
            out.write(b"more")

    refused(site, f"tree:{top}", ConflictError, "log: changed", progress=Calling("hash", grow))


def test_an_archive_that_changes_between_two_readings_is_noticed(site: Site) -> None:
    site.convert(site.tar(file("unrelated", noise(MIB, 50))), tag="unrelated")  # so that data is read twice
    source = site.tar(file("f", noise(MIB, 51)))
    path = source.removeprefix("tar:")

    def overwrite() -> None:
        with open(path, "r+b") as archive:
            archive.seek(4096)
            archive.write(b"other bytes")

    changing = Calling("compress", overwrite)
    refused(site, source, ConflictError, "changed while it was read", progress=changing)
    assert changing.called


# -- somebody else ----------------------------------------------------------------------------------------------------


def test_a_tag_that_somebody_moved_meanwhile(site: Site) -> None:
    source = site.tar(file("mine", noise(50_000, 5)))
    other = site.tar(file("theirs", b"t"))

    def move() -> None:
        site.convert(other, tag="it")

    moving = Calling("metadata", move)
    with pytest.raises(ConflictError, match="'it'"):
        site.convert(source, tag="it", progress=moving)
    assert moving.called
    assert set(site.rows("it")) == {b"", b"theirs"}
    assert site.leftovers() == []
    site.convert(source, tag="it")
    assert set(site.rows("it")) == {b"", b"mine"}


@pytest.mark.case("G01", "G05")
def test_a_collector_in_the_middle_of_a_conversion_takes_nothing_away(site: Site) -> None:
    shared = noise(200_000, 2)
    site.store.delete_reference("other", expected=site.store.resolve("other"))

    def sweep() -> None:
        target = current(site.store, "it")
        assert target is not None
        site.convert(site.tar(file("keeper")), tag="keeper")
        site.store.delete_reference("it", expected=target)
        collect(site.store, plan_collection(site.store, grace=0))

    for step in ("compress", "metadata"):
        sweeping = Calling(step, sweep)
        report = site.convert(site.tar(file("same", shared), file(step, noise(MIB, 6))), tag="new", progress=sweeping)
        assert sweeping.called
        assert site.rows("new")[b"same"].value == shared
        assert report.shared_size >= 200_704
        site.convert(site.tar(file("before", shared)), tag="it")


@pytest.mark.case("G01")
def test_a_publisher_that_slept_too_long_fails_loudly(tmp_path: Path) -> None:
    clock = SteppedClock(FileClock(str(tmp_path / "store" / "clock")))
    with fsync_for_free():
        Site(tmp_path)
        site = Site(tmp_path, clock=clock)

        def sleep() -> None:
            clock.advance(2 * DAY)
            collect(site.store, plan_collection(site.store, grace=0, force=True))

        sleeping = Calling("metadata", sleep)
        with pytest.raises(ConflictError, match="has expired"):
            site.convert(site.tar(file("a", noise(MIB, 7))), tag="it", progress=sleeping)
        assert sleeping.called
        assert list(site.store.names()) == []
        site.convert(site.tar(file("a", noise(MIB, 7))), tag="it")
        assert site.rows("it")[b"a"].value == noise(MIB, 7)


# -- full disks -------------------------------------------------------------------------------------------------------


def full_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    left = [2]

    def pwrite(file: int, data: bytes, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


class FullFile(io.BytesIO):
    """A temporary file on a full disk."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *args, **fields: FullFile())


def no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **fields: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)


@pytest.mark.case("C06")
@pytest.mark.parametrize("fill", [full_spool, full_metadata, no_metadata])
def test_a_disk_that_is_full_for_temporary_files(
    site: Site, monkeypatch: pytest.MonkeyPatch, fill: Callable[[pytest.MonkeyPatch], None]
) -> None:
    compressed = site.raw_tar(compress(tar(file("a", noise(2 * MIB, 8))), "gzip"))
    plain = site.tar(file("a", noise(2 * MIB, 8)))
    with monkeypatch.context() as patch:
        fill(patch)
        with pytest.raises(NoSpaceError, match="free space"):
            site.convert(compressed if fill is full_spool else plain, tag="it")
    assert set(site.rows("it")) == {b"", b"before"}
    assert site.leftovers() == []
    site.convert(compressed, tag="it")
    assert site.rows("it")[b"a"].value == noise(2 * MIB, 8)


@pytest.mark.case("C06")
@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_a_disk_that_fills_up_at_any_point_of_publishing(site: Site, call: str) -> None:
    """Each time a little later, until it goes through."""
    source = site.tar(file("a", noise(MIB, 9)), file("b", b"small"))
    before_names = {reference.name: reference.target for reference in site.store.references()}
    steps = 0
    while True:
        with failing(call, errno.ENOSPC, after=steps):
            try:
                site.convert(source, tag="it")
                break
            except NoSpaceError as error:
                assert "free space" in str(error)
        assert {reference.name: reference.target for reference in site.store.references()} == before_names
        assert [name for name in site.leftovers() if ".tmp-" in name] == []
        steps += 1
        assert steps < 100
    assert steps > 5
    assert site.rows("it")[b"a"].value == noise(MIB, 9)
    assert site.rows("other")[b"before"].value == noise(200_000, 2)


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("C03")
@pytest.mark.parametrize("pieces", [None, 0, 3])
@pytest.mark.parametrize("step", (*PHASES, "pack"))
def test_stopping_at_any_step_leaves_nothing_behind(site: Site, step: str, pieces: int | None) -> None:
    layers = [
        tar(file("before", noise(200_000, 2)), *(file(f"f{n}", noise(MIB, 100 + n)) for n in range(6))),
        tar(file("second", noise(MIB, 10))),
    ]
    source = site.image(layers)
    references = {reference.name: reference.target for reference in site.store.references()}
    blobs = site.blobs()
    stopping = Interrupting(step, pieces)
    try:
        site.convert(source, tag="it", progress=stopping, dedup=step != "pack")
    except Stop:
        assert stopping.stopped
    else:
        assert not stopping.stopped and pieces == 3, "fewer pieces than that"
        return
    assert {reference.name: reference.target for reference in site.store.references()} == references
    assert site.leftovers() == []
    collect(site.store, plan_collection(site.store, grace=0))
    assert site.blobs() == blobs
    site.convert(source, tag="it")
    assert site.rows("it")[b"second"].value == noise(MIB, 10)


def test_an_error_while_the_source_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Trickle):
        def read(self, size: int = -1, /) -> bytes:
            data = super().read(size)
            if not data:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return data

    real = archive.Meter

    def meter(stream: Readable, *rest: Any) -> Any:
        return real(Failing(LAYER[: 20 * BLOCK], [4096]), *rest)

    monkeypatch.setattr(archive, "Meter", meter)
    refused(site, site.raw_tar(compress(LAYER, "")), UnavailableError, "Input/output error")
