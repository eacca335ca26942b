"""How good a plan is: for runs it was not learned from, by simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import UsageError, printable
from prefetch.learn.evidence import Corpus, Evidence
from prefetch.learn.frames import FrameDue, planned_frames
from prefetch.learn.learners import LEARNERS, Choice
from prefetch.learn.planning import frames, within
from prefetch.learn.runs import runs_of
from prefetch.learn.simulate import COSTS, LINK, Costs, Link, Outcome, Program, simulate, warm
from prefetch.learn.sizes import GUESSED, Sizes
from prefetch.plans.format import Plan
from prefetch.trace.format import Trace

MOST_FOLDS = 12
"""Parts that runs are divided into, each held out once. With more runs, more are held out at a time."""
MOST_WASTED = 0.15
"""The share of what is fetched that may be in vain (the aim of docs/prefetch.md); beyond it waste counts five times."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One held-out run: its start without a plan, with all there, and with the plan; and what the plan named."""

    cold: Outcome
    warm: Outcome
    planned: Outcome
    named_frames: int
    named_bytes: int


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over held-out runs, or ratios of sums; shares are 0 to 1 unless said otherwise.

    Attributes:
        runs: how many.
        gap_closed: of the time between cold and warm, the share that the plan saves. Below 0 if it does harm.
        worst_gap_closed: of the run with the least.
        recall: of the frames that runs used, the share that the plan names.
        precision: of the frames that the plan names, the share that runs used.
        wasted: of the bytes fetched, by whomever, and of those planned, the share that runs didn't use. A plan that is
            not through when the run ends counts as if it were.
        demand_share: frames that demand reads brought, by frames used.
        requests: of a start, on average.
        cold_requests: of one without a plan.
        bytes: that the plan names, compressed, on average.
        seconds: of a start with the plan, on average.
        cold_seconds: without.
        warm_seconds: with all there.
    """

    runs: int
    gap_closed: float
    worst_gap_closed: float
    recall: float
    precision: float
    wasted: float
    demand_share: float
    requests: float
    cold_requests: float
    bytes: int
    seconds: float
    cold_seconds: float
    warm_seconds: float

    @property
    def merit(self) -> float:
        """What learners are compared by: time saved, less bytes wasted. Two hundredths of waste undo one of time."""
        return self.gap_closed - self.wasted / 2 - 2 * max(0.0, self.wasted - MOST_WASTED)

    def to_json(self) -> dict[str, object]:
        """The figures, rounded to four digits behind the point, so that they print the same everywhere."""
        figures: dict[str, object] = {"merit": round(self.merit, 4)}
        for name in self.__slots__:
            value = getattr(self, name)
            figures[name] = round(value, 4) if isinstance(value, float) else value
        return figures


def score_of(scored: Sequence[Scored]) -> Score:
    """Of at least one run."""
    count = len(scored)
    planned = [each.planned for each in scored]
    used = sum(each.used_frames for each in planned)
    hits = used - sum(each.missed_frames for each in planned)
    named_frames = sum(each.named_frames for each in scored)
    fetched = sum(each.fetched_bytes + each.left_bytes for each in planned)
    return Score(
        count,
        _share(
            sum(each.cold.seconds - each.planned.seconds for each in scored),
            sum(each.cold.seconds - each.warm.seconds for each in scored),
        ),
        min(_share(each.cold.seconds - each.planned.seconds, each.cold.seconds - each.warm.seconds) for each in scored),
        _share(hits, used),
        _share(hits, named_frames),
        _share(sum(each.wasted_bytes + each.left_wasted_bytes for each in planned), fetched, 0.0),
        _share(sum(each.demand_frames for each in planned), used, 0.0),
        sum(each.requests for each in planned) / count,
        sum(each.cold.requests for each in scored) / count,
        round(sum(each.named_bytes for each in scored) / count),
        sum(each.seconds for each in planned) / count,
        sum(each.cold.seconds for each in scored) / count,
        sum(each.warm.seconds for each in scored) / count,
    )


def _share(part: float, whole: float, empty: float = 1.0) -> float:
    """``part`` of ``whole``; ``empty`` where there is nothing to have a share of (times: below a microsecond)."""
    return part / whole if whole > 1e-6 else empty


class Examination:
    """Scores plans on runs; what a run costs without a plan is simulated once."""

    def __init__(self, sizes: Sizes, link: Link, costs: Costs) -> None:
        self._sizes = sizes
        self._link = link
        self._costs = costs

    def prepare(self, programs: Iterable[Program]) -> list[tuple[Program, Outcome, Outcome]]:
        return [
            (program, simulate(program, link=self._link, costs=self._costs), warm(program, self._costs))
            for program in programs
        ]

    def examine(self, frames: Sequence[FrameDue], prepared: Iterable[tuple[Program, Outcome, Outcome]]) -> list[Scored]:
        size = sum(self._sizes.compressed(frame.pack, frame.number) for frame in frames)
        return [
            Scored(cold, hot, simulate(program, frames, link=self._link, costs=self._costs), len(frames), size)
            for program, cold, hot in prepared
        ]


def score(
    plans: Sequence[Plan], traces: Iterable[Trace], *, link: Link = LINK, costs: Costs = COSTS, sizes: Sizes = GUESSED
) -> Score:
    """Of plans that are replayed together, on runs that they should not have been learned from.

    Raises:
        UsageError: there is no trace.
        LimitError: plan or trace come to more than any start reads.
    """
    runs = runs_of(traces)
    if not runs:
        raise UsageError("there is no trace to score a plan on")
    examination = Examination(sizes, link, costs)
    prepared = examination.prepare(Program(run, sizes) for run in runs)
    return score_of(examination.examine(planned_frames(plans, sizes), prepared))


def folds(count: int, holdout: int) -> list[tuple[int, ...]]:
    """Which of ``count`` runs are held out together; each is once. Neighbours are kept apart: they are most alike.

    Raises:
        UsageError: none would be left to learn from.
    """
    if not 1 <= holdout < count:
        raise UsageError(f"{holdout} of {count} runs can't be held out: at least one has to be, and one be left")
    parts_of = min(MOST_FOLDS, -(-count // holdout))
    return [tuple(range(first, count, parts_of)) for first in range(parts_of)]


class Validation:
    """Cross-validation of learners over the same runs: each plan is scored on runs that it was not learned from."""

    def __init__(
        self,
        corpus: Corpus,
        holdout: int,
        *,
        budget: int | None = None,
        link: Link = LINK,
        costs: Costs = COSTS,
        sizes: Sizes = GUESSED,
    ) -> None:
        """Raises UsageError if so many can't be held out."""
        self.folds = folds(len(corpus.runs), holdout)
        self._examination = Examination(sizes, link, costs)
        self._prepared = self._examination.prepare(Program(run, sizes) for run in corpus.runs)
        self._budget = budget
        self._link, self._costs, self._sizes = link, costs, sizes
        everything = frozenset(range(len(corpus.runs)))
        self._evidence = [corpus.evidence(everything.difference(fold)) for fold in self.folds]
        self._known: dict[tuple[int, tuple[tuple[Digest, int], ...]], list[Scored]] = {}

    def results(self, learner: str) -> list[list[Scored]]:
        """Of one learner, by fold."""
        return [self._result(number, learner) for number in range(len(self.folds))]

    def _result(self, fold: int, learner: str) -> list[Scored]:
        evidence = self._evidence[fold]
        choice = choose(evidence, learner, budget=self._budget, link=self._link, costs=self._costs, sizes=self._sizes)
        planned = frames(choice, evidence)
        # Learners with other numbers often come to the same plan; dues beyond the order change nothing.
        key = fold, tuple((frame.pack, frame.number) for frame in planned)
        known = self._known.get(key)
        if known is None:
            held_out = (self._prepared[number] for number in self.folds[fold])
            known = self._known[key] = self._examination.examine(planned, held_out)
        return known


def choose(evidence: Evidence, learner: str, *, budget: int | None, link: Link, costs: Costs, sizes: Sizes) -> Choice:
    """What the learner of this name picks of some runs, within the budget."""
    choice = LEARNERS[learner](evidence)
    if budget is None:
        return choice
    return Choice(within(budget, choice.frames, evidence, sizes=sizes, link=link, costs=costs), choice.share)


def cross_validate(
    learner: str,
    traces: Iterable[Trace],
    *,
    holdout: int = 1,
    budget: int | None = None,
    link: Link = LINK,
    costs: Costs = COSTS,
    sizes: Sizes = GUESSED,
) -> Score:
    """Of one learner: learned from the runs but ``holdout`` of them, scored on these, until each was held out once.

    Raises:
        UsageError: no such learner, too few different traces, or traces of different images.
        LimitError: they come to more than any start reads.
    """
    if learner not in LEARNERS:
        raise UsageError(f"there is no learner {printable(learner)}; there are {', '.join(LEARNERS)}")
    corpus = Corpus(runs_of(traces), sizes)
    validation = Validation(corpus, holdout, budget=budget, link=link, costs=costs, sizes=sizes)
    return score_of([each for fold in validation.results(learner) for each in fold])
