"""Buckets wherever fsspec reaches: ``gs:``, ``abfs:``, ``sftp:``, ``memory:`` and more.

What fsspec promises is little, so this is what such a store has:

* **No conditional writes.** Who writes a reference looks at it first; of two who do so at the same moment, the last
  wins. Collect when nobody publishes.
* **Time** is the service's where it dates its objects: how far its clock is from this machine's is found out by writing
  an object. Who can't write has this machine's.
* **Whole objects.** Object services replace an object at once. On file systems (``sftp:``) it is written under another
  name beside it, and renamed.
* Reads that see every finished write, if the service has them. Listings are never cached here, and end with an error
  where one of their directories can't be read.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any, BinaryIO

from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    from_os_error,
    printable,
)
from layerstore.store.bucket import ABSENT, PROBE, Absent, Entry, Guarantees, Piece
from layerstore.store.clock import NANOSECONDS, elapsed

CLOCK = PROBE + "clock"
CLOCK_SECONDS = 600.0
"""After which the service's clock is looked at anew."""

_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created", "timeModified")
"""What file systems of fsspec call the time of an object."""
_TAGS = ("ETag", "etag", "md5Hash", "generation", "content_md5")
_RENAMING = frozenset({"sftp", "ssh", "file", "local", "smb", "ftp", "hdfs", "dask"})
"""Protocols of file systems, where a file that is being written is seen."""
_STAGED = ".staged-"


class FsspecBucket:
    """A :class:`~layerstore.store.bucket.Bucket` at a URL of fsspec.

    Attributes:
        location: the URL without credentials.
    """

    def __init__(self, url: str, **options: object) -> None:
        """``options`` go to fsspec's file system.

        Raises:
            UnsupportedError: no such protocol, or the package that fsspec needs for it isn't installed.
            UnavailableError: it can't be reached.
        """
        import fsspec

        scheme, _, rest = url.partition(":")
        rest = rest.removeprefix("//").partition("?")[0]
        host, slash, path = rest.partition("/")
        self.location = printable(f"{scheme}://{host.rpartition('@')[2]}{slash}{path}".rstrip("/"))
        try:
            # An instance of our own: shared ones keep the credentials of whoever was first.
            self._system, self._root = fsspec.core.url_to_fs(
                url, skip_instance_cache=True, use_listings_cache=False, **options
            )
        except (ValueError, ImportError) as error:
            raise UnsupportedError(f"{self.location}: {_one_line(error, url)}") from error
        except Exception as error:  # some connect at once
            raise UnavailableError(f"{self.location}: {_one_line(error, url)}") from error
        self._url = url
        self._root = str(self._root).rstrip("/")
        self._renames = scheme in _RENAMING
        self._looking = threading.Lock()
        self._writing = threading.Lock()
        self._looked = float("-inf")
        self._time: tuple[int, float] | None = None

    def guarantees(self) -> Guarantees:
        return Guarantees(False, False)

    def close(self) -> None:
        pass  # fsspec has no word for it: what its file systems hold goes with them

    def now(self) -> int:
        with self._looking:
            if elapsed() - self._looked > CLOCK_SECONDS:
                self._looked = elapsed()
                self._time = self._look()
        if self._time is None:
            return time.time_ns()
        return self._time[0] + int((elapsed() - self._time[1]) * NANOSECONDS)

    def _look(self) -> tuple[int, float] | None:
        """What the service dates an object that is written now, and when that was."""
        before = elapsed()
        try:
            with self._errors(CLOCK), self._placed(CLOCK) as path:
                self._system.pipe_file(path, b"")
            with self._errors(CLOCK):
                modified = _modified(self._system.info(self._path(CLOCK)))
        except ImgtoolError:
            return None
        return None if modified is None else (modified, before)

    def head(self, key: str) -> Entry:
        with self._errors(key):
            return self._entry(key, self._system.info(self._path(key)))

    def read(self, key: str, offset: int, length: int) -> Piece:
        entry = self.head(key)
        length = max(0, min(length, entry.size - offset))
        return Piece(self._bytes(key, offset, length) if length else b"", entry)

    def read_at(self, entry: Entry, offset: int, length: int) -> bytes:
        # Whether it is still the same object isn't asked: that would be a second request each time.
        length = max(0, min(length, entry.size - offset))
        return self._bytes(entry.key, offset, length) if length else b""

    def _bytes(self, key: str, offset: int, length: int) -> bytes:
        with self._errors(key):
            data = bytes(self._system.cat_file(self._path(key), start=offset, end=offset + length))
        if len(data) != length:
            raise CorruptError(
                f"{self.location}/{printable(key)}: {len(data)} of {length} bytes at {offset} came: publish it again"
            )
        return data

    def write(self, key: str, data: bytes, *, expected: str | Absent | None = None) -> str:
        # Of the threads of one process, one at a time looks and writes; nothing keeps others away meanwhile.
        with self._writing if expected is not None else nullcontext():
            if expected is not None:
                self._compare(key, expected)
            with self._errors(key), self._placed(key) as path:
                self._system.pipe_file(path, data)
            return self.head(key).etag

    def _compare(self, key: str, expected: str | Absent) -> None:
        try:
            found: str | Absent = self.head(key).etag
        except NotFoundError:
            found = ABSENT
        if found != expected:
            raise ConflictError(f"{self.location}/{printable(key)} is not what was expected")

    def send(self, key: str, file: BinaryIO, size: int) -> str:
        with self._errors(key), self._placed(key) as path, self._system.open(path, "wb") as target:
            shutil.copyfileobj(file, target, 4 << 20)
        entry = self.head(key)
        if entry.size != size:
            self.delete(key)
            raise CorruptError(f"{self.location}/{printable(key)}", expected=f"{size} bytes", actual=f"{entry.size}")
        return entry.etag

    @contextmanager
    def _placed(self, key: str) -> Iterator[str]:
        """Where to write an object so that nobody sees it half."""
        path = self._path(key)
        if not self._renames:
            yield path
            return
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        staged = f"{path}{_STAGED}{secrets.token_hex(8)}"
        try:
            yield staged
            self._system.mv(staged, path)
        except BaseException:
            try:
                self._system.rm_file(staged)
            except Exception:
                pass  # it may not have been made; collection removes it
            raise

    def entries(self, prefix: str) -> Iterator[Entry]:
        for path, info in self._files(prefix):
            key = self._key(path)
            if key.startswith(prefix) and _STAGED not in key:
                yield self._entry(key, info)

    def _files(self, prefix: str) -> list[tuple[str, Mapping[str, Any]]]:
        """All files below the directory that a prefix names. Unlike ``find``, it fails where one can't be read."""
        directory = prefix.rpartition("/")[0]
        found: list[tuple[str, Mapping[str, Any]]] = []
        pending = [self._path(directory) if directory else self._root]
        with self._errors(prefix):
            self._system.invalidate_cache()
            while pending:
                path = pending.pop()
                try:
                    listed = self._system.ls(path, detail=True)
                except FileNotFoundError:
                    if found or pending or path not in (self._path(directory), self._root):
                        raise UnavailableError(
                            f"{self.location}: {printable(path)} has gone while it was listed"
                        ) from None
                    return []
                for info in listed:
                    if info["type"] == "directory":
                        pending.append(str(info["name"]))
                    elif str(info["name"]).rstrip("/") != path:  # as some list a marker of the directory itself
                        found.append((str(info["name"]), info))
        return sorted(found, key=lambda each: self._key(each[0]))

    def delete(self, key: str, *, expected: str | None = None) -> bool:
        try:
            if expected is not None and self.head(key).etag != expected:
                raise ConflictError(f"{self.location}/{printable(key)} is not what was expected")
            with self._errors(key):
                self._system.rm_file(self._path(key))
        except NotFoundError:
            pass
        return True

    def copy(self, key: str, target: str) -> None:
        with self._errors(key), self._placed(target) as path:
            self._system.cp_file(self._path(key), path)

    def abort_uploads(self, *, before: int, keep: Container[str], dry_run: bool) -> int:
        if not self._renames:
            return 0
        freed = 0
        for path, info in self._files(""):
            entry = self._entry(self._key(path), info)
            key, staged, _ = entry.key.partition(_STAGED)
            if staged and key not in keep and entry.modified <= before:
                freed += entry.size
                if not dry_run:
                    self.delete(entry.key)
        return freed

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if self._root else key

    def _key(self, path: str) -> str:
        return str(path).lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/")

    def _entry(self, key: str, info: Mapping[str, Any]) -> Entry:
        modified = _modified(info)
        if modified is None:
            modified = time.time_ns()  # it is as young as can be: nothing is deleted for its age
        size = int(info.get("size") or 0)
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), f"{size}-{modified}")
        return Entry(key, size, modified, tag)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        what = f"{self.location}/{printable(key)}"
        try:
            yield
        except ImgtoolError:
            raise
        except FileNotFoundError as error:
            raise NotFoundError(f"{what} doesn't exist") from error
        except OSError as error:
            raise from_os_error(error, what) from error
        except NotImplementedError as error:
            raise UnsupportedError(f"{what}: fsspec can't do that there") from error
        except Exception as error:  # each of fsspec's file systems raises what its own library does
            raise UnavailableError(f"{what}: {_one_line(error, self._url)}") from error


def _modified(info: Mapping[str, Any]) -> int | None:
    """Nanoseconds since 1970; None where nothing is said that can be understood."""
    value = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if isinstance(value, (int, float)):
        return int(value * NANOSECONDS)
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000_000) * 1000


def _one_line(error: Exception, url: str) -> str:
    """Without the URL, which may have credentials."""
    host = url.partition("://")[2].partition("/")[0]
    text = " ".join(str(error).split()).replace(url, "it")
    if "@" in host:
        text = text.replace(host.rpartition("@")[0], "…")
    return printable(text)[:300]
