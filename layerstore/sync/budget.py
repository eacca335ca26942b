"""Which images cover most tasks in so many bytes, each blob counted once.

An image is worth its tasks, and costs the bytes of its blobs that no image chosen before it has. To choose best is a
knapsack whose items share their weight, for which nobody knows a quick way (in the literature: the set-union knapsack
problem), so several ways are gone, and the best of their results is taken:

``per-new-byte``   again and again the image with most tasks per byte that it adds. It shuns families: the first member
                   pays for all that they share.
``per-half-share``, ``per-share``
                   the same, but a blob that N candidates have counts as its bytes / √N, or / N. It finds families,
                   also some for which the budget doesn't last.
``family-first``   one member of a family is taken first, for each of the largest shared blobs in turn; then as above.
``largest-first``  by tasks alone: what most people would do by hand.
``single``         the one image with most tasks.

Then images are exchanged as long as that is a gain: one that didn't fit, for some that cover less.

No choice can be better than the *bound*: N images that share a blob pay at least its bytes / N each, so what they cost
at least is known for each alone, and the best mixture of these costs, parts of images allowed, is quickly found. By the
same costs so many images fit at most, and no more than those share a blob, which makes the costs higher.

Everything is decided by numbers and then by names, so the same input gives the same choice.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from layerstore.digest import Digest
from layerstore.errors import UsageError

POWERS = {"per-new-byte": 0.0, "per-half-share": 0.5, "per-share": 1.0}
FAMILIES = 24
"""Shared blobs for each of which a family is tried first,"""
FAMILY_WORK = 100_000
"""and blobs of images that are looked at for that: with many images, fewer families are tried."""
ROUNDS = 4
"""Of exchanges,"""
WANTED = 400
"""for so many images that weren't chosen, those with most tasks,"""
OFFERED = 64
"""against so many that were, those with fewest tasks per byte of their own."""
STEPS = 10
"""Of a curve,"""
STEP_FAMILIES = 4
"""at each of which fewer families are tried."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An image that may be chosen: what it is worth, and its blobs with their bytes."""

    name: str
    tasks: float
    blobs: Mapping[Digest, int]


@dataclass(frozen=True, slots=True)
class Tried:
    """What one way came to."""

    way: str
    tasks: float
    bytes: int
    images: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Images that fit into a budget.

    Attributes:
        budget: bytes.
        names: in the order in which they are to be copied: most tasks per new byte first.
        bytes: of their blobs, each once.
        tasks: that they cover.
        way: that found them, with ``+exchange`` if it helped.
        tried: what each way came to.
        bound: tasks that no choice can exceed.
    """

    budget: int
    names: tuple[str, ...]
    bytes: int
    tasks: float
    way: str
    tried: tuple[Tried, ...]
    bound: float


def choose(candidates: Iterable[Candidate], budget: int, *, families: int = FAMILIES) -> Choice:
    """The images to have in ``budget`` bytes. Images without tasks are never chosen.

    Args:
        candidates: to choose from.
        budget: bytes.
        families: at most so many are tried first.

    Raises:
        UsageError: a negative budget.
    """
    if budget < 0:
        raise UsageError(f"a budget of {budget} bytes is none")
    problem = _Problem(candidates, budget)
    ways = {way: _greedy(problem, power) for way, power in POWERS.items()}
    ways["family-first"] = _family_first(problem, families)
    ways["largest-first"] = _largest_first(problem)
    ways["single"] = _single(problem)
    best = max(ways, key=lambda way: ways[way].merit)  # of equals the first
    better = _exchanged(problem, ways[best])
    way = f"{best}+exchange" if better.merit > ways[best].merit else best
    chosen = better if better.merit > ways[best].merit else ways[best]
    return Choice(
        budget,
        tuple(problem.names[number] for number in _ordered(problem, chosen.order)),
        chosen.bytes,
        chosen.tasks,
        way,
        tuple(Tried(each, got.tasks, got.bytes, len(got.order)) for each, got in ways.items()),
        max(_bound(problem), chosen.tasks),
    )


def all_bytes(candidates: Iterable[Candidate]) -> int:
    """Bytes of all blobs of images that have tasks, each once."""
    sizes: dict[Digest, int] = {}
    for candidate in candidates:
        if candidate.tasks > 0:
            sizes.update(candidate.blobs)
    return sum(sizes.values())


def curve(candidates: Sequence[Candidate], chosen: Choice) -> tuple[Choice, ...]:
    """What budgets cover: tenths of all that there is, and that of ``chosen``, ascending.

    Each is chosen for itself, unless what fits into the one before is better.
    """
    whole = all_bytes(candidates)
    steps = sorted({whole * step // STEPS for step in range(1, STEPS + 1)} | {min(chosen.budget, whole), chosen.budget})
    points = [
        chosen if budget == chosen.budget else choose(candidates, budget, families=STEP_FAMILIES) for budget in steps
    ]
    for number, (before, after) in enumerate(pairwise(list(points))):
        before = points[number]
        if before.tasks > after.tasks and after is not chosen:
            points[number + 1] = Choice(
                after.budget, before.names, before.bytes, before.tasks, before.way, after.tried, after.bound
            )
    return tuple(points)


class _Problem:
    """Candidates that have tasks and fit, by number in the order of their names; blobs by number."""

    def __init__(self, candidates: Iterable[Candidate], budget: int) -> None:
        fitting = [each for each in candidates if each.tasks > 0 and sum(each.blobs.values()) <= budget]
        fitting.sort(key=lambda each: each.name)
        self.budget = budget
        self.names = [each.name for each in fitting]
        self.tasks = [each.tasks for each in fitting]
        numbers: dict[Digest, int] = {}
        self.blobs = [[numbers.setdefault(digest, len(numbers)) for digest in sorted(each.blobs)] for each in fitting]
        self.sizes = [0] * len(numbers)
        self.users: list[list[int]] = [[] for _ in numbers]
        for number, each in enumerate(fitting):
            for digest, size in each.blobs.items():
                self.sizes[numbers[digest]] = size
                self.users[numbers[digest]].append(number)
        self.whole = [sum(self.sizes[blob] for blob in blobs) for blobs in self.blobs]

    @property
    def work(self) -> int:
        return sum(map(len, self.blobs))


class _Chosen:
    """Images taken, in order, and how often each blob is among theirs."""

    def __init__(self, problem: _Problem, order: Iterable[int] = ()) -> None:
        self._problem = problem
        self.order: list[int] = []
        self.taken = [False] * len(problem.names)
        self.counts = [0] * len(problem.sizes)
        self.bytes = 0
        self.tasks: float = 0
        for number in order:
            self.take(number)

    @property
    def merit(self) -> tuple[float, int]:
        return self.tasks, -self.bytes

    @property
    def left(self) -> int:
        return self._problem.budget - self.bytes

    def cost(self, number: int) -> int:
        """Bytes that it would add."""
        sizes, counts = self._problem.sizes, self.counts
        return sum(sizes[blob] for blob in self._problem.blobs[number] if not counts[blob])

    def take(self, number: int) -> list[int]:
        """Add it; the blobs that are new."""
        new = [blob for blob in self._problem.blobs[number] if not self.counts[blob]]
        self.bytes += sum(self._problem.sizes[blob] for blob in new)
        for blob in self._problem.blobs[number]:
            self.counts[blob] += 1
        self.tasks += self._problem.tasks[number]
        self.taken[number] = True
        self.order.append(number)
        return new

    def drop(self, number: int) -> None:
        """Take it out again."""
        for blob in self._problem.blobs[number]:
            self.counts[blob] -= 1
            if not self.counts[blob]:
                self.bytes -= self._problem.sizes[blob]
        self.tasks -= self._problem.tasks[number]
        self.taken[number] = False
        self.order.remove(number)

    def own(self, number: int) -> int:
        """Bytes that would be free without it."""
        sizes, counts = self._problem.sizes, self.counts
        return sum(sizes[blob] for blob in self._problem.blobs[number] if counts[blob] == 1)


def _greedy(problem: _Problem, power: float, first: Iterable[int] = ()) -> _Chosen:
    """Again and again what has most tasks per byte; a blob of N candidates counts as its bytes / N ** power."""
    weights = [size / len(users) ** power for size, users in zip(problem.sizes, problem.users, strict=True)]
    chosen = _Chosen(problem, first)
    prices = [0.0] * len(problem.names)

    def entry(number: int) -> tuple[float, float, int]:
        counts = chosen.counts
        price = sum(weights[blob] for blob in problem.blobs[number] if not counts[blob])
        prices[number] = price
        tasks = problem.tasks[number]
        return (-tasks / price if price else float("-inf")), -tasks, number

    heap = [entry(number) for number in range(len(problem.names)) if not chosen.taken[number]]
    heapq.heapify(heap)
    while heap:
        rank, _, number = heapq.heappop(heap)
        price = prices[number]
        if chosen.taken[number] or rank != (-problem.tasks[number] / price if price else float("-inf")):
            continue  # it has become cheaper since, and is further up
        if chosen.cost(number) > chosen.left:
            continue  # should it become cheaper, it comes again
        cheaper: set[int] = set()
        for blob in chosen.take(number):
            cheaper.update(problem.users[blob])
        for other in sorted(cheaper):
            if not chosen.taken[other]:
                heapq.heappush(heap, entry(other))
    return chosen


def _family_first(problem: _Problem, families: int) -> _Chosen:
    shared = [blob for blob, users in enumerate(problem.users) if len(users) > 1]
    shared.sort(key=lambda blob: (-problem.sizes[blob], blob))
    best = _Chosen(problem)
    tried: set[int] = set()
    for blob in shared[: min(families, FAMILY_WORK // (problem.work or 1))]:
        member = max(
            problem.users[blob],
            key=lambda number: (problem.tasks[number] / (problem.whole[number] or 1), -number),
        )
        if member in tried:
            continue
        tried.add(member)
        for power in (0.0, 1.0):
            found = _greedy(problem, power, [member])
            best = max(best, found, key=lambda each: each.merit)
    return best


def _largest_first(problem: _Problem) -> _Chosen:
    chosen = _Chosen(problem)
    for number in sorted(range(len(problem.names)), key=lambda each: (-problem.tasks[each], each)):
        if chosen.cost(number) <= chosen.left:
            chosen.take(number)
    return chosen


def _single(problem: _Problem) -> _Chosen:
    every = range(len(problem.names))
    best = max(every, key=lambda number: (problem.tasks[number], -problem.whole[number], -number), default=None)
    return _Chosen(problem, [] if best is None else [best])


def _exchanged(problem: _Problem, chosen: _Chosen) -> _Chosen:
    """Take what was left out for others that cover less, as long as there is such a thing."""
    for _ in range(ROUNDS):
        before = chosen.merit
        chosen = _Chosen(problem, chosen.order)
        wanted = [number for number in range(len(problem.names)) if not chosen.taken[number]]
        wanted.sort(key=lambda number: (-problem.tasks[number], number))
        ranked = sorted(chosen.order, key=lambda number: (problem.tasks[number] / (chosen.own(number) or 1), number))
        offered = ranked[:OFFERED]
        for number in wanted[:WANTED]:
            gone = _in_exchange(problem, chosen, number, offered)
            if gone is not None:
                for each in gone:
                    chosen.drop(each)
                    offered.remove(each)
                chosen.take(number)
        chosen = _greedy(problem, 0.0, chosen.order)
        if chosen.merit <= before:
            break
    return chosen


def _in_exchange(problem: _Problem, chosen: _Chosen, wanted: int, offered: Iterable[int]) -> list[int] | None:
    """What of ``offered`` would have to go for ``wanted``, if it covers less; None if there is no such thing."""
    missing = chosen.cost(wanted) - chosen.left
    kept = set(problem.blobs[wanted])
    gone: list[int] = []
    lost: float = 0
    taken: dict[int, int] = {}
    for number in offered:
        if missing <= 0:
            break
        if lost + problem.tasks[number] >= problem.tasks[wanted]:
            continue
        gone.append(number)
        lost += problem.tasks[number]
        for blob in problem.blobs[number]:
            taken[blob] = taken.get(blob, 0) + 1
            if taken[blob] == chosen.counts[blob] and blob not in kept:
                missing -= problem.sizes[blob]
    return gone if missing <= 0 else None


def _ordered(problem: _Problem, order: Sequence[int]) -> list[int]:
    """The same images, so that the first ones cover much: a copy may end early."""
    chosen = set(order)
    ranked = _greedy(problem, 0.0).order
    first = [number for number in ranked if number in chosen]
    return first + sorted(chosen.difference(first))


def _bound(problem: _Problem) -> float:
    least = _least(problem)
    left = float(problem.budget)
    covered = 0.0
    for number in sorted(range(len(least)), key=lambda each: (-problem.tasks[each] / (least[each] or 1e-9), each)):
        part = 1.0 if least[number] <= left else left / least[number]
        covered += part * problem.tasks[number]
        left -= part * least[number]
        if part < 1.0:
            break
    return min(covered * (1 + 1e-9), float(sum(problem.tasks)))


def _least(problem: _Problem) -> list[float]:
    """Bytes that each image pays at least in any choice: its part of each blob, among as many as may share that."""
    most = len(problem.names)
    while True:
        least = [
            sum(problem.sizes[blob] / min(len(problem.users[blob]), most) for blob in blobs) for blobs in problem.blobs
        ]
        # So many fit at most, by what they pay at least; and no more than those share a blob.
        paid = accumulate(sorted(least))
        fit = sum(each <= problem.budget * (1 + 1e-9) for each in paid)
        if fit >= most or not fit:
            return least
        most = fit
