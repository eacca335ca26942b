"""Checking a whole store: every blob against its name, every reference against what it reaches.

What the bytes of packs and metadata images mean is checked by whoever knows them, through a :class:`Check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from layerstore.digest import Digest
from layerstore.errors import ConflictError, CorruptError, ImgtoolError, NotFoundError, UnavailableError
from layerstore.oci.descriptor import Descriptor
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import PruneStore, Store
from layerstore.store.reach import Documents, Link, present_target, walk_links
from layerstore.store.reading import is_intact


class Fault(StrEnum):
    """What is wrong."""

    CORRUPT = "corrupt"
    """The bytes of a blob are not what its name promises."""
    UNREADABLE = "unreadable"
    """The file system or server fails on it."""
    MISSING = "missing"
    """A reference reaches a blob that isn't there."""
    SIZE = "size"
    """A blob has another size than a descriptor says."""
    REFERENCE = "reference"
    """A reference, or a document that it reaches, can't be read."""
    CONTENT = "content"
    """Found by a :class:`Check`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a store.

    Attributes:
        fault: what.
        message: one line that names it.
        digest: of the blob, if it is one.
        reference: name, if it was found on the way from one.
        quarantined: where a corrupt blob has been put, if that was asked for and done.
        raw: it concerns a raw form only, without which the reference is whole.
    """

    fault: Fault
    message: str
    digest: Digest | None = None
    reference: str | None = None
    quarantined: str | None = None
    raw: bool = False


class Check(Protocol):
    """Looks into a manifest whose blobs are all there and whole."""

    def __call__(self, store: Store, name: str, target: Descriptor) -> Iterable[Finding]: ...


def verify(
    store: PruneStore,
    *,
    quarantine: bool = False,
    check: Check | None = None,
    progress: Progress = SILENT,
) -> Iterator[Finding]:
    """Everything that is wrong, as it is found; nothing if all is well.

    Args:
        store: changed only by ``quarantine``.
        quarantine: take corrupt blobs out of their names, so that the next publisher replaces them.
        check: called once for each distinct target of the sound references.
        progress: told the bytes read.

    Raises:
        ImgtoolError: the store can't be listed.
    """
    blobs = list(store.blobs())
    progress.start("verify blobs", sum(blob.size for blob in blobs))
    bad: dict[Digest, Finding] = {}
    for blob in blobs:
        finding = _verify_blob(store, blob.digest, quarantine, progress)
        if finding is not None:
            bad[blob.digest] = finding
            yield finding
    progress.start("verify references", None)
    documents = Documents(store)
    checked: set[Digest] = set()
    for name in store.names():
        try:
            target = store.resolve(name)
        except NotFoundError:
            continue  # deleted meanwhile
        except ImgtoolError as error:
            yield Finding(Fault.REFERENCE, str(error), reference=name)
            continue
        findings = list(_verify_reference(store, documents, name, target, bad))
        current = present_target(store, name) if findings else target
        if current is None or current.digest != target.digest:
            continue  # deleted or replaced meanwhile, and what it reached swept
        yield from findings
        if check is not None and all(finding.raw for finding in findings) and target.digest not in checked:
            checked.add(target.digest)
            yield from check(store, name, target)


def _verify_blob(store: PruneStore, digest: Digest, quarantine: bool, progress: Progress) -> Finding | None:
    message = f"blob {digest} in {store.location} is corrupt"
    try:
        with store.open(digest) as blob:
            if is_intact(blob, digest, progress):
                return None
    except NotFoundError:
        return None  # deleted meanwhile
    except CorruptError as error:
        message = str(error)
    except UnavailableError as error:
        return Finding(Fault.UNREADABLE, str(error), digest)
    if not quarantine:
        return Finding(Fault.CORRUPT, f"{message}: publish it again, or quarantine it", digest)
    try:
        place = store.quarantine(digest)
    except (ConflictError, NotFoundError):
        return None  # replaced or deleted meanwhile
    return Finding(Fault.CORRUPT, f"{message}: publish it again; moved to {place}", digest, quarantined=place)


def _verify_reference(
    store: PruneStore, documents: Documents, name: str, target: Descriptor, bad: dict[Digest, Finding]
) -> Iterator[Finding]:
    what = f"reference {name!r} in {store.location}"
    found: set[tuple[Digest, bool]] = set()
    try:
        for link in walk_links(documents, target, what):
            digest = link.descriptor.digest
            finding = _check_link(store, link, what, bad.get(digest))
            if finding is not None and (digest, link.raw) not in found:
                found.add((digest, link.raw))
                yield replace(finding, digest=digest, reference=name, raw=link.raw)
    except ImgtoolError as error:
        message = str(error) if what in str(error) else f"{what}: {error}"
        yield Finding(Fault.REFERENCE, message, reference=name)


def _check_link(store: PruneStore, link: Link, what: str, bad: Finding | None) -> Finding | None:
    """What is wrong with a blob that a reference reaches; ``bad`` is what was wrong with its bytes."""
    digest = link.descriptor.digest
    if bad is not None:
        if link.optional and bad.quarantined:
            return None
        needed_by = ", as a raw pack: only direct mounts need it" if link.raw else ""
        return Finding(bad.fault, f"{what} reaches the bad blob {digest}{needed_by}")
    try:
        size = store.stat(digest)
    except NotFoundError:
        return None if link.optional else Finding(Fault.MISSING, f"{what} reaches blob {digest}, which is missing")
    if size == link.descriptor.size:
        return None
    return Finding(Fault.SIZE, f"{what} says blob {digest} has {link.descriptor.size} bytes, it has {size}")
