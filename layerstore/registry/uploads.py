"""Writing blobs: in one request where they are small, else chunk by chunk in a session that can be taken up again.

::

    POST blobs/uploads/ ─▶ session ─ PATCH chunk … ─▶ PUT ?digest=
        ?mount=&from=   ─▶ 201: it is there, from another repository; 202: an ordinary session

Where a session goes on is said by the ``Location`` of each answer, and nothing is assembled by hand: it may be
relative, have a query, or be at another host, which then gets no credentials. After a failure the session is asked how
much it has; one that is lost is begun anew. docker's registry 2.8 loses those whose last chunk has come in part, and
keeps their bytes until it purges them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
)
from layerstore.oci.document import shown
from layerstore.registry.blobs import Blobs
from layerstore.registry.client import RefusedError, RegistryClient
from layerstore.registry.tokens import push
from layerstore.registry.wire import Answer, resolve

CHUNK_BYTES = 16 << 20
"""Of a blob that are sent, and kept in memory, at a time."""
LARGEST_CHUNK = 256 << 20
"""Of what a registry may ask for as its least."""
SESSIONS = 3
"""That are begun for one blob."""
RESUMES = 5
"""Failures in a row after which nothing more has arrived."""
COMMIT_SECONDS = 60.0
"""That a registry may take longer than usual to put a blob in its place, besides one for each COMMIT_SPEED bytes."""
COMMIT_SPEED = 64 << 20

_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,19})")

Read = Callable[[int, int], bytes]
"""``read(offset, length)`` of what is to be sent."""


@dataclass(slots=True)
class Session:
    """An upload under way: where it goes on, and the least that a chunk must have."""

    url: str
    least: int = 0


class Uploads:
    """Writes blobs to a client's repository."""

    def __init__(self, client: RegistryClient, blobs: Blobs) -> None:
        self._client = client
        self._blobs = blobs
        self._scopes = push(client.address.repository)

    def send(self, digest: Digest, size: int, read: Read, *, session: Session | None = None) -> None:
        """Write a blob, from a session on if one has been begun. One that is there already is there still.

        Raises:
            CorruptError: the registry has received something else.
            UnavailableError: it fails again and again.
        """
        what = f"blob {digest} in {self._client.address}"
        for attempt in range(SESSIONS):
            if session is None:
                session = self._begin(what)
            try:
                with self._cancelled(session, digest):
                    if self._fill(session, digest, size, read, what):
                        return
            except _LostSessionError as error:
                if attempt == SESSIONS - 1:
                    raise UnavailableError(str(error)) from error
            session = None

    def mount(self, digest: Digest, repository: str) -> Session | None:
        """Take a blob over from another repository. None: it is there now; else a session to send it."""
        what = f"blob {digest} in {self._client.address}"
        query = urlencode({"mount": str(digest), "from": repository})
        scopes = push(self._client.address.repository, mounting=repository)
        try:
            with self._client.ask(
                "POST", f"blobs/uploads/?{query}", what, scopes=scopes, body=b"", repeat=True
            ) as answer:
                return None if answer.status == 201 else self._session(answer, what)
        except (NotFoundError, PermissionError_, UnsupportedError, RefusedError):
            return self._begin(what)

    def give_up(self, session: Session, digest: Digest) -> None:
        """Tell the registry; where that fails it gives the session up in time."""
        try:
            with self._client.ask("DELETE", session.url, f"upload of {digest}", scopes=self._scopes):
                pass
        except ImgtoolError:
            pass

    def _begin(self, what: str) -> Session:
        with self._client.ask("POST", "blobs/uploads/", what, scopes=self._scopes, body=b"", repeat=True) as answer:
            return self._session(answer, what)

    def _session(self, answer: Answer, what: str) -> Session:
        least = answer.headers.get("OCI-Chunk-Min-Length", "")
        size = int(least) if re.fullmatch("[0-9]{1,12}", least) else 0
        if size > LARGEST_CHUNK:
            raise UnsupportedError(f"{what}: the registry takes no chunks below {size} bytes")
        return Session(resolve(answer.url, answer.headers.get("Location"), what), size)

    def _fill(self, session: Session, digest: Digest, size: int, read: Read, what: str) -> bool:
        """Send all of it and commit.

        Raises:
            _LostSessionError: it has to be begun anew.
        """
        step = max(CHUNK_BYTES, session.least)
        if size <= step:
            return self._commit(session, digest, read(0, size) if size else b"", size, what)
        done, fruitless = 0, 0
        while done < size:
            before = done
            chunk = read(done, min(step, size - done))
            try:
                done = self._patch(session, done, chunk, what)
            except (UnavailableError, ConflictError, NotFoundError) as error:
                done = self._asked(session, size, error, what)
            fruitless = fruitless + 1 if done <= before else 0
            if fruitless > RESUMES:
                raise _LostSessionError(f"{what}: the registry takes no more of it: try later")
        return self._commit(session, digest, b"", size, what)

    def _patch(self, session: Session, offset: int, chunk: bytes, what: str) -> int:
        """Send a chunk; how much the registry has then."""
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{offset}-{offset + len(chunk) - 1}",
        }
        with self._client.ask(
            "PATCH", session.url, what, scopes=self._scopes, headers=headers, body=chunk, seconds=COMMIT_SECONDS
        ) as answer:
            self._move(session, answer, what)
            return _received(answer, default=offset + len(chunk))

    def _asked(self, session: Session, size: int, error: ImgtoolError, what: str) -> int:
        """How much the registry has, by its own word, after a failure."""
        if isinstance(error, RefusedError) and error.status not in (400, 416):
            raise error
        try:
            with self._client.ask("GET", session.url, what, scopes=self._scopes) as answer:
                self._move(session, answer, what)
                received = _received(answer, default=-1)
        except (NotFoundError, RefusedError) as lost:
            raise _LostSessionError(f"{what}: the upload was lost: {error}") from lost
        if not 0 <= received <= size:
            raise _LostSessionError(f"{what}: nobody knows how much has arrived: {error}") from error
        return received

    def _commit(self, session: Session, digest: Digest, data: bytes, size: int, what: str) -> bool:
        url = f"{session.url}{'&' if '?' in session.url else '?'}digest={quote(str(digest), safe=':')}"
        headers = {"Content-Type": "application/octet-stream"}
        try:
            with self._client.ask(
                "PUT",
                url,
                what,
                scopes=self._scopes,
                headers=headers,
                body=data,
                seconds=COMMIT_SECONDS + size / COMMIT_SPEED,
            ) as answer:
                # docker's registry says the sha256 of what it was given by sha512, and has it by both.
                stated = answer.headers.get("Docker-Content-Digest", "")
                if stated.startswith(f"{digest.algorithm}:") and stated != str(digest):
                    raise CorruptError(f"{what} was written as something else: {shown(stated)}")
                return True
        except (UnavailableError, NotFoundError) as error:
            # The answer may have been lost and the blob be there; or the session has gone.
            if self._is_there(digest, size):
                return True
            raise _LostSessionError(f"{error}") from error

    def _is_there(self, digest: Digest, size: int) -> bool:
        try:
            return self._blobs.size(digest) == size
        except NotFoundError:
            return False

    def _move(self, session: Session, answer: Answer, what: str) -> None:
        if "Location" in answer.headers:
            session.url = resolve(answer.url, answer.headers["Location"], what)

    @contextmanager
    def _cancelled(self, session: Session, digest: Digest) -> Iterator[None]:
        """Give the session up if it isn't committed."""
        try:
            yield
        except BaseException:
            self.give_up(session, digest)
            raise


class _LostSessionError(UnavailableError):
    """An upload can't go on in its session."""


def _received(answer: Answer, *, default: int) -> int:
    """Bytes that a registry says it has. ``0-0`` is what it says of none, too: nobody sends a single byte."""
    match = _RANGE.fullmatch(answer.headers.get("Range", "").strip())
    if match is None:
        return default
    last = int(match[1])
    return last + 1 if last else 0
