"""A store in a directory, local or on a shared file system. The package's page shows the layout and the locks."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    UsageError,
    printable,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.staging import (
    ScratchDirectory,
    make_directory,
    make_file,
    read_file,
    reclaim_files,
    reclaim_scratch,
    sync_directory,
    touched,
    write_file,
)
from layerstore.store.blobfile import BlobFile, BlobUpload
from layerstore.store.clock import NANOSECONDS, Clock, FileClock
from layerstore.store.failures import disk_errors
from layerstore.store.format import MARKER_BYTES, REFERENCE_BYTES, ReferenceDocument, StoreMarker
from layerstore.store.lease import DirectoryLease, LeaseDirectory
from layerstore.store.locks import LOCK_SECONDS, FileLock
from layerstore.store.names import decode_name, encode_name
from layerstore.store.protocol import ALGORITHMS, BlobInfo, Lease, Reference
from layerstore.store.reach import present_target
from layerstore.store.reading import is_intact

MARKER = "store.json"
_DIRECTORIES = ("blobs", "blobs/sha256", "refs", "leases", "quarantine", "tmp")
_FILES = ("lock", "refs.lock", "clock")
_OWN_NAMES = frozenset({MARKER, *_FILES, *_DIRECTORIES})
_FOREIGN_ALLOWED = "lost+found"
_RESOLVED = 1024
"""References that are remembered for as long as their files are the same."""

_Identity = tuple[int, int, int, int]
"""A fresh file system has it, and such a one may become a store."""


class DirectoryStore:
    """A ``PruneStore`` and ``LocalStore`` of :mod:`layerstore.store.protocol` in a directory that exists.

    :meth:`create` makes one.

    Attributes:
        root: absolute path of the store.
        location: the same, for messages.
    """

    def __init__(self, path: str, *, clock: Clock | None = None, lock_seconds: float = LOCK_SECONDS) -> None:
        """Open the store at ``path``.

        Args:
            path: its directory.
            clock: instead of the file system's own time.
            lock_seconds: how long to wait for a lock.

        Raises:
            NotFoundError: there is none.
            CorruptError: its marker can't be parsed.
            UnsupportedError: of another version, or with a feature that this release lacks.
        """
        self.root = os.path.abspath(path)
        self.location = printable(self.root)
        self._resolved: dict[str, tuple[_Identity, Descriptor]] = {}
        if not _is_store(self.root):
            raise NotFoundError(
                f"{self.location} is not a store, it has no {MARKER}: check the path and whether it is "
                "mounted, or create a store there"
            )
        self._clock = FileClock(self._path("clock")) if clock is None else clock
        self._lock = FileLock(self._path("lock"), seconds=lock_seconds)
        self._references_lock = FileLock(self._path("refs.lock"), seconds=lock_seconds)
        self._leases = LeaseDirectory(self._path("leases"), lock=self._lock, clock=self._clock)
        self._collector: int | None = None

    @classmethod
    def create(cls, path: str, *, clock: Clock | None = None, lock_seconds: float = LOCK_SECONDS) -> DirectoryStore:
        """The store at ``path``, made if it does not exist; several may try at once.

        Raises:
            ConflictError: the directory holds something else, or a store that has lost its marker.
        """
        root = os.path.abspath(path)
        if not _is_store(root):
            _make_store(root)
        return cls(root, clock=clock, lock_seconds=lock_seconds)

    # Reading

    def stat(self, digest: Digest) -> int:
        # Opened even for this: that is when NFS asks the server instead of its cache.
        with self.open(digest) as blob:
            return blob.size

    def open(self, digest: Digest) -> BlobFile:
        with disk_errors(f"open blob {digest}"):
            try:
                return BlobFile(self.local_path(digest), digest)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise self._missing(f"blob {digest}") from error

    def local_path(self, digest: Digest) -> str:
        return self._path("blobs", digest.algorithm, digest.hex)

    def names(self) -> Iterator[str]:
        with disk_errors("list references"):
            try:
                files = os.listdir(self._path("refs"))
            except FileNotFoundError as error:
                raise self._damaged("refs") from error
        names = []
        for file in files:
            if file.startswith("."):  # on its way in, or NFS's .nfs…: no name starts with a dot
                continue
            try:
                names.append(decode_name(file))
            except UsageError as error:
                path = printable(self._path("refs", file))
                raise CorruptError(f"{path} is not a reference: move the file elsewhere") from error
        yield from sorted(names)

    def resolve(self, name: str) -> Descriptor:
        path = self._path("refs", encode_name(name))
        with disk_errors("read reference"):
            try:
                identity = _identity(path)
                known = self._resolved.get(name)
                if known is not None and known[0] == identity:  # references are replaced, never written over
                    return known[1]
                data = read_file(path, REFERENCE_BYTES)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise self._missing(f"reference {name!r}") from error
        what = f"reference {name!r} in {self.location}"
        try:
            document = ReferenceDocument.parse(data, what)
        except UnsupportedError:
            raise
        except ImgtoolError as error:
            raise CorruptError(f"{error}: remove {printable(path)} and publish again") from error
        if document.name != name:
            raise CorruptError(f"{what} says that it is {printable(document.name)!r}: remove {printable(path)}")
        if len(self._resolved) >= _RESOLVED:
            self._resolved.clear()
        self._resolved[name] = identity, document.target
        return document.target

    def references(self) -> Iterator[Reference]:
        for name in self.names():
            try:
                target = self.resolve(name)
            except NotFoundError:
                continue  # deleted meanwhile
            yield Reference(name, target)

    # Publishing

    def upload(self, algorithm: str = "sha256") -> BlobUpload:
        if algorithm not in ALGORITHMS:
            raise UsageError(f"blobs are named by {' or '.join(ALGORITHMS)}, not by {algorithm!r}")
        directory = self._path("blobs", algorithm)
        with disk_errors("start blob"):
            make_directory(directory)
        return BlobUpload(directory, algorithm, self._lock)

    @contextmanager
    def scratch(self) -> Iterator[str]:
        with disk_errors("make scratch directory"):
            scratch = ScratchDirectory(self._path("tmp"))
        try:
            yield scratch.path
        finally:
            with disk_errors("remove scratch directory"):
                scratch.remove()

    def lease(self, *, seconds: int = 86_400) -> DirectoryLease:
        return self._leases.create(seconds)

    def set_reference(
        self, name: str, target: Descriptor, *, expected: Descriptor | None, lease: Lease, reaches: Iterable[Digest]
    ) -> None:
        path = self._path("refs", encode_name(name))
        if not isinstance(lease, DirectoryLease) or not lease.belongs_to(self._leases):
            raise UsageError(f"the lease for reference {name!r} is not one of {self.location}")
        needed = set(reaches)
        with self._lock.shared():
            lease.check()
            self._check_present(name, target, needed)
            with self._references_lock.exclusive():
                self._compare(name, present_target(self, name), expected)
                with disk_errors(f"write reference {name!r}"):
                    write_file(path, ReferenceDocument(name, target).to_bytes())

    def delete_reference(self, name: str, *, expected: Descriptor) -> None:
        path = self._path("refs", encode_name(name))
        with self._lock.shared(), self._references_lock.exclusive():
            self._compare(name, self.resolve(name), expected)
            with disk_errors(f"delete reference {name!r}"):
                os.unlink(path)
                # Before anything it reached can be deleted for good.
                sync_directory(self._path("refs"))

    # Pruning

    def blobs(self) -> Iterator[BlobInfo]:
        now = self._listing_time()
        with disk_errors("list blobs"):
            for algorithm in self._algorithms():
                yield from self._blobs_of(algorithm, now)

    def pinned(self) -> frozenset[Digest]:
        return self._leases.pinned()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        with self._lock.exclusive():
            with disk_errors("refresh listings"):
                # A network file system may answer from a cached listing; after a change of our own it asks again.
                for name in ("refs", "leases"):
                    os.utime(self._path(name))
            self._collector = threading.get_ident()
            try:
                yield
            finally:
                self._collector = None

    def delete(self, digest: Digest, *, older_than: float = 0.0) -> bool:
        if self._collector != threading.get_ident():
            raise RuntimeError("blobs are deleted only inside collecting()")
        path = self.local_path(digest)
        with disk_errors(f"delete blob {digest}"):
            try:
                if self._clock() - touched(os.stat(path)) < older_than * NANOSECONDS:
                    return False
                os.unlink(path)
            except FileNotFoundError:
                return False
        return True

    def quarantine(self, digest: Digest) -> str:
        # Hashed without the lock, which publishers wait for, and moved only if it is still the same file.
        with self.open(digest) as blob:
            if is_intact(blob, digest):
                raise ConflictError(f"blob {digest} is intact: verify again")
            target = self._path("quarantine", f"{digest.algorithm}-{digest.hex}-{secrets.token_hex(4)}")
            path = self.local_path(digest)
            with self._lock.exclusive(), disk_errors(f"move blob {digest}"):
                try:
                    same = os.path.samestat(os.stat(path), blob.status)
                except FileNotFoundError:
                    same = False
                if not same:
                    raise ConflictError(f"blob {digest} has been replaced or deleted meanwhile: verify again")
                os.rename(path, target)
                sync_directory(os.path.dirname(target))
                sync_directory(os.path.dirname(path))
        return target

    def reclaim(self, *, older_than: float, dry_run: bool = False) -> int:
        age = int(older_than * NANOSECONDS)
        before = self._clock() - age
        with disk_errors("remove leftovers"):
            directories = [self.root, self._path("refs")]
            directories += [self._path("blobs", algorithm) for algorithm in self._algorithms()]
            freed = sum(reclaim_files(directory, before, dry_run=dry_run) for directory in directories)
            freed += reclaim_scratch(self._path("tmp"), before, dry_run=dry_run)
        return freed + self._leases.reclaim(older_than_ns=age, dry_run=dry_run)

    def _path(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def _algorithms(self) -> list[str]:
        try:
            names = sorted(os.listdir(self._path("blobs")))
        except FileNotFoundError as error:
            raise self._damaged("blobs") from error
        return [name for name in names if os.path.isdir(self._path("blobs", name))]

    def _blobs_of(self, algorithm: str, now: int) -> Iterator[BlobInfo]:
        for name in sorted(os.listdir(self._path("blobs", algorithm))):
            try:
                digest = Digest.parse(f"{algorithm}:{name}")
            except ImgtoolError:
                continue
            try:
                status = os.stat(self.local_path(digest))
            except FileNotFoundError:
                continue  # deleted meanwhile
            yield BlobInfo(digest, status.st_size, max(0, now - touched(status)) / NANOSECONDS)

    def _listing_time(self) -> int:
        try:
            return self._clock()
        except PermissionError_:
            # A store that can't be written can be verified; its clock can't be asked, and nothing is deleted by it.
            return time.time_ns()

    def _check_present(self, name: str, target: Descriptor, digests: set[Digest]) -> None:
        try:
            size = self.stat(target.digest)
            for digest in sorted(digests):
                self.stat(digest)
        except NotFoundError as error:
            raise ConflictError(f"reference {name!r} is not written: {error}; publish again") from error
        if size != target.size:
            raise CorruptError(f"blob {target.digest}", expected=f"{target.size} bytes", actual=f"{size}")

    def _compare(self, name: str, present: Descriptor | None, expected: Descriptor | None) -> None:
        found, wanted = (None if each is None else each.digest for each in (present, expected))
        if found != wanted:
            raise ConflictError(
                f"reference {name!r} in {self.location} stands for {found or 'nothing'} where "
                f"{wanted or 'nothing'} was expected: look again"
            )

    def _missing(self, what: str) -> ImgtoolError:
        """Missing, unless it is the whole store that is."""
        if os.path.exists(self._path(MARKER)):
            return NotFoundError(f"{what} is not in {self.location}")
        return UnavailableError(f"{self.location} is not there any more, is it mounted? {what} wasn't read")

    def _damaged(self, name: str) -> ImgtoolError:
        return CorruptError(f"{printable(self._path(name))} is missing: is the store mounted, and all of it?")


def _is_store(root: str) -> bool:
    """Whether a marker is there, and one for this release."""
    path = os.path.join(root, MARKER)
    with disk_errors("open store"):
        try:
            data = read_file(path, MARKER_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return False
    try:
        StoreMarker.parse(data, f"store {printable(path)}")
    except UnsupportedError:
        raise
    except ImgtoolError as error:
        raise CorruptError(f"{error}: is this a store?") from error
    return True


def _make_store(root: str) -> None:
    """Directories and lock files first, marker last: a creation that died is repeated, not repaired."""
    with disk_errors(f"create store {printable(root)}"):
        os.makedirs(os.path.dirname(root), exist_ok=True)
        make_directory(root)
        _refuse_foreign(root)
        for name in _DIRECTORIES:
            make_directory(os.path.join(root, name))
        for name in _FILES:
            make_file(os.path.join(root, name))
        write_file(os.path.join(root, MARKER), StoreMarker().to_bytes())


def _identity(path: str) -> _Identity:
    """Of a file that is replaced when it changes, and, by its times, of one that isn't."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _refuse_foreign(root: str) -> None:
    for name in sorted(os.listdir(root)):
        if name not in _OWN_NAMES and name != _FOREIGN_ALLOWED and not name.startswith("."):
            raise ConflictError(
                f"{printable(root)} holds other things, such as {printable(name)!r}: choose an empty directory"
            )
    for name in ("refs", "blobs/sha256"):
        path = os.path.join(root, name)
        if os.path.isdir(path) and any(not entry.startswith(".") for entry in os.listdir(path)):
            if _is_store(root):
                return  # another creator was faster
            raise ConflictError(f"{printable(root)} has content but no {MARKER}: a damaged store; restore that file")
