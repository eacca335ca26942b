"""Which frames of a node's packs plans are about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fetchers import OTHER, SMALL, Bench, a_bench
from support.fetching import SmallPack, small_pack

from layerstore.cache.metadata import PackUse
from layerstore.cache.packs import CachedPack
from layerstore.digest import Digest
from layerstore.pack.format import BLOCK_SIZE
from prefetch.plans.format import CERTAIN, Plan, PlannedRange, PlanPart
from prefetch.plans.match import BEYOND, NO_PACK, UNUSED, Coverage, match

FRAME = 2 * BLOCK_SIZE


@pytest.fixture
def packs(tmp_path: Path) -> Iterator[list[CachedPack]]:
    with a_bench(tmp_path) as bench:
        yield [cached(bench, small) for small in (SMALL, OTHER)]


def cached(bench: Bench, small: SmallPack) -> CachedPack:
    return bench.pack(small, bench.store(small, location=f"store of {small.stored.digest}"))


def part(*ranges: PlannedRange, of: tuple[SmallPack, ...] = (SMALL, OTHER), layer: bytes = b"layer") -> PlanPart:
    return PlanPart(Digest.of(layer), tuple(small.stored.digest for small in of), ranges)


def blocks(device: int, first: int, count: int, due: int = 0, chance: int = CERTAIN) -> PlannedRange:
    return PlannedRange(device, first * BLOCK_SIZE, count * BLOCK_SIZE, due, chance)


def fetched(plans: list[Plan], packs: list[CachedPack]) -> list[tuple[int, int, int, int]]:
    return [(packs.index(pack), *rest) for pack, *rest in match(plans, packs).fetches]


def test_ranges_become_frames_by_when_they_are_due(packs: list[CachedPack]) -> None:
    plan = Plan((part(blocks(1, 20, 1, 10), blocks(2, 3, 4, 5, 700), blocks(1, 0, 2, 5, 800)),))
    assert fetched([plan], packs) == [
        (0, 0, 5, 800),
        (1, 1, 5, 700),
        (1, 2, 5, 700),
        (1, 3, 5, 700),
        (0, 10, 10, CERTAIN),
    ]
    assert match([plan], packs).coverage == Coverage(3, 7 * BLOCK_SIZE, 3, 7 * BLOCK_SIZE, {})


def test_each_frame_is_fetched_once_when_it_is_first_due_and_as_likely_as_it_can_be(packs: list[CachedPack]) -> None:
    first = Plan((part(blocks(1, 0, 6, 30, 9000), blocks(1, 2, 2, 10, 100)),))
    second = Plan((part(blocks(1, 1, 1, 20, 200), blocks(1, 3, 2, 40, CERTAIN), of=(SMALL,)),))
    expected = [(0, 1, 10, CERTAIN), (0, 0, 20, 9000), (0, 2, 30, CERTAIN)]
    assert fetched([first, second], packs) == fetched([second, first], packs) == expected


def test_neither_the_layer_nor_the_order_of_its_packs_matters(packs: list[CachedPack]) -> None:
    """A plan for another build, or another order of layers, is good for the packs that both have."""
    one = Plan((part(blocks(1, 4, 2), blocks(2, 6, 2)),))
    other = Plan((part(blocks(1, 6, 2), of=(OTHER,), layer=b"a"), part(blocks(1, 4, 2), of=(SMALL,), layer=b"b")))
    assert set(fetched([one], packs)) == set(fetched([other], packs)) == {(0, 2, 0, CERTAIN), (1, 3, 0, CERTAIN)}
    assert set(match([one], packs[::-1]).fetches) == set(match([one], packs).fetches)


def test_what_does_not_match_is_counted(packs: list[CachedPack]) -> None:
    gone = small_pack(4, seed=9)
    end = len(SMALL.frames) * 2
    plan = Plan(
        (
            part(blocks(1, 0, 2), blocks(1, end - 1, 3), blocks(1, end, 1), blocks(2, 1 << 30, 1)),
            part(blocks(1, 0, 1), blocks(2, 0, 1), of=(gone, SMALL)),
        )
    )
    found = match([plan], packs)
    assert {(planned.pack, planned.number) for planned in found.fetches} == {(packs[0], 0), (packs[0], 39)}
    assert found.coverage == Coverage(6, 9 * BLOCK_SIZE, 3, 4 * BLOCK_SIZE, {BEYOND: 2, NO_PACK: 1})


@pytest.mark.case("P02")
def test_nothing_planned_is_nothing_to_fetch(packs: list[CachedPack]) -> None:
    for plans in ([], [Plan(())], [Plan((part(),))], [Plan((part(of=()),))]):
        assert match(plans, packs).fetches == ()
        assert match(plans, packs).coverage == Coverage()
    nothing = match([Plan((part(blocks(1, 0, 1)),))], [])
    assert nothing.fetches == ()
    assert nothing.coverage.unmatched == {NO_PACK: 1}


def test_ranges_that_overlap_again_and_again(packs: list[CachedPack]) -> None:
    plan = Plan((part(*(blocks(1, 0, 80, 20_000 - number, 1 + number % CERTAIN) for number in range(20_000))),))
    found = match([plan], packs)
    assert [(planned.number, planned.due, planned.chance) for planned in found.fetches] == [
        (number, 1, CERTAIN) for number in range(40)
    ]
    assert found.coverage.matched_ranges == 20_000


def test_what_the_image_does_not_refer_to_is_not_fetched(packs: list[CachedPack]) -> None:
    plan = Plan((part(blocks(1, 0, 2), blocks(1, 4, 2), blocks(1, 9, 1), blocks(2, 0, 1)),))
    uses = [PackUse(SMALL.stored.digest.hex, ((1, 1), (3, 1))), PackUse(SMALL.stored.digest.hex, ((8, 3),))]
    matched = match([plan], packs, uses)
    assert [(packs.index(each.pack), each.number) for each in matched.fetches] == [(0, 0), (0, 4)]
    assert matched.coverage == Coverage(4, 6 * BLOCK_SIZE, 2, 3 * BLOCK_SIZE, {UNUSED: 2})
    assert match([plan], packs, ()).coverage.unmatched == {UNUSED: 4}
