"""What holds for any runs, plans and links."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces import digest, layer, trace

from layerstore.pack.format import FRAME_SIZE
from prefetch.learn.evidence import Corpus
from prefetch.learn.frames import FrameDue, planned_frames
from prefetch.learn.ranges import disjoint, joined
from prefetch.learn.runs import run_of, runs_of
from prefetch.learn.simulate import Costs, Link, Program, simulate, warm
from prefetch.learn.sizes import GUESSED
from prefetch.learn.train import train
from prefetch.plans.format import CERTAIN, PlannedRange, parse_plan
from prefetch.trace.format import Access, Trace, Wait

BLOCK = 4096
LAYERS = (layer("base", "shared", "own"), layer("work", "work", "shared"))
BLOCKS = FRAME_SIZE // BLOCK


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    path = draw(st.sampled_from([None, "a", "b"]))
    return Access(
        draw(st.integers(0, 2_000_000)),
        draw(st.integers(0, 1)),
        draw(st.integers(1, 2)),
        draw(st.integers(0, 40 * BLOCKS)) * BLOCK,
        draw(st.integers(1, 3 * BLOCKS)) * BLOCK,
        draw(st.sampled_from([0, 0, 30_000])),
        path=path,
        file_offset=draw(st.integers(0, 100)) * BLOCK if path else 0,
    )


waits = st.builds(lambda start, length: Wait(start, start + length), st.integers(0, 10**6), st.integers(0, 10**5))
traces = st.builds(
    lambda read, waited, command: trace(read, layers=LAYERS, waits=waited, command=[command]),
    st.lists(accesses(), max_size=25),
    st.lists(waits, max_size=4),
    st.sampled_from(["sh", "python"]),
)
links = st.builds(
    Link, st.sampled_from([0.0, 0.001, 0.02]), st.sampled_from([float("inf"), 25e6, 1e6]), st.integers(1, 8)
)
costs = st.builds(
    Costs,
    frame=st.sampled_from([0.0, 0.001]),
    want=st.sampled_from([0.0, 0.0005]),
    processors=st.integers(1, 3),
    lead=st.sampled_from([0.0, 0.05]),
    ahead=st.booleans(),
)
plans = st.lists(
    st.builds(FrameDue, st.sampled_from(LAYERS[0].packs), st.integers(0, 45), st.just(0), st.just(CERTAIN)), max_size=60
)
planned = st.builds(
    lambda device, offset, length, due, chance, path: PlannedRange(
        device, offset * BLOCK, length * BLOCK, due, chance, path, offset * BLOCK if path else 0
    ),
    st.integers(1, 2),
    st.integers(0, 30),
    st.integers(1, 12),
    st.integers(0, 30_000),
    st.integers(1, CERTAIN),
    st.sampled_from([None, "a", "b"]),
)


@settings(deadline=None)
@given(traces, plans, links, costs)
def test_a_start_is_thought_and_waits_and_every_frame_comes_once(
    run: Trace, plan: list[FrameDue], link: Link, costs: Costs
) -> None:
    program = Program(run_of(run))
    hot = warm(program, costs)
    for given_plan in (None, plan):
        outcome = simulate(program, given_plan, link=link, costs=costs)
        assert outcome.seconds == pytest.approx(hot.seconds + outcome.waited)
        assert outcome.waited >= 0
        assert outcome.demand_frames <= outcome.used_frames == hot.used_frames
        assert outcome.demand_reads <= outcome.requests <= outcome.fetched_frames
        assert outcome.fetched_frames >= outcome.used_frames
        assert 0 <= outcome.wasted_bytes <= outcome.fetched_bytes
        assert outcome.left_wasted_bytes == outcome.left_bytes, "what a run uses is never left"
        size = GUESSED.compressed(digest("x"), 0)
        assert outcome.fetched_bytes == outcome.fetched_frames * size


@settings(deadline=None)
@given(traces, links)
def test_a_plan_that_knows_all_beforehand_leaves_no_wait(run: Trace, link: Link) -> None:
    program = Program(run_of(run))
    plan = planned_frames([train("p", [run])] if run.accesses else [], GUESSED)
    outcome = simulate(program, plan, link=link, costs=Costs(lead=60.0))
    assert (outcome.waited, outcome.demand_reads, outcome.wasted_bytes) == (0.0, 0, 0)


@settings(deadline=None)
@given(st.lists(traces, min_size=1, max_size=5))
def test_segments_are_disjoint_and_cover_what_was_read(several: list[Trace]) -> None:
    corpus = Corpus(runs_of(several), GUESSED)
    blocks: dict[tuple[int, int, int], int] = {}
    for index, segment in enumerate(corpus.segments):
        pack, number = corpus.frames[segment.frame]
        assert pack == corpus.layers[segment.layer].packs[segment.device - 1]
        assert number * FRAME_SIZE <= segment.offset < segment.offset + segment.length <= (number + 1) * FRAME_SIZE
        for block in range(segment.offset, segment.offset + segment.length, BLOCK):
            assert blocks.setdefault((segment.layer, segment.device, block), index) == index
    for run, firsts in zip(corpus.runs, corpus.firsts, strict=True):
        read: dict[tuple[int, int, int], int] = {}
        for each in run.reads:
            for block in range(each.offset, each.offset + each.length, BLOCK):
                read.setdefault((each.layer, each.device, block), each.at)
        assert {blocks[block]: at for block, at in reversed(read.items())}.keys() == firsts.keys()
        for block, at in read.items():
            assert firsts[blocks[block]] == at


@settings(max_examples=25, deadline=None)
@given(st.lists(traces, min_size=1, max_size=4), st.randoms(use_true_random=False), st.sampled_from([None, 10**6]))
def test_any_runs_make_a_plan_that_does_not_depend_on_their_order(
    several: list[Trace], shuffle: random.Random, budget: int | None
) -> None:
    if not any(run.accesses for run in several):
        return
    plan = train("p", several, budget=budget)
    shuffle.shuffle(several)
    assert train("p", several, budget=budget) == plan
    assert parse_plan(plan.to_bytes(), "plan") == plan
    read = {
        (run.header.layers[each.layer].metadata, each.device, block)
        for run in several
        for each in run.accesses
        for block in range(each.offset, each.end, BLOCK)
    }
    seen = [
        (part.metadata, each.device, block)
        for part in plan.parts
        for each in part.ranges
        for block in range(each.offset, each.end, BLOCK)
    ]
    assert len(set(seen)) == len(seen), "ranges of a part overlap"
    assert read.issuperset(seen), "only what was read is planned"


@settings(deadline=None)
@given(st.lists(planned, max_size=12))
def test_ranges_are_made_disjoint_by_blocks(ranges: list[PlannedRange]) -> None:
    wanted: dict[tuple[int, int], tuple[int, int]] = {}
    for each in ranges:
        for block in range(each.offset, each.end, BLOCK):
            due, chance = wanted.get((each.device, block), (each.due, each.chance))
            wanted[each.device, block] = min(due, each.due), max(chance, each.chance)
    cut = list(disjoint(ranges))
    found = {}
    for each in cut:
        for block in range(each.offset, each.end, BLOCK):
            assert (each.device, block) not in found
            found[each.device, block] = each.due, each.chance
            if each.path is not None:
                assert each.file_offset == each.offset
    assert found == wanted
    made = joined(cut)
    assert list(made) == sorted(made, key=lambda each: (each.due, each.device, each.offset))
    again = {(each.device, block): each.chance for each in made for block in range(each.offset, each.end, BLOCK)}
    assert again == {block: chance for block, (_, chance) in wanted.items()}
