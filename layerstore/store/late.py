"""A store that is opened when it is first asked, and again as long as it can't be."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

from layerstore.digest import Digest
from layerstore.errors import NotFoundError, UnavailableError, printable
from layerstore.oci.descriptor import Descriptor
from layerstore.store.protocol import Blob, Reference, SizedStore, Store
from layerstore.store.retrying import close_store

_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")


class LateStore:
    """A :class:`~layerstore.store.protocol.Store` that need not be reachable yet.

    A store that isn't there is unavailable, so that nothing which it may have looks missing.

    Attributes:
        location: for messages: without credentials, and of http without a query, which may be a signature.
    """

    def __init__(self, location: str, opener: Callable[[str], Store]) -> None:
        shown = location.partition("?")[0] if location.lower().startswith("http") else location
        self.location = printable(_CREDENTIALS.sub("", shown))
        self._given = location
        self._opener = opener
        self._mutex = threading.Lock()
        self._store: Store | None = None

    def opened(self) -> Store:
        """The store itself.

        Raises:
            NotFoundError: there is none.
            ImgtoolError: and whatever else the opener raises.
        """
        with self._mutex:
            if self._store is None:
                self._store = self._opener(self._given)
            return self._store

    def stat(self, digest: Digest) -> int:
        return self._asked().stat(digest)

    def open(self, digest: Digest) -> Blob:
        return self._asked().open(digest)

    def open_sized(self, digest: Digest, size: int) -> Blob:
        store = self._asked()
        return store.open_sized(digest, size) if isinstance(store, SizedStore) else store.open(digest)

    def names(self) -> Iterator[str]:
        return self._asked().names()

    def resolve(self, name: str) -> Descriptor:
        return self._asked().resolve(name)

    def references(self) -> Iterator[Reference]:
        return self._asked().references()

    def close(self) -> None:
        if self._store is not None:
            close_store(self._store)

    def _asked(self) -> Store:
        try:
            return self.opened()
        except NotFoundError as error:
            raise UnavailableError(f"no store is there now: {error}") from error
