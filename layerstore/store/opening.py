"""Stores by where they are: a directory's path, or a URL.

====================================  ============================================  ================================
location                              store                                         can be
====================================  ============================================  ================================
a path, ``file:///PATH``              ``directory``                                 read, written, collected
``http://``, ``https://``             ``http``: a directory behind a web server     read
``s3://BUCKET/PREFIX?endpoint=URL``   ``objects`` in a bucket of ``s3``             read, written, collected
``oci://HOST/REPOSITORY``,            ``registry``                                  read, written
``oci+http://…``
any other scheme that fsspec has      ``objects`` in a bucket of ``anywhere``       read, written, collected
``A|B``                               ``composition``: mirrors of one store         read
====================================  ============================================  ================================

Each is imported when it is opened: most take longer to import than a directory takes to open.
"""

from __future__ import annotations

import re
import threading
from urllib.parse import unquote, urlsplit

from layerstore.errors import UnsupportedError, UsageError, printable
from layerstore.store.bucket import Bucket
from layerstore.store.directory import DirectoryStore
from layerstore.store.protocol import PruneStore, Store, WriteStore

SCHEMES = ("file", "http", "https", "s3", "oci", "oci+http")
"""Those of this project; all others are fsspec's."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
BETWEEN_MIRRORS = "|"
"""In a location, where one of them is a URL: the mirrors of a store, the first first."""


def is_url(location: str) -> bool:
    return _SCHEME.match(location) is not None


def mirrors_of(location: str) -> list[str]:
    """The locations of several mirrors, or this one: a path may have the mark in it."""
    parts = location.split(BETWEEN_MIRRORS)
    return parts if any(map(is_url, parts)) else [location]


def open_store(location: str) -> Store:
    """The store at a location, for reading.

    Raises:
        UnsupportedError: a URL of a scheme that nobody knows; a store of another version.
        UsageError: not a URL that can be asked.
        NotFoundError: no store is there.
        CorruptError: its marker can't be parsed.
        UnavailableError: it can't be reached.
    """
    mirrors = mirrors_of(location)
    if len(mirrors) > 1:
        from layerstore.store.composition import mirrored

        return mirrored(mirrors, open_store)
    if _scheme(location) in ("http", "https"):
        from layerstore.store.http import HttpStore

        return HttpStore(location)
    return open_write_store(location, create=False)


def open_write_store(location: str, *, create: bool, spool: str | None = None) -> WriteStore:
    """The store at a location, for publishing.

    Args:
        location: of one store.
        create: make it where there is none.
        spool: directory for what is on its way to a store that is no directory; None is the system's.

    Raises:
        UsageError: it can only be read.
        ImgtoolError: as :func:`open_store`, and the store's own ``create``.
    """
    scheme = _scheme(location)
    if scheme in (None, "file"):
        path = location if scheme is None else _path(location)
        return DirectoryStore.create(path) if create else DirectoryStore(path)
    if scheme in ("http", "https") or len(mirrors_of(location)) > 1:
        # The message doesn't repeat the location, for it may have credentials.
        raise UsageError(
            "a store behind a web server, or one of several mirrors, can only be read: name the place where it is "
            "written, a directory or a bucket"
        )
    if scheme in ("oci", "oci+http"):
        from layerstore.store.registry import RegistryStore

        return RegistryStore(location, spool=spool)
    from layerstore.store.objects import ObjectStore

    bucket = _bucket(scheme, location)
    return ObjectStore.create(bucket, spool=spool) if create else ObjectStore(bucket, spool=spool)


def open_prune_store(location: str, *, spool: str | None = None) -> PruneStore:
    """The store at a location, for verifying all of it or collecting.

    Raises:
        UnsupportedError: it can't be listed from outside: a registry collects by itself.
        ImgtoolError: as :func:`open_write_store`.
    """
    store = open_write_store(location, create=False, spool=spool)
    if not isinstance(store, PruneStore):
        where = store.location
        _close(store)
        raise UnsupportedError(
            f"{where} is a registry: its blobs can't be listed from outside. Delete names with imgtool rm; what no "
            "name reaches, its own garbage collection reclaims"
        )
    return store


def _scheme(location: str) -> str | None:
    """In lower case; None is a path."""
    match = _SCHEME.match(location)
    return None if match is None else match[1].lower()


def _path(url: str) -> str:
    """Of a ``file:`` URL."""
    parts = urlsplit(url)
    path = unquote(parts.path, errors="surrogateescape")
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or parts.query or parts.fragment:
        raise UsageError(f"{printable(url)} is not file:///PATH: directories of other hosts have to be mounted")
    return path


def _bucket(scheme: str | None, location: str) -> Bucket:
    if scheme == "s3":
        from layerstore.store.s3 import S3Bucket

        return S3Bucket(location)
    import fsspec

    from layerstore.store.anywhere import FsspecBucket

    if scheme not in fsspec.available_protocols():
        raise UnsupportedError(
            f"stores at {scheme}:// URLs are not supported: give the path of a directory, or a URL of "
            f"{', '.join(SCHEMES)}, or of what fsspec has here: "
            f"{', '.join(sorted(set(fsspec.available_protocols()) - set(SCHEMES)))}"
        )
    return FsspecBucket(location)


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
