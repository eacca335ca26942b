"""Plans from the traces of several runs: what is in them, and what they are compared by."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.traces import MS, World, access, digest, frame, layer, mixed, runs, trace

from layerstore.errors import ConflictError, LimitError, UsageError
from layerstore.pack.format import FRAME_SIZE
from prefetch.learn.clusters import by_command, by_content
from prefetch.learn.describe import compare_plans, describe_plan
from prefetch.learn.evidence import Corpus
from prefetch.learn.frames import planned_frames
from prefetch.learn.learners import LEARNERS, named
from prefetch.learn.runs import Waits, run_of, runs_of
from prefetch.learn.score import cross_validate, folds, score
from prefetch.learn.simulate import Link
from prefetch.learn.sizes import GUESSED
from prefetch.learn.train import train, workloads
from prefetch.plans.format import CERTAIN, Plan, PlannedRange, parse_plan
from prefetch.trace.format import Access, Trace, TracedLayer, Wait

SIZE = GUESSED.compressed(digest("x"), 0)


def run(accesses: Sequence[Access], number: int = 0, **fields: object) -> Trace:
    """A trace that differs from others of the same accesses."""
    made = trace(accesses, **fields)  # type: ignore[arg-type]
    return replace(made, header=replace(made.header, started=str(number)))


def frames(plan: Plan) -> list[int]:
    """The numbers of the frames of a plan over one pack, in order."""
    return [planned.number for planned in planned_frames([plan], GUESSED)]


def ranges(plan: Plan, part: int = 0) -> tuple[PlannedRange, ...]:
    return plan.parts[part].ranges


# --- what is learned


def test_union_has_all_and_intersection_what_all_have() -> None:
    traces = [run([frame(0, 0), frame(MS, 40), frame(2 * MS, 80 + number)], number) for number in range(4)]
    union = train("p", traces, learner="union")
    assert sorted(frames(union)) == [0, 40, 80, 81, 82, 83]
    assert {planned.chance for planned in ranges(union)} == {CERTAIN, CERTAIN // 4}
    assert frames(train("p", traces, learner="intersection")) == [0, 40]


def test_noise_is_dropped() -> None:
    traces = runs(8, noise=3, optional=0)
    plan = train("p", traces)
    core = set.intersection(*({(each.layer, each.offset) for each in one.accesses} for one in traces))
    counts: dict[tuple[int, int], int] = {}
    for one in traces:
        for each in {(each.layer, each.offset // FRAME_SIZE) for each in one.accesses}:
            counts[each] = counts.get(each, 0) + 1
    planned = {
        (number, offset // FRAME_SIZE)
        for number, part in enumerate(plan.parts)
        for each in part.ranges
        for offset in range(each.offset, each.end, FRAME_SIZE)
    }
    assert planned >= {(number, offset // FRAME_SIZE) for number, offset in core}
    assert not {each for each in planned if counts[each] == 1}


def test_deadlines_are_when_the_first_runs_need_it_without_waits() -> None:
    traces = [
        run([frame(0, 0), frame((100 + 10 * number) * MS, 40)], number, waits=[Wait(0, 50 * MS)]) for number in range(5)
    ]
    plan = train("p", traces, learner="frequency-50")
    assert [planned.due for planned in ranges(plan)] == [0, 50 * MS]
    late = train("p", traces, learner="quantile-50-50")
    assert [planned.due for planned in ranges(late)] == [0, 70 * MS]


def test_order_by_rank_does_not_depend_on_speed() -> None:
    """A run ten times as slow as the others doesn't reorder what it reads in the same order."""
    order = [5, 90, 45, 200, 130]
    traces = [
        run([frame(place * speed * MS, number) for place, number in enumerate(order)], speed)
        for speed in (10, 11, 12, 100)
    ]
    plan = train("p", traces, learner="rank-50")
    assert frames(plan) == order


def test_layers_are_kept_apart_and_each_run_speaks_for_its_own() -> None:
    base = layer("base")
    stacks = [(base, layer(name)) for name in ("one", "two")]
    traces = [
        run([frame(0, 0), frame(MS, 40, layer=1), *([frame(2 * MS, 80)] if number == 0 else [])], number, layers=stack)
        for number, stack in enumerate([stacks[0], stacks[1], stacks[1], stacks[1]])
    ]
    plan = train("p", traces, learner="union")
    assert [part.metadata for part in plan.parts] == [each.metadata for each in (base, *sorted_layers(stacks))]
    assert [(planned.offset // FRAME_SIZE, planned.chance) for planned in ranges(plan)] == [
        (0, CERTAIN),
        (80, CERTAIN // 4),
    ]
    for number in (1, 2):
        assert [planned.chance for planned in ranges(plan, number)] == [CERTAIN], "all runs that have it read it"


def sorted_layers(stacks: Sequence[tuple[TracedLayer, ...]]) -> list[TracedLayer]:
    return sorted({stack[1] for stack in stacks}, key=lambda each: each.metadata)


def test_a_pack_of_several_layers_is_planned_where_it_was_read() -> None:
    stack = (layer("base", "shared"), layer("work", "own", "shared"))
    traces = [run([frame(0, 0, layer=1, device=2), frame(MS, 9)], number, layers=stack) for number in range(2)]
    plan = train("p", traces, learner="union")
    assert [(part.metadata, [each.device for each in part.ranges]) for part in plan.parts] == [
        (stack[0].metadata, [1]),
        (stack[1].metadata, [2]),
    ]


def test_ranges_that_overlap_are_counted_in_pieces() -> None:
    traces = [run([access(0, 0, 32 << 10)], 1), run([access(0, 16 << 10, 32 << 10)], 2)]
    plan = train("p", traces, learner="union")
    assert [(each.offset >> 10, each.length >> 10, each.chance) for each in ranges(plan)] == [
        (0, 16, CERTAIN // 2),
        (16, 16, CERTAIN),
        (32, 16, CERTAIN // 2),
    ]


def test_neighbours_that_are_alike_are_one_range() -> None:
    reads = [access(number * MS, number << 14, path="lib", file_offset=number << 14) for number in range(8)]
    plan = train("p", [run(reads, number) for number in range(3)], learner="union")
    assert ranges(plan) == (PlannedRange(1, 0, 8 << 14, 0, CERTAIN, "lib", 0),)
    apart = [reads[0], reads[1]._replace(path="other")]
    assert len(ranges(train("p", [run(apart, number) for number in range(3)], learner="union"))) == 2


def test_what_few_read_of_a_hot_frame_is_not_planned() -> None:
    traces = [run([access(0, 0), *([access(MS, 1 << 16)] if number == 0 else [])], number) for number in range(5)]
    plan = train("p", traces, learner="frequency-50")
    assert [planned.offset for planned in ranges(plan)] == [0]


def test_a_frame_that_all_need_for_another_piece_is_planned() -> None:
    traces = [run([access(0, number << 16)], number) for number in range(3)]
    plan = train("p", traces, learner="frequency-90")
    assert [planned.offset for planned in ranges(plan)] == [0, 1 << 16, 2 << 16]


def test_a_workload_of_few_runs_is_no_noise_to_clusters() -> None:
    traces = mixed(9, 3)
    minority = {access.offset // FRAME_SIZE for access in traces[-1].accesses if access.layer == 1}
    by_share, by_cluster = (train("p", traces, learner=name) for name in ("frequency-50", "cluster-75"))
    found = [
        len(minority & {frame.number for frame in planned_frames([Plan(plan.parts[1:])], GUESSED)})
        for plan in (by_share, by_cluster)
    ]
    assert found[1] > len(minority) * 0.8 > found[0]


def test_the_core_comes_first_then_the_larger_workload() -> None:
    common = [frame(50 * MS, 0)]
    traces = [
        run([*common, frame(MS * place, number)], 10 * number + place, command=[str(number)])
        for number, count in ((40, 2), (80, 3))
        for place in range(count)
    ]
    assert frames(train("p", traces, learner="command-75-core")) == [0, 80, 40]
    assert set(frames(train("p", traces, learner="command-75"))) == {0, 40, 80}
    assert frames(train("p", traces, learner="command-75"))[-1] == 0


def test_runs_are_grouped_by_what_they_read_or_by_command() -> None:
    corpus = Corpus(runs_of(mixed(4, 3, 2)), GUESSED)
    evidence = corpus.evidence()
    groups = [[corpus.runs[number].command for number in group] for group in by_content(evidence)]
    assert groups == [[("sh",)] * 4, [("python",)] * 3, [("gcc",)] * 2]
    assert by_command(evidence) == by_content(evidence)


def test_workloads_are_told_apart() -> None:
    traces = [*mixed(2, 3), run([frame(0, 590)], layers=World().layers, command=["odd"])]
    groups = workloads(traces)
    assert [[each.header.command for each in group] for group in groups] == [
        [("python",)] * 3,
        [("sh",)] * 2,
        [("odd",)],
    ]
    assert {id(each) for group in groups for each in group} == set(map(id, traces))
    assert train("p", traces, learner="union").learned["commands"] == [["odd"], ["python"], ["sh"]]


# --- budgets


@pytest.mark.parametrize("budget", [0, SIZE - 1, SIZE, 3 * SIZE, 10**9])
def test_a_plan_keeps_to_its_budget(budget: int) -> None:
    plan = train("p", runs(4), budget=budget)
    assert sum(GUESSED.compressed(each.pack, each.number) for each in planned_frames([plan], GUESSED)) <= budget
    assert plan.learned["budget"] == budget
    assert plan.score["bytes"] <= budget  # type: ignore[operator]


def test_a_budget_goes_to_what_is_likeliest() -> None:
    traces = [
        run([frame(number * 10, place * 40) for place in range(5) if number >= place], number) for number in range(5)
    ]
    assert frames(train("p", traces, learner="union", budget=2 * SIZE)) == [0, 40]


# --- learners and scores


def test_every_learner_is_tried_and_the_best_is_taken() -> None:
    plan = train("p", runs(6))
    tried = plan.learned["tried"]
    assert isinstance(tried, list)
    assert {row["learner"] for row in tried} == set(LEARNERS)
    assert [row["merit"] for row in tried] == sorted((row["merit"] for row in tried), reverse=True)
    assert plan.learned["learner"] == tried[0]["learner"]
    assert (plan.learned["runs"], plan.learned["folds"], plan.learned["holdout"]) == (6, 6, 1)


def test_a_good_plan_closes_the_gap_and_wastes_little() -> None:
    plan = train("p", runs(8, noise=1))
    figures = plan.score
    assert 0.9 < figures["gap_closed"] <= 1  # type: ignore[operator]
    assert figures["wasted"] < 0.1  # type: ignore[operator]
    assert figures["demand_share"] < 0.05  # type: ignore[operator]
    assert figures["requests"] < figures["cold_requests"] / 2  # type: ignore[operator]
    assert figures["warm_seconds"] < figures["seconds"] < figures["cold_seconds"]  # type: ignore[operator]


def test_a_learner_that_is_asked_for_is_taken() -> None:
    traces = runs(4)
    assert train("p", traces, learner="union").learned["learner"] == "union"
    family = train("p", traces, learner="quantile")
    assert str(family.learned["learner"]).startswith("quantile-")
    assert {row["learner"] for row in family.learned["tried"]} == set(named("quantile"))  # type: ignore[attr-defined]


def test_the_link_decides_what_is_best() -> None:
    plan = train("p", runs(4), link=Link(0.005, 25e6, 4))
    assert plan.learned["link"] == {"latency": 0.005, "bandwidth": 25e6, "requests": 4}
    assert train("p", runs(4)).learned["link"] == {"latency": 0.02, "bandwidth": None, "requests": 8}


def test_a_single_run_makes_a_plan_without_a_score() -> None:
    plan = train("p", runs(1))
    assert (plan.learned["learner"], plan.learned["runs"], dict(plan.score)) == ("union", 1, {})
    assert "single run" in str(plan.learned["note"])
    assert sum(part.bytes for part in plan.parts) > 0


def test_two_runs_are_scored_on_each_other() -> None:
    plan = train("p", runs(2))
    assert (plan.learned["folds"], plan.score["runs"]) == (2, 2)


def test_the_same_trace_twice_is_one_run() -> None:
    one, other = runs(2)
    plan = train("p", [one, other, one])
    assert (plan.learned["runs"], plan.learned["duplicates"]) == (2, 1)
    assert train("p", [one, one]).learned["runs"] == 1


def test_runs_are_held_out_each_once() -> None:
    assert folds(5, 2) == [(0, 3), (1, 4), (2,)]
    assert sorted(sum(folds(40, 1), ())) == list(range(40))
    assert len(folds(40, 1)) == 12, "more runs are held out together, so that time stays bounded"
    for count, holdout in ((3, 3), (3, 0), (1, 1)):
        with pytest.raises(UsageError, match="held out"):
            folds(count, holdout)


def test_a_plan_is_scored_on_given_runs() -> None:
    traces = runs(9)
    plan = train("p", traces[:6])
    unseen = score([plan], traces[6:])
    assert (unseen.runs, unseen.recall > 0.85, unseen.wasted < 0.15) == (3, True, True)
    nothing = score([], traces[6:])
    assert (nothing.gap_closed, nothing.recall, nothing.precision, nothing.bytes) == (0.0, 0.0, 1.0, 0)
    whole = score([train("p", traces[6:7])], traces[6:7])
    assert (whole.recall, whole.precision, whole.wasted, whole.demand_share) == (1.0, 1.0, 0.0, 0.0)
    with pytest.raises(UsageError, match="no trace"):
        score([plan], [])


def test_cross_validation_is_of_runs_that_were_not_learned_from() -> None:
    """Runs that have nothing in common but their image: what is learned of the others is in vain."""
    traces = [run([frame(MS * place, 300 * number + 20 * place) for place in range(5)], number) for number in range(4)]
    figures = cross_validate("union", traces)
    assert (figures.recall, figures.precision, figures.runs) == (0.0, 0.0, 4)
    assert figures.wasted == pytest.approx(15 / 20)
    assert cross_validate("union", traces, holdout=2).wasted == pytest.approx(10 / 15)


def test_the_score_is_not_that_of_the_luckiest_learner() -> None:
    plan = train("p", mixed(3, 2, 2))
    tried = plan.learned["tried"]
    assert isinstance(tried, list)
    assert plan.score["merit"] <= tried[0]["merit"]  # type: ignore[operator]


# --- values


def test_the_order_of_traces_does_not_matter() -> None:
    traces = [*mixed(3, 2), run([frame(0, 7)], layers=World().layers)]
    for learner in ("cluster", "rank", "early"):
        wanted = train("p", traces, learner=learner).to_bytes()
        random.Random(learner).shuffle(traces)
        assert train("p", traces, learner=learner).to_bytes() == wanted


def test_nor_do_hashes_of_strings() -> None:
    script = (
        "from support.traces import mixed; from prefetch.learn.train import train; "
        "print(train('p', mixed(2, 2), learner='cluster').digest)"
    )
    top = Path(__file__).parents[2]
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": f"{top}:{top}/tests"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{train('p', mixed(2, 2), learner='cluster').digest}\n"}


def test_a_plan_reads_back_as_it_was() -> None:
    plan = train("p", runs(3))
    assert parse_plan(plan.to_bytes(), "plan") == plan
    assert (plan.name, plan.image, plan.manifest) == ("p", "world", None)


def test_a_plan_of_several_images_names_none() -> None:
    traces = [run([frame(0, 0)], number, image=f"image{number}") for number in range(2)]
    assert train("p", traces).image == ""


# --- waits


def test_waits_that_overlap_count_once() -> None:
    waits = Waits([Wait(30, 40), Wait(10, 20), Wait(15, 25), Wait(12, 14), Wait(50, 50), Wait(40, 45)])
    assert [waits.until(time) for time in (0, 10, 17, 25, 28, 35, 44, 100)] == [0, 0, 7, 15, 15, 20, 29, 30]


def test_without_wait_lines_accesses_tell_of_waits() -> None:
    made = run_of(run([frame(0, 0, waited=20 * MS), frame(25 * MS, 9, waited=10 * MS)], ended=50 * MS))
    assert [read.at for read in made.reads] == [0, 5 * MS]
    assert made.ended == 20 * MS


def test_a_recording_that_was_cut_off_ends_with_its_last_read() -> None:
    made = run_of(replace(run([frame(0, 0), frame(3 * MS, 9)]), ended=None))
    assert made.ended == 3 * MS


# --- refusals


def test_traces_with_nothing_in_common_are_refused() -> None:
    traces = [run([frame(0, 0)], image=name, layers=[layer(name)]) for name in ("debian", "django", "debian")]
    with pytest.raises(UsageError, match=r"1 of 2 traces share no layer with the others \(d\w+, d\w+\)"):
        train("p", traces)


def test_layers_in_common_are_found_through_others() -> None:
    stacks = [[layer("a"), layer("b")], [layer("c"), layer("d")], [layer("b"), layer("c")]]
    traces = [run([frame(0, 0)], number, layers=stack) for number, stack in enumerate(stacks)]
    assert len(train("p", traces, learner="union").parts) == 3


def test_a_pack_in_common_is_enough() -> None:
    traces = [run([frame(0, 0)], number, layers=[layer(f"build {number}", "same")]) for number in range(2)]
    plan = train("p", traces, learner="intersection")
    assert [part.metadata for part in plan.parts] == sorted(digest(f"metadata build {number}") for number in range(2))


def test_traces_that_disagree_about_a_layer_are_refused() -> None:
    layers = [TracedLayer(digest("same"), (digest(name),)) for name in ("one", "other")]
    traces = [run([frame(0, 0)], number, layers=[each]) for number, each in enumerate(layers)]
    with pytest.raises(ConflictError, match="disagree about the packs"):
        train("p", traces)


@pytest.mark.parametrize(
    ("traces", "fields", "message"),
    [
        ([], {}, "no trace"),
        ([trace([])], {}, "nothing was read"),
        (runs(2), {"learner": "guess"}, "no learner guess"),
        (runs(2), {"budget": -1}, "negative"),
        (runs(3), {"holdout": 3}, "3 of 3 runs"),
        (runs(3), {"holdout": 0}, "0 of 3 runs"),
    ],
)
def test_what_can_not_be_trained_is_refused(traces: list[Trace], fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train("p", traces, **fields)  # type: ignore[arg-type]


def test_an_unknown_learner_is_not_validated() -> None:
    with pytest.raises(UsageError, match="there is no learner"):
        cross_validate("quantile", runs(2))


def test_hostile_traces_do_not_take_all_time_and_memory() -> None:
    with pytest.raises(LimitError):
        train("p", [run([access(0, 0, 1 << 44)])])
    wide = [access(number, number << 12, (1 << 30) - (number << 13)) for number in range(6000)]
    with pytest.raises(LimitError):
        train("p", [run(wide)])


# --- rows


def test_a_plan_is_described_in_rows() -> None:
    traces = [
        run([access(0, 0, path="bin/sh"), frame(300 * MS, 40, path="lib/c", file_offset=0)], number)
        for number in range(2)
    ]
    described = describe_plan(train("p", traces, learner="union"))
    (part,) = described.parts
    assert (part.packs, part.ranges, part.frames, part.frame_bytes) == (1, 2, 2, 2 * SIZE)
    assert (part.bytes, part.likely_bytes, part.first_due, part.last_due) == (32 << 10, 32 << 10, 0, 300 * MS)
    assert [(row.until, row.frames) for row in described.dues] == [(50_000, 1), (500_000, 1)]
    assert [(row.path, row.bytes, row.due, row.chance) for row in described.files] == [
        ("bin/sh", 16 << 10, 0, CERTAIN),
        ("lib/c", 16 << 10, 300 * MS, CERTAIN),
    ]
    assert describe_plan(Plan(())).parts == ()


def test_dues_at_the_end_are_in_the_last_row() -> None:
    traces = [run([frame(60_000 * MS, number)], number) for number in range(2)]
    described = describe_plan(train("p", traces, learner="union"))
    assert [(row.until, row.frames) for row in described.dues] == [(None, 2)]


def test_plans_are_compared() -> None:
    first = [run([frame(0, 0, path="a"), frame(50 * MS, 40, path="b")], number) for number in range(2)]
    second = [
        run([access(0, 8192, path="a", file_offset=8192), frame(500 * MS, 40, path="b"), frame(0, 80, path="c")], n)
        for n in range(2)
    ]
    one, other = (train("p", traces, learner="union") for traces in (first, second))
    found = compare_plans(one, other)
    assert found.frames == (2, 0, 1)
    assert found.moved == 1
    assert not found.same
    assert [row.path for row in found.only_second] == ["c"]
    assert not found.only_first
    (difference,) = found.layers
    assert (difference.both, difference.only_first, difference.only_second) == (24 << 10, 8 << 10, 24 << 10)
    assert compare_plans(one, one).same
    assert math.isclose(sum(compare_plans(one, Plan(())).frames), 2)
