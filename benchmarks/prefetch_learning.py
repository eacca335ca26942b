"""Runs that are recorded, plans that are learned from some of them, and what simulation says of the others."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.coldstart import LinkKind
from benchmarks.harness import Run
from benchmarks.prefetch_node import Arm, Job, Rig
from benchmarks.workloads import Workload
from layerstore.digest import Digest
from prefetch.learn.score import Score, score
from prefetch.learn.simulate import Link
from prefetch.learn.sizes import Sizes
from prefetch.learn.train import train
from prefetch.plans.format import Plan
from prefetch.trace.format import Trace


@dataclass(frozen=True, slots=True)
class Seeds:
    """Of runs to learn from, and of runs that plans are scored on."""

    train: Sequence[int]
    held_out: Sequence[int]

    @classmethod
    def numbered(cls, train: int, held_out: int) -> Seeds:
        return cls(range(1, train + 1), range(1001, 1001 + held_out))


@dataclass(frozen=True, slots=True)
class Recorded:
    """The traces of one workload, by seed."""

    train: Mapping[int, Trace]
    held_out: Mapping[int, Trace]


@dataclass(frozen=True, slots=True)
class Overhead:
    """The same runs, recorded and not, in turn; each over a fresh mount, with the packs in the page cache."""

    recorded: list[Run] = field(default_factory=list)
    unrecorded: list[Run] = field(default_factory=list)

    def shares(self) -> list[float]:
        """Of each pair, what recording added to the program's time."""
        return [_program(one) / _program(other) - 1 for one, other in zip(self.recorded, self.unrecorded, strict=True)]

    def to_json(self) -> dict[str, object]:
        """Seconds of the programs."""
        return {"recorded": [*map(_program, self.recorded)], "unrecorded": [*map(_program, self.unrecorded)]}

    def median(self) -> float:
        return statistics.median(self.shares())


def _program(run: Run) -> float:
    """Seconds that the program took, with its container."""
    return run.wall - float(str(run.more["up"]))


def record(rig: Rig, image: str, workloads: Sequence[Workload], seeds: Seeds) -> dict[str, Recorded]:
    """Each workload once for each seed, on one node that has everything."""
    recorded = {}
    with rig.node(image, "all") as node:
        for workload in workloads:
            traces = {}
            for seed in (*seeds.train, *seeds.held_out):
                run, traces[seed] = rig.record(node, image, Job(workload, seed))
                print(f"  {workload.name}-{seed}: {run.wall:.2f} s, {len(traces[seed].accesses)}", file=sys.stderr)
            recorded[workload.name] = Recorded(
                {seed: traces[seed] for seed in seeds.train}, {seed: traces[seed] for seed in seeds.held_out}
            )
    return recorded


def overhead(rig: Rig, image: str, workloads: Sequence[Workload], rounds: int) -> dict[str, Overhead]:
    """What recording costs each workload; a first pair isn't counted."""
    found = {workload.name: Overhead() for workload in workloads}
    with rig.node(image, "all") as node:
        for workload in workloads:
            for number in range(rounds + 1):
                job = Job(workload, 2000 + number)
                turns = [lambda job=job: rig.record(node, image, job)[0]]
                turns.append(lambda job=job: rig.run(node, rig.request(image, Arm()), job))
                # Whoever comes second finds more in the caches of the machine.
                pair = [turn() for turn in (turns if number % 2 else reversed(turns))]
                recorded, unrecorded = pair if number % 2 else reversed(pair)
                if number:
                    found[workload.name].recorded.append(recorded)
                    found[workload.name].unrecorded.append(unrecorded)
    return found


def link_of(kind: LinkKind) -> Link:
    """The link of the benchmark as the simulator takes it."""
    return Link(kind.latency, kind.rate / 8 if kind.rate else math.inf)


def learn(name: str, traces: Sequence[Trace], sizes: Sizes, kind: LinkKind) -> Plan:
    """A plan of some runs."""
    return train(name, traces, link=link_of(kind), sizes=sizes)


def simulated(plan: Plan, traces: Sequence[Trace], sizes: Sizes, kind: LinkKind) -> Score:
    """How good simulation says that it is."""
    return score([plan], traces, link=link_of(kind), sizes=sizes)


@dataclass(frozen=True, slots=True)
class Used:
    """What a run read: frames, and their bytes as they are fetched."""

    frames: int
    bytes: int


def used(trace: Trace, sizes: Sizes) -> Used:
    frames: set[tuple[Digest, int]] = set()
    for access in trace.accesses:
        pack = trace.header.layers[access.layer].packs[access.device - 1]
        frames.update((pack, number) for number in sizes.frames(pack, access.offset, access.length))
    return Used(len(frames), sum(sizes.compressed(*frame) for frame in frames))
