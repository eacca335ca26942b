"""What ``verify`` finds in a store: blobs that aren't their names, and blobs that are, but mean something wrong."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.conversions import Site, noise
from support.erofs_images import sealed
from support.faults import fsync_for_free
from support.layouts import Layout, config_of, encode
from support.stores import descriptor
from support.tars import file, hardlink, tar, whiteout

from layerstore.audit import ContentCheck
from layerstore.compose import plan_stack, publish_stack
from layerstore.convert import Report
from layerstore.digest import Digest
from layerstore.erofs.format import EROFS_SUPER_OFFSET
from layerstore.errors import CorruptError, NoSpaceError
from layerstore.image import Image, Layer, Role
from layerstore.oci.config import ImageConfig
from layerstore.opened import decompress_metadata
from layerstore.pack.format import (
    BLOCK_SIZE,
    FRAME_SIZE,
    ChunkListHeader,
    ChunkRecord,
    FrameIndexHeader,
    FrameRecord,
    SkippableHeader,
    skippable,
)
from layerstore.pack.stored import Span, StoredPack
from layerstore.publish import Publisher
from layerstore.store.verification import Fault, Finding, verify

PLAIN = ImageConfig.parse(encode(config_of([])), "config")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fsync_for_free():
        yield Site(tmp_path)


@pytest.fixture
def report(site: Site) -> Report:
    """An image under the name ``it``, with a pack of several frames."""
    return site.convert(
        site.tar(file("a", noise(FRAME_SIZE * 2 + 5000, 1)), file("b", b"b"), hardlink("c", "a")), tag="it"
    )


def findings(site: Site, **fields: Any) -> list[Finding]:
    return list(verify(site.store, check=ContentCheck(), **fields))


def publish(site: Site, *layers: Layer, tag: str = "it", diff_ids: list[Digest] | None = None) -> Image:
    """As a publisher would who believes in these layers."""
    with site.store.lease() as lease:
        raw = [digest for layer in layers for digest in layer.raw_digests]
        config = Publisher(site.store, lease).config(PLAIN, raw if diff_ids is None else diff_ids)
        image = Image(layers, config)
        expected = site.store.resolve(tag) if tag in site.store.names() else None
        Publisher(site.store, lease).image(image, tag=tag, expected=expected)
    return image


def put(site: Site, data: bytes) -> Digest:
    digest = Digest.of(data)
    with site.store.upload() as upload:
        upload.write(data)
        upload.commit(digest, len(data))
    return digest


def test_a_sound_store_has_no_findings(site: Site, report: Report) -> None:
    base = tar(file("x", noise(70_000, 2)), file("y", b"y"))
    site.convert(site.image([base]), tag="base")
    site.convert(
        site.image([base, tar(whiteout("y"), file("z", noise(9000, 3)))]), Role.WORKSPACE, base="base", tag="w"
    )
    publish_stack(site.store, plan_stack(site.store, base="base", workspace="w"), tag="env")
    site.convert(site.image([]), tag="empty")
    assert findings(site) == []


@pytest.mark.case("C05", "Z19")
def test_every_damaged_blob_is_found_under_its_name_and_reference(site: Site, report: Report) -> None:
    parts = {
        "pack": report.layer.packs[0].blob,
        "metadata": report.layer.blob,
        "config": report.image.config.digest,
        "manifest": report.manifest,
    }
    for digest in parts.values():
        intact = site.blob_path(digest).read_bytes()
        site.flip(digest, len(intact) // 2)
        found = findings(site)
        assert {(each.fault, each.digest) for each in found if each.digest} == {(Fault.CORRUPT, digest)}
        assert any(each.reference == "it" for each in found)
        assert all(str(digest) in each.message for each in found)
        site.blob_path(digest).write_bytes(intact)
        assert findings(site) == []


@pytest.mark.case("C05")
def test_quarantine_and_converting_again_repair(site: Site, report: Report) -> None:
    digest = report.layer.packs[0].blob
    site.flip(digest, 50)
    found = findings(site, quarantine=True)
    assert found[0].quarantined is not None and Path(found[0].quarantined).exists()
    assert not site.blob_path(digest).exists()
    assert {each.fault for each in findings(site)} == {Fault.MISSING}
    again = site.convert(
        site.tar(file("a", noise(FRAME_SIZE * 2 + 5000, 1)), file("b", b"b"), hardlink("c", "a")), tag="it"
    )
    assert again.layer.metadata == report.layer.metadata
    assert findings(site) == []


# -- blobs that are what their names say, and wrong all the same ------------------------------------------------------


@dataclass
class Indexes:
    """The records behind a pack's frames, to be forged."""

    chunks: bytearray
    frames: bytearray


def forged_pack(site: Site, pack: StoredPack, forge: Callable[[Indexes], object]) -> StoredPack:
    """The same frames under other indexes, with the digests that these have."""
    blob = site.blob_path(pack.blob).read_bytes()

    def records(span: Span, header: int) -> bytearray:
        return bytearray(blob[span.offset + header : span.offset + span.length])

    indexes = Indexes(
        records(pack.chunk_list, ChunkListHeader.STRUCT.size), records(pack.frame_index, FrameIndexHeader.STRUCT.size)
    )
    forge(indexes)
    count = len(indexes.chunks) // ChunkRecord.STRUCT.size
    header = FrameIndexHeader(pack.raw_size, len(indexes.frames) // FrameRecord.STRUCT.size)
    data = blob[: pack.data_end]
    spans = []
    for content in (ChunkListHeader(count).pack() + indexes.chunks, header.pack() + indexes.frames):
        spans.append(Span(len(data) + SkippableHeader.STRUCT.size, len(content), Digest.of(content)))
        data += skippable(bytes(content))
    chunk_list, frame_index = spans
    return replace(pack, blob=put(site, data), blob_size=len(data), chunk_list=chunk_list, frame_index=frame_index)


def wrong_chunk(indexes: Indexes) -> None:
    indexes.chunks[40:44] = b"lies"


def wrong_frame(indexes: Indexes) -> None:
    indexes.frames[20:24] = b"lies"


def short_list(indexes: Indexes) -> None:
    del indexes.chunks[-ChunkRecord.STRUCT.size :]


def long_list(indexes: Indexes) -> None:
    indexes.chunks += ChunkRecord(b"x" * 32, 1).pack()


def empty_chunk(indexes: Indexes) -> None:
    indexes.chunks += ChunkRecord(b"x" * 32, 0).pack()


def huge_chunk(indexes: Indexes) -> None:
    indexes.chunks[:] = ChunkRecord(b"x" * 32, 2**32 - 1).pack()


@pytest.mark.parametrize(
    ("forge", "text"),
    [
        (wrong_chunk, "is another than its list says"),
        (wrong_frame, "frame 0 of pack"),
        (short_list, "does not cover the pack"),
        (long_list, "does not cover the pack"),
        (empty_chunk, "a chunk of 0 blocks"),
        (huge_chunk, "a chunk of 4294967295 blocks"),
    ],
)
def test_a_pack_that_contradicts_itself(
    site: Site, report: Report, forge: Callable[[Indexes], object], text: str
) -> None:
    pack = forged_pack(site, report.layer.packs[0], forge)
    publish(site, replace(report.layer, packs=(pack,)))
    [found] = findings(site)
    assert (found.fault, found.digest, found.reference) == (Fault.CONTENT, pack.blob, "it")
    assert text in found.message


def test_a_forged_pack_that_is_not_forged_is_sound(site: Site, report: Report) -> None:
    pack = forged_pack(site, report.layer.packs[0], lambda indexes: None)
    publish(site, replace(report.layer, packs=(pack,)))
    assert findings(site) == []


def test_a_pack_under_another_ones_digest(site: Site, report: Report) -> None:
    pack = report.layer.packs[0]
    publish(site, replace(report.layer, packs=(replace(pack, digest=Digest.of(b"another")),)), tag="liar")
    found = findings(site)
    assert {each.reference for each in found} == {"liar"}
    assert {each.fault for each in found} == {Fault.CONTENT}
    assert [each.digest for each in found] == [pack.blob, report.layer.blob]
    assert "raw bytes of pack" in found[0].message
    assert "device table" in found[1].message


@pytest.mark.parametrize("what", ["frame_index", "chunk_list"])
def test_an_index_that_is_not_where_the_manifest_says(site: Site, report: Report, what: str) -> None:
    pack = report.layer.packs[0]
    span: Span = getattr(pack, what)
    for wrong in (replace(span, offset=span.offset - 1), replace(span, digest=Digest.of(b""))):
        forged: Any = replace(pack, **{what: wrong})
        publish(site, replace(report.layer, packs=(forged,)), tag="liar")
        assert [(each.fault, each.digest, each.reference) for each in findings(site)] == [
            (Fault.CONTENT, pack.blob, "liar")
        ]


def forged_metadata(site: Site, layer: Layer, change: Callable[[bytearray], object]) -> Layer:
    out = io.BytesIO()
    decompress_metadata(site.store, layer, out.write)
    data = bytearray(out.getvalue())
    change(data)
    raw = bytes(data)
    blob = zstandard.ZstdCompressor().compress(raw)
    return replace(layer, metadata=Digest.of(raw), metadata_size=len(raw), blob=put(site, blob), blob_size=len(blob))


def wrong_checksum(data: bytearray) -> None:
    data[EROFS_SUPER_OFFSET + 4] ^= 1


def loose_root(data: bytearray) -> None:
    data[EROFS_SUPER_OFFSET + 14 : EROFS_SUPER_OFFSET + 16] = b"\xff\x7f"
    data[:] = sealed(data)


def no_magic(data: bytearray) -> None:
    data[EROFS_SUPER_OFFSET] ^= 1


@pytest.mark.case("Z13", "Z15")
@pytest.mark.parametrize(
    "change", [wrong_checksum, loose_root, no_magic, lambda data: data.__delitem__(slice(1, None))]
)
def test_a_metadata_image_that_cannot_be_mounted(
    site: Site, report: Report, change: Callable[[bytearray], object]
) -> None:
    forged = forged_metadata(site, report.layer, change)
    publish(site, forged)
    [found] = findings(site)
    assert (found.fault, found.digest, found.reference) == (Fault.CONTENT, forged.blob, "it")


def test_a_metadata_image_that_is_not_the_one_promised(site: Site, report: Report) -> None:
    for forged in (
        replace(report.layer, metadata=Digest.of(b"other")),
        replace(report.layer, metadata_size=report.layer.metadata_size + BLOCK_SIZE),
        replace(report.layer, metadata_size=1),
    ):
        publish(site, forged, tag="liar")
        [found] = findings(site)
        assert (found.fault, found.reference) == (Fault.CONTENT, "liar")
        assert "metadata image" in found.message


def test_packs_in_the_wrong_order(site: Site, report: Report) -> None:
    other = site.convert(site.tar(file("a", noise(FRAME_SIZE * 2 + 5000, 1)), file("n", noise(99_000, 4))), tag="two")
    assert len(other.layer.packs) == 2
    publish(site, replace(other.layer, packs=other.layer.packs[::-1]), tag="two")
    [found] = findings(site)
    assert "device table" in found.message and found.reference == "two"
    with pytest.raises(CorruptError, match="device table"):
        site.rows("two")


def test_a_config_of_other_layers(site: Site, report: Report) -> None:
    publish(site, report.layer, tag="liar", diff_ids=[Digest.of(b"another")])
    [found] = findings(site)
    assert (found.fault, found.reference) == (Fault.CONTENT, "liar")
    assert "other diff IDs" in found.message


@pytest.mark.case("M15")
def test_an_image_of_others_is_named(site: Site) -> None:
    layout = Layout(site.path / "layout")
    manifest = layout.image([tar(file("a"))], tag="it")
    for path in sorted((layout.path / "blobs/sha256").iterdir()):
        put(site, path.read_bytes())
    target = replace(descriptor(layout.blob_path(manifest["digest"]).read_bytes()), media_type=manifest["mediaType"])
    with site.store.lease() as lease:
        lease.pin([target.digest])
        site.store.set_reference("foreign", target, expected=None, lease=lease, reaches=[target.digest])
    [found] = findings(site)
    assert (found.fault, found.reference) == (Fault.CONTENT, "foreign")
    assert "convert it first" in found.message


def test_what_images_share_is_looked_into_once(site: Site, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    site.convert(site.tar(file("copy", noise(FRAME_SIZE * 2 + 5000, 1))), tag="second")
    seen: list[Digest] = []
    real = ContentCheck._check_pack

    def check(self: ContentCheck, store: Any, pack: StoredPack) -> None:
        seen.append(pack.digest)
        real(self, store, pack)

    monkeypatch.setattr(ContentCheck, "_check_pack", check)
    assert findings(site) == []
    assert seen == [report.layer.packs[0].digest]


def test_no_room_for_a_temporary_file_is_no_damage(site: Site, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **fields: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(NoSpaceError, match="temporary file"):
        findings(site)
