"""Running a plan: all of it in the background, some of it under way at a time, durable at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import copy

from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError, UnavailableError
from layerstore.progress import Progress
from prefetch.backlog import Want
from prefetch.commits import Commits
from prefetch.plan import FRAMES_PER_READ, FrameRange, PackFetch, ranges
from prefetch.statistics import Fetched, Priority, Tally

Submit = Callable[[Want, Iterable[int]], None]


class PlanRun:
    """One run of one plan. Plans that run at the same time take turns, since each has but a few ranges queued."""

    def __init__(
        self, plan: Sequence[PackFetch], submit: Submit, abandon: Callable[[Sequence[Want]], None], window: int
    ) -> None:
        """``window``: ranges that are queued or under way at a time."""
        self._plan = plan
        self._submit = submit
        self._abandon = abandon
        self._window = window
        self._changed = threading.Condition()
        self._under_way = 0
        self._error: ImgtoolError | None = None
        self._tally = Tally()

    def run(self, commits: Commits, progress: Progress, now: Callable[[], float]) -> Fetched:
        """Fetch what is missing and make it durable; what a failing disk took back meanwhile is fetched once more.

        Raises:
            ImgtoolError: the first error; what was fetched stays.
        """
        packs = list(dict.fromkeys(item.pack for item in self._plan))
        failure: ImgtoolError | None = None
        with ExitStack() as stack:
            for pack in packs:
                stack.enter_context(pack.busy())
            missing = self._missing()
            progress.start("fetch", sum(pack.index.blob_range(span.numbers)[1] for pack, span in missing))
            advance: Callable[[int], None] | None = progress.advance
            for _ in range(2):
                self._fetch(missing, advance, now)
                failure = None
                for pack in packs:
                    try:
                        commits.sync(pack)
                    except ImgtoolError as failed:
                        failure = failed
                missing, advance = self._missing(), None
                if failure is None and not missing:
                    return self._tally.total()
        failure = failure or next((error for pack in packs if (error := commits.error(pack))), None)
        if failure is None:
            raise UnavailableError(f"frames of pack {missing[0][0].digest} did not last until they were durable")
        raise copy(failure) from failure

    def _missing(self) -> list[tuple[CachedPack, FrameRange]]:
        return [
            (item.pack, span)
            for item in self._plan
            for span in ranges(
                item.pack.unready(number for span in item.ranges for number in span.numbers), most=FRAMES_PER_READ
            )
        ]

    def _fetch(
        self,
        missing: Sequence[tuple[CachedPack, FrameRange]],
        advance: Callable[[int], None] | None,
        now: Callable[[], float],
    ) -> None:
        wants = []
        try:
            for pack, span in missing:
                self._wait(self._window - 1)
                with self._changed:
                    self._under_way += 1
                want = Want(pack, self._done, Priority.BACKGROUND, None, now(), tally=self._tally, advance=advance)
                wants.append(want)
                self._submit(want, span.numbers)
            self._wait(0)
        finally:
            self._abandon(wants)

    def _wait(self, most: int) -> None:
        """Wait until no more than ``most`` ranges are under way; raises if one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way <= most or self._error)
            if self._error is not None:
                raise copy(self._error) from self._error  # others may raise the same one, and add to it

    def _done(self, error: ImgtoolError | None) -> None:
        with self._changed:
            self._under_way -= 1
            self._error = self._error or error
            self._changed.notify()
