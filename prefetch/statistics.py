"""What fetching has cost, and who is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError


class Priority(IntEnum):
    """Who is served first."""

    DEMAND = 0
    """A reader waits for it."""
    BACKGROUND = 1
    """A plan, or a guess."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was taken from stores: requests, bytes compressed and raw, and the frames that were right."""

    requests: int = 0
    compressed: int = 0
    raw: int = 0
    frames: int = 0

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(
            self.requests + other.requests,
            self.compressed + other.compressed,
            self.raw + other.raw,
            self.frames + other.frames,
        )


class Tally:
    """A :class:`Fetched` that is still being counted."""

    __slots__ = ("compressed", "frames", "raw", "requests")

    def __init__(self) -> None:
        self.requests = self.compressed = self.raw = self.frames = 0

    def total(self) -> Fetched:
        return Fetched(self.requests, self.compressed, self.raw, self.frames)


@dataclass(frozen=True, slots=True)
class FetchStats:
    """Counters since the start, and how things stand now.

    Attributes:
        demand, background: what was taken from stores, by the priority that the read began with.
        queued_demand, queued_background: frames that wait for a thread.
        resting: frames whose next attempt has to wait for its time.
        in_flight: reads under way that nobody has given up.
        waiting: wants that have not been answered.
        threads: that exist; those stuck in a read that was given up are among them.
        retries: frames that were tried again.
        failures: wants that were answered with an error.
        stalled: reads that were given up because the store didn't answer.
        coalesced: frames that needed no request of their own, since a neighbour's brought them.
        verified: frames that were there already, and right.
        demand_waits, demand_seconds: demands that had to wait and have been answered, and the sum of their waits.
    """

    demand: Fetched
    background: Fetched
    queued_demand: int
    queued_background: int
    resting: int
    in_flight: int
    waiting: int
    threads: int
    retries: int
    failures: int
    stalled: int
    coalesced: int
    verified: int
    demand_waits: int
    demand_seconds: float


class Observer(Protocol):
    """Told from the fetcher's threads, which wait meanwhile: return soon."""

    def fetched(self, pack: CachedPack, numbers: Sequence[int], priority: Priority, seconds: float, size: int) -> None:
        """One read brought these frames, verified and written; ``size`` bytes came from the store."""
        ...

    def failed(self, pack: CachedPack, numbers: Sequence[int], error: ImgtoolError) -> None:
        """An attempt at these frames failed; there may be others. No frames: the pack could not be made durable."""
        ...


class Unobserved:
    """Tells nobody."""

    def fetched(
        self, pack: CachedPack, numbers: Sequence[int], priority: Priority, seconds: float, size: int
    ) -> None: ...

    def failed(self, pack: CachedPack, numbers: Sequence[int], error: ImgtoolError) -> None: ...


UNOBSERVED: Observer = Unobserved()
