"""The simulator against what can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.traces import MS, World, access, digest, frame, trace

from layerstore.errors import LimitError
from layerstore.pack.format import FRAME_SIZE
from prefetch.learn.frames import FrameDue, planned_frames
from prefetch.learn.runs import run_of
from prefetch.learn.simulate import Costs, Link, Outcome, Program, simulate, warm
from prefetch.learn.sizes import GUESSED, Sizes
from prefetch.plans.format import Plan, PlannedRange, PlanPart
from prefetch.plans.match import match
from prefetch.share import FIRST_WINDOW
from prefetch.trace.format import Access, Trace

PACK = digest("pack base")
SIZE = GUESSED.compressed(PACK, 0)
FREE = Costs(frame=0.0, want=0.0, answer=0.0, ahead=False)
SLOW = Link(0.020)
APART = 40
"""Frames so far apart are never one request, and nobody reads ahead from one to the other."""


def start(
    accesses: Sequence[Access],
    planned: Sequence[int] | None = None,
    *,
    link: Link = SLOW,
    costs: Costs = FREE,
    ended: int | None = None,
) -> Outcome:
    """A run over one pack, with the plan of these frames."""
    program = Program(run_of(trace(accesses, ended=ended)))
    plan = None if planned is None else [FrameDue(PACK, number, 0, 1) for number in planned]
    return simulate(program, plan, link=link, costs=costs)


def test_one_frame_takes_a_turn_of_the_link() -> None:
    outcome = start([frame(0, 0)])
    assert outcome.seconds == pytest.approx(0.020)
    assert outcome.waited == pytest.approx(0.020)
    assert (outcome.demand_reads, outcome.demand_frames, outcome.used_frames, outcome.requests) == (1, 1, 1, 1)
    assert (outcome.fetched_bytes, outcome.wasted_bytes, outcome.missed_frames) == (SIZE, 0, 1)


def test_its_bytes_take_their_time() -> None:
    assert start([frame(0, 0)], link=Link(0.020, 1e6)).seconds == pytest.approx(0.020 + SIZE / 1e6)


def test_so_does_the_node() -> None:
    costs = Costs(frame=0.001, want=0.0005, answer=0.00025, event=0.0001)
    assert start([frame(0, 0)], costs=costs).seconds == pytest.approx(0.020 + 0.001 + 0.0005 + 0.00025 + 0.0001)


def test_frames_one_after_the_other_take_a_turn_each() -> None:
    outcome = start([frame(0, number * APART) for number in range(7)])
    assert outcome.seconds == pytest.approx(7 * 0.020)
    assert outcome.demand_reads == 7


def test_planned_frames_come_side_by_side() -> None:
    numbers = [0, APART]
    outcome = start([frame(0, number) for number in numbers], numbers)
    assert outcome.seconds == pytest.approx(0.020)
    assert (outcome.requests, outcome.demand_reads) == (2, 0)


def test_side_by_side_they_share_the_link() -> None:
    numbers = [0, APART]
    outcome = start([frame(0, number) for number in numbers], numbers, link=Link(0.020, 1e6))
    assert outcome.seconds == pytest.approx(0.020 + 2 * SIZE / 1e6)


def test_neighbours_are_one_request() -> None:
    assert FIRST_WINDOW / 4 > 2 * SIZE
    outcome = start([frame(0, 0), frame(0, 1)], [0, 1])
    assert (outcome.requests, outcome.fetched_frames) == (1, 2)


def test_what_comes_while_the_program_thinks_costs_nothing() -> None:
    outcome = start([frame(1000 * MS, 0)], [0])
    assert outcome == Outcome(1.0, used_frames=1, requests=1, fetched_frames=1, fetched_bytes=SIZE)


def test_a_replay_may_begin_before_the_program() -> None:
    assert start([frame(0, 0)], [0], costs=replace(FREE, lead=0.015)).seconds == pytest.approx(0.005)
    assert start([frame(0, 0)], [0], costs=replace(FREE, lead=0.025)).seconds == pytest.approx(0.0)


def test_a_range_over_two_frames_needs_both() -> None:
    outcome = start([access(0, FRAME_SIZE - 4096, 8192)])
    assert (outcome.used_frames, outcome.demand_reads, outcome.demand_frames) == (2, 1, 2)
    assert outcome.seconds == pytest.approx(0.020)


def test_a_program_thinks_after_its_last_read() -> None:
    assert start([frame(0, 0)], ended=300 * MS).seconds == pytest.approx(0.320)


def test_what_was_read_once_is_there() -> None:
    outcome = start([frame(0, 0), access(0, 4096), frame(0, 0)])
    assert outcome.seconds == pytest.approx(0.020)


def test_warm_is_the_run_itself() -> None:
    program = Program(run_of(trace([frame(0, 0), frame(70 * MS, 5)], ended=100 * MS)))
    assert warm(program, FREE).seconds == pytest.approx(0.1)
    assert warm(program, replace(FREE, event=0.001)).seconds == pytest.approx(0.102)


def test_what_no_run_needs_is_wasted() -> None:
    outcome = start([frame(1000 * MS, 0)], [0, APART, 2 * APART])
    assert outcome.seconds == pytest.approx(1.0)
    assert (outcome.fetched_bytes, outcome.wasted_bytes, outcome.left_bytes) == (3 * SIZE, 2 * SIZE, 0)


def test_what_was_not_reached_is_left() -> None:
    numbers = [0, *(APART * number for number in range(1, 200))]
    outcome = start([frame(20 * MS, 0)], numbers, link=Link(0.020, math.inf, 4))
    assert outcome.left_bytes > 0
    assert outcome.left_wasted_bytes == outcome.left_bytes
    assert outcome.fetched_bytes + outcome.left_bytes == 200 * SIZE


def test_demand_goes_before_what_is_planned() -> None:
    """A surprise among two hundred planned frames waits for what is under way, not for all of them."""
    planned = [APART * number for number in range(1, 201)]
    link = Link(0.020, 10e6)
    surprise = start([frame(1 * MS, 0)], planned, link=link)
    last = start([frame(1 * MS, planned[-1])], [*planned[:-1], planned[-1]], link=Link(0.020, 10e6, 1))
    assert surprise.demand_reads == 1
    assert surprise.seconds < 0.3 < 200 * SIZE / 10e6
    assert last.demand_frames == 1, "what is planned late, and waited for, is demanded"


def test_what_is_under_way_is_not_asked_for_again() -> None:
    outcome = start([frame(5 * MS, 0)], [0])
    assert (outcome.requests, outcome.demand_reads, outcome.demand_frames) == (1, 0, 0)
    assert outcome.waited == pytest.approx(0.015)


def test_processors_are_shared() -> None:
    costs = replace(FREE, frame=0.001, processors=1)
    accesses = [access(0, 0, 2 * FRAME_SIZE)]
    assert start(accesses, costs=costs).seconds == pytest.approx(0.022)
    numbers = [0, APART]
    one = start([frame(0, number) for number in numbers], numbers, costs=costs)
    two = start([frame(0, number) for number in numbers], numbers, costs=replace(costs, processors=2))
    assert one.seconds == pytest.approx(0.022)
    assert two.seconds == pytest.approx(0.021)


def test_reading_on_is_read_ahead() -> None:
    accesses = [frame(0, number) for number in range(30)]
    cold = start(accesses, costs=replace(FREE, ahead=True))
    assert start(accesses).demand_reads == 30
    assert cold.demand_reads < 15
    assert cold.seconds < 0.4


def test_there_is_no_reading_ahead_of_a_plan() -> None:
    numbers = list(range(0, 60, 2))
    outcome = start([frame(0, number) for number in numbers], numbers, costs=replace(FREE, ahead=True))
    assert outcome.fetched_frames == len(numbers)
    assert outcome.wasted_bytes == 0


def test_waits_of_the_recording_do_not_count() -> None:
    workload = World().workload("program")
    lazily, locally = (Program(run_of(workload.run(1, wait=wait))) for wait in (25.0, 0.0))
    assert warm(lazily).seconds == pytest.approx(warm(locally).seconds, abs=0.001)
    assert simulate(lazily).seconds == pytest.approx(simulate(locally).seconds, rel=0.01)


def test_equal_starts_have_equal_outcomes() -> None:
    program = Program(run_of(World().workload("program").run(1)))
    plan = [FrameDue(PACK, number, number, 1) for number in range(300)]
    link = Link(0.005, 25e6)
    assert simulate(program, plan, link=link) == simulate(program, plan, link=link)


class _Half(Sizes):
    """Knows that the pack has so many frames, and nothing else."""

    def count(self, pack: object) -> int | None:
        return 4


def test_what_a_pack_does_not_have_is_not_fetched() -> None:
    program = Program(run_of(trace([frame(0, 0)])), _Half())
    outcome = simulate(program, [FrameDue(PACK, number, 0, 1) for number in (0, 3, 4, 90)], link=SLOW, costs=FREE)
    assert outcome.fetched_frames + outcome.left_bytes // SIZE == 2


def test_no_start_reads_sixteen_terabytes() -> None:
    whole = trace([access(0, 0, 1 << 44)])
    with pytest.raises(LimitError, match="more than"):
        Program(run_of(whole))
    plan = Plan((PlanPart(digest("x"), (PACK,), (PlannedRange(1, 0, 1 << 44, 0),)),))
    with pytest.raises(LimitError, match="more than"):
        planned_frames([plan], GUESSED)


def test_planned_frames_are_each_there_once_in_the_order_of_need() -> None:
    other = digest("other pack")
    parts = (
        PlanPart(digest("a"), (PACK, other), (PlannedRange(1, 0, 4096, 50, 10), PlannedRange(2, 0, 4096, 70, 5))),
        PlanPart(
            digest("b"),
            (PACK,),
            (PlannedRange(1, 4096, 4096, 20, 3), PlannedRange(1, FRAME_SIZE - 4096, 8192, 90, 100)),
        ),
    )
    frames = planned_frames([Plan(parts)], GUESSED)
    assert frames == [FrameDue(PACK, 0, 20, 100), FrameDue(other, 0, 70, 5), FrameDue(PACK, 1, 90, 100)]
    assert match([Plan(parts)], []).coverage.ranges == 4


def test_a_run_without_reads_is_its_time() -> None:
    empty = Program(run_of(Trace(trace([frame(0, 0)]).header, (), (), 5000)))
    assert simulate(empty, [FrameDue(PACK, 0, 0, 1)]).seconds == pytest.approx(0.005)
    assert simulate(empty).requests == 0
