"""Images laid out anew: the same trees, hot chunks first and together, nothing cold twice."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import Calling, Interrupting, Site, Stop, noise
from support.faults import failing, fsync_for_free
from support.relays import hot, pack_bytes, padded, same
from support.tars import directory, fifo, file, hardlink, opaque, sparse_pax, symlink, tar, whiteout

from layerstore.audit import ContentCheck
from layerstore.compose import plan_stack, publish_stack
from layerstore.digest import Digest
from layerstore.erofs.layout import Device
from layerstore.erofs.writer import write_image
from layerstore.errors import ConflictError, CorruptError, NoSpaceError, NotFoundError
from layerstore.hot import HotRange
from layerstore.image import Role, load_image
from layerstore.opened import open_layer
from layerstore.pack.chunks import CHUNK_SIZE
from layerstore.pack.format import BLOCK_SIZE, FRAME_SIZE
from layerstore.rawpacks import is_raw
from layerstore.relay import MovedLayer, Touched, relay
from layerstore.store.collect import collect, plan_collection
from layerstore.store.directory import DirectoryStore
from layerstore.store.verification import verify

A, B, C = noise(5 * CHUNK_SIZE + 100, 1), noise(70_000, 2), noise(3 * FRAME_SIZE, 3)
SHARED = noise(2 * CHUNK_SIZE, 4)
LAYER = tar(
    directory("./", mode=0o751, uid=3, gid=4, mtime=77),
    directory("usr/lib", mode=0o1777, mtime=10, pax={"SCHILY.xattr.trusted.x": b"dir"}),
    file("a", A, mode=0o4755, uid=1000, mtime=5, pax={"SCHILY.xattr.user.k": b"v"}),
    file("usr/lib/big", C, mtime=-7),
    hardlink("usr/lib/a", "a"),
    file("b", B, pax={"mtime": "1635528968.656625010"}),
    file("copy-1", SHARED),
    file("copy-2", SHARED + b"tail"),
    sparse_pax("holes", 300_000, [(0, noise(5000, 5)), (200_000, noise(9000, 6))], "1.0"),
    file("small", b"inline"),
    file("empty"),
    symlink("link", "a"),
    fifo("pipe"),
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A store with one image of one layer, as ``it``."""
    with fsync_for_free():
        site = Site(tmp_path)
        site.convert(site.image([LAYER]), tag="it")
        yield site


def sound(site: Site) -> None:
    assert list(verify(site.store, check=ContentCheck())) == []
    assert site.leftovers() == []


def files_of(site: Site, name: str = "it", *parts: bytes | tuple[bytes, int, int]) -> list[HotRange]:
    (layer,) = load_image(site.store, name).layers
    return hot(site.store, layer, *parts)


# ---- what it makes


@pytest.mark.case("P06")
def test_the_tree_stays_and_hot_chunks_lie_together_in_their_order(site: Site) -> None:
    wanted = files_of(site, "it", (b"b", 16_384, 1), b"a", (b"usr/lib/big", 700_000, 40_000))
    blobs = site.blobs()
    report = relay(site.store, "it", wanted, tag="hot")
    same(site, "it", "hot")
    sound(site)
    (before,), (after,) = load_image(site.store, "it").layers, report.image.layers
    new, *rest = after.packs
    assert rest == list(before.packs)
    assert pack_bytes(site.store, new) == B[16_384:32_768] + padded(A) + C[688_128:753_664]
    assert (report.chunks, report.hot_size) == (len(wanted), new.raw_size)
    assert (report.matched, report.unmatched) == (len(wanted), {})
    assert report.copied_size == report.hot_size
    assert report.after == Touched(frames=1, reads=1, size=new.data_end)
    assert (report.before.frames, report.before.reads) == (2, 2)
    assert report.image.descriptor().digest == report.manifest == site.store.resolve("hot").digest
    assert report.stored_size == sum(site.blobs().values()) - sum(blobs.values())


@pytest.mark.case("P06")
def test_of_hard_links_one_name_is_enough_and_the_data_are_stored_once(site: Site) -> None:
    report = relay(site.store, "it", files_of(site, "it", b"usr/lib/a"), tag="hot")
    same(site, "it", "hot")
    assert report.image.layers[0].packs[0].raw_size == len(padded(A))
    rows = site.rows("hot")
    assert rows[b"a"].links == rows[b"usr/lib/a"].links == {b"a", b"usr/lib/a"}
    assert files_of(site, "hot", b"a") == files_of(site, "hot", b"usr/lib/a")


def test_every_file_with_a_hot_chunk_finds_it_in_the_new_pack(site: Site) -> None:
    relay(site.store, "it", files_of(site, "it", b"copy-1"), tag="hot")
    same(site, "it", "hot")
    devices = [each.device for each in files_of(site, "hot", b"copy-1", b"copy-2")]
    assert devices == [1, 1, 1, 1, 2]


def test_a_range_takes_whole_chunks_each_once_where_it_is_first_wanted(site: Site) -> None:
    layer = load_image(site.store, "it").layers[0]
    whole = files_of(site, "it", b"a")
    inside = [each._replace(offset=each.offset + BLOCK_SIZE, length=1) for each in whole[:2]]
    report = relay(site.store, "it", [inside[1], *inside, whole[1]], tag="hot")
    assert (report.matched, report.chunks) == (4, 2)
    assert pack_bytes(site.store, report.image.layers[0].packs[0]) == A[CHUNK_SIZE : 2 * CHUNK_SIZE] + A[:CHUNK_SIZE]
    # One range over everything is the pack as it is.
    everything = HotRange(layer.metadata, 1, 0, layer.packs[0].raw_size)
    assert relay(site.store, "it", [everything]).manifest == site.store.resolve("it").digest


def test_the_digests_depend_on_image_and_ranges_alone(site: Site, tmp_path: Path) -> None:
    wanted = files_of(site, "it", b"usr/lib/big", b"a", b"b")
    expected = relay(site.store, "it", wanted, tag="hot", jobs=1)
    other = Site(tmp_path / "other")
    other.convert(other.image([LAYER]), tag="there")
    again = relay(other.store, "there", wanted, tag="x", jobs=5)
    assert again.manifest == expected.manifest
    assert again.image == expected.image
    assert relay(site.store, "it", wanted[::-1]).manifest != expected.manifest


def test_laid_out_again_by_the_same_ranges_it_is_the_same_image(site: Site) -> None:
    wanted = files_of(site, "it", b"usr/lib/big", b"a", (b"holes", 200_000, 5000))
    first = relay(site.store, "it", wanted, tag="hot")
    (moved,) = first.layers
    now = [
        HotRange(moved.after.metadata, device, offset, length)
        for each in wanted
        for device, offset, length, _ in moved.at(each.device, each.offset, each.length)
    ]
    before = site.snapshot()
    second = relay(site.store, "hot", now)
    assert second.manifest == first.manifest
    assert second.stored_size == 0
    assert second.before == second.after == first.after
    assert second.copied_size == 0
    assert site.snapshot() == before


def test_what_a_metadata_image_is_read_as_writes_it_again(site: Site) -> None:
    (layer,) = load_image(site.store, "it").layers
    with open_layer(site.store, layer) as opened:
        summary = write_image(opened.tree(), [Device(p.digest, p.blocks) for p in layer.packs], io.BytesIO())
    assert summary.digest == layer.metadata


# ---- packs that drop out


@pytest.fixture
def several(site: Site) -> Site:
    """``many`` refers to a pack of its own, ``it``'s, and two others."""
    one, two = noise(100_000, 11), noise(100_000, 12)
    site.convert(site.tar(file("one", one)), Role.TOOLKIT, tag="one")
    site.convert(site.tar(file("two", two)), Role.TOOLKIT, tag="two")
    site.convert(site.tar(file("1", one), file("2", two), file("a", A), file("own", noise(200_000, 13))), tag="many")
    assert len(load_image(site.store, "many").layers[0].packs) == 4
    return site


@pytest.mark.parametrize(
    "gone", [(b"own",), (b"1",), (b"2", b"1"), (b"a",), (b"own", b"1", b"a"), (b"2", b"own", b"a")]
)
def test_packs_without_cold_chunks_drop_out_and_the_others_get_new_numbers(
    several: Site, gone: tuple[bytes, ...]
) -> None:
    (before,) = load_image(several.store, "many").layers
    wanted = files_of(several, "many", *gone)[::-1]  # another order than that of any pack
    lost = {each.device for each in wanted}
    assert len(lost) == len(gone)
    report = relay(several.store, "many", wanted, tag="hot", jobs=3)
    same(several, "many", "hot")
    sound(several)
    (moved,) = report.layers
    kept = tuple(pack for number, pack in enumerate(before.packs, 1) if number not in lost)
    assert moved.after.packs[1:] == kept
    assert moved.devices == tuple(
        0 if number in lost else 2 + kept.index(pack) for number, pack in enumerate(before.packs, 1)
    )
    assert report.copied_size == 0
    for device in range(1, 5):
        there = list(moved.at(device, 0, BLOCK_SIZE * before.packs[device - 1].blocks))
        assert sum(length for *_, length, _ in there) <= before.packs[device - 1].raw_size


def test_where_some_pack_has_the_hot_chunks_alone_and_in_order_it_is_the_hot_pack(several: Site) -> None:
    (before,) = load_image(several.store, "many").layers
    report = relay(several.store, "many", files_of(several, "many", b"1"))
    assert report.manifest == several.store.resolve("many").digest
    assert report.before == report.after
    wanted = files_of(several, "many", b"own")
    assert relay(several.store, "many", wanted).layers[0].after.packs == before.packs


def test_all_packs_may_drop_out(several: Site) -> None:
    report = relay(several.store, "many", files_of(several, "many", b"own", b"1", b"2", b"a"), tag="hot")
    same(several, "many", "hot")
    (moved,) = report.layers
    assert moved.devices == (0, 0, 0, 0)
    assert len(moved.after.packs) == 1


def test_ranges_translate_block_by_block(several: Site) -> None:
    store = several.store
    wanted = files_of(several, "many", b"a", (b"own", 30_000, 20_000), (b"1", 0, 1))
    (moved,) = relay(store, "many", wanted).layers
    before = [pack_bytes(store, pack) for pack in moved.before.packs]
    after = [pack_bytes(store, pack) for pack in moved.after.packs]
    for device, old in enumerate(before, 1):
        for start in range(0, len(old), 3 * BLOCK_SIZE):
            length = min(5 * BLOCK_SIZE, len(old) - start)
            found = 0
            for to, offset, size, skipped in moved.at(device, start, length):
                assert skipped == found or moved.devices[device - 1] == 0
                assert after[to - 1][offset : offset + size] == old[start + skipped : start + skipped + size]
                found += size
            if moved.devices[device - 1]:
                assert found == length
    assert list(moved.at(9, 0, BLOCK_SIZE)) == []


# ---- nothing to do


@pytest.mark.case("P02")
@pytest.mark.parametrize(
    "layer",
    [
        tar(directory("etc"), symlink("etc/link", "/nowhere"), file("nothing"), fifo("pipe"), file("small", b"inline")),
        tar(),
        tar(sparse_pax("all-hole", 10 << 20, [], "0.1")),
    ],
    ids=["no data", "empty", "holes alone"],
)
def test_a_layer_without_data_stays_whatever_is_planned(site: Site, layer: bytes) -> None:
    site.convert(site.tar(layer, end=b"") if layer else site.tar(), tag="bare")
    (bare,) = load_image(site.store, "bare").layers
    wanted = [HotRange(bare.metadata, 1, 0, BLOCK_SIZE), HotRange(bare.metadata, 0, 0, BLOCK_SIZE)]
    report = relay(site.store, "bare", wanted, tag="hot")
    assert report.image == load_image(site.store, "bare")
    assert (report.matched, report.unmatched) == (0, {"of another pack": 2})
    assert report.layers == (MovedLayer(bare, bare, ()),)
    assert (report.chunks, report.before, report.after, report.stored_size) == (0, Touched(), Touched(), 0)
    same(site, "bare", "hot")
    sound(site)


@pytest.mark.case("P02")
def test_an_empty_plan_is_the_same_image_under_another_name(site: Site) -> None:
    before = site.snapshot()[0]
    report = relay(site.store, "it", [], tag="hot")
    assert site.store.resolve("hot") == site.store.resolve("it")
    assert report.stored_size == 0
    assert site.blobs() == before
    assert report.layers[0].devices == (1,)
    assert list(report.layers[0].at(1, BLOCK_SIZE, BLOCK_SIZE)) == [(1, BLOCK_SIZE, BLOCK_SIZE, 0)]


def test_ranges_that_name_nothing_are_counted(site: Site) -> None:
    (layer,) = load_image(site.store, "it").layers
    end = layer.packs[0].raw_size
    wanted = [
        HotRange(Digest.of(b"other"), 1, 0, BLOCK_SIZE),
        HotRange(layer.metadata, 2, 0, BLOCK_SIZE),
        HotRange(layer.metadata, 1, end, BLOCK_SIZE),
        HotRange(layer.metadata, 1, end - BLOCK_SIZE, 2 * BLOCK_SIZE),
        HotRange(layer.metadata, 1, 0, 0),
        HotRange(layer.metadata, 1, -BLOCK_SIZE, BLOCK_SIZE),
        *files_of(site, "it", b"b"),
    ]
    report = relay(site.store, "it", wanted)
    assert report.unmatched == {"of another layer": 1, "of another pack": 1, "beyond its pack": 4}
    assert report.matched == len(wanted) - 6
    assert report.hot_size == len(padded(B))


def test_blocks_of_a_pack_that_this_image_does_not_use_are_in_no_file(site: Site) -> None:
    site.convert(site.tar(file("b", B), file("a", A)), tag="part")
    (layer,) = load_image(site.store, "part").layers
    assert len(layer.packs) == 1
    (big, *_) = files_of(site, "it", b"usr/lib/big")
    report = relay(site.store, "part", [big._replace(layer=layer.metadata), *files_of(site, "part", b"b")], tag="hot")
    assert report.unmatched == {"in no file": 1}
    same(site, "part", "hot")


# ---- stacks


@pytest.fixture
def stack(site: Site) -> Site:
    work = tar(whiteout("copy-1"), opaque("usr/lib"), file("usr/lib/new", noise(60_000, 20)), file("b2", B))
    site.convert(site.image([LAYER, work]), Role.WORKSPACE, base="it", tag="work")
    publish_stack(site.store, plan_stack(site.store, base="it", workspace="work"), tag="env")
    return site


@pytest.mark.parametrize("which", ["base", "workspace", "both"])
def test_layers_are_laid_out_each_for_itself(stack: Site, which: str) -> None:
    base, work = load_image(stack.store, "env").layers
    wanted = []
    if which != "workspace":
        wanted += hot(stack.store, base, b"copy-1", b"usr/lib/big")
    if which != "base":
        wanted += hot(stack.store, work, b"usr/lib/new", b"b2")
    report = relay(stack.store, "env", wanted[::-1], tag="hot")
    same(stack, "env", "hot")
    sound(stack)
    new_base, new_work = report.image.layers
    assert (new_base == base) == (which == "workspace")
    assert (new_work.metadata == work.metadata) == (which == "base")
    assert new_work.base == new_base.metadata
    assert [layer.role for layer in report.image.layers] == [Role.BASE, Role.WORKSPACE]
    # What is laid out alone is the same layer as in the stack: layers stay shareable.
    if which != "workspace":
        alone = relay(stack.store, "it", hot(stack.store, base, b"copy-1", b"usr/lib/big")[::-1], tag="hot-base")
        assert alone.image.layers == (new_base,)
        assert plan_stack(stack.store, base="hot-base", workspace="work").image.layers == (new_base, work)


@pytest.mark.case("P06")
def test_a_whiteout_hides_what_it_hid(stack: Site) -> None:
    base, _ = load_image(stack.store, "env").layers
    relay(stack.store, "env", hot(stack.store, base, b"copy-1"), tag="hot")
    rows = stack.rows("hot")
    assert b"copy-1" not in rows and b"usr/lib/big" not in rows
    same(stack, "env", "hot")


# ---- deduplication, collection, raw packs


def test_other_images_find_hot_chunks_in_the_new_pack(site: Site) -> None:
    report = relay(site.store, "it", files_of(site, "it", b"a", b"b", b"copy-1", b"usr/lib/big"), tag="hot")
    current = site.store.resolve("it")
    site.store.delete_reference("it", expected=current)
    plan = plan_collection(site.store, grace=0)
    collect(site.store, plan)
    again = site.convert(site.tar(file("elsewhere/a", A), file("elsewhere/big", C)), tag="later")
    assert again.new_size == 0
    assert again.layer.packs == report.image.layers[0].packs[:1]
    sound(site)


def test_an_image_converted_again_refers_to_its_first_pack(site: Site) -> None:
    relay(site.store, "it", files_of(site, "it", b"a", b"b"), tag="hot")
    again = site.convert(site.image([LAYER]), tag="again")
    assert again.new_size == 0
    assert again.manifest == site.store.resolve("it").digest


def test_raw_packs(site: Site) -> None:
    wanted = files_of(site, "it", b"a", b"b")
    plain = relay(site.store, "it", wanted)
    report = relay(site.store, "it", wanted, tag="hot", raw=True)
    assert report.manifest == plain.manifest
    packs = report.image.layers[0].packs
    for pack in packs:
        assert is_raw(site.store, pack)
        assert Path(site.store.local_path(pack.digest)).read_bytes() == pack_bytes(site.store, pack)
    assert report.stored_size == sum(pack.raw_size for pack in packs)
    sound(site)


# ---- failures


def test_a_name_may_be_moved_to_the_new_image(site: Site) -> None:
    report = relay(site.store, "it", files_of(site, "it", b"a"), tag="it")
    assert site.store.resolve("it").digest == report.manifest


def test_no_such_image(site: Site) -> None:
    before = site.snapshot()
    with pytest.raises(NotFoundError):
        relay(site.store, "nothing", [], tag="hot")
    assert site.snapshot() == before


@pytest.mark.parametrize("step", ["read", "compress", "metadata"])
def test_interrupted_it_leaves_the_store_as_it_was(site: Site, step: str) -> None:
    before = site.snapshot()
    progress = Interrupting(step)
    with pytest.raises(Stop):
        relay(site.store, "it", files_of(site, "it", b"a"), tag="hot", progress=progress)
    assert progress.stopped
    blobs, references, leftovers = site.snapshot()
    assert (references, leftovers) == before[1:]
    assert set(blobs) - set(before[0]) == set() or step == "metadata"  # by then the pack is there, for gc


def test_a_damaged_frame_is_found(site: Site) -> None:
    (layer,) = load_image(site.store, "it").layers
    site.flip(layer.packs[0].blob, 1000)
    before = site.snapshot()
    with pytest.raises(CorruptError, match="frame 0 of pack"):
        relay(site.store, "it", files_of(site, "it", b"a"), tag="hot")
    assert site.snapshot() == before


def test_a_name_that_somebody_else_has_moved(site: Site) -> None:
    other = site.convert(site.tar(file("x", b"x")), tag="other")
    relay(site.store, "it", [], tag="hot")

    def move() -> None:
        relay(site.store, "other", [], tag="hot")

    with pytest.raises(ConflictError):
        relay(site.store, "it", files_of(site, "it", b"a"), tag="hot", progress=Calling("metadata", move))
    assert site.store.resolve("hot").digest == other.manifest


def test_a_full_disk(site: Site) -> None:
    before = site.snapshot()
    with failing("write", errno.ENOSPC), pytest.raises(NoSpaceError):
        relay(site.store, "it", files_of(site, "it", b"a"), tag="hot")
    assert site.snapshot() == before
    assert not [name for name in os.listdir(site.store.root) if name.startswith(".tmp")]


def test_a_collector_at_work_meanwhile_takes_nothing(site: Site) -> None:
    store = site.store

    def sweep() -> None:
        store.delete_reference("it", expected=store.resolve("it"))
        other = DirectoryStore(store.root)
        collect(other, plan_collection(other, grace=0))

    site.convert(site.tar(file("x", b"x")), tag="other")
    relay(store, "it", files_of(site, "it", b"a"), tag="hot", progress=Calling("metadata", sweep))
    sound(site)
    assert site.rows("hot")[b"usr/lib/big"].value == C
