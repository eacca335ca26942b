"""Leases of a directory store: one document each, replaced atomically whenever it changes.

Whether a lease is valid is decided by its file: one that is gone (released, expired and reclaimed, removed by hand)
has expired, whatever its holder believes.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace

from layerstore.digest import Digest
from layerstore.errors import ConflictError, CorruptError, MalformedError, UsageError, printable
from layerstore.staging import allocated, read_file, reclaim_files, write_file
from layerstore.store.clock import NANOSECONDS, Clock
from layerstore.store.failures import disk_errors
from layerstore.store.format import LEASE_BYTES, LeaseDocument
from layerstore.store.locks import FileLock


class LeaseDirectory:
    """``leases/`` of a store. ``lock`` is what excludes collectors."""

    def __init__(self, path: str, *, lock: FileLock, clock: Clock) -> None:
        self.path = path
        self.lock = lock
        self.clock = clock

    def create(self, seconds: int) -> DirectoryLease:
        if seconds <= 0:
            raise UsageError(f"a lease of {seconds} seconds protects nothing")
        document = LeaseDocument(secrets.token_hex(16), self.expiry(seconds))
        with disk_errors("write lease"):
            write_file(self.path_of(document.identifier), document.to_bytes())
        return DirectoryLease(self, document, seconds)

    def pinned(self) -> frozenset[Digest]:
        """What valid leases pin; any that can't be read is an error."""
        now = self.clock()
        return frozenset(pin for lease in self._documents() if not lease.expired(now) for pin in lease.pins)

    def reclaim(self, *, older_than_ns: int, dry_run: bool) -> int:
        """Remove leases that expired at least this long ago, and half-written ones; the bytes they took."""
        with self.lock.exclusive():
            now = self.clock()
            freed = 0
            for lease in self._documents():
                if lease.expired(now - older_than_ns):
                    path = self.path_of(lease.identifier)
                    with disk_errors("remove lease"):
                        freed += allocated(os.stat(path))
                        if not dry_run:
                            os.unlink(path)
            with disk_errors("remove unfinished leases"):
                return freed + reclaim_files(self.path, now - older_than_ns, dry_run=dry_run)

    def path_of(self, identifier: str) -> str:
        return os.path.join(self.path, identifier)

    def expiry(self, seconds: int) -> int:
        """Rounded up: a lease lasts at least as long as was asked for."""
        return -(-self.clock() // NANOSECONDS) + seconds

    def _documents(self) -> Iterator[LeaseDocument]:
        with disk_errors("list leases"):
            names = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        for name in names:
            path = self.path_of(name)
            with disk_errors("read lease"):
                try:
                    data = read_file(path, LEASE_BYTES)
                except FileNotFoundError:
                    continue  # released meanwhile
            try:
                document = LeaseDocument.parse(data, f"lease {printable(path)}")
            except MalformedError as error:
                raise CorruptError(f"{error}; remove the file if no publisher uses it") from error
            if document.identifier != name:
                raise CorruptError(
                    f"lease {printable(path)} says that it is {printable(document.identifier)!r}; remove the file"
                )
            yield document


class DirectoryLease:
    """A lease held by this process; from several threads, if need be."""

    def __init__(self, directory: LeaseDirectory, document: LeaseDocument, seconds: int) -> None:
        self._directory = directory
        self._document = document
        self._seconds = seconds
        self._mutex = threading.Lock()

    @property
    def identifier(self) -> str:
        return self._document.identifier

    def pin(self, digests: Iterable[Digest]) -> None:
        wanted = frozenset(digests)
        with self._mutex, self._directory.lock.shared():
            self.check()
            pins = self._document.pins | wanted
            if pins != self._document.pins:
                self._write(replace(self._document, pins=pins))

    def renew(self) -> None:
        with self._mutex, self._directory.lock.shared():
            self.check()
            self._write(replace(self._document, expires=self._directory.expiry(self._seconds)))

    def release(self) -> None:
        """Stop protecting. One that can't be removed now expires by itself."""
        try:
            os.unlink(self._directory.path_of(self.identifier))
        except OSError:
            pass

    def check(self) -> None:
        """Only while holding the store's lock, or the answer is out of date.

        Raises:
            ConflictError: the lease has expired.
        """
        if not self._document.expired(self._directory.clock()):
            with disk_errors("look for lease"):
                if os.path.lexists(self._directory.path_of(self.identifier)):
                    return
        store = printable(os.path.dirname(self._directory.path))
        raise ConflictError(f"lease {self.identifier} on {store} has expired: what it pinned may be gone, start again")

    def belongs_to(self, directory: LeaseDirectory) -> bool:
        return self._directory.path == directory.path

    def _write(self, document: LeaseDocument) -> None:
        with disk_errors("write lease"):
            write_file(self._directory.path_of(self.identifier), document.to_bytes())
        self._document = document

    def __enter__(self) -> DirectoryLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
