"""Plans at work: what is fetched ahead for the sandboxes of a node.

::

    up ─▶ begin ─▶ one thread: Shelf ─▶ match ─▶ Replays.join ─▶ PlannedStart, of one sandbox
                        └─ layers without a plan ─▶ few threads: store ─▶ Shelf.keep ─▶ match ─▶ join, late

Nothing of this is ever an error of a start, and none waits for it: what takes longer than PATIENCE_MS goes on beside
it. What is wrong with a plan is counted, and said by :meth:`PlannedStart.document`.

A process that ends takes its replays along. Sandboxes that stand when the next one begins get no new ones: by then
their programs read what they need by themselves, and their plans' deadlines are over.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from layerstore.cache.metadata import PackUse
from layerstore.cache.packs import CachedPack
from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, NotFoundError, PermissionError_, UnavailableError, printable
from layerstore.progress import SILENT, Progress
from overlay.errands import Errands
from prefetch.fetcher import Fetcher
from prefetch.plans.match import Matched, match
from prefetch.plans.replay import Replay, Replays, ReplayStats, State
from prefetch.plans.shelf import NAME_BYTES, Shelf

if TYPE_CHECKING:
    from layerstore.store.protocol import Store
    from prefetch.plans.format import Plan

AUTO, NONE = "auto", "none"
"""Choices that are no name of a plan."""

PATIENCE_MS = 25
"""A start waits so long for what the node knows itself. A look-up takes 1 ms, reading the largest plan 300."""
STORE_SECONDS = 10.0
"""Who waits for prefetch gives a store so long to say whether it has a plan."""
ASKED_AGAIN = 60.0
"""Seconds for which a store that failed isn't asked for plans."""
PROBLEMS = ("damaged", "unmatched", "failed")
"""What is counted: plans that can't be read; starts for which a plan named packs that the image lacks; stores that
could not be asked, and disks that could not keep what they said."""
_ASKING = 4
"""Look-ups in stores at a time."""
_REMEMBERED = 64
"""Decisions that are remembered, for images that start again and again."""
_BELIEVED = 60.0
"""Seconds for which one is, while the directories of plans don't change."""
_PROBLEMS_KNOWN = 1000
_TELLING = 0.2
"""Seconds between two looks at a replay that somebody waits for."""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What is to be fetched ahead over certain packs.

    Attributes:
        plans: name and digest of each that has a part in it.
        matched: frames, in order, and how much of the plans was found.
        unplanned: layers that none of them has a part for.
        problems: what is wrong with a plan, one line each.
    """

    plans: tuple[tuple[str, str], ...]
    matched: Matched
    unplanned: tuple[Digest, ...]
    problems: tuple[str, ...]


class Followed:
    """A decision, and the replay that follows it on behalf of some starts. ``users`` is guarded by all starts' lock."""

    def __init__(self, decision: Decision, name: str) -> None:
        self.decision = decision
        self.name = name
        self.replay: Replay | None = None
        self.users = 0


@dataclass(frozen=True, slots=True)
class _Remembered:
    stamp: object
    at: float
    packs: tuple[CachedPack, ...]
    decision: Decision


class PlannedStart:
    """One sandbox, and what is fetched ahead for it. Any thread may call."""

    def __init__(self, choice: str, hurried: threading.Event) -> None:
        """While ``hurried`` is set nobody waits for it."""
        self.choice = choice
        self._hurried = hurried
        self._lock = threading.Lock()
        self._followed: list[Followed] = []
        self._problems: list[str] = []
        self._known = threading.Event()
        self._settled = threading.Event()
        self.ended = False

    # --- for those who make it

    def follow(self, decision: Decision, begin: Callable[[Decision], Followed]) -> None:
        """One more decision; a replay follows it, unless all has ended."""
        with self._lock:
            self._problems += decision.problems
            if not self.ended:
                self._followed.append(begin(decision))

    def troubled(self, problem: str) -> None:
        with self._lock:
            self._problems.append(problem)

    def known(self) -> None:
        """All that this node knows has been looked at."""
        self._known.set()

    def settled(self) -> None:
        """Nobody is asked for a plan any more."""
        self._known.set()
        self._settled.set()

    def end(self) -> list[Followed]:
        """What was followed and has to be left. What it was can still be asked."""
        with self._lock:
            followed = [] if self.ended else list(self._followed)
            self.ended = True
        self.settled()
        return followed

    # --- for those who ask

    def wait_for_node(self) -> None:
        """A moment, for what this node knows itself."""
        self._known.wait(PATIENCE_MS / 1000)

    def wait(self, progress: Progress = SILENT) -> None:
        """Until all that is planned is here, or it is clear that the rest won't come, or there is no time for that."""
        until = time.monotonic() + STORE_SECONDS
        while not self._hurried.is_set() and not self._settled.wait(min(_TELLING, STORE_SECONDS)):
            if time.monotonic() >= until:
                break
        replays = self._replays()
        progress.start("prefetch", None)
        told = 0
        for replay in replays:
            over = False
            while not over and not self._hurried.is_set():
                over = replay.wait(_TELLING)
                raw = sum(other.stats().raw for other in replays)
                progress.advance(raw - told)
                told = raw

    @property
    def plans(self) -> tuple[tuple[str, str], ...]:
        """Name and digest of those that were found up to now."""
        with self._lock:
            return tuple(dict.fromkeys(plan for followed in self._followed for plan in followed.decision.plans))

    def coverage(self) -> tuple[int, int]:
        """Bytes that the plans name, and of these those that the sandbox's packs have."""
        with self._lock:
            covered = [followed.decision.matched.coverage for followed in self._followed]
        return sum(each.bytes for each in covered), sum(each.matched_bytes for each in covered)

    def document(self, known: dict[Replay, ReplayStats] | None = None) -> dict[str, Any]:
        """As ``ps --json`` says it; counts are frames, sizes bytes. ``known``: for who asks of many that share them."""
        known = {} if known is None else known
        plans = self.plans
        planned_bytes, matched_bytes = self.coverage()
        with self._lock:
            problems = list(self._problems)
        replays = self._replays()
        for replay in replays:
            if replay not in known:
                known[replay] = replay.stats()
        stats = [known[replay] for replay in replays]
        return {
            "asked": self.choice,
            "plan": ", ".join(name or digest for name, digest in plans) or None,
            "plans": [{"name": name, "digest": digest} for name, digest in plans],
            "state": _state([each.state for each in stats], looking=not self._settled.is_set()),
            **{name: sum(getattr(each, name) for each in stats) for name in COUNTS},
            "seconds": round(max((each.seconds for each in stats), default=0.0), 6),
            "planned_bytes": planned_bytes,
            "matched_bytes": matched_bytes,
            "problems": problems + [each.error for each in stats if each.error is not None],
        }

    def _replays(self) -> list[Replay]:
        with self._lock:
            return [followed.replay for followed in self._followed if followed.replay is not None]


TOTALS = ("planned", "brought", "present", "used", "late", "failed", "requests", "raw", "compressed")
COUNTS = (*TOTALS, "left")
"""Of :class:`prefetch.plans.replay.ReplayStats`."""


def _state(states: Sequence[State], *, looking: bool) -> str:
    """Of several replays, that of the one which has most before it."""
    for state in (State.RUNNING, State.WAITING):
        if state in states:
            return str(state)
    if looking:
        return "looking"
    return str(states[-1]) if states else "none"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Somebody whose layers a store is being asked about."""

    planned: PlannedStart
    layers: tuple[Digest, ...]
    packs: tuple[CachedPack, ...]
    unplanned: frozenset[Digest]


class PlannedStarts:
    """The plans of a node, and the replays that follow them. Any thread may call."""

    def __init__(
        self,
        root: str,
        fetcher: Fetcher,
        *,
        uses: Callable[[str], Sequence[PackUse]],
        bandwidth: int | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Start nothing yet.

        Args:
            root: of the node.
            fetcher: brings what is planned.
            uses: what a layer refers to of its packs, by the hex of its metadata image; raises ImgtoolError.
            bandwidth: bytes a second from stores for all replays together.
            warn: is told what is damaged.
        """
        self._uses = uses
        self.shelf = Shelf(root)
        self._directories = (f"{root}/plans", f"{root}/plans/layers")
        self._replays = Replays(fetcher, bandwidth=bandwidth)
        self._warn = warn
        self._deciding = Errands("plans", 1)
        self._asking = Errands("plans-of-stores", _ASKING)
        self._lock = threading.Lock()
        """Guards everything below."""
        self._numbers = count(1)
        self._following: dict[Decision, Followed] = {}
        self._remembered: OrderedDict[tuple[str, tuple[Digest, ...]], _Remembered] = OrderedDict()
        self._asked: dict[tuple[Digest, ...], list[_Waiting]] = {}
        """Who waits for an answer about these layers."""
        self._failed: dict[str, float] = {}
        """Until when stores aren't asked, by location."""
        self._standing: set[PlannedStart] = set()
        self._hurried = threading.Event()
        self._totals: Counter[str] = Counter()
        self._problems: Counter[str] = Counter(dict.fromkeys(PROBLEMS, 0))
        self._known_problems: set[str] = set()

    def check(self, choice: str) -> None:
        """Raises NotFoundError: it names a plan that this node doesn't have."""
        if choice not in (AUTO, NONE) and choice not in self.shelf.names():
            raise NotFoundError(f"there is no plan {printable(choice)!r} on this node; `imgtool plan ls` lists them")

    def begin(
        self, choice: str, layers: Sequence[Digest], packs: Sequence[CachedPack], store: Store | None
    ) -> PlannedStart:
        """Fetch ahead for one more sandbox, until :meth:`end`. Returns after a moment, and raises nothing.

        Args:
            choice: auto, or the name of a plan.
            layers: digests of metadata images, bottom first.
            packs: those of the layers, open and in use until the end.
            store: asked about layers for which the node has no plan.
        """
        planned = PlannedStart(choice, self._hurried)
        with self._lock:
            self._standing.add(planned)
        of, over = tuple(layers), tuple(dict.fromkeys(packs))
        remembered = self._recall(choice, of, over)
        if remembered is not None:
            planned.follow(remembered, self._follow)
            planned.settled()
        else:
            self._deciding.send(partial(self._start, planned, of, over, store))
            planned.wait_for_node()
        return planned

    def end(self, planned: PlannedStart) -> None:
        """Its sandbox is gone, or wasn't made."""
        with self._lock:
            self._standing.discard(planned)
        for followed in planned.end():
            self._leave(followed)

    def _follow(self, decision: Decision) -> Followed:
        """Sandboxes for which the same was decided share what follows it, unless that has given up."""
        with self._lock:
            followed = self._following.get(decision)
            if followed is None or (followed.replay is not None and followed.replay.state == State.GAVE_UP):
                followed = self._following[decision] = Followed(decision, f"decision {next(self._numbers)}")
                if decision.matched.fetches:
                    followed.replay = self._replays.join(followed.name, decision.matched)
            followed.users += 1
            return followed

    def _leave(self, followed: Followed) -> None:
        with self._lock:
            followed.users -= 1
            if followed.users:
                return
            if self._following.get(followed.decision) is followed:
                del self._following[followed.decision]
        self._replays.leave(followed.name)
        if followed.replay is not None:
            stats = followed.replay.stats()
            with self._lock:
                self._totals.update({name: getattr(stats, name) for name in TOTALS})

    def hurry(self, hurried: bool) -> None:
        """Whether nobody may wait for what is fetched ahead, however long it takes: the node is about to stop."""
        if hurried:
            self._hurried.set()
        else:
            self._hurried.clear()

    def close(self) -> None:
        """End all. Stores that are being asked answer nobody."""
        self._deciding.close()
        self._asking.close()
        self._replays.close()
        with self._lock:
            standing = list(self._standing)
        for planned in standing:
            self.end(planned)

    def status(self) -> dict[str, Any]:
        """Replays under way; what all have brought since this process began, in frames and bytes; what was wrong."""
        with self._lock:
            following = [followed.replay for followed in self._following.values() if followed.replay is not None]
            totals, problems = Counter(self._totals), dict(self._problems)
        stats = [replay.stats() for replay in following]
        return {
            "replays": sum(each.state == State.RUNNING for each in stats),
            **{name: totals[name] + sum(getattr(each, name) for each in stats) for name in TOTALS},
            "problems": problems,
        }

    # --- what this node knows: one thread, and starts that remember

    def _start(
        self, planned: PlannedStart, layers: tuple[Digest, ...], packs: tuple[CachedPack, ...], store: Store | None
    ) -> None:
        """Decide by the plans of this node; where it lacks some, the store is asked."""
        asking = False
        try:
            decision = self._decide(planned.choice, layers, packs)
            planned.follow(decision, self._follow)
            planned.known()
            if store is not None and planned.choice == AUTO and not planned.ended:
                unasked = tuple(self.shelf.unasked(layers))
                waiting = _Waiting(planned, layers, packs, frozenset(decision.unplanned))
                asking = bool(unasked) and self._ask(waiting, unasked, store)
        except ImgtoolError as error:
            self._trouble("damaged", str(error))
            planned.troubled(str(error))
        finally:
            if not asking:
                planned.settled()

    def _decide(self, choice: str, layers: tuple[Digest, ...], packs: tuple[CachedPack, ...]) -> Decision:
        """Raises ImgtoolError: the plan of this name can't be read."""
        stamp = self._stamp()
        if choice == AUTO:
            found = self.shelf.find(layers, [pack.digest for pack in packs])
        else:
            found = [self.shelf.load(choice)]
        problems = self.shelf.problems() if choice == AUTO else []
        for problem in problems:
            self._trouble("damaged", problem)
        decision = self._matched(found, layers, packs, problems)
        if choice != AUTO or not self.shelf.unasked(layers):
            with self._lock:
                key = (choice, layers)
                self._remembered[key] = _Remembered(stamp, time.monotonic(), packs, decision)
                self._remembered.move_to_end(key)
                while len(self._remembered) > _REMEMBERED:
                    self._remembered.popitem(last=False)
        return decision

    def _matched(
        self, plans: Sequence[Plan], layers: Sequence[Digest], packs: tuple[CachedPack, ...], problems: Sequence[str]
    ) -> Decision:
        matched = match(plans, packs, self._used(layers))
        said = list(problems)
        if matched.coverage.unmatched:
            names = ", ".join(map(_shown, plans))
            reasons = ", ".join(f"{count} {reason}" for reason, count in matched.coverage.unmatched.items())
            said.append(f"plan {names}: of {matched.coverage.ranges} ranges {reasons}")
            self._trouble("unmatched", said[-1])
        planned = {part.metadata for plan in plans for part in plan.parts}
        return Decision(
            tuple((_shown(plan), str(plan.digest)) for plan in plans),
            matched,
            tuple(layer for layer in layers if layer not in planned),
            tuple(said),
        )

    def _used(self, layers: Sequence[Digest]) -> list[PackUse] | None:
        """What the layers refer to of their packs; None if that isn't known of one of them."""
        try:
            return [use for layer in layers for use in self._uses(layer.hex)]
        except ImgtoolError:
            return None

    def _recall(self, choice: str, layers: tuple[Digest, ...], packs: tuple[CachedPack, ...]) -> Decision | None:
        """What was decided a moment ago, if nothing has changed since."""
        with self._lock:
            known = self._remembered.get((choice, layers))
        if known is None or known.packs != packs or time.monotonic() - known.at > _BELIEVED:
            return None
        return known.decision if known.stamp == self._stamp() else None

    def _stamp(self) -> object:
        """Differs when a plan was saved or removed."""
        return tuple(map(_changed, self._directories))

    # --- what a store knows: a few threads

    def _ask(self, waiting: _Waiting, layers: tuple[Digest, ...], store: Store) -> bool:
        """Whether it is being asked: then the one who waits will be settled."""
        with self._lock:
            if time.monotonic() < self._failed.get(store.location, 0.0):
                return False
            others = self._asked.get(layers)
            if others is not None:
                others[:] = [other for other in others if not other.planned.ended]
                others.append(waiting)
                return True
            self._asked[layers] = [waiting]
        self._asking.send(partial(self._ask_store, layers, store))
        return True

    def _ask_store(self, layers: tuple[Digest, ...], store: Store) -> None:
        found: list[Plan] = []
        problems: list[str] = []
        try:
            for layer in layers:
                plan = self._look_up(layer, store, problems)
                if plan is not None:
                    found.append(plan)
        finally:
            with self._lock:
                waiting = self._asked.pop(layers, [])
            decided: dict[object, Decision] = {}
            for each in waiting:
                self._tell(each, found, problems, decided)

    def _look_up(self, layer: Digest, store: Store, problems: list[str]) -> Plan | None:
        """The plan of a layer, kept on this node from now on; None: the store has none that can be used."""
        # With all that publishing needs: a node whose plans are its own never asks.
        from prefetch.plans.published import fetch

        plan = None
        try:
            plan = fetch(store, layer)
        except (UnavailableError, PermissionError_) as error:
            with self._lock:
                self._failed[store.location] = time.monotonic() + ASKED_AGAIN
            self._trouble("failed", str(error))
            problems.append(str(error))
            return None
        except ImgtoolError as error:  # it is there, and no plan: as good as none, and not worth asking for at once
            self._trouble("damaged", str(error))
            problems.append(str(error))
        try:
            self.shelf.keep(layer, plan)
        except ImgtoolError as error:
            self._trouble("failed", str(error))
        return plan

    def _tell(
        self, waiting: _Waiting, plans: Sequence[Plan], problems: Sequence[str], decided: dict[object, Decision]
    ) -> None:
        """Follow what was found, late, of layers that had no plan until now. Those alike share what is decided."""
        try:
            for problem in problems:
                waiting.planned.troubled(problem)
            fitting = [plan for plan in plans if any(part.metadata in waiting.unplanned for part in plan.parts)]
            if fitting and not waiting.planned.ended:
                alike = waiting.layers, waiting.packs, waiting.unplanned
                if alike not in decided:
                    decided[alike] = self._matched(fitting, waiting.layers, waiting.packs, ())
                waiting.planned.follow(decided[alike], self._follow)
        finally:
            waiting.planned.settled()

    def _trouble(self, kind: str, problem: str) -> None:
        """Count it; what is the same for every start, once."""
        with self._lock:
            if problem in self._known_problems:
                return
            if len(self._known_problems) < _PROBLEMS_KNOWN:
                self._known_problems.add(problem)
            self._problems[kind] += 1
        self._warn(f"prefetch: {problem}")


def _shown(plan: Plan) -> str:
    """Its name. A plan of somebody else's may have any, and it goes into receipts, which have a limit."""
    return printable(plan.name[:NAME_BYTES])


def _changed(directory: str) -> int:
    try:
        return os.stat(directory).st_mtime_ns
    except OSError:
        return 0
