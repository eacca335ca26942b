"""Carrying out a plan: several images at a time, each blob once, and on after a failure."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, NoSpaceError, UnavailableError, UsageError
from layerstore.oci.descriptor import Descriptor
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Store, WriteStore
from layerstore.store.reach import is_document
from layerstore.store.transfer import Transfer
from layerstore.sync.contents import Survey
from layerstore.sync.plan import Move, State, SyncPlan, conflict, plan_sync

UNAVAILABLE_AT_MOST = 8
"""Failures of this kind, with no blob moved between them: then a store is gone, and the rest is not tried."""


class Done(StrEnum):
    """What became of a reference."""

    COPIED = "copied"
    PRESENT = "present"
    KEPT = "kept"
    """Of a plan: another one is there, which stays."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """It was not tried any more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one reference; ``error`` where it failed. ``blobs`` and ``bytes`` as its move says."""

    name: str
    manifest: Digest | None
    done: Done
    blobs: int = 0
    bytes: int = 0
    error: ImgtoolError | None = None


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What became of all, in the order of the plan, those that couldn't be read last.

    Attributes:
        images: of the references.
        plans: of the plans of their layers.
        blobs: moved.
        bytes: moved.
        stopped: the failure after which nothing more was tried.
    """

    images: tuple[Outcome, ...]
    plans: tuple[Outcome, ...]
    blobs: int
    bytes: int
    stopped: ImgtoolError | None = None

    @property
    def failure(self) -> ImgtoolError | None:
        """The error that stands for all: what stopped it, or the first."""
        failures = [image.error for image in self.images if image.error is not None]
        return self.stopped or (failures[0] if failures else None)


def sync(
    surveyed: Survey,
    source: Store,
    destination: WriteStore,
    *,
    replace: bool = False,
    jobs: int = 4,
    progress: Progress = SILENT,
) -> SyncReport:
    """Copy what was surveyed of ``source``, with its plans. What has arrived stays, whatever comes after.

    Args:
        surveyed: what to copy, in this order.
        source: only read; leased if it can be, which keeps a collector away meanwhile.
        destination: where to. Nothing is deleted there.
        replace: whether references, and plans, to something else may be replaced.
        jobs: blobs at a time, and images.
        progress: told the bytes moved.

    Raises:
        UsageError: no jobs.
        ImgtoolError: a store fails before the first image is tried. Later failures are in the report.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} jobs copy nothing")
    with Transfer(source, destination, progress=progress) as transfer:
        plan = plan_sync(surveyed, source, destination, replace=replace, pin=transfer.pin)
        progress.start("sync", plan.bytes)
        return _Run(plan, transfer).run(jobs)


class _SkippedError(Exception):
    """Nothing is tried any more."""


class _Run:
    def __init__(self, plan: SyncPlan, transfer: Transfer) -> None:
        self._plan = plan
        self._transfer = transfer
        self._mutex = threading.Lock()
        self._content: dict[Digest, Future[None]] = {}
        self._documents: dict[Digest, Future[None]] = {}
        self._failed: set[str] = set()
        self._unavailable: list[ImgtoolError] = []
        self._stopped: ImgtoolError | None = None
        self._blobs = self._bytes = 0

    def run(self, jobs: int) -> SyncReport:
        plan = self._plan
        users: dict[Digest, list[str]] = defaultdict(list)
        content: dict[Digest, Descriptor] = {}
        for move in plan.moves:
            for blob in move.missing:
                if not is_document(blob):
                    users[blob.digest].append(move.name)
                    content.setdefault(blob.digest, blob)
        with (
            ThreadPoolExecutor(jobs, thread_name_prefix="sync-blob") as blobs,
            ThreadPoolExecutor(jobs, thread_name_prefix="sync") as references,
        ):
            try:
                for digest, blob in content.items():
                    self._content[digest] = blobs.submit(self._move_for, blob, users[digest])
                images = [references.submit(self._image, move) for move in plan.images]
                of_plan: dict[str, list[Future[Outcome]]] = defaultdict(list)
                for move, future in zip(plan.images, images, strict=True):
                    for name in move.contents.plans:
                        of_plan[name].append(future)
                # Plans come after their images in the same queue, so whoever waits for an image doesn't wait in vain.
                plans = [references.submit(self._plan_of, move, of_plan[move.name]) for move in plan.plans]
                done = [future.result() for future in images], [future.result() for future in plans]
            except BaseException:
                self._transfer.stop.set()
                for pool in (blobs, references):
                    pool.shutdown(wait=False, cancel_futures=True)
                raise
        unreadable = [Outcome(each.name, None, Done.FAILED, error=each.error) for each in plan.unreadable]
        unreadable_plans = [Outcome(each.name, None, Done.FAILED, error=each.error) for each in plan.unreadable_plans]
        return SyncReport(
            tuple(done[0] + unreadable), tuple(done[1] + unreadable_plans), self._blobs, self._bytes, self._stopped
        )

    # --- references

    def _image(self, move: Move) -> Outcome:
        if move.state is State.CONFLICT:
            error = conflict(move, self._plan.destination)
            return Outcome(move.name, move.contents.target.digest, Done.FAILED, error=error)
        return self._reference(move)

    def _plan_of(self, move: Move, images: list[Future[Outcome]]) -> Outcome:
        """A plan goes where its layer is."""
        if not any(image.result().done in (Done.COPIED, Done.PRESENT) for image in images):
            return Outcome(move.name, move.contents.target.digest, Done.SKIPPED)
        if move.state is State.CONFLICT:
            return Outcome(move.name, move.contents.target.digest, Done.KEPT)
        return self._reference(move)

    def _reference(self, move: Move) -> Outcome:
        target = move.contents.target
        if not move.copies:
            return Outcome(move.name, target.digest, Done.PRESENT)
        try:
            self._arrive(move)
            self._transfer.destination.set_reference(
                move.name,
                target,
                expected=move.found,
                lease=self._transfer.lease,
                reaches=[blob.digest for blob in move.contents.blobs],
            )
        except (_SkippedError, CancelledError):
            return Outcome(move.name, target.digest, Done.SKIPPED)
        except ImgtoolError as error:
            self._failure(error)
            with self._mutex:
                self._failed.add(move.name)
            return Outcome(move.name, target.digest, Done.FAILED, error=error)
        return Outcome(move.name, target.digest, Done.COPIED, move.blobs, move.bytes)

    def _arrive(self, move: Move) -> None:
        what = f"reference {move.name!r} in {self._plan.source}"
        for blob in move.missing:
            if not is_document(blob):
                self._content[blob.digest].result()
        # Documents after all that they name, as registries want them.
        for blob in move.missing:
            if is_document(blob):
                self._document(blob, what)
        if self._transfer.stop.is_set():
            raise _SkippedError

    def _failure(self, error: ImgtoolError) -> None:
        """Stop at what the next blob or image would meet as well."""
        with self._mutex:
            if isinstance(error, UnavailableError) and all(error is not each for each in self._unavailable):
                self._unavailable.append(error)
            if isinstance(error, NoSpaceError) or len(self._unavailable) >= UNAVAILABLE_AT_MOST:
                self._stopped = self._stopped or error
                self._transfer.stop.set()

    # --- blobs

    def _move_for(self, blob: Descriptor, users: list[str]) -> None:
        """Move content unless everything that needs it has failed."""
        with self._mutex:
            if self._failed.issuperset(users):
                raise _SkippedError
        self._move(blob, f"reference {users[0]!r} in {self._plan.source}")

    def _document(self, blob: Descriptor, what: str) -> None:
        """Move a document, or wait for the thread that does."""
        with self._mutex:
            future = self._documents.get(blob.digest)
            mine = future is None
            if future is None:
                future = self._documents[blob.digest] = Future()
        if mine:
            try:
                self._move(blob, what)
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(None)
        future.result()

    def _move(self, blob: Descriptor, what: str) -> None:
        try:
            if self._transfer.stop.is_set() or not self._transfer.move(blob, what):
                raise _SkippedError
        except ImgtoolError as error:
            self._failure(error)
            raise
        with self._mutex:
            self._unavailable.clear()
            self._blobs += 1
            self._bytes += blob.size
