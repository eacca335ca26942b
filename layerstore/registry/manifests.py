"""Manifests and indexes of a repository, by tag or digest, and its tags.

A manifest is verified when it is read: against the digest it was asked for by, or the one that the registry says it
has. What has a ``subject`` is written by :mod:`layerstore.registry.referrers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    MalformedError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
)
from layerstore.oci import mediatype
from layerstore.oci.blob import verify
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import MANIFEST_BYTES, parse, shown
from layerstore.registry.client import RefusedError, RegistryClient
from layerstore.registry.tokens import DeniedError, delete, push
from layerstore.registry.wire import Answer, origin, resolve

OCI_ARTIFACT = "application/vnd.oci.artifact.manifest.v1+json"
ACCEPT = {
    "Accept": ", ".join(
        (mediatype.OCI_INDEX, mediatype.OCI_MANIFEST, mediatype.DOCKER_LIST, mediatype.DOCKER_MANIFEST, OCI_ARTIFACT)
    )
}
PAGE_BYTES = 16 << 20
"""Of one page of a list."""
PAGE_TAGS = 1000
"""Tags that are asked for at a time; a registry may give fewer."""
PAGES = 100_000

_NEXT = re.compile(r'<([^>]*)>\s*;[^,]*\brel="?next"?', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Stored:
    """A manifest or index in a registry.

    Attributes:
        descriptor: media type as the registry says it, else as the document does; digest and size of ``data``.
        data: its bytes; empty where only the descriptor was asked for.
        etag: for a conditional write; empty if there is none.
    """

    descriptor: Descriptor
    data: bytes
    etag: str = ""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A manifest that was written. ``listed``: the registry itself lists it among the referrers of its subject."""

    digest: Digest
    listed: bool


class Manifests:
    """The manifests and tags of a client's repository."""

    def __init__(self, client: RegistryClient) -> None:
        self._client = client
        self._heads = True
        """False once HEAD requests turned out to be of no use there."""

    def get(self, reference: str | Digest, *, limit: int = MANIFEST_BYTES) -> Stored:
        """A verified manifest.

        Raises:
            NotFoundError: no such tag or digest.
            CorruptError: another digest.
            LimitError: more than ``limit`` bytes.
        """
        what = self._what(reference)
        with self._client.ask(
            "GET", f"manifests/{reference}", what, headers=ACCEPT, expected=limit, repeat=True
        ) as answer:
            data = answer.whole(limit)
            return Stored(_descriptor(answer, reference, data, what), data, _etag(answer))

    def head(self, reference: str | Digest) -> Stored:
        """The descriptor alone: by HEAD, or where that is refused or doesn't say it, by GET.

        Raises:
            NotFoundError: no such tag or digest.
        """
        what = self._what(reference)
        if self._heads:
            try:
                with self._client.ask("HEAD", f"manifests/{reference}", what, headers=ACCEPT) as answer:
                    stated = _stated_digest(answer, what) if isinstance(reference, str) else reference
                    if stated is not None and answer.length and _kind(answer):
                        return Stored(Descriptor(_kind(answer), stated, answer.length), b"", _etag(answer))
            except DeniedError:
                raise
            except (PermissionError_, UnsupportedError, RefusedError):
                self._heads = False  # signed URLs are often for GET alone
        found = self.get(reference)
        return Stored(found.descriptor, b"", found.etag)

    def put(self, reference: str | Digest, data: bytes, media_type: str, *, replacing: str | None = "") -> Pushed:
        """Write a manifest under a tag or its digest.

        Args:
            reference: where to.
            data: its bytes.
            media_type: what it is.
            replacing: the etag of what is there now; None for nothing. Registries that don't look at it write anyway.

        Raises:
            RefusedError: such as MANIFEST_BLOB_UNKNOWN; see :func:`unknown_blobs`.
            ConflictError: it isn't what was to be replaced.
            CorruptError: the registry has given it another digest.
        """
        what = self._what(reference)
        headers = {"Content-Type": media_type}
        if replacing is None:
            headers["If-None-Match"] = "*"
        elif replacing:
            headers["If-Match"] = replacing
        with self._client.ask(
            "PUT",
            f"manifests/{reference}",
            what,
            scopes=push(self._client.address.repository),
            headers=headers,
            body=data,
            repeat=True,
        ) as answer:
            stated = _stated_digest(answer, what)
            listed = bool(answer.headers.get("OCI-Subject"))
        digest = reference if isinstance(reference, Digest) else stated or Digest.of(data)
        verify(data, Descriptor(media_type, digest, len(data)), what)
        return Pushed(digest, listed)

    def delete(self, reference: str | Digest) -> None:
        """Delete a tag, or a manifest with all its tags.

        Raises:
            NotFoundError: no such tag or digest.
            UnsupportedError: the registry doesn't delete.
            RefusedError: it doesn't delete by tag.
        """
        with self._client.ask(
            "DELETE",
            f"manifests/{reference}",
            self._what(reference),
            scopes=delete(self._client.address.repository),
            repeat=True,
        ):
            pass

    def tags(self) -> list[str]:
        """All tags, in the registry's order; none where there is no repository: the first push makes it."""
        what = f"tags of {self._client.address}"
        found: list[str] = []
        try:
            for answer, data in pages(self._client, f"tags/list?n={PAGE_TAGS}", what):
                tags = parse(data, what, limit=PAGE_BYTES).get("tags") or []
                if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
                    raise MalformedError(f"{what}: {shown(answer.url)} gives no list of tags")
                found.extend(tags)
        except NotFoundError:
            return []
        return list(dict.fromkeys(found))

    def _what(self, reference: str | Digest) -> str:
        return f"{'tag' if isinstance(reference, str) else 'manifest'} {reference} in {self._client.address}"


def pages(client: RegistryClient, path: str, what: str) -> Iterator[tuple[Answer, bytes]]:
    """The pages of a list: ``Link`` headers are followed to the end, within the registry.

    Raises:
        UnavailableError: they lead elsewhere, or in a circle.
    """
    seen = set()
    url = client.address.url(path)
    for _ in range(PAGES):
        seen.add(url)
        with client.ask("GET", url, what, expected=PAGE_BYTES) as answer:
            data = answer.whole(PAGE_BYTES)
        yield answer, data
        match = _NEXT.search(answer.headers.get("Link", ""))
        if match is None:
            return
        url = resolve(url, match[1], what)
        if origin(url) != origin(client.address.origin):
            raise UnavailableError(f"{what}: the next page is at another host: refused")
        if url in seen:
            break
    raise UnavailableError(f"{what}: the pages of the list have no end")


def unknown_blobs(error: RefusedError) -> tuple[Digest, ...]:
    """What a registry says a manifest lacks: blobs, or manifests of an index. Empty if it doesn't say which."""
    found: list[Digest] = []
    for code, detail in zip(error.codes, error.details, strict=True):
        if code not in ("MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN", "MANIFEST_UNKNOWN"):
            continue
        values = [detail, *detail.values()] if isinstance(detail, dict) else [detail]
        for value in values:
            try:
                found.append(Digest.parse(value))
            except ImgtoolError:
                continue
    return tuple(dict.fromkeys(found))


def lacks_blobs(error: ImgtoolError) -> bool:
    """Whether a manifest was refused for what it names."""
    codes = {"MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN", "MANIFEST_UNKNOWN"}
    return isinstance(error, RefusedError) and not codes.isdisjoint(error.codes)


def _descriptor(answer: Answer, reference: str | Digest, data: bytes, what: str) -> Descriptor:
    if isinstance(reference, Digest):
        digest = reference
    else:
        digest = _stated_digest(answer, what) or Digest.of(data)
    descriptor = Descriptor(_kind(answer) or _own_kind(data, what), digest, len(data))
    verify(data, descriptor, what)
    return descriptor


def _kind(answer: Answer) -> str:
    """The media type, if it says anything."""
    return "" if answer.media_type in mediatype.VAGUE else answer.media_type


def _own_kind(data: bytes, what: str) -> str:
    document = parse(data, what, limit=len(data))
    stated = document.get("mediaType")
    if isinstance(stated, str) and stated:
        return stated
    return mediatype.OCI_INDEX if "manifests" in document else mediatype.OCI_MANIFEST


def _stated_digest(answer: Answer, what: str) -> Digest | None:
    text = answer.headers.get("Docker-Content-Digest", "").strip()
    if not text:
        return None
    try:
        return Digest.parse(text)
    except ImgtoolError as error:
        raise CorruptError(f"{what}: the registry says a digest that is none: {shown(text)}") from error


def _etag(answer: Answer) -> str:
    """One that can be a condition: a weak one can't."""
    etag = answer.headers.get("ETag", "")
    return "" if etag.startswith("W/") else etag
