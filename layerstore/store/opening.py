"""Stores by where they are: a directory's path, or a URL."""

from __future__ import annotations

import re
import threading

from layerstore.errors import UnsupportedError
from layerstore.store.directory import DirectoryStore
from layerstore.store.protocol import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_url(location: str) -> bool:
    return _SCHEME.match(location) is not None


def open_store(location: str) -> Store:
    """The store at a path or at a URL of http or https, for reading.

    Raises:
        UnsupportedError: a URL of another scheme; a store of another version.
        UsageError: not a URL that can be asked.
        NotFoundError: no store is there.
        CorruptError: its marker can't be parsed.
        UnavailableError: it can't be reached.
    """
    match = _SCHEME.match(location)
    if match is None:
        return DirectoryStore(location)
    scheme = match[1].lower()
    if scheme not in ("http", "https"):
        raise UnsupportedError(
            f"stores at {scheme}:// URLs are not supported: give the path of a directory, or an http:// or https:// URL"
        )
    # urllib3 takes longer to import than a directory takes to open.
    from layerstore.store.http import HttpStore

    return HttpStore(location)


class Stores:
    """Stores that stay open once they are, by location; for any number of threads. A context manager.

    A store is also known by its own ``location``, which has no credentials: who has only that, as an origin of a pack
    has, gets the store that was opened with them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Store] = {}

    def open(self, location: str) -> Store:
        """As :func:`open_store`; what can't be opened is tried again at the next call."""
        store = self._open.get(location)
        if store is not None:
            return store
        opened = open_store(location)  # without the lock: a server that doesn't answer holds up nobody else
        with self._lock:
            store = self._open.setdefault(location, opened)
            if store is opened:
                self._open[store.location] = store
        if store is not opened:
            _close(opened)
        return store

    def close(self) -> None:
        """Close idle connections. A store that is open stays usable."""
        with self._lock:
            stores = list({id(store): store for store in self._open.values()}.values())
            self._open.clear()
        for store in stores:
            _close(store)

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _close(store: Store) -> None:
    close = getattr(store, "close", None)  # no capability of a store: most hold nothing open
    if close is not None:
        close()
