"""Traces as real programs leave them: a common core, optional parts, noise and jitter, of several workloads.

::

    world = World(seed=1)                        # a base and a workspace with files in packs
    shell = world.workload("sh", core=60)        # reads 60 chunks in every run, others in some
    traces = [shell.run(number) for number in range(8)]

Everything follows from seeds: equal arguments give equal traces.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerstore.digest import Digest
from layerstore.pack.format import FRAME_SIZE
from prefetch.trace.format import Access, Trace, TracedLayer, TraceHeader, Wait

CHUNK = 16 << 10
MS = 1000
"""Microseconds."""


def digest(name: str) -> Digest:
    """A digest that stands for something with this name."""
    return Digest.of(name.encode())


def layer(name: str, *packs: str) -> TracedLayer:
    """A layer with packs of these names, or one of its own."""
    return TracedLayer(digest(f"metadata {name}"), tuple(digest(f"pack {pack}") for pack in packs or (name,)))


def access(at: int, offset: int, length: int = CHUNK, **fields: object) -> Access:
    """Of the first device of the first layer; ``at`` in microseconds."""
    return Access(at, **{"layer": 0, "device": 1, "offset": offset, "length": length, **fields})  # type: ignore[arg-type]


def frame(at: int, number: int, **fields: object) -> Access:
    """The first chunk of a frame."""
    return access(at, number * FRAME_SIZE, **fields)


def trace(
    accesses: Sequence[Access],
    *,
    layers: Sequence[TracedLayer] = (),
    waits: Sequence[Wait] = (),
    ended: int | None = None,
    image: str = "image",
    command: Sequence[str] = ("program",),
) -> Trace:
    """A run over one layer, unless others are given."""
    header = TraceHeader(tuple(layers) or (layer("base"),), image=image, command=tuple(command))
    ordered = sorted(accesses, key=lambda each: each.at)
    if ended is None and ordered:
        ended = ordered[-1].at
    return Trace(header, tuple(ordered), tuple(waits), ended)


@dataclass(frozen=True)
class Step:
    """A chunk that a workload reads."""

    layer: int
    offset: int
    at: float
    """Milliseconds, before jitter."""
    chance: float
    path: str
    file_offset: int


class World:
    """An image of a base and a workspace, each with one pack of so many frames."""

    def __init__(self, seed: int = 1, *, base: int = 600, workspace: int = 200, name: str = "world") -> None:
        self.name = name
        self.layers = (layer(f"{name} base"), layer(f"{name} workspace"))
        self.frames = (base, workspace)
        self.seed = seed

    def workload(
        self,
        name: str,
        *,
        core: int = 150,
        optional: int = 40,
        noise: int = 6,
        milliseconds: float = 600,
        shared: int = 60,
    ) -> Workload:
        """A program. ``shared`` of its core are the same chunks for all workloads of the world."""
        common = random.Random(f"{self.seed} shared")
        own = random.Random(f"{self.seed} {name}")
        times = sorted(own.uniform(0, milliseconds) for _ in range(core))
        steps = []
        for number, at in enumerate(times):
            source = common if number < shared else own
            steps.append(self._step(source, at, 1.0))
        for _ in range(optional):
            steps.append(self._step(own, own.uniform(0, milliseconds), own.choice((0.3, 0.6, 0.8, 0.95))))
        return Workload(self, name, tuple(steps), noise, milliseconds)

    def _step(self, source: random.Random, at: float, chance: float) -> Step:
        """A chunk in one of the places where a program's files lie: near others, with gaps."""
        number = 0 if source.random() < 0.7 else 1
        cluster = source.randrange(12) * (self.frames[number] // 12)
        place = cluster + min(int(source.expovariate(0.25)), self.frames[number] // 12 - 1)
        offset = place * FRAME_SIZE + source.randrange(FRAME_SIZE // CHUNK) * CHUNK
        return Step(
            number, offset, at, chance, f"usr/lib/{number}/{place // 4}.so", offset - place // 4 * 4 * FRAME_SIZE
        )


@dataclass(frozen=True)
class Workload:
    """A program whose runs differ."""

    world: World
    name: str
    steps: tuple[Step, ...]
    noise: int
    milliseconds: float

    def run(self, number: int, *, speed: float = 1.0, wait: float = 0.0) -> Trace:
        """Run ``number``; ``wait``: milliseconds that every access waits, which delays all that follow."""
        source = random.Random(f"{self.world.seed} {self.name} {number}")
        hurry = speed * source.uniform(0.9, 1.15)
        steps = [step for step in self.steps if source.random() < step.chance]
        for _ in range(self.noise):
            place = source.randrange(self.world.frames[0])
            at = source.uniform(0, self.milliseconds)
            steps.append(Step(0, place * FRAME_SIZE, at, 0.0, f"var/{place}", 0))
        timed = [(max(0.0, step.at * hurry + source.gauss(0, 3)), step) for step in steps]
        timed.sort(key=lambda pair: pair[0])
        accesses, waits = [], []
        late = 0.0
        for at, step in timed:
            start = int((at + late) * MS)
            late += wait
            where = Access(start, step.layer, 1, step.offset, CHUNK, int(wait * MS), 1, self.name[:15], step.path)
            accesses.append(where._replace(file_offset=step.file_offset))
            if wait:
                waits.append(Wait(start, int((at + late) * MS)))
        ended = int((self.milliseconds * hurry + late) * MS) + 1
        ended = max(ended, accesses[-1].at)
        return replace(
            trace(accesses, layers=self.world.layers, waits=waits, ended=ended, image=self.world.name),
            header=TraceHeader(self.world.layers, image=self.world.name, command=(self.name,), started=str(number)),
        )


def runs(count: int, *, seed: int = 1, **fields: object) -> list[Trace]:
    """Runs of one workload."""
    workload = World(seed).workload("program", **fields)  # type: ignore[arg-type]
    return [workload.run(number) for number in range(count)]


def mixed(*counts: int, seed: int = 1) -> list[Trace]:
    """Runs of several workloads of one image, so many of each."""
    world = World(seed)
    names = ("sh", "python", "gcc", "git")
    return [
        world.workload(name).run(number) for name, count in zip(names, counts, strict=False) for number in range(count)
    ]
