"""Real starts of held-out runs, in turn with and without plans, and what they come to."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.harness import Run, spread
from benchmarks.prefetch_learning import Used
from benchmarks.prefetch_node import Arm, Job, Rig
from benchmarks.workloads import Workload
from prefetch.plans.format import Plan

COLD, PLANNED, WAITED, MIXED = "cold", "planned", "planned, waited for", "planned for all workloads"
WARM, STORED, EAGER = "warm", "warm, from disk", "eager"
RELAID, RELAID_PLANNED = "re-laid", "re-laid, planned"
NOTHING, NOTHING_PLANNED = "from nothing", "from nothing, planned"


@dataclass(frozen=True, slots=True)
class Case:
    """An arm: which image is started how, and with which plan.

    Attributes:
        used: what a run reads of this image, by seed.
        published: the plan is in the store, and not on the node.
    """

    image: str
    arm: Arm
    used: Mapping[int, Used]
    plan: Plan | None = None
    published: bool = False


@dataclass(frozen=True, slots=True)
class Laid:
    """An image as it lies in the store, a plan for it, and what held-out runs use of it, by seed."""

    image: str
    plan: Plan
    used: Mapping[int, Used]


def cases(plain: Laid, relaid: Laid, mixed: Plan) -> dict[str, Case]:
    """All arms of a workload; ``mixed`` is the one plan for all workloads of the image."""
    image, plan, used = plain.image, plain.plan, plain.used
    return {
        COLD: Case(image, Arm(), used),
        PLANNED: Case(image, Arm(planned=True), used, plan),
        WAITED: Case(image, Arm(planned=True, wait=True), used, plan),
        MIXED: Case(image, Arm(planned=True), used, mixed),
        RELAID: Case(relaid.image, Arm(), relaid.used),
        RELAID_PLANNED: Case(relaid.image, Arm(planned=True), relaid.used, relaid.plan),
        WARM: Case(image, Arm(has="all", hot=True), used),
        STORED: Case(image, Arm(has="all"), used),
        EAGER: Case(image, Arm(mode="eager"), used),
        NOTHING: Case(image, Arm(has="nothing"), used),
        NOTHING_PLANNED: Case(image, Arm(has="nothing", planned=True), used, plan, published=True),
    }


@dataclass(frozen=True, slots=True)
class Starts:
    """The starts of one workload.

    Attributes:
        arms: by name.
        runs: by arm, then by seed, one for each round.
    """

    arms: Mapping[str, Case]
    runs: Mapping[str, Mapping[int, Sequence[Run]]]

    def seconds(self, arm: str) -> list[float]:
        """Of every start."""
        return [run.wall for runs in self.runs[arm].values() for run in runs]

    def by_seed(self, arm: str) -> dict[int, float]:
        """The median start of each seed."""
        return {seed: statistics.median(run.wall for run in runs) for seed, runs in self.runs[arm].items()}

    def gap_closed(self, arm: str, cold: str = COLD, warm: str = WARM) -> float:
        """(cold - arm) / (cold - warm), of sums over seeds."""
        slow, fast, own = (sum(self.by_seed(name).values()) for name in (cold, warm, arm))
        return (slow - own) / (slow - fast) if slow > fast else float("nan")

    def ratio(self, arm: str, cold: str = COLD) -> float:
        """How many times as fast as without a plan: of sums over seeds."""
        return sum(self.by_seed(cold).values()) / sum(self.by_seed(arm).values())

    def mean(self, arm: str, *keys: str) -> float:
        """Of a figure in ``more``, over all starts."""
        return statistics.fmean(_figure(run, keys) for runs in self.runs[arm].values() for run in runs)

    def wasted(self, arm: str) -> float:
        """Of the bytes that were fetched, those that the run doesn't use, by the trace of the same seed."""
        return self._of_all(arm, lambda run, used: max(0.0, _bytes(run) - used.bytes), lambda run, used: _bytes(run))

    def demand_share(self, arm: str) -> float:
        """Frames that demand reads brought, by frames used."""
        return self._of_all(
            arm, lambda run, used: _figure(run, ("fetched", "demand", "frames")), lambda run, used: used.frames
        )

    def late_share(self, arm: str) -> float:
        """Frames that the plan brought when a reader was waiting for them already, by frames used."""
        return self._of_all(arm, lambda run, used: _figure(run, ("prefetch", "late")), lambda run, used: used.frames)

    def to_json(self) -> dict[str, object]:
        """Every run."""
        return {
            name: {
                str(seed): {
                    "used": asdict(self.arms[name].used[seed]),
                    "starts": [{"seconds": run.wall, **run.more} for run in runs],
                }
                for seed, runs in by_seed.items()
            }
            for name, by_seed in self.runs.items()
        }

    def _of_all(self, arm: str, part: Callable[[Run, Used], float], whole: Callable[[Run, Used], float]) -> float:
        """Of sums over all starts; 0 if there is nothing to have a share of."""
        used = self.arms[arm].used
        pairs = [(run, used[seed]) for seed, runs in self.runs[arm].items() for run in runs]
        return sum(part(*pair) for pair in pairs) / (sum(whole(*pair) for pair in pairs) or 1.0)


def together(starts: Sequence[Starts]) -> Starts:
    """Those of several workloads as if they were of one, with arms that all of them have; seeds are numbered anew."""
    names = [name for name in starts[0].arms if all(name in each.arms for each in starts)]
    arms, runs = {}, {}
    for name in names:
        keys = [(number, seed) for number, each in enumerate(starts) for seed in each.arms[name].used]
        seeds = {key: new for new, key in enumerate(keys)}
        used = {new: starts[number].arms[name].used[seed] for (number, seed), new in seeds.items()}
        arms[name] = replace(starts[0].arms[name], used=used)
        runs[name] = {new: starts[number].runs[name][seed] for (number, seed), new in seeds.items()}
    return Starts(arms, runs)


def start_all(rig: Rig, workload: Workload, arms: Mapping[str, Case], rounds: int) -> Starts:
    """Every arm once for each held-out seed and round, in turn."""
    runs: dict[str, dict[int, list[Run]]] = {name: {seed: [] for seed in case.used} for name, case in arms.items()}
    for number in range(1, rounds + 1):
        for seed in arms[COLD].used:
            for name, case in arms.items():
                run = _start(rig, case, Job(workload, seed))
                runs[name][seed].append(run)
                print(f"  round {number} {workload.name}-{seed} {name}: {run.wall:.2f} s", file=sys.stderr)
    return Starts(arms, runs)


def _start(rig: Rig, case: Case, job: Job) -> Run:
    if case.published and case.plan is not None:
        with rig.published(case.plan):
            return rig.start(case.image, job, case.arm)
    return rig.start(case.image, job, case.arm, case.plan)


def _bytes(run: Run) -> float:
    """That came from the store for frames."""
    return sum(_figure(run, ("fetched", kind, "compressed")) for kind in ("demand", "background"))


def _figure(run: Run, keys: Sequence[str]) -> float:
    value: object = run.more
    for key in keys:
        assert isinstance(value, Mapping)
        value = value[key]
    return float(str(value))


HEADINGS = ("arm", "seconds", "spread", "up", "gap closed", "times as fast", "turns", "MB", "wasted", "demand", "late")


def row(starts: Starts, name: str) -> tuple[str, ...]:
    """For a table: what an arm came to."""
    arm = starts.arms[name].arm
    cold = NOTHING if arm.has == "nothing" else COLD
    figures = [*(name, *spread(starts.seconds(name)), f"{starts.mean(name, 'up'):.2f}")]
    figures += [f"{starts.gap_closed(name, cold):.1%}", f"{starts.ratio(name, cold):.2f}"]
    figures += [f"{starts.mean(name, 'turns'):.0f}", f"{starts.mean(name, 'bytes') / 1e6:.1f}"]
    fetches = arm.has != "all"
    figures += [f"{starts.wasted(name):.1%}", f"{starts.demand_share(name):.1%}"] if fetches else ["-", "-"]
    return (*figures, f"{starts.late_share(name):.1%}" if arm.planned else "-")
