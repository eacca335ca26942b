"""A directory store that any web server serves: read only, over HTTP.

The files are those of :mod:`layerstore.store.directory`, by the same relative names: ``store.json``,
``blobs/<algorithm>/<hex>``, ``refs/<encoded name>``, whose ``%`` is ``%25`` in a URL. Nothing is needed of the server
but files and single ranges. One blob is opened by one request, which brings its first bytes too, so a document or a
small metadata image costs no second one; each read beyond them is one request.

HTTP has no listing. The one that nginx makes as JSON (``autoindex_format json``) is understood for ``refs/``; without
it names can be resolved, not listed.

What differs from a directory: an open blob is no longer there once it is deleted. Whoever mounts from a store keeps its
images named in it, so that isn't noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import quote

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    MalformedError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    UsageError,
    printable,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import parse_value
from layerstore.store.directory import MARKER
from layerstore.store.format import MARKER_BYTES, REFERENCE_BYTES, ReferenceDocument, StoreMarker
from layerstore.store.httpget import CONNECT_TIMEOUT, READ_TIMEOUT, WebPageError, WebServer
from layerstore.store.names import decode_name, encode_name
from layerstore.store.protocol import Reference

START_BYTES = 16 << 10
"""Bytes of a blob that come when it is opened: most manifests and configs; at 200 Mbit/s less than a millisecond."""

LISTING_BYTES = 64 << 20
"""Of a listing: some 500,000 names."""

_FRESH = {"Cache-Control": "no-cache"}
"""For what changes in place: caches on the way ask the server whether it has."""


class HttpStore:
    """A :class:`~layerstore.store.protocol.Store` below a URL.

    Attributes:
        location: the URL without credentials, for messages.
    """

    def __init__(
        self, url: str, *, connect_timeout: float = CONNECT_TIMEOUT, read_timeout: float = READ_TIMEOUT
    ) -> None:
        """Open the store at ``url``: its marker is read.

        Args:
            url: ``http://`` or ``https://``; ``user:password@`` before the host is for basic authentication.
            connect_timeout: seconds until a connection stands.
            read_timeout: seconds until an answer is complete, and more for a long one: see ``WebServer``.

        Raises:
            UsageError: not such a URL.
            NotFoundError: there is no store.
            CorruptError: its marker can't be parsed.
            UnsupportedError: of another version, or with a feature that this release lacks.
        """
        self._server = WebServer(url, connect_timeout=connect_timeout, read_timeout=read_timeout)
        self.location = self._server.location
        try:
            try:
                self._read_marker()
            except NotFoundError as error:
                raise NotFoundError(
                    f"{self.location} is not a store, it has no {MARKER}: check the URL, and that it is of the "
                    "directory which has that file"
                ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close idle connections."""
        self._server.close()

    def stat(self, digest: Digest) -> int:
        return self._open(digest, 1).size

    def open(self, digest: Digest) -> HttpBlob:
        return self._open(digest, START_BYTES)

    def open_sized(self, digest: Digest, size: int) -> HttpBlob:
        return self._blob(digest, size, b"")

    def names(self) -> Iterator[str]:
        """As of every store, where the server lists ``refs/`` as nginx does in JSON.

        Raises:
            UnsupportedError: it doesn't.
        """
        names = []
        for file in self._listed():
            if file.startswith("."):  # on its way in
                continue
            try:
                names.append(decode_name(file))
            except UsageError as error:
                raise CorruptError(f"{self.location} lists {printable(file[:300])!r}, which is no reference") from error
        yield from sorted(names)

    def resolve(self, name: str) -> Descriptor:
        path = f"refs/{quote(encode_name(name), safe=':')}"
        what = f"reference {name!r} in {self.location}"
        with self._existing(f"reference {name!r}"):
            data = self._server.read_document(path, what, limit=REFERENCE_BYTES, headers=_FRESH)
        try:
            document = ReferenceDocument.parse(data, what)
        except UnsupportedError:
            raise
        except ImgtoolError as error:
            raise CorruptError(f"{error}: publish it again") from error
        if document.name != name:
            raise CorruptError(f"{what} says that it is {printable(document.name)!r}: publish it again")
        return document.target

    def references(self) -> Iterator[Reference]:
        for name in self.names():
            try:
                target = self.resolve(name)
            except NotFoundError:
                continue  # deleted meanwhile
            yield Reference(name, target)

    def _open(self, digest: Digest, length: int) -> HttpBlob:
        path, what = self._place(digest)
        with self._existing(f"blob {digest}"):
            size, start = self._server.read_start(path, what, length)
        return self._blob(digest, size, start)

    def _blob(self, digest: Digest, size: int, start: bytes) -> HttpBlob:
        path, what = self._place(digest)

        def read(offset: int, length: int) -> bytes:
            with self._existing(f"blob {digest}"):
                return self._server.read_range(path, what, offset, length, size)

        return HttpBlob(what, size, start, read)

    def _place(self, digest: Digest) -> tuple[str, str]:
        """Below the URL, and for messages."""
        return f"blobs/{digest.algorithm}/{digest.hex}", f"blob {digest} in {self.location}"

    def _read_marker(self) -> None:
        what = f"store {self.location}/{MARKER}"
        data = self._server.read_document(MARKER, what, limit=MARKER_BYTES, headers=_FRESH)
        try:
            StoreMarker.parse(data, what)
        except UnsupportedError:
            raise
        except ImgtoolError as error:
            raise CorruptError(f"{error}: is this a store?") from error

    @contextmanager
    def _existing(self, what: str) -> Iterator[None]:
        """What isn't found is missing, unless it is the whole store that is."""
        try:
            yield
        except NotFoundError as error:
            try:
                self._read_marker()
            except ImgtoolError as why:
                raise UnavailableError(
                    f"{self.location} is not served any more, so {what} wasn't read: {why}"
                ) from error
            raise NotFoundError(f"{what} is not in {self.location}") from error

    def _listed(self) -> list[str]:
        """File names in ``refs/``."""
        what = f"list of references in {self.location}"
        try:
            data = self._server.read_document("refs/", what, limit=LISTING_BYTES, headers=_FRESH)
            return _parse_listing(data, what)
        except (NotFoundError, PermissionError_, WebPageError, MalformedError) as error:
            self._read_marker()  # or the page is a portal's, and nothing is missing but the network
            raise UnsupportedError(
                f"the names in {self.location} can't be listed: its server gives no JSON listing of refs/ (nginx: "
                "autoindex_format json); ask for an image by its name, or list them where the store is"
            ) from error


def _parse_listing(data: bytes, what: str) -> list[str]:
    entries = parse_value(data, what, limit=LISTING_BYTES)
    names = []
    for entry in entries if isinstance(entries, list) else [None]:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise MalformedError(f"{what} is no array of objects with names")
        names.append(name)
    return names


class HttpBlob:
    """A blob behind a URL. It holds no connection, so closing it does nothing."""

    def __init__(self, what: str, size: int, start: bytes, read: Callable[[int, int], bytes]) -> None:
        self._what = what
        self._size = size
        self._start = start
        self._read = read

    @property
    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise CorruptError(
                f"{self._what} has {self._size} bytes, {length} at {offset} were to be read: publish it again"
            )
        if offset + length <= len(self._start) or not length:
            return self._start[offset : offset + length]
        return self._read(offset, length)

    def close(self) -> None:
        pass

    def __enter__(self) -> HttpBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
