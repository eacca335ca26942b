"""Copying what a reference stands for from store to store.

Missing blobs only, each verified on its way, under leases on both sides; the reference last. Every store holds the same
bytes, so a copy is the same image. Raw forms of packs stay where they are: a store that wants them makes its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import ConflictError, CorruptError, NotFoundError, PermissionError_, UsageError
from layerstore.oci.descriptor import Descriptor
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Lease, Store, WriteStore
from layerstore.store.reach import Documents, is_document, present_target, walk
from layerstore.store.reading import pieces

LEASE_SECONDS = 86_400


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
    target = source.resolve(name)
    expected = _expected(new_name, target, destination, replace)
    with ExitStack() as stack:
        source_lease = _lease(source)
        if source_lease is not None:
            stack.enter_context(source_lease)
            source_lease.pin([target.digest])
        leases = _Leases(source_lease, stack.enter_context(destination.lease(seconds=LEASE_SECONDS)))
        what = f"reference {name!r} in {source.location}"
        reached = list(walk(Documents(source), target, what))
        digests = [descriptor.digest for descriptor in reached]
        leases.pin(digests)
        missing = [descriptor for descriptor in reached if not _present(destination, descriptor)]
        progress.start(f"copy {name}", sum(descriptor.size for descriptor in missing))

        def one(descriptor: Descriptor, stop: threading.Event) -> None:
            _copy_blob(descriptor, source, destination, stop, progress, what)
            leases.keep()

        # A registry takes a document only after all that it names; the walk yields them in that order.
        _run(one, [each for each in missing if not is_document(each)], jobs)
        _run(one, [each for each in missing if is_document(each)], 1)
        complete(target, leases.destination)
        destination.set_reference(new_name, target, expected=expected, lease=leases.destination, reaches=digests)
    return Copied(target, len(missing), sum(descriptor.size for descriptor in missing), len(reached) - len(missing))


def _expected(name: str, target: Descriptor, destination: WriteStore, replace: bool) -> Descriptor | None:
    present = present_target(destination, name)
    if present is not None and present.digest != target.digest and not replace:
        raise ConflictError(
            f"reference {name!r} in {destination.location} stands for {present.digest}, not {target.digest}: "
            "choose another name or say to replace it"
        )
    return present


def _lease(source: Store) -> Lease | None:
    """One on the source if it can be written. Without it a collector may win: then the copy fails, loudly."""
    if not isinstance(source, WriteStore):
        return None
    try:
        return source.lease(seconds=LEASE_SECONDS)
    except PermissionError_:
        return None


def _present(destination: WriteStore, descriptor: Descriptor) -> bool:
    """Whether it need not be copied. One of the wrong size is damaged, and replaced."""
    try:
        return destination.stat(descriptor.digest) == descriptor.size
    except NotFoundError:
        return False


class _Leases:
    """The leases of both sides, renewed in good time."""

    def __init__(self, source: Lease | None, destination: Lease) -> None:
        self.source = source
        self.destination = destination
        self._mutex = threading.Lock()
        self._renewed = time.monotonic()

    def pin(self, digests: Iterable[Digest]) -> None:
        digests = list(digests)
        for lease in self._both():
            lease.pin(digests)

    def keep(self) -> None:
        with self._mutex:
            if time.monotonic() - self._renewed > LEASE_SECONDS / 4:
                self._renewed = time.monotonic()
                for lease in self._both():
                    lease.renew()

    def _both(self) -> Iterator[Lease]:
        if self.source is not None:
            yield self.source
        yield self.destination


def _run(one: Callable[[Descriptor, threading.Event], None], descriptors: Iterable[Descriptor], jobs: int) -> None:
    """``one`` for each, ``jobs`` at a time; the first error stops the others at their next piece."""
    stop = threading.Event()

    def task(descriptor: Descriptor) -> None:
        try:
            if not stop.is_set():
                one(descriptor, stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(jobs, thread_name_prefix="copy") as pool:
        futures = [pool.submit(task, descriptor) for descriptor in descriptors]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _copy_blob(
    descriptor: Descriptor,
    source: Store,
    destination: WriteStore,
    stop: threading.Event,
    progress: Progress,
    what: str,
) -> None:
    digest = descriptor.digest
    try:
        blob = source.open(digest)
    except NotFoundError as error:
        raise CorruptError(f"{what} reaches a blob that is missing: {error}") from error
    with blob, destination.upload(digest.algorithm) as upload:
        if blob.size != descriptor.size:
            raise CorruptError(
                f"blob {digest} in {source.location}", expected=f"{descriptor.size} bytes", actual=f"{blob.size}"
            )
        for piece in pieces(blob):
            if stop.is_set():
                return
            upload.write(piece)
            progress.advance(len(piece))
        try:
            upload.commit(digest, descriptor.size)
        except CorruptError as error:
            raise CorruptError(f"copy from {source.location}: {error}") from error
