"""Blobs of a repository: sizes, ranges, and downloads that go on where they broke off.

One range is asked for at a time; several in one request are not understood by many registries. A registry may ignore a
range, which is noticed. Where a blob lies elsewhere (a redirect, usually a signed URL of an object store) that place is
remembered for the blob while it is read, and the registry is asked again when the place refuses.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from layerstore.digest import Digest, Hasher
from layerstore.errors import (
    CorruptError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    os_errors,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.registry.client import RefusedError, RegistryClient
from layerstore.registry.tokens import DeniedError
from layerstore.registry.wire import Answer, CutError, origin

RESUMES = 5
"""Times in a row that a body which broke off, and had brought nothing, is asked for again."""
RESUMES_IN_ALL = 100
RESTARTS = 3
"""Of one download, where a registry can't go on from the middle."""
WHOLE_LIMIT = 8 << 20
"""Where a range is ignored and everything sent, so many bytes from the start are read; a later range is given up."""
PIECE = 1 << 20
"""Bytes that are read at a time."""


@dataclass(slots=True)
class Place:
    """Where a blob's bytes are, as far as is known: ``url`` is where the registry has last sent us."""

    digest: Digest
    what: str
    url: str | None = None


class Blobs:
    """The blobs of a client's repository."""

    def __init__(self, client: RegistryClient) -> None:
        self._client = client
        self._heads = True
        """False once HEAD requests turned out to be of no use there."""

    def place(self, digest: Digest) -> Place:
        return Place(digest, f"blob {digest} in {self._client.address}")

    def size(self, digest: Digest) -> int:
        """Bytes, by a HEAD request; where that is refused or says nothing, by a GET of the first byte.

        Raises:
            NotFoundError: no such blob.
        """
        place = self.place(digest)
        if self._heads:
            try:
                with self._client.ask("HEAD", f"blobs/{digest}", place.what) as answer:
                    if answer.length:
                        return answer.length
            except DeniedError:
                raise
            except (PermissionError_, UnsupportedError, RefusedError):
                self._heads = False  # signed URLs are often for GET alone
        return self.start(place, 1)[0]

    def start(self, place: Place, length: int) -> tuple[int, bytes]:
        """The size of a blob, and its first bytes: ``length``, or fewer if it is shorter.

        Raises:
            NotFoundError: no such blob.
        """
        data = b""
        with self._client.ask(
            "GET",
            f"blobs/{place.digest}",
            place.what,
            headers={"Range": f"bytes=0-{length - 1}"},
            expected=length,
            also=(416,),
        ) as answer:
            self._remember(place, answer)
            if answer.status == 416:
                if answer.content_range() != (None, None, 0):
                    raise answer.another_range(f"bytes 0-{length - 1}")
                return 0, b""
            if answer.status == 206:
                first, last, size = answer.content_range()
                if first != 0 or last != min(length, size) - 1:
                    raise answer.another_range(f"bytes 0-{min(length, size) - 1}")
            else:
                size = _whole_length(answer, place.what)
            wanted = min(length, size)
            try:
                while len(data) < wanted and (part := answer.some(wanted - len(data))):
                    data += part
            except CutError:
                pass
        return size, data + b"".join(self.pieces(place, len(data), wanted, size))

    def read(self, place: Place, offset: int, length: int, size: int) -> bytes:
        """``length`` bytes from ``offset`` of a blob of ``size`` bytes.

        Raises:
            NotFoundError: no such blob.
            CorruptError: it has another size.
        """
        parts = list(self.pieces(place, offset, offset + length, size))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pieces(self, place: Place, offset: int, end: int, size: int) -> Iterator[bytes]:
        """Bytes from ``offset`` to ``end`` of a blob of ``size`` bytes, in order. Errors are those of :meth:`read`."""
        resumes = _Resumes(place.what)
        while offset < end:
            before = offset
            try:
                with self._range(place, offset, end, size) as answer:
                    while offset < end and (part := answer.some(min(end - offset, PIECE))):
                        offset += len(part)
                        yield part
            except CutError:
                pass
            if offset < end:
                resumes.count(offset - before)

    def download(self, descriptor: Descriptor, target: int, what: str, stop: threading.Event) -> None:
        """Write a whole blob to the file ``target``, from its start, and verify it.

        Raises:
            NotFoundError: no such blob.
            CorruptError: it has another size or digest.
            NoSpaceError: the file can't hold it.
            UnavailableError: it breaks off again and again, or ``stop`` was set.
        """
        sink = _Sink(descriptor, target, what, stop)
        resumes = _Resumes(what)
        etag = ""
        while True:
            before = sink.done
            headers = {"Range": f"bytes={before}-{descriptor.size - 1}"} if before else {}
            path, also = f"blobs/{descriptor.digest}", (416,) if before else ()
            try:
                with self._client.ask(
                    "GET", path, what, headers=headers, expected=descriptor.size - before, also=also
                ) as answer:
                    if before and not _goes_on(answer, before, descriptor.size, etag):
                        sink.restart()
                        before = 0
                        if answer.status != 200:
                            continue
                    if answer.status == 200 and answer.length not in (None, descriptor.size):
                        size = f"{descriptor.size} bytes"
                        raise CorruptError(f"{what} has the wrong size", expected=size, actual=f"{answer.length}")
                    etag = answer.headers.get("ETag", "")
                    sink.take(answer)
            except CutError:
                pass
            if sink.done == descriptor.size:
                break
            resumes.count(sink.done - before)
        descriptor.digest.check(sink.hasher, f"{what} has the wrong digest")

    @contextmanager
    def _range(self, place: Place, offset: int, end: int, size: int) -> Iterator[Answer]:
        """An answer whose next bytes are those at ``offset``: from where the blob was last, or through the registry."""
        with ExitStack() as stack:
            answer: Answer | None = None
            if place.url is not None:
                try:
                    answer = stack.enter_context(self._answer(place.url, place, offset, end, size))
                except (NotFoundError, PermissionError_, UnavailableError, UnsupportedError):
                    place.url = None  # a signed URL that has expired, or a server that has gone
            if answer is None:
                answer = stack.enter_context(self._answer(f"blobs/{place.digest}", place, offset, end, size))
            yield answer

    @contextmanager
    def _answer(self, path: str, place: Place, offset: int, end: int, size: int) -> Iterator[Answer]:
        headers = {"Range": f"bytes={offset}-{end - 1}"}
        with self._client.ask("GET", path, place.what, headers=headers, expected=end - offset, also=(416,)) as answer:
            if answer.status == 416:
                raise CorruptError(f"{place.what} has no bytes {offset}-{end - 1}, of {size}: publish it again")
            if answer.status == 206:
                found = answer.content_range()
                if found[2] != size:
                    raise CorruptError(f"{place.what} has another size", expected=str(size), actual=str(found[2]))
                if found != (offset, end - 1, size):
                    raise answer.another_range(headers["Range"])
            else:
                actual = _whole_length(answer, place.what)
                if actual != size:
                    raise CorruptError(f"{place.what} has another size", expected=str(size), actual=str(actual))
                if end > WHOLE_LIMIT and offset:
                    raise UnavailableError(
                        f"{place.what}: the registry ignores ranges, and bytes {offset}-{end - 1} are too far into it"
                    )
                _skip(answer, offset, place.what)
            self._remember(place, answer)
            yield answer

    def _remember(self, place: Place, answer: Answer) -> None:
        elsewhere = origin(answer.url) != origin(self._client.address.origin)
        place.url = answer.url if elsewhere else None


class _Resumes:
    """Counts how often a body broke off."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._fruitless = 0
        self._all = 0

    def count(self, got: int) -> None:
        """One more time, after ``got`` bytes. Raises UnavailableError if that was too often."""
        self._all += 1
        self._fruitless = 0 if got > 0 else self._fruitless + 1
        if self._fruitless > RESUMES or self._all > RESUMES_IN_ALL:
            raise UnavailableError(f"{self._what}: the answer is cut short again and again: try later")


class _Sink:
    """A download's file, and the digest of what is in it."""

    def __init__(self, descriptor: Descriptor, target: int, what: str, stop: threading.Event) -> None:
        self.done = 0
        self.hasher: Hasher = descriptor.digest.hasher()
        self._descriptor = descriptor
        self._target = target
        self._what = what
        self._stop = stop
        self._restarts = 0

    def restart(self) -> None:
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise UnavailableError(f"{self._what} breaks off, and the registry can't go on from there: try again")
        self.done, self.hasher = 0, self._descriptor.digest.hasher()

    def take(self, answer: Answer) -> None:
        """What comes, to the end of the blob. Raises CutError."""
        while self.done < self._descriptor.size:
            part = answer.some(min(PIECE, self._descriptor.size - self.done))
            if not part:
                return
            if self._stop.is_set():
                raise UnavailableError(f"{self._what}: the download was given up")
            with os_errors(f"write {self._what}"):
                at = 0
                while at < len(part):
                    at += os.pwrite(self._target, memoryview(part)[at:], self.done + at)
            self.hasher.update(part)
            self.done += len(part)


def _goes_on(answer: Answer, done: int, size: int, etag: str) -> bool:
    """Whether an answer is the rest of what came before: that range, of the same thing."""
    if answer.status != 206 or answer.headers.get("ETag", "") != etag:
        return False
    return answer.content_range() == (done, size - 1, size)


def _whole_length(answer: Answer, what: str) -> int:
    if answer.length is None:
        raise UnavailableError(f"{what}: the registry doesn't say its length")
    return answer.length


def _skip(answer: Answer, length: int, what: str) -> None:
    while length:
        part = answer.some(min(length, PIECE))
        if not part:
            raise CutError(f"{what}: the answer was cut short: try again")
        length -= len(part)
