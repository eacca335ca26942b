"""Training: the learner that scores best makes the plan, from all runs; what lost is written down beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from layerstore.errors import LimitError, UsageError, printable
from prefetch.learn.clusters import alike
from prefetch.learn.evidence import Corpus
from prefetch.learn.learners import named
from prefetch.learn.planning import parts
from prefetch.learn.runs import run_of, runs_of
from prefetch.learn.score import Score, Scored, Validation, choose, score_of
from prefetch.learn.simulate import COSTS, LINK, Costs, Link
from prefetch.learn.sizes import GUESSED, Sizes
from prefetch.plans.format import PLAN_BYTES, Plan
from prefetch.trace.format import Trace

AUTO = "auto"
ALONE = "union"
"""What makes a plan of a single run, on which no other learner can be better."""
COMMANDS = 20
"""Command lines of runs that a plan names."""
SUFFICIENT = ("merit", "gap_closed", "recall", "precision", "wasted", "demand_share", "requests", "bytes")
"""Figures that are kept of each learner that was tried."""


def train(
    name: str,
    traces: Sequence[Trace],
    *,
    learner: str = AUTO,
    budget: int | None = None,
    link: Link = LINK,
    costs: Costs = COSTS,
    sizes: Sizes = GUESSED,
    holdout: int = 1,
) -> Plan:
    """Learn a plan. The same traces, in whatever order, give the same plan.

    Args:
        name: of the plan.
        traces: of one image, or of images that share layers or packs; a trace speaks for the layers that it has.
        learner: a name of :data:`prefetch.learn.learners.LEARNERS`, a family of them, or ``auto``: the best of all.
        budget: bytes that the plan may have fetched, compressed; no limit if not given.
        link: that learners are compared for.
        costs: of a node.
        sizes: of frames, and where they lie.
        holdout: runs that are held out at a time. A single run can't be, and its plan has no score.

    Returns:
        the plan. Its score is honest about the choice, too: for each held-out run it is that of the learner that does
        best on the others. Of ``learned``, ``tried`` lists every learner with its own, best first.

    Raises:
        UsageError: no traces, traces that have nothing in common or in which nothing was read, no such learner, or
            more to be held out than there are.
        ConflictError: traces disagree about a layer.
        LimitError: the plan would be larger than plans may be, or traces come to more than any start reads.
    """
    candidates = named(learner)
    if not candidates:
        raise UsageError(f"there is no learner {printable(learner)}; try auto")
    if budget is not None and budget < 0:
        raise UsageError(f"a budget of {budget} bytes: it can't be negative")
    runs = runs_of(traces)
    corpus = Corpus(runs, sizes)
    if not corpus.frames:
        raise UsageError("nothing was read from packs in these traces: there is nothing to plan")
    learned: dict[str, object] = {
        "learner": ALONE if learner == AUTO else candidates[0],
        "runs": len(runs),
        "duplicates": len(traces) - len(runs),
        "commands": [list(command) for command in sorted({run.command for run in runs if run.command})[:COMMANDS]],
        "budget": budget,
        "link": {
            "latency": link.latency,
            "bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else None,
            "requests": link.requests,
        },
    }
    figures: Mapping[str, object] = {}
    if len(runs) == 1:
        learned["note"] = "a single run: none is left to score the plan on"
    else:
        validation = Validation(corpus, holdout, budget=budget, link=link, costs=costs, sizes=sizes)
        results = {each: validation.results(each) for each in candidates}
        best = _best(results)
        learned |= {
            "learner": best[0],
            "holdout": max(map(len, validation.folds)),
            "folds": len(validation.folds),
            "tried": [_tried(each, _total(results[each])) for each in best],
        }
        figures = _honest(results, len(validation.folds)).to_json()
    chosen = learned["learner"]
    assert isinstance(chosen, str)
    evidence = corpus.evidence()
    planned = parts(choose(evidence, chosen, budget=budget, link=link, costs=costs, sizes=sizes), evidence)
    images, manifests = {run.image for run in runs}, {run.manifest for run in runs}
    plan = Plan(
        planned,
        name,
        images.pop() if len(images) == 1 else "",
        manifests.pop() if len(manifests) == 1 else None,
        learned,
        figures,
    )
    size = len(plan.to_bytes())
    if size > PLAN_BYTES:
        raise LimitError(
            f"the plan has {size} bytes, more than the limit of {PLAN_BYTES}: give a budget, or fewer traces"
        )
    return plan


def workloads(traces: Sequence[Trace], *, sizes: Sizes = GUESSED) -> list[tuple[Trace, ...]]:
    """Traces grouped by what they read, the largest group first; what is like no other comes alone, at the end.

    Programs that have little in common are better served by a plan each: one plan for all either wastes what the others
    need, or misses it.

    Raises:
        UsageError, ConflictError, LimitError: as :func:`train`.
    """
    by_identity = {run_of(trace).identity: trace for trace in traces}
    corpus = Corpus(runs_of(traces), sizes)
    return [tuple(by_identity[corpus.runs[number].identity] for number in group) for group in alike(corpus.evidence())]


def _total(result: Sequence[Sequence[Scored]]) -> Score:
    return score_of([each for fold in result for each in fold])


def _best(results: Mapping[str, Sequence[Sequence[Scored]]]) -> list[str]:
    """Learners by merit; of equals, what fetches less comes first, then the simpler, which is listed earlier."""

    def key(learner: str) -> tuple[float, int]:
        total = _total(results[learner])
        return -round(total.merit, 4), total.bytes

    return sorted(results, key=key)


def _honest(results: Mapping[str, Sequence[Sequence[Scored]]], folds: int) -> Score:
    """The score of the procedure: each fold counts with the learner that is best on all other folds.

    Choosing by the same runs that are scored would flatter the choice, the more the more learners are tried.
    """
    scored: list[Scored] = []
    for fold in range(folds):
        others = {
            learner: [result for number, result in enumerate(by_fold) if number != fold]
            for learner, by_fold in results.items()
        }
        scored += results[_best(others)[0]][fold]
    return score_of(scored)


def _tried(learner: str, score: Score) -> Mapping[str, object]:
    figures = score.to_json()
    return {"learner": learner, **{name: figures[name] for name in SUFFICIENT}}
