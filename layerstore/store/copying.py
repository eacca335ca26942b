"""Copying what a reference stands for from store to store.

Missing blobs only, each verified on its way, under leases on both sides; the reference last
(:mod:`layerstore.store.transfer`). What has arrived stays, so a copy that failed is finished by the next. Every store
holds the same bytes, so a copy is the same image. Raw forms of packs stay where they are: a store that wants them makes
its own. Plans are found by layer, not by image: :func:`copy_plans` takes those of an image along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from layerstore.attachment import attachment_name
from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    LimitError,
    MalformedError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.progress import SILENT, Progress
from layerstore.store.composition import patient
from layerstore.store.protocol import Lease, Store, WriteStore
from layerstore.store.reach import Documents, is_document, present_target, walk
from layerstore.store.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy did: the target of the reference, and how many blobs and bytes it moved and found there."""

    target: Descriptor
    blobs: int
    bytes: int
    present: int


def copy(
    name: str,
    source: Store,
    destination: WriteStore,
    *,
    rename: str | None = None,
    replace: bool = False,
    jobs: int = 4,
    progress: Progress = SILENT,
    complete: Callable[[Descriptor, Lease], None] = lambda target, lease: None,
) -> Copied:
    """Copy a reference and all that it reaches.

    Args:
        name: of the reference in ``source``.
        source: only read; leased if it can be, which keeps a collector away meanwhile.
        destination: where to.
        rename: name in ``destination``, if another.
        replace: whether a reference to something else may be replaced.
        jobs: blobs at a time.
        progress: told the bytes copied.
        complete: called with the target when all that it reaches is there and the reference isn't yet; the lease is
            one on ``destination``.

    Raises:
        NotFoundError: no such reference in ``source``.
        ConflictError: ``destination`` has that name for something else, or it was changed meanwhile.
        CorruptError: something of ``source`` is missing or damaged; it is named, and no reference is written.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} jobs copy nothing")
    new_name = name if rename is None else rename
    target = patient(source).resolve(name)
    expected = expected_target(new_name, target, destination, replace)
    with Transfer(source, destination, progress=progress) as transfer:
        transfer.hold(target)
        what = f"reference {name!r} in {source.location}"
        reached = list(walk(Documents(transfer.source), target, what))
        digests = [descriptor.digest for descriptor in reached]
        transfer.pin(digests)
        missing = transfer.missing(reached)
        progress.start(f"copy {name}", sum(descriptor.size for descriptor in missing))
        # A registry takes a document only after all that it names; the walk yields them in that order.
        _run(transfer, [each for each in missing if not is_document(each)], what, jobs)
        _run(transfer, [each for each in missing if is_document(each)], what, 1)
        complete(target, transfer.lease)
        destination.set_reference(new_name, target, expected=expected, lease=transfer.lease, reaches=digests)
    return Copied(target, len(missing), sum(descriptor.size for descriptor in missing), len(reached) - len(missing))


@dataclass(frozen=True, slots=True)
class CopiedPlans:
    """What became of the plans of some layers.

    Attributes:
        copied: layers whose plan was copied.
        present: layers whose plan was there already.
        kept: layers that have another plan there, which stays.
        failed: why a plan wasn't copied that can't be read, one line each.
    """

    copied: tuple[Digest, ...] = ()
    present: tuple[Digest, ...] = ()
    kept: tuple[Digest, ...] = ()
    failed: tuple[str, ...] = ()


def copy_plans(
    layers: Iterable[Digest],
    source: Store,
    destination: WriteStore,
    *,
    replace: bool = False,
    progress: Progress = SILENT,
) -> CopiedPlans:
    """Copy the plans that layers have, once the layers are there. One that is damaged is said and left.

    Args:
        layers: identities.
        source: only read; leased if it can be.
        destination: where to.
        replace: whether a plan that a layer has there may be replaced by another.
        progress: told the bytes copied.

    Raises:
        UnavailableError, PermissionError_, NoSpaceError: one of the stores fails while something is copied.
    """
    copied, present, kept, failed = [], [], [], []
    for layer in layers:
        name = attachment_name(layer)
        try:
            target = present_target(source, name)
        except (CorruptError, UnsupportedError, UnavailableError) as error:
            failed.append(str(error))  # unavailable is what mirrors say of a plan when one of them is gone
            continue
        try:
            if target is None:
                continue
            there = present_target(destination, name)
            if there is not None and there.digest == target.digest:
                present.append(layer)
            elif there is not None and not replace:
                kept.append(layer)
            else:
                copy(name, source, destination, replace=replace, jobs=1, progress=progress)
                copied.append(layer)
        except (CorruptError, MalformedError, UnsupportedError, LimitError, ConflictError, NotFoundError) as error:
            failed.append(str(error))
    return CopiedPlans(tuple(copied), tuple(present), tuple(kept), tuple(failed))


def expected_target(name: str, target: Descriptor, destination: Store, replace: bool) -> Descriptor | None:
    """What ``name`` stands for in the destination, which may become ``target``.

    Raises:
        ConflictError: it stands for something else, and is not to be replaced.
    """
    present = present_target(destination, name)
    if present is not None and present.digest != target.digest and not replace:
        raise ConflictError(
            f"reference {name!r} in {destination.location} stands for {present.digest}, not {target.digest}: "
            "choose another name or say to replace it"
        )
    return present


def _run(transfer: Transfer, descriptors: Iterable[Descriptor], what: str, jobs: int) -> None:
    """Move each, ``jobs`` at a time; the first error stops the others at their next piece."""

    def task(descriptor: Descriptor) -> None:
        try:
            if not transfer.stop.is_set():
                transfer.move(descriptor, what)
        except BaseException:
            transfer.stop.set()
            raise

    with ThreadPoolExecutor(jobs, thread_name_prefix="copy") as pool:
        futures = [pool.submit(task, descriptor) for descriptor in descriptors]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            transfer.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
