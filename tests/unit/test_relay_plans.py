"""Plans and layouts: what comes first, and where planned ranges are afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.relays import hot, pack_bytes, padded, same
from support.tars import directory, file, symlink, tar

from layerstore.compose import plan_stack, publish_stack
from layerstore.digest import Digest
from layerstore.errors import printable
from layerstore.hot import HotFile
from layerstore.image import Image, Layer, Role, load_image
from layerstore.pack.chunks import CHUNK_SIZE
from layerstore.pack.format import BLOCK_SIZE, FRAME_SIZE
from prefetch.plans.format import CERTAIN, Plan, PlannedRange, PlanPart, encode_plan, order, parse_plan
from prefetch.plans.relaid import (
    LIKELY,
    fitted,
    hot_files,
    hot_ranges,
    optimize,
    replanned,
    wanted,
)

A, B, C = noise(5 * CHUNK_SIZE + 100, 1), noise(70_000, 2), noise(3 * FRAME_SIZE, 3)
LAYER = tar(file("a", A), file("b", B), file("lib/big", C), symlink("link", "a"), file("small", b"inline"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A store with one image of one layer, as ``it``."""
    with fsync_for_free():
        site = Site(tmp_path)
        site.convert(site.image([LAYER]), tag="it")
        yield site


def part_of(site: Site, layer: Layer, *parts: tuple[bytes, int, int, int, int]) -> PlanPart:
    """A part with (path, offset, length, due, chance) of files, by chunks."""
    found = []
    for path, offset, length, due, chance in parts:
        step = offset // CHUNK_SIZE * CHUNK_SIZE
        for each in hot(site.store, layer, (path, offset, length)):
            found.append(PlannedRange(each.device, each.offset, each.length, due, chance, printable(path), step))
            step += each.length
    return PlanPart(layer.metadata, tuple(pack.digest for pack in layer.packs), order(found))


@pytest.fixture
def plan(site: Site) -> Plan:
    (layer,) = load_image(site.store, "it").layers
    part = part_of(
        site,
        layer,
        (b"lib/big", 700_000, 40_000, 500, CERTAIN),
        (b"lib/big", 300_000, 10, 700, CERTAIN),
        (b"b", 0, 10, 100, 2000),
        (b"a", 0, 40_000, 900, 6000),
        (b"lib/big", 0, 10, 1000, 400),
    )
    return Plan((part,), name="p", image="it", learned={"learner": "union", "runs": 3}, score={"recall": 1.0})


def data_of(site: Site, image: Image, plan: Plan) -> list[tuple[int, int, bytes]]:
    """What the ranges of a plan hold, with due and chance, block by block, in an order of its own."""
    found = []
    layers = {layer.metadata: layer for layer in image.layers}
    for part in plan.parts:
        layer = layers[part.metadata]
        assert part.packs == tuple(pack.digest for pack in layer.packs)
        packs = [pack_bytes(site.store, pack) for pack in layer.packs]
        for each in part.ranges:
            data = packs[each.device - 1][each.offset : each.end]
            assert len(data) == each.length
            found += [(each.due, each.chance, data[at : at + BLOCK_SIZE]) for at in range(0, len(data), BLOCK_SIZE)]
    return sorted(found)


def test_likely_ranges_come_first_each_group_by_when_it_is_due(plan: Plan) -> None:
    dues = [each.due for _, each in wanted(plan)]
    assert dues == [*sorted(dues[:-2]), 100, 1000]
    assert [each.chance >= LIKELY for _, each in wanted(plan)] == [True] * (len(dues) - 2) + [False] * 2
    assert [each.due for _, each in wanted(plan, 2000)] == dues[:-1]
    assert len(hot_ranges(plan)) == len(hot_files(plan)) == len(dues)
    assert hot_ranges(plan, CERTAIN + 1) == []


def test_ranges_without_a_path_can_not_be_said_by_path(plan: Plan) -> None:
    part = plan.parts[0]
    bare = replace(plan, parts=(replace(part, ranges=tuple(each._replace(path=None) for each in part.ranges)),))
    assert {each.path for each in hot_files(bare)} == {b""}
    odd = replace(plan, parts=(replace(part, ranges=(part.ranges[0]._replace(path="\\q"),)),))
    assert [each.path for each in hot_files(odd)] == [b""]
    assert hot_ranges(bare) == hot_ranges(plan)
    assert hot_files(plan)[-1] == HotFile(b"lib/big", 0, CHUNK_SIZE)


@pytest.mark.parametrize("min_chance", [0, 2000, LIKELY, CERTAIN + 1])
def test_the_plan_of_the_new_image_names_the_same_data(site: Site, plan: Plan, min_chance: int) -> None:
    done = optimize(site.store, "it", plan, tag="hot", min_chance=min_chance)
    same(site, "it", "hot")
    before, after = load_image(site.store, "it"), done.report.image
    assert data_of(site, after, done.plan) == data_of(site, before, plan)
    count = len(plan.parts[0].ranges)
    assert done.unlikely == sum(each.chance < min_chance for each in plan.parts[0].ranges)
    assert done.report.matched == count - done.unlikely
    assert done.report.unmatched == {} and done.matched is None
    assert parse_plan(encode_plan(done.plan, "x"), "x") == done.plan
    assert (done.plan.name, done.plan.image, done.plan.manifest) == ("p", "hot", str(done.report.manifest))
    assert done.plan.learned == {"learner": "union", "runs": 3, "laid_out_by": str(plan.digest)}


def test_the_new_plan_is_one_run_through_the_hot_pack(site: Site, plan: Plan) -> None:
    done = optimize(site.store, "it", plan, tag="hot")
    (part,) = done.plan.parts
    likely = [each for each in part.ranges if each.chance >= LIKELY]
    assert {each.device for each in part.ranges} == {1}
    at = 0
    for each in likely:
        assert each.offset == at
        at = each.end
    assert sum(each.length for each in part.ranges) == part_size(done.report.image)
    # Laid out by its own plan it stays as it is.
    again = optimize(site.store, "hot", done.plan, tag="again")
    assert again.report.manifest == done.report.manifest
    assert again.plan.parts == done.plan.parts


def part_size(image: Image) -> int:
    return image.layers[0].packs[0].raw_size


@pytest.mark.case("P02")
def test_an_empty_plan_and_one_of_another_image(site: Site, plan: Plan) -> None:
    done = optimize(site.store, "it", Plan(()), tag="hot")
    assert done.report.manifest == site.store.resolve("it").digest
    assert done.plan.parts == ()
    site.convert(site.tar(directory("d"), symlink("l", "d"), file("e")), tag="bare")
    done = optimize(site.store, "bare", plan, tag="bare-hot")
    assert done.plan.parts == ()
    assert done.matched is not None and done.matched.rate == 0
    assert done.report.manifest == site.store.resolve("bare").digest


def test_a_plan_of_another_build_is_found_by_its_files(site: Site, plan: Plan) -> None:
    changed = noise(len(A), 50)
    build = tar(file("0-new", noise(100_000, 51)), file("a", changed), file("b", B), file("lib/big", C))
    site.convert(site.image([build]), tag="next", dedup=False)
    image = load_image(site.store, "next")
    fit = fitted(site.store, image, plan)
    assert fit.matched is not None and fit.matched.rate == 1
    assert sum(part.bytes for part in fit.plan.parts) == plan.parts[0].bytes
    done = optimize(site.store, "next", plan, tag="hot")
    same(site, "next", "hot")
    first = pack_bytes(site.store, done.report.image.layers[0].packs[0])
    assert first.startswith(C[688_128:753_664] + C[294_912:311_296] + changed[: 3 * CHUNK_SIZE])
    assert data_of(site, done.report.image, done.plan) == data_of(site, image, fit.plan)


def test_a_plan_of_another_build_is_found_by_shared_packs_even_without_paths(site: Site, plan: Plan) -> None:
    build = tar(file("0-new", noise(100_000, 51)), file("moved/a", A), file("b2", B), file("lib/big2", C))
    site.convert(site.image([build]), tag="next")
    bare = replace(
        plan,
        parts=tuple(replace(p, ranges=tuple(each._replace(path=None) for each in p.ranges)) for p in plan.parts),
    )
    fit = fitted(site.store, load_image(site.store, "next"), bare)
    assert fit.matched is not None and fit.matched.rate == 1
    (part,) = fit.plan.parts
    assert {part.packs[each.device - 1] for each in part.ranges} == {plan.parts[0].packs[0]}
    assert part.bytes == plan.parts[0].bytes


def test_what_is_nowhere_is_counted(site: Site, plan: Plan) -> None:
    site.convert(site.tar(file("b", B), file("lib/big", b"inline now")), tag="next", dedup=False)
    part = plan.parts[0]
    bare = replace(part, metadata=Digest.of(b"x"), packs=(Digest.of(b"y"),), ranges=(PlannedRange(1, 0, 4096, 5),))
    fit = fitted(site.store, load_image(site.store, "next"), replace(plan, parts=(part, bare)))
    assert fit.matched is not None
    assert fit.matched.unknown == ("a",)
    assert fit.matched.by_path == sum(each.length for each in part.ranges if each.path == "b")
    assert fit.matched.lost == fit.matched.bytes - fit.matched.by_path
    (left,) = fit.plan.parts
    assert {each.path for each in left.ranges} == {"b"}


def test_a_plan_of_a_stack(site: Site) -> None:
    work = tar(file("src/new", noise(60_000, 20)), file("b2", B))
    site.convert(site.image([LAYER, work]), Role.WORKSPACE, base="it", tag="work")
    publish_stack(site.store, plan_stack(site.store, base="it", workspace="work"), tag="env")
    base, upper = load_image(site.store, "env").layers
    plan = Plan(
        (
            part_of(site, base, (b"lib/big", 0, 50_000, 10, CERTAIN), (b"a", 0, 1, 5, CERTAIN)),
            part_of(site, upper, (b"src/new", 0, 60_000, 7, CERTAIN), (b"b2", 0, 60_000, 9, 3000)),
        )
    )
    done = optimize(site.store, "env", plan, tag="hot")
    same(site, "env", "hot")
    assert [part.metadata for part in done.plan.parts] == [layer.metadata for layer in done.report.image.layers]
    assert data_of(site, done.report.image, done.plan) == data_of(site, load_image(site.store, "env"), plan)
    assert [{each.device for each in part.ranges} for part in done.plan.parts] == [{1}, {1}]
    # Of a layer of which nothing is planned, nothing changes.
    alone = optimize(site.store, "env", Plan(plan.parts[1:]), tag="hot-2")
    assert alone.report.image.layers[0] == base
    assert [part.metadata for part in alone.plan.parts] == [alone.report.image.layers[1].metadata]


def test_a_conversion_by_a_plan_has_its_plan(site: Site, plan: Plan) -> None:
    build = tar(file("0-new", noise(100_000, 51)), file("a", A), file("b", B), file("lib/big", C))
    report = site.convert(site.image([build]), tag="next", hot=hot_files(plan))
    assert report.hot is not None and report.hot.copied_size == report.hot.size
    new = replanned(site.store, report.image, plan, name="next")
    assert new.matched is not None and new.matched.rate == 1
    (part,) = new.plan.parts
    # All of it is in the new pack, though the pack that the plan was made for is referred to as well.
    assert {each.device for each in part.ranges} == {1}
    assert plan.parts[0].packs[0] in part.packs
    assert sum(each.length for each in part.ranges) == report.hot.size
    assert data_of(site, report.image, new.plan) == data_of(site, load_image(site.store, "it"), plan)
    assert padded(A) in b"".join(pack_bytes(site.store, pack) for pack in report.layer.packs)
    assert (new.plan.image, new.plan.manifest) == ("next", str(report.manifest))
