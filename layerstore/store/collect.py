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
* A plan is kept by its own reference and keeps no layer. When nothing has its layer any more, so that nobody can ever
  find it, the reference goes first, by compare-and-swap, and then what it kept. It is one as its manifest says, not by
  its name alone. If an image with that layer is published just then, it is without a plan, which costs time and no
  content.
* A store with blobs and no references is more often a mistake (wrong path, half-mounted) than garbage: refused unless
  forced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from layerstore.attachment import Artifact, attached_layer
from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    LimitError,
    MalformedError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from layerstore.oci.manifest import Manifest, parse_document
from layerstore.pack.stored import UNCOMPRESSED_DIGEST
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import BlobInfo, BulkPruneStore, PruneStore, Reference
from layerstore.store.reach import DOCUMENT_BYTES, Documents, reference_links
from layerstore.store.reading import read_blob

GRACE_SECONDS = 3600.0
"""Age under which nothing is deleted. Leases protect publishers; this protects against whoever forgot to take one."""

HOLD_SECONDS = 5.0
"""How long publishers are kept waiting at a time; far less than they are willing to wait."""

AT_ONCE = 256
"""Blobs of one request to a store that deletes many: a second or two on a slow one."""


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """What a collection would delete.

    Attributes:
        location: of the store.
        grace: seconds.
        force: whether a store without references may be swept.
        references: how many were marked from, ``orphans`` left out.
        kept: blobs that are reachable or pinned, and
        kept_bytes: their size.
        young: unreachable, but within the grace period; by digest.
        doomed: unreachable and older; by digest.
        leftovers: bytes that dead writers left in temporary files.
        orphans: references to plans of layers that no image has any more, old enough to go.
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
    orphans: tuple[Reference, ...] = ()

    @property
    def doomed_bytes(self) -> int:
        return sum(blob.size for blob in self.doomed)


@dataclass(frozen=True, slots=True)
class Collection:
    """What a collection did.

    Attributes:
        deleted: by digest.
        spared: planned, but reachable, pinned, replaced or gone by then.
        orphans: names of the plans that were dropped.
        leftovers: bytes of temporary files and expired leases removed.
    """

    deleted: tuple[BlobInfo, ...]
    spared: tuple[BlobInfo, ...]
    leftovers: int
    orphans: tuple[str, ...] = ()

    @property
    def deleted_bytes(self) -> int:
        return sum(blob.size for blob in self.deleted)


@dataclass(frozen=True, slots=True)
class Orphan:
    """A reference to a plan of a layer that nothing has any more, and what it reaches."""

    reference: Reference
    reached: frozenset[Digest]


@dataclass(frozen=True, slots=True)
class Marks:
    """What there is to keep.

    Attributes:
        digests: that references other than orphans reach, or leases pin.
        references: how many these are.
        orphans: by name; no image has their layers.
    """

    digests: frozenset[Digest]
    references: int
    orphans: Mapping[str, Orphan]

    @property
    def everything(self) -> frozenset[Digest]:
        """What is to be kept as long as the orphans are there."""
        return self.digests.union(*(orphan.reached for orphan in self.orphans.values()))


def mark(store: PruneStore, documents: Documents) -> Marks:
    """Everything that references reach or leases pin.

    Raises:
        ImgtoolError: any of it can't be read.
    """
    # Pins first: a publisher refers before it releases, so it is seen at least once.
    marked = set(store.pinned())
    identities = set(map(str, marked))
    walked: set[Digest] = set()
    attached: list[tuple[Reference, Digest]] = []
    references = 0
    for reference in store.references():
        layer = attached_layer(reference.name)
        if layer is not None:
            attached.append((reference, layer))
            continue
        references += 1
        if reference.target.digest not in walked:
            walked.add(reference.target.digest)
            for link in reference_links(store, documents, reference):
                # What need not be there is marked without a look: it may come at any time.
                marked.add(link.descriptor.digest)
                identities.add(link.descriptor.annotations.get(UNCOMPRESSED_DIGEST, ""))
    orphans: dict[str, Orphan] = {}
    for reference, layer in attached:
        reached = frozenset(link.descriptor.digest for link in reference_links(store, documents, reference))
        if str(layer) not in identities and _is_attached(store, reference, layer):
            orphans[reference.name] = Orphan(reference, reached)
        else:
            references += 1
            marked |= reached
    return Marks(frozenset(marked), references, orphans)


def _is_attached(store: PruneStore, reference: Reference, layer: Digest) -> bool:
    """Whether it is what its name says, and not an image that somebody has called so."""
    try:
        document = parse_document(read_blob(store, reference.target, limit=DOCUMENT_BYTES), None)
        artifact = Artifact.of(document) if isinstance(document, Manifest) else None
    except NotFoundError:
        return True  # deleted and swept since it was listed
    except (MalformedError, UnsupportedError, LimitError):
        return False
    return artifact is not None and artifact.layer == layer


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
    ages = {blob.digest: blob.age for blob in blobs}
    old = [each for each in marks.orphans.values() if ages.get(each.reference.target.digest, grace) >= grace]
    wanted = marks.digests.union(*(each.reached for each in marks.orphans.values() if each not in old))
    kept = [blob for blob in blobs if blob.digest in wanted]
    loose = [blob for blob in blobs if blob.digest not in wanted]
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
        orphans=tuple(orphan.reference for orphan in old),
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
    dropped = _drop(store, documents, plan.orphans)
    progress.start("delete", plan.doomed_bytes)
    deleted: list[BlobInfo] = []
    spared: list[BlobInfo] = []
    left = deque(plan.doomed)
    bulk = isinstance(store, BulkPruneStore)
    while left:
        with store.collecting():
            marks = mark(store, documents)
            _require_references(store, marks, plan.force)
            wanted = marks.everything
            end = time.monotonic() + hold
            while left:
                some = [left.popleft() for _ in range(min(len(left), AT_ONCE if bulk else 1))]
                loose = [blob.digest for blob in some if blob.digest not in wanted]
                gone = _delete(store, loose, plan.grace)
                for blob in some:
                    (deleted if blob.digest in gone else spared).append(blob)
                    progress.advance(blob.size)
                if time.monotonic() >= end:
                    break
    return Collection(tuple(deleted), tuple(spared), store.reclaim(older_than=plan.grace), dropped)


def _delete(store: PruneStore, digests: list[Digest], grace: float) -> frozenset[Digest]:
    if isinstance(store, BulkPruneStore):
        return store.delete_many(digests, older_than=grace)
    return frozenset(digest for digest in digests if store.delete(digest, older_than=grace))


def _drop(store: PruneStore, documents: Documents, planned: tuple[Reference, ...]) -> tuple[str, ...]:
    """Remove the references that are still orphans; the names of those removed."""
    dropped = []
    orphans = mark(store, documents).orphans if planned else {}
    for reference in planned:
        still = orphans.get(reference.name)
        if still is not None and still.reference.target.digest == reference.target.digest:
            try:
                store.delete_reference(reference.name, expected=reference.target)
            except (NotFoundError, ConflictError):
                continue  # removed or published again meanwhile
            dropped.append(reference.name)
    return tuple(dropped)


def _require_references(store: PruneStore, marks: Marks, force: bool) -> None:
    if not marks.references and not force:
        raise ConflictError(
            f"{store.location} has blobs but no references: check that it is the right store and wholly mounted; "
            "force the collection if all of it is garbage"
        )
