"""A store that is asked once for what several threads want at the same moment."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar, cast

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.heldblob import CountedBlob
from layerstore.store.protocol import Blob, Reference, SizedStore, Store
from layerstore.store.retrying import close_store

T = TypeVar("T")


class SingleFlightStore:
    """A :class:`~layerstore.store.protocol.Store` that asks another one, once for each question at a time.

    Who asks what another thread has asked, and has not been answered yet, waits for the same answer, or error. Nothing
    is remembered: who asks later gets a later answer. Of an open blob each has a handle, and the last that is closed
    closes it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sizes = _Flights[int]()
        self._targets = _Flights[Descriptor]()
        self._blobs = _Flights[CountedBlob[Blob]]()

    @property
    def location(self) -> str:
        return self._store.location

    def stat(self, digest: Digest) -> int:
        return self._sizes.once(digest, lambda: self._store.stat(digest))

    def open(self, digest: Digest) -> Blob:
        return self._shared(digest, lambda: self._store.open(digest))

    def open_sized(self, digest: Digest, size: int) -> Blob:
        store = self._store
        if not isinstance(store, SizedStore):
            return self.open(digest)
        return self._shared((digest, size), lambda: store.open_sized(digest, size))

    def names(self) -> Iterator[str]:
        return self._store.names()

    def resolve(self, name: str) -> Descriptor:
        return self._targets.once(name, lambda: self._store.resolve(name))

    def references(self) -> Iterator[Reference]:
        return self._store.references()

    def close(self) -> None:
        close_store(self._store)

    def _shared(self, key: object, opened: Callable[[], Blob]) -> Blob:
        return BlobHandle(
            self._blobs.once(key, lambda: CountedBlob(opened()), join=CountedBlob.join, leave=CountedBlob.leave)
        )


class BlobHandle:
    """One user's handle of a blob that others may have as well."""

    def __init__(self, held: CountedBlob[Blob]) -> None:
        self._held: CountedBlob[Blob] | None = held
        self._blob = held.blob

    @property
    def size(self) -> int:
        return self._blob.size

    def read_at(self, offset: int, length: int) -> bytes:
        return self._blob.read_at(offset, length)

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.leave()

    def __enter__(self) -> BlobHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Flight(Generic[T]):
    def __init__(self) -> None:
        self.answer: Future[T | None] = Future()
        self.waiting = 0


class _Flights(Generic[T]):
    """Questions that are being asked, by what they are about."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._under_way: dict[object, _Flight[T]] = {}

    def once(
        self,
        key: object,
        ask: Callable[[], T],
        *,
        join: Callable[[T], None] = lambda answer: None,
        leave: Callable[[T], None] = lambda answer: None,
    ) -> T:
        """What ``ask`` returns, here or in the thread that was first.

        ``join`` is called for each who waits before the first goes on; who has waited in vain, being interrupted,
        undoes it by ``leave``.
        """
        while True:
            with self._mutex:
                flight = self._under_way.get(key)
                if flight is None:
                    flight = self._under_way[key] = _Flight()
                    break
                flight.waiting += 1
            try:
                answer = flight.answer.result()
            except ImgtoolError as error:
                raise copy.copy(error) from error  # whoever adds to a message adds to his own
            except BaseException:
                flight.answer.add_done_callback(lambda done: _leave(done, leave))
                raise
            if answer is not None:
                return answer
            # The first one was interrupted, which is no answer.
        return self._asked(key, flight, ask, join)

    def _asked(self, key: object, flight: _Flight[T], ask: Callable[[], T], join: Callable[[T], None]) -> T:
        answer: T | None = None
        error: ImgtoolError | None = None
        try:
            answer = ask()
            return answer
        except ImgtoolError as caught:
            error = caught
            raise
        finally:
            with self._mutex:
                del self._under_way[key]
            if error is not None:
                flight.answer.set_exception(copy.copy(error))  # what is added to the first one's is not theirs
            else:
                if answer is not None:
                    for _ in range(flight.waiting):
                        join(answer)
                flight.answer.set_result(answer)


def _leave(done: Future[T | None], leave: Callable[[T], None]) -> None:
    if done.exception() is None and done.result() is not None:
        leave(cast(T, done.result()))
