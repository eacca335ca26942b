"""Blobs on their way from store to store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from layerstore.digest import Digest
from layerstore.errors import CorruptError, NotFoundError, PermissionError_
from layerstore.oci.descriptor import Descriptor
from layerstore.progress import SILENT, Progress
from layerstore.store.composition import patient
from layerstore.store.protocol import Blob, Lease, SizedStore, Store, WriteStore

LEASE_SECONDS = 86_400
LOOKS = 16
"""Questions to a store at a time: whether a blob is there, what a document says. They wait, and compute nothing."""
PIECE = 4 << 20
"""Bytes read at a time, and repeated if that fails: at 200 Mbit/s eight times the 20 ms that a request may cost."""
ANSWERS = 2
"""Times that a blob is read whose bytes are wrong: a fault on the way may pass, another mirror may have it right."""


class Transfer:
    """Moves blobs from ``source`` to ``destination``, under leases on both sides. A context manager.

    What has arrived stays there, whatever comes after, so a second transfer moves the rest. Within one, a blob that
    breaks off is read on from where it did (:mod:`layerstore.store.retrying`); of a transfer that has ended, only whole
    blobs are left.

    Attributes:
        source: for reading: asked again where it is unavailable for a moment.
        destination: as given.
        stop: when it is set, blobs under way are given up at their next piece.
    """

    def __init__(self, source: Store, destination: WriteStore, *, progress: Progress = SILENT) -> None:
        """Nothing is asked yet. ``progress`` is told the bytes moved."""
        self.stop = threading.Event()
        self.source = patient(source, wait=self.stop.wait)
        self.destination = destination
        self.progress = progress
        self._given = source
        self._leases: list[Lease] = []
        self._stack = ExitStack()
        self._mutex = threading.Lock()
        self._renewed = time.monotonic()

    def __enter__(self) -> Transfer:
        with ExitStack() as stack:
            source = _lease(self._given)
            if source is not None:
                self._leases.append(stack.enter_context(source))
            self._leases.append(stack.enter_context(self.destination.lease(seconds=LEASE_SECONDS)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def lease(self) -> Lease:
        """The one on the destination."""
        return self._leases[-1]

    def hold(self, target: Descriptor) -> None:
        """Keep what a reference of the source stands for from its collector, where that one can be written."""
        for lease in self._leases[:-1]:
            lease.pin([target.digest])

    def pin(self, digests: Iterable[Digest]) -> None:
        """Keep these from the collectors of both sides."""
        digests = list(digests)
        for lease in self._leases:
            lease.pin(digests)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """Those that have to be moved, in their order; pin them before. One of a wrong size is damaged: replaced."""
        return missing_blobs(self.destination, descriptors)

    def move(self, descriptor: Descriptor, what: str) -> bool:
        """Move a blob, verified; any thread may. False if it was given up.

        Raises:
            CorruptError: the source lacks it, or has other bytes; ``what`` names what reaches it.
        """
        told = 0

        def tell(count: int) -> None:
            nonlocal told
            if count > told:  # what is read a second time has been told
                self.progress.advance(count - told)
                told = count

        for attempt in range(1, ANSWERS + 1):
            with _required(what):
                blob = self._open(descriptor)
            try:
                with blob, self.destination.upload(descriptor.digest.algorithm) as upload:
                    if blob.size != descriptor.size:
                        raise CorruptError(
                            f"blob {descriptor.digest} in {self.source.location}",
                            expected=f"{descriptor.size} bytes",
                            actual=f"{blob.size}",
                        )
                    for offset in range(0, descriptor.size, PIECE):
                        if self.stop.is_set():
                            return False
                        with _required(what):
                            piece = blob.read_at(offset, min(PIECE, descriptor.size - offset))
                        upload.write(piece)
                        tell(upload.size)
                    try:
                        upload.commit(descriptor.digest, descriptor.size)
                    except CorruptError as error:
                        raise CorruptError(f"copy from {self.source.location}: {error}") from error
                break
            except CorruptError as error:
                if attempt == ANSWERS or isinstance(error.__cause__, NotFoundError):
                    raise
        self._keep()
        return True

    def _open(self, descriptor: Descriptor) -> Blob:
        if isinstance(self.source, SizedStore):  # it says by the first read what open would have asked for
            return self.source.open_sized(descriptor.digest, descriptor.size)
        return self.source.open(descriptor.digest)

    def _keep(self) -> None:
        """Renew the leases in good time."""
        with self._mutex:
            if time.monotonic() - self._renewed > LEASE_SECONDS / 4:
                self._renewed = time.monotonic()
                for lease in self._leases:
                    lease.renew()


def missing_blobs(store: Store, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
    """Those that a store lacks, or has in another size, in their order."""

    def lacks(descriptor: Descriptor) -> bool:
        try:
            return store.stat(descriptor.digest) != descriptor.size
        except NotFoundError:
            return True

    listed = list(descriptors)
    with ThreadPoolExecutor(LOOKS, thread_name_prefix="look") as pool:
        return [each for each, absent in zip(listed, pool.map(lacks, listed), strict=True) if absent]


def _lease(source: Store) -> Lease | None:
    """One on the source if it can be written. Without it a collector may win: then the copy fails, loudly."""
    if not isinstance(source, WriteStore):
        return None
    try:
        return source.lease(seconds=LEASE_SECONDS)
    except PermissionError_:
        return None


@contextmanager
def _required(what: str) -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise CorruptError(f"{what} reaches a blob that is missing: {error}") from error
