"""One start, simulated: a program that reads, a node that fetches, and the link between node and store.

::

    program: thinks, reads, thinks …    node: N requests at once, demand first     link: latency, shared bandwidth
        └─ misses ─▶ demand ──────────────▶ queue ─▶ request ─▶ transfer ─▶ decode (processors) ─▶ frame is ready
                     read-ahead, plan ────────▲                                                        │
        ◀── goes on ──────────────────────────────────────────────────────────────────────────────────┘

What it leaves out: the program reads one thing after the other, so what threads of it do at once counts as a row; the
program and the node don't compete for processors; a store is as fast at everything. Figures are therefore for
comparing plans over one link; ``benchmarks/`` has what real starts took. Rules that the fetcher has (read-ahead, what
background may do beside demand, frames in a read) are taken from where it has them.

Nothing is random, and equal arguments give equal outcomes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from layerstore.cache.packs import CachedPack
from layerstore.digest import Digest
from prefetch.learn.frames import FrameDue
from prefetch.learn.runs import Run
from prefetch.learn.sizes import GUESSED, Sizes, check_frames
from prefetch.plan import FRAMES_PER_READ
from prefetch.readahead import ReadAhead
from prefetch.share import PARTS, QUIET_SECONDS, Share

WINDOW = 512
"""Frames that a replay wants at a time, among which neighbours are found; :mod:`prefetch.plans.replay` has it, too."""
_PACK = 32
"""A frame as one number: the pack above this bit, its number below. So neighbours differ by 1."""


@dataclass(frozen=True, slots=True)
class Link:
    """Between the node and the store.

    Attributes:
        latency: seconds from a request to the first byte of its answer.
        bandwidth: bytes a second that all requests share evenly; infinite if there is no limit.
        requests: at once, as the fetcher's threads.
    """

    latency: float = 0.020
    bandwidth: float = math.inf
    requests: int = 8


@dataclass(frozen=True, slots=True)
class Costs:
    """What a start costs besides the link, in seconds.

    The defaults are what docs/measurements.md has for ``import numpy``: a wait costs about 2 ms more than the turn of
    the link, of which a frame takes one to be decompressed, verified and written.

    Attributes:
        frame: of one processor, to make a frame ready.
        want: from a reader's miss to the request of it.
        answer: from the frame to the reader's going on.
        event: of each first read of something that is there. None by default: a recorded run has paid for its events,
            and its times hold them; 21 µs for runs recorded without.
        processors: that make frames ready.
        lead: the replay begins so long before the run's time 0.
        ahead: whether the node reads ahead of demands.
    """

    frame: float = 0.001
    want: float = 0.0005
    answer: float = 0.0005
    event: float = 0.0
    processors: int = 2
    lead: float = 0.0
    ahead: bool = True


COSTS = Costs()
LINK = Link()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a start came to.

    Attributes:
        seconds: until the program ended.
        waited: of these, for frames.
        demand_reads: requests because a reader waited.
        demand_frames: frames that these brought; one that was planned, but late, is among them.
        used_frames: frames that the run read.
        missed_frames: of these, how many no plan named.
        requests: all that were made until the program ended.
        fetched_frames: by these.
        fetched_bytes: compressed.
        wasted_bytes: of the fetched ones, those of frames that the run never read.
        left_bytes: planned, and not asked for when the program ended.
        left_wasted_bytes: of these, what the run never read. A longer run would fetch them.
    """

    seconds: float
    waited: float = 0.0
    demand_reads: int = 0
    demand_frames: int = 0
    used_frames: int = 0
    missed_frames: int = 0
    requests: int = 0
    fetched_frames: int = 0
    fetched_bytes: int = 0
    wasted_bytes: int = 0
    left_bytes: int = 0
    left_wasted_bytes: int = 0


class Program:
    """A run as the simulator takes it: seconds of thought before each read, and the frames that it needs."""

    def __init__(self, run: Run, sizes: Sizes = GUESSED) -> None:
        """Raises LimitError if the run reads more frames than any start does."""
        self.sizes = sizes
        self.packs: dict[Digest, int] = {}
        self.steps: list[tuple[float, tuple[int, ...]]] = []
        self.ended = run.ended / 1e6
        spans: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
        seen: set[int] = set()
        count = 0
        for read in run.reads:
            key = read.layer, read.device, read.offset, read.length
            frames = spans.get(key)
            if frames is None:
                pack = run.pack(read)
                numbers = sizes.frames(pack, read.offset, read.length)
                count += len(numbers)
                check_frames(count, "a run")
                base = self.packs.setdefault(pack, len(self.packs)) << _PACK
                frames = spans[key] = tuple(base + number for number in numbers)
            # What was read before is ready for the rest of the run: only frames that are new can stop the program.
            fresh = tuple(frame for frame in frames if frame not in seen)
            seen.update(fresh)
            self.steps.append((read.at / 1e6, fresh))
        self.used = frozenset(seen)


def warm(program: Program, costs: Costs = COSTS) -> Outcome:
    """The start when all is there."""
    return Outcome(program.ended + costs.event * len(program.steps), used_frames=len(program.used))


def simulate(
    program: Program, plan: Sequence[FrameDue] | None = None, *, link: Link = LINK, costs: Costs = COSTS
) -> Outcome:
    """The start on a node that has nothing but metadata: lazily, and with a plan's frames replayed in their order.

    Args:
        program: that starts.
        plan: in the order in which it is fetched; None for a start without one.
        link: to the store.
        costs: of the node.
    """
    packs = dict(program.packs)
    planned = [
        (packs.setdefault(frame.pack, len(packs)) << _PACK) + frame.number
        for frame in plan or ()
        if frame.number < (program.sizes.count(frame.pack) or 1 << _PACK)
    ]
    node = _Node(list(packs), planned, program, link, costs)
    now = begin = costs.lead
    last = waited = 0.0
    for at, frames in program.steps:
        now += at - last + costs.event
        last = at
        if frames:
            node.run_until(now)
            missing = [frame for frame in frames if frame not in node.ready]
            if missing:
                ready = node.demand(missing, now + costs.want) + costs.answer
                waited += ready - now
                now = ready
    now += program.ended - last
    node.run_until(now)
    return node.outcome(now - begin, waited)


class _Request:
    """Frames under way; those that are ready leave it, from the end."""

    __slots__ = ("background", "frames", "size", "started")

    def __init__(self, frames: list[int], background: bool, size: int, started: float) -> None:
        self.frames = frames
        self.background = background
        self.size = size
        self.started = started


class _Pipe:
    """The bandwidth that answers share evenly: progress is counted in bytes that each of them has had."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._had = 0.0
        self._since = 0.0
        self._under_way: list[tuple[float, int, _Request]] = []
        self._order = 0

    def _progress(self, now: float) -> None:
        if self._under_way:
            self._had += (now - self._since) * self._bandwidth / len(self._under_way)
        self._since = now

    def add(self, request: _Request, now: float) -> None:
        self._progress(now)
        self._order += 1
        heapq.heappush(self._under_way, (self._had + request.size, self._order, request))

    def next(self) -> float:
        """When the first answer is complete, if none comes before."""
        if not self._under_way:
            return math.inf
        return self._since + max(0.0, self._under_way[0][0] - self._had) * len(self._under_way) / self._bandwidth

    def take(self, now: float) -> _Request:
        """The answer that is complete now."""
        self._progress(now)
        self._had, _, request = heapq.heappop(self._under_way)
        return request


class _Pack:
    """What the policy of reading ahead asks of a pack."""

    __slots__ = ("__weakref__", "index")

    def __init__(self, frames: int) -> None:
        self.index = range(frames)


class _Node:
    """The node: its queue, its requests, its processors."""

    def __init__(
        self, packs: Sequence[Digest], planned: Sequence[int], program: Program, link: Link, costs: Costs
    ) -> None:
        self.ready: set[int] = set()
        self._link = link
        self._costs = costs
        self._sizes = program.sizes
        self._used = program.used
        self._packs = packs
        self._planned = planned
        self._in_plan = frozenset(planned)
        self._place = {frame: place for place, frame in reversed(list(enumerate(planned)))}
        self._next_planned = 0
        self._taken: set[int] = set()  # asked for, or ready
        self._wanted: set[int] = set()  # by the reader
        self._demand: deque[int] = deque()
        self._ahead: deque[int] = deque()
        self._ahead_set: set[int] = set()
        self._policy = ReadAhead() if costs.ahead else None
        self._stand_ins = [_Pack(self._count(number)) for number in range(len(packs))]
        self._demanded = -math.inf
        self._free = link.requests
        self._share = Share()
        self._asking = 0  # background requests without an answer
        self._background = 0
        self._background_most = max(1, link.requests - max(1, link.requests // 4))
        self._pipe = _Pipe(link.bandwidth) if math.isfinite(link.bandwidth) else None
        self._events: list[tuple[float, int, bool, _Request]] = []
        self._order = 0
        self._waiting: tuple[list[_Request], list[_Request]] = ([], [])  # for a processor: demand, background
        self._idle = costs.processors
        self._demand_reads = self._demand_frames = self._requests = self._fetched = self._wasted = 0
        self._dispatch(0.0)

    def _count(self, pack: int) -> int:
        """Frames of a pack; where that isn't known, up to the last one that anybody names."""
        known = self._sizes.count(self._packs[pack])
        if known is not None:
            return known
        named = (*self._used, *self._planned)
        return 1 + max((frame & (1 << _PACK) - 1 for frame in named if frame >> _PACK == pack), default=0)

    # --- the program's side

    def demand(self, missing: Sequence[int], now: float) -> float:
        """A reader waits for these from ``now`` on; returns when they are ready."""
        self.run_until(now)
        missing = [frame for frame in missing if frame not in self.ready]
        if not missing:
            return now
        self._wanted.update(missing)
        self._demand.extend(frame for frame in missing if frame not in self._taken)
        # What a plan is about to bring says nothing of what is around it.
        surprising = [frame for frame in missing if frame not in self._in_plan]
        if self._policy is not None and surprising:
            self._read_ahead(self._policy, surprising)
        self._dispatch(now)
        left = set(missing)
        while left:
            now = self._step()
            left -= self.ready
        self._wanted.clear()
        return now

    def _read_ahead(self, policy: ReadAhead, missing: Sequence[int]) -> None:
        by_pack: dict[int, list[int]] = {}
        for frame in missing:
            by_pack.setdefault(frame >> _PACK, []).append(frame & (1 << _PACK) - 1)
        for pack, numbers in by_pack.items():
            # The policy needs of a pack how many frames it has, and that it can be a weak key.
            around = policy.around(cast(CachedPack, self._stand_ins[pack]), numbers)
            for number in reversed(around):
                frame = (pack << _PACK) + number
                if frame not in self._taken and frame not in self._ahead_set:
                    self._ahead.appendleft(frame)
                    self._ahead_set.add(frame)

    # --- time

    def run_until(self, now: float) -> None:
        """Let everything happen that happens until ``now``."""
        while self._next() <= now:
            self._step()

    def _next(self) -> float:
        first = self._events[0][0] if self._events else math.inf
        return first if self._pipe is None else min(first, self._pipe.next())

    def _push(self, time: float, answer: bool, request: _Request) -> None:
        """At ``time`` the answer to a request begins, or else one more of its frames is ready."""
        self._order += 1
        heapq.heappush(self._events, (time, self._order, answer, request))

    def _step(self) -> float:
        """The next thing that happens; returns when it did."""
        arrival = math.inf if self._pipe is None else self._pipe.next()
        if self._pipe is not None and arrival <= (self._events[0][0] if self._events else math.inf):
            self._arrive(self._pipe.take(arrival), arrival)
            return arrival
        now, _, answer, request = heapq.heappop(self._events)
        if not answer:
            self._decoded(request, now)
        elif self._pipe is None:
            self._arrive(request, now)
        else:
            self._pipe.add(request, now)
        return now

    # --- requests

    def _dispatch(self, now: float) -> None:
        while self._free:
            frames, background = self._take_demand(), False
            if not frames and (room := self._room()) is not None:
                frames, background = self._take_ahead(room) or self._take_planned(room), True
            if not frames:
                return
            self._free -= 1
            size = sum(map(self._size, frames))
            self._requests += 1
            self._fetched += size
            self._wasted += sum(self._size(frame) for frame in frames if frame not in self._used)
            if background:
                self._background += 1
                self._asking += 1
            else:
                self._demanded = now
                self._demand_reads += 1
                self._demand_frames += len(frames)
            self._taken.update(frames)
            self._share.started(size)
            self._push(now + self._link.latency, True, _Request(frames, background, size, now))

    def _size(self, frame: int) -> int:
        return self._sizes.compressed(self._packs[frame >> _PACK], frame & (1 << _PACK) - 1)

    def _room(self) -> float | None:
        """Bytes that a background request may ask for, as :class:`prefetch.schedule.Schedule` has it."""
        if self._background >= self._background_most:
            return None
        left = self._share.window - self._share.under_way
        return min(left, self._share.window / PARTS) if left > 0 or not self._asking else None

    def _take_demand(self) -> list[int]:
        while self._demand:
            frame = self._demand.popleft()
            if frame not in self._taken:
                return self._neighbours(frame, frozenset(self._demand).__contains__, math.inf)
        return []

    def _take_ahead(self, room: float) -> list[int]:
        while self._ahead:
            frame = self._ahead.popleft()
            self._ahead_set.discard(frame)
            if frame not in self._taken:
                found = self._neighbours(frame, self._is_queued, room)
                self._ahead_set.difference_update(found)
                return found
        return []

    def _take_planned(self, room: float) -> list[int]:
        while self._next_planned < len(self._planned):
            frame = self._planned[self._next_planned]
            self._next_planned += 1
            if frame not in self._taken:
                return self._neighbours(frame, self._is_queued, room)
        return []

    def _is_queued(self, frame: int) -> bool:
        """Whether background wants a frame now."""
        return frame in self._ahead_set or self._place.get(frame, math.inf) < self._next_planned + WINDOW

    def _neighbours(self, frame: int, fits: Callable[[int], bool], room: float) -> list[int]:
        """The frame and those that fit on both sides of it, in the order of the pack; forwards first."""
        ends = [frame, frame]
        count, room = 1, room - self._size(frame)
        for side, step in ((1, 1), (0, -1)):
            while count < FRAMES_PER_READ:
                other = ends[side] + step
                if other in self._taken or not fits(other) or (size := self._size(other)) > room:
                    break
                ends[side] = other
                count, room = count + 1, room - size
        return list(range(ends[0], ends[1] + 1))

    # --- frames

    def _arrive(self, request: _Request, now: float) -> None:
        """The answer is there. Frames that a reader waits for come first, then in the order of the pack."""
        beside = now - self._demanded < QUIET_SECONDS
        self._share.arrived(request.size, now - request.started, beside=beside)
        self._asking -= request.background
        request.frames.sort(key=lambda frame: (frame in self._wanted, -frame))  # taken from the end
        self._waiting[request.background].append(request)
        self._decode(now)
        self._dispatch(now)

    def _decode(self, now: float) -> None:
        while self._idle and (self._waiting[0] or self._waiting[1]):
            queue = self._waiting[0] or self._waiting[1]
            self._idle -= 1
            self._push(now + self._costs.frame, False, queue.pop(0))

    def _decoded(self, request: _Request, now: float) -> None:
        self.ready.add(request.frames.pop())
        self._idle += 1
        if request.frames:
            self._waiting[request.background].insert(0, request)
        else:
            self._free += 1
            self._background -= request.background
            if not request.background:
                self._demanded = now
        self._decode(now)
        if not request.frames:
            self._dispatch(now)

    def outcome(self, seconds: float, waited: float) -> Outcome:
        left = [frame for frame in dict.fromkeys(self._planned) if frame not in self._taken]
        return Outcome(
            seconds,
            waited,
            self._demand_reads,
            self._demand_frames,
            len(self._used),
            len(self._used - self._in_plan),
            self._requests,
            len(self._taken),
            self._fetched,
            self._wasted,
            sum(map(self._size, left)),
            sum(self._size(frame) for frame in left if frame not in self._used),
        )
