"""What runs have in common: by how many of them each piece of a pack was read, and when."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerstore.digest import Digest
from layerstore.errors import LimitError
from prefetch.learn.runs import Run, join_layers
from prefetch.learn.sizes import Sizes, check_frames
from prefetch.trace.format import TracedLayer

MOST_PIECES = 4 << 20
"""Pieces that the ranges of a pack are cut into, counted for each range: thousands of runs have less."""


class Frame(NamedTuple):
    """A frame of a pack."""

    pack: Digest
    number: int


class Segment(NamedTuple):
    """A piece of a pack as a layer has it, which each run reads wholly or not at all; inside one frame.

    Attributes:
        layer: of the corpus, counted from 0.
        device: of the layer, counted from 1.
        offset: into the raw pack, bytes.
        length: bytes.
        path: of the file that was read, the first by name where there are several; None if no trace knows.
        file_offset: where in the file it begins.
        frame: number of its frame in the corpus.
    """

    layer: int
    device: int
    offset: int
    length: int
    path: str | None
    file_offset: int
    frame: int


class Corpus:
    """All runs that are learned from or scored on, over one grid of segments.

    Attributes:
        layers: of all runs, each once.
        runs: in their canonical order.
        segments: by layer, device and offset.
        frames: by pack and number.
        segments_of: of each frame, its segments.
        firsts: of each run, the segments that it read, and when first.
    """

    def __init__(self, runs: Sequence[Run], sizes: Sizes) -> None:
        """Cut what the runs read into segments.

        Raises:
            UsageError: there are no runs, or they have nothing in common.
            ConflictError: they disagree about a layer.
            LimitError: they read more than any start does.
        """
        self.layers: tuple[TracedLayer, ...] = join_layers(runs)
        self.runs = tuple(runs)
        self._numbers = {layer.metadata: number for number, layer in enumerate(self.layers)}
        devices: dict[tuple[int, int], list[tuple[int, int, str | None, int]]] = {}
        for run in runs:
            numbers = [self._numbers[layer.metadata] for layer in run.layers]
            for read in run.reads:
                what = read.offset, read.offset + read.length, read.path, read.file_offset
                devices.setdefault((numbers[read.layer], read.device), []).append(what)
        segments: list[Segment] = []
        frames: dict[Frame, int] = {}
        self._starts: dict[tuple[int, int], tuple[list[int], int]] = {}
        count = 0
        for layer, device in sorted(devices):
            pack = self.layers[layer].packs[device - 1]
            first = len(segments)
            for start, end, path, file_offset in _cut(set(devices[layer, device])):
                numbers_of = sizes.frames(pack, start, end - start)
                count += len(numbers_of)
                check_frames(count, "what the traces read")
                for number in numbers_of:
                    low, high = sizes.bounds(pack, number)
                    low, high = max(low, start), min(high, end)
                    frame = frames.setdefault(Frame(pack, number), len(frames))
                    at = file_offset + low - start if path is not None else 0
                    segments.append(Segment(layer, device, low, high - low, path, at, frame))
            self._starts[layer, device] = [segment.offset for segment in segments[first:]], first
        order = sorted(frames)
        place = {frames[frame]: number for number, frame in enumerate(order)}
        self.frames = tuple(order)
        self.segments = tuple(segment._replace(frame=place[segment.frame]) for segment in segments)
        self.segments_of: tuple[list[int], ...] = tuple([] for _ in order)
        for index, segment in enumerate(self.segments):
            self.segments_of[segment.frame].append(index)
        self.firsts = tuple(self._first(run) for run in runs)
        self._layers_of = tuple(frozenset(self._numbers[layer.metadata] for layer in run.layers) for run in runs)
        self._packs_of = tuple(frozenset(pack for layer in run.layers for pack in layer.packs) for run in runs)

    def _first(self, run: Run) -> Mapping[int, int]:
        """The segments that a run read, by when it did first."""
        found: dict[int, int] = {}
        seen: set[tuple[int, int, int, int]] = set()
        numbers = [self._numbers[layer.metadata] for layer in run.layers]
        for read in run.reads:
            where = read.layer, read.device, read.offset, read.length
            if where in seen:
                continue
            seen.add(where)
            offsets, base = self._starts[numbers[read.layer], read.device]
            begin, end = bisect_left(offsets, read.offset), bisect_left(offsets, read.offset + read.length)
            for index in range(base + begin, base + end):
                found.setdefault(index, read.at)
        return found

    def has_pack(self, number: int, pack: Digest) -> bool:
        """Whether some layer of run ``number`` has the pack."""
        return pack in self._packs_of[number]

    def evidence(self, chosen: Iterable[int] | None = None) -> Evidence:
        """Of some runs, by their numbers; of all if not given."""
        numbers = tuple(range(len(self.runs)) if chosen is None else sorted(chosen))
        segment_times: dict[int, list[int]] = {}
        frame_times: dict[int, list[int]] = {}
        frame_runs: dict[int, list[int]] = {}
        for number in numbers:
            frames: dict[int, int] = {}
            for index, at in self.firsts[number].items():
                segment_times.setdefault(index, []).append(at)
                frame = self.segments[index].frame
                known = frames.get(frame)
                if known is None or at < known:
                    frames[frame] = at
            for frame, at in frames.items():
                frame_times.setdefault(frame, []).append(at)
                frame_runs.setdefault(frame, []).append(number)
        over_layer = [sum(layer in self._layers_of[number] for number in numbers) for layer in range(len(self.layers))]
        over_pack: dict[Digest, int] = {}
        for number in numbers:
            for pack in self._packs_of[number]:
                over_pack[pack] = over_pack.get(pack, 0) + 1
        return Evidence(
            self,
            numbers,
            {index: sorted(times) for index, times in sorted(segment_times.items())},
            {frame: sorted(times) for frame, times in sorted(frame_times.items())},
            {frame: tuple(of) for frame, of in sorted(frame_runs.items())},
            tuple(over_layer),
            over_pack,
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """What some runs of a corpus tell.

    Attributes:
        corpus: that they are of.
        runs: their numbers in it.
        segment_times: of each segment that one of them read, when each that did read it first, sorted.
        frame_times: the same of frames.
        frame_runs: which runs read a frame.
        over_layer: how many of the runs have a layer.
        over_pack: how many have a pack.
    """

    corpus: Corpus
    runs: tuple[int, ...]
    segment_times: Mapping[int, Sequence[int]]
    frame_times: Mapping[int, Sequence[int]]
    frame_runs: Mapping[int, tuple[int, ...]]
    over_layer: tuple[int, ...]
    over_pack: Mapping[Digest, int]

    def frame_chance(self, frame: int) -> float:
        """The share of runs with the frame's pack that read some of it."""
        return len(self.frame_times[frame]) / self.over_pack[self.corpus.frames[frame].pack]

    def segment_chance(self, index: int) -> float:
        """The share of runs with the segment's layer that read it."""
        return len(self.segment_times[index]) / self.over_layer[self.corpus.segments[index].layer]


def quantile(times: Sequence[int], share: float) -> int:
    """Of sorted times, the one below which so large a share of them lies, rounded towards the earlier."""
    return times[int(share * (len(times) - 1))]


def _cut(reads: Iterable[tuple[int, int, str | None, int]]) -> Iterable[tuple[int, int, str | None, int]]:
    """Ranges of a pack cut at the ends of all of them, by offset; each with the first path by name, and its offset."""
    ordered = sorted(reads, key=lambda read: (read[0], read[1], read[2] is None, read[2] or "", read[3]))
    cuts = sorted({edge for read in ordered for edge in read[:2]})
    named: dict[int, tuple[bool, str, int]] = {}
    count = 0
    for start, end, path, file_offset in ordered:
        numbers = range(bisect_left(cuts, start), bisect_right(cuts, end) - 1)
        count += len(numbers)
        if count > MOST_PIECES:
            raise LimitError(f"the ranges of these traces overlap in more than {MOST_PIECES} pieces: no runs read so")
        for number in numbers:
            name = path is None, path or "", file_offset + cuts[number] - start if path is not None else 0
            known = named.get(number)
            if known is None or name < known:
                named[number] = name
    for number in sorted(named):
        unnamed, path, file_offset = named[number]
        yield cuts[number], cuts[number + 1], None if unnamed else path, file_offset
