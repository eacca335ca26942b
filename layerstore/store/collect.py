"""Garbage collection: mark from references and leases, then delete what neither reaches.

Deleting is the dangerous part, so:

* :func:`plan_collection` changes nothing. It lists blobs first and marks afterwards, so whatever becomes reachable or
  pinned in between is kept.
* :func:`collect` marks again while publishers are excluded, and deletes only what both marks left out and what is still
  older than the grace period. It holds the store for a few seconds at a time and marks anew each time.
* Whatever fails while marking (a reference or lease that can't be read, a document that is missing, damaged or of an
  unknown kind) ends the collection before anything is deleted.
* Deleting only removes unreachable blobs, one by one, and writes nothing: it works on a full disk, a crash at any point
  is harmless, and running it again finishes.
* A store with blobs and no references is more often a mistake (wrong path, half-mounted) than garbage: refused unless
  forced.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import ConflictError, UsageError
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import BlobInfo, PruneStore
from layerstore.store.reach import Documents, reference_links

GRACE_SECONDS = 3600.0
"""Age under which nothing is deleted. Leases protect publishers; this protects against whoever forgot to take one."""

HOLD_SECONDS = 5.0
"""How long publishers are kept waiting at a time; far less than they are willing to wait."""


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """What a collection would delete.

    Attributes:
        location: of the store.
        grace: seconds.
        force: whether a store without references may be swept.
        references: how many were marked from.
        kept: blobs that are reachable or pinned, and
        kept_bytes: their size.
        young: unreachable, but within the grace period; by digest.
        doomed: unreachable and older; by digest.
        leftovers: bytes that dead writers left in temporary files.
    """

    location: str
    grace: float
    force: bool
    references: int
    kept: int
    kept_bytes: int
    young: tuple[BlobInfo, ...]
    doomed: tuple[BlobInfo, ...]
    leftovers: int

    @property
    def doomed_bytes(self) -> int:
        return sum(blob.size for blob in self.doomed)


@dataclass(frozen=True, slots=True)
class Collection:
    """What a collection did.

    Attributes:
        deleted: by digest.
        spared: planned, but reachable, pinned, replaced or gone by then.
        leftovers: bytes of temporary files and expired leases removed.
    """

    deleted: tuple[BlobInfo, ...]
    spared: tuple[BlobInfo, ...]
    leftovers: int

    @property
    def deleted_bytes(self) -> int:
        return sum(blob.size for blob in self.deleted)


@dataclass(frozen=True, slots=True)
class Marks:
    """The digests to keep, and how many references they come from."""

    digests: frozenset[Digest]
    references: int


def mark(store: PruneStore, documents: Documents) -> Marks:
    """Everything that references reach or leases pin.

    Raises:
        ImgtoolError: any of it can't be read.
    """
    # Pins first: a publisher refers before it releases, so it is seen at least once.
    marked = set(store.pinned())
    walked: set[Digest] = set()
    references = 0
    for reference in store.references():
        references += 1
        if reference.target.digest not in walked:
            walked.add(reference.target.digest)
            # What need not be there is marked without a look: it may come at any time.
            marked |= {link.descriptor.digest for link in reference_links(store, documents, reference)}
    return Marks(frozenset(marked), references)


def plan_collection(
    store: PruneStore, *, grace: float = GRACE_SECONDS, force: bool = False, documents: Documents | None = None
) -> CollectionPlan:
    """What :func:`collect` would delete now.

    Args:
        store: looked at, not changed.
        grace: seconds; younger blobs are kept.
        force: plan even if there are blobs but no references.
        documents: what has been read of the store's documents already; pass the same to :func:`collect`.

    Raises:
        ConflictError: there are blobs, but no references.
        ImgtoolError: whatever stops marking.
    """
    if grace < 0:
        raise UsageError(f"a grace period of {grace} seconds is none")
    blobs = tuple(store.blobs())
    marks = mark(store, documents or Documents(store))
    if blobs:
        _require_references(store, marks, force)
    kept = [blob for blob in blobs if blob.digest in marks.digests]
    loose = [blob for blob in blobs if blob.digest not in marks.digests]
    return CollectionPlan(
        location=store.location,
        grace=grace,
        force=force,
        references=marks.references,
        kept=len(kept),
        kept_bytes=sum(blob.size for blob in kept),
        young=tuple(blob for blob in loose if blob.age < grace),
        doomed=tuple(blob for blob in loose if blob.age >= grace),
        leftovers=store.reclaim(older_than=grace, dry_run=True),
    )


def collect(
    store: PruneStore,
    plan: CollectionPlan,
    *,
    documents: Documents | None = None,
    hold: float = HOLD_SECONDS,
    progress: Progress = SILENT,
) -> Collection:
    """Delete what the plan says, as far as that still holds.

    Args:
        store: the one that the plan was made for.
        plan: from :func:`plan_collection`.
        documents: as given to :func:`plan_collection`; makes marking under the lock short.
        hold: seconds to keep publishers waiting at a time.
        progress: told the bytes deleted.

    Raises:
        ConflictError: there are no references any more.
        UnavailableError: somebody else holds the store for too long.
        ImgtoolError: whatever stops marking.
    """
    if plan.location != store.location:
        raise UsageError(f"the plan is for {plan.location}, not for {store.location}")
    if documents is None:
        documents = Documents(store)
        mark(store, documents)  # reads all documents, so that those below read only new ones
    progress.start("delete", plan.doomed_bytes)
    deleted: list[BlobInfo] = []
    spared: list[BlobInfo] = []
    left = deque(plan.doomed)
    while left:
        with store.collecting():
            marks = mark(store, documents)
            _require_references(store, marks, plan.force)
            end = time.monotonic() + hold
            while left:
                blob = left.popleft()
                if blob.digest not in marks.digests and store.delete(blob.digest, older_than=plan.grace):
                    deleted.append(blob)
                else:
                    spared.append(blob)
                progress.advance(blob.size)
                if time.monotonic() >= end:
                    break
    return Collection(tuple(deleted), tuple(spared), store.reclaim(older_than=plan.grace))


def _require_references(store: PruneStore, marks: Marks, force: bool) -> None:
    if not marks.references and not force:
        raise ConflictError(
            f"{store.location} has blobs but no references: check that it is the right store and wholly mounted; "
            "force the collection if all of it is garbage"
        )
