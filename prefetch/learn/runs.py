"""Runs: what traces say of a program, without the waits of the node that they were recorded on."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerstore.digest import Digest
from layerstore.errors import ConflictError, UsageError, printable
from prefetch.trace.format import Trace, TracedLayer, Wait


class Read(NamedTuple):
    """A range that a run read for the first time.

    Attributes:
        at: microseconds of the run before, waits left out.
        layer: of the run's layers, counted from 0.
        device: of the layer, counted from 1.
        offset: into the raw pack, bytes.
        length: bytes.
        path: of the file, as in the trace; None if unknown.
        file_offset: where in the file it begins.
    """

    at: int
    layer: int
    device: int
    offset: int
    length: int
    path: str | None = None
    file_offset: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a program.

    Attributes:
        layers: what it ran over, bottom first.
        reads: by their times.
        ended: how long it took without waits, microseconds.
        command: what was run, where that is known.
        image: name of what it ran in.
        manifest: digest of that, where it was a single image.
        identity: the same for the same content, whatever it was read from; orders runs.
    """

    layers: tuple[TracedLayer, ...]
    reads: tuple[Read, ...]
    ended: int
    command: tuple[str, ...] = ()
    image: str = ""
    manifest: str | None = None
    identity: str = ""

    def pack(self, read: Read) -> Digest:
        """The pack that was read."""
        return self.layers[read.layer].packs[read.device - 1]


class Waits:
    """Intervals in which somebody waited, joined where they overlap: the program as a whole got no further."""

    def __init__(self, waits: Iterable[Wait]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._before: list[int] = []  # waited before each of them
        total = 0
        for start, end in sorted(waits):
            if self._ends and start <= self._ends[-1]:
                total += max(0, end - self._ends[-1])
                self._ends[-1] = max(end, self._ends[-1])
            elif end > start:
                self._starts.append(start)
                self._ends.append(end)
                self._before.append(total)
                total += end - start

    def until(self, time: int) -> int:
        """Microseconds waited before ``time``."""
        number = bisect_right(self._starts, time) - 1
        if number < 0:
            return 0
        return self._before[number] + min(time, self._ends[number]) - self._starts[number]


def run_of(trace: Trace) -> Run:
    """The run that a trace tells of.

    Where the trace has no wait lines, what it says of its accesses is taken: each waited from its time on.
    """
    waits = trace.waits or [Wait(each.at, each.at + each.waited) for each in trace.accesses if each.waited]
    waited = Waits(waits)
    reads = [
        Read(
            each.at - waited.until(each.at),
            each.layer,
            each.device,
            each.offset,
            each.length,
            each.path,
            each.file_offset if each.path is not None else 0,
        )
        for each in trace.accesses
    ]
    reads.sort(key=lambda read: (read.at, read.layer, read.device, read.offset, read.length, read.path or ""))
    ended = 0 if trace.ended is None else trace.ended - waited.until(trace.ended)
    ended = max(ended, reads[-1].at if reads else 0)
    header = trace.header
    hasher = hashlib.sha256()
    said = (header.layers, header.image, header.manifest, header.command, header.started, ended)
    for value in (said, *reads):
        hasher.update(repr(value).encode("utf-8", "surrogatepass"))
    return Run(header.layers, tuple(reads), ended, header.command, header.image, header.manifest, hasher.hexdigest())


def runs_of(traces: Iterable[Trace]) -> tuple[Run, ...]:
    """The runs of traces, in an order that doesn't depend on how they are given; of equal ones, one."""
    found = {run.identity: run for run in map(run_of, traces)}
    return tuple(sorted(found.values(), key=lambda run: (run.command, run.identity)))


def join_layers(runs: Sequence[Run]) -> tuple[TracedLayer, ...]:
    """The layers of all runs, each once: lower ones first, as far as the runs agree.

    Raises:
        ConflictError: two runs list other packs for the same layer.
        UsageError: there are no runs, or some have no layer and no pack in common with the others.
    """
    if not runs:
        raise UsageError("there is no trace to learn from")
    height: dict[TracedLayer, int] = {}
    for run in runs:
        for number, layer in enumerate(run.layers):
            height[layer] = max(number, height.get(layer, 0))
    layers = sorted(height, key=lambda layer: (height[layer], layer.metadata, layer.packs))
    seen: set[Digest] = set()
    for layer in layers:
        if layer.metadata in seen:
            raise ConflictError(f"traces disagree about the packs of layer {layer.metadata}: one of them is damaged")
        seen.add(layer.metadata)
    _check_related(runs)
    return tuple(layers)


def _check_related(runs: Sequence[Run]) -> None:
    """Raises UsageError unless every run is tied to the first by layers or packs that runs share."""
    tied: set[Digest] = set(_names(runs[0]))
    left = list(runs[1:])
    while True:
        near = [run for run in left if tied & _names(run)]
        if not near:
            break
        for run in near:
            tied |= _names(run)
        left = [run for run in left if not tied & _names(run)]
    if left:
        one, other = (printable(run.image) or "an unnamed image" for run in (runs[0], left[0]))
        raise UsageError(
            f"{len(left)} of {len(runs)} traces share no layer with the others ({one}, {other}): train a plan for each "
            "image, or re-map them to one build first"
        )


def _names(run: Run) -> frozenset[Digest]:
    return frozenset(name for layer in run.layers for name in (layer.metadata, *layer.packs))
