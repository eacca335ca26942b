"""What refers to a manifest: artifacts that have it as their ``subject``.

A registry lists them itself (``referrers/DIGEST``), or it doesn't know of that; then clients keep the list, as an
index under the *fall-back tag* ``sha256-HEX`` (distribution-spec 1.1, "Referrers Tag Schema"). That is read, changed
and written by everybody, without a lock: so it is written on condition where the registry takes one, and looked at
afterwards, twice, and written again until our own entry is in it. An entry may still be lost to a writer who has read
before us and writes after we have looked twice; it takes one that is slower than all of that.

Some registries give the subject itself for the fall-back tag. What isn't an index of its own is no list: nothing
refers, as far as anybody can tell, and it is never overwritten.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from urllib.parse import urlencode

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from layerstore.oci import mediatype
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import dump, parse
from layerstore.oci.manifest import Index, Manifest, parse_document
from layerstore.registry.client import RefusedError, RegistryClient
from layerstore.registry.manifests import Manifests, Pushed, Stored, pages

ATTEMPTS = 10
"""Times that the list is written until our entry is in it."""
SETTLE_SECONDS = 0.1
"""Before the second look; longer where a write takes longer."""

Warn = Callable[[str], None]


def fallback_tag(subject: Digest) -> str:
    return f"{subject.algorithm}-{subject.hex}"


class Referrers:
    """The referrers of a repository's manifests."""

    def __init__(
        self, client: RegistryClient, manifests: Manifests, *, warn: Warn, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._client = client
        self._manifests = manifests
        self._warn = warn
        self._sleep = sleep
        self._api = True
        """False once the registry turned out not to have the referrers API."""

    def of(self, subject: Digest, artifact_type: str | None = None) -> list[Descriptor]:
        """What refers to ``subject``; of one type only, if that is given."""
        found = self._listed(subject, artifact_type) if self._api else None
        if found is None:
            index = self._fallback(subject)[0]
            found = [] if index is None else list(index.manifests)
        return [each for each in found if artifact_type in (None, each.artifact_type)]

    def push(self, reference: str | Digest, data: bytes, media_type: str, *, replacing: str | None = "") -> Pushed:
        """Write a manifest, and see to it that it is among the referrers of its subject, if it has one.

        Raises:
            UnavailableError: it is written, but the list can't be.
            ImgtoolError: as :meth:`Manifests.put`.
        """
        pushed = self._manifests.put(reference, data, media_type, replacing=replacing)
        if pushed.listed or b'"subject"' not in data:
            return pushed
        document = parse_document(data, media_type, f"manifest {pushed.digest}")
        if document.subject is not None:
            self._attach(document.subject.digest, _entry(document, pushed.digest, media_type))
        return pushed

    def _listed(self, subject: Digest, artifact_type: str | None) -> list[Descriptor] | None:
        """By the registry's own list; None if it keeps none."""
        what = f"referrers of {subject} in {self._client.address}"
        query = f"?{urlencode({'artifactType': artifact_type})}" if artifact_type else ""
        found: list[Descriptor] = []
        try:
            for answer, data in pages(self._client, f"referrers/{subject}{query}", what):
                if answer.media_type != mediatype.OCI_INDEX:
                    return None  # a page of something else, with status 200
                document = parse_document(data, answer.media_type, what, limit=len(data))
                assert isinstance(document, Index)
                found.extend(document.manifests)
        except (NotFoundError, UnsupportedError, RefusedError):
            self._api = False
            return None
        return found

    def _fallback(self, subject: Digest) -> tuple[Index | None, Stored | None]:
        """The list under the fall-back tag, and what is stored there, which may be no list."""
        try:
            stored = self._manifests.get(fallback_tag(subject))
        except NotFoundError:
            return None, None
        what = f"tag {fallback_tag(subject)} in {self._client.address}"
        if stored.descriptor.digest == subject or stored.descriptor.media_type != mediatype.OCI_INDEX:
            self._warn(f"{what} is no list of referrers: it is taken for none, and left as it is")
            return None, stored
        document = parse_document(stored.data, mediatype.OCI_INDEX, what)
        assert isinstance(document, Index)
        return document, stored

    def _attach(self, subject: Digest, entry: Descriptor) -> None:
        what = f"list of referrers of {subject} in {self._client.address}"
        for _ in range(ATTEMPTS):
            index, stored = self._fallback(subject)
            if index is None and stored is not None:
                raise ConflictError(
                    f"{entry.digest} is written, but not in the {what}: the tag for it stands for something else"
                )
            started = time.monotonic()
            if index is None or not _has(index, entry):
                data = _with(index, entry)
                try:
                    self._manifests.put(
                        fallback_tag(subject),
                        data,
                        mediatype.OCI_INDEX,
                        replacing=None if stored is None else stored.etag,
                    )
                except ConflictError:
                    continue  # somebody else was faster
                if not self._is_listed(subject, entry):
                    continue
            # Who had read before we wrote has written by now, and taken us off the list.
            took = time.monotonic() - started
            self._sleep(max(SETTLE_SECONDS, 2 * took) * random.uniform(1.0, 1.5))
            if self._is_listed(subject, entry):
                return
        raise UnavailableError(f"{entry.digest} is written, but others keep taking it off the {what}: write it again")

    def _is_listed(self, subject: Digest, entry: Descriptor) -> bool:
        index = self._fallback(subject)[0]
        return index is not None and _has(index, entry)


def _has(index: Index, entry: Descriptor) -> bool:
    return any(each.digest == entry.digest for each in index.manifests)


def _with(index: Index | None, entry: Descriptor) -> bytes:
    """The list with one more entry. What can't be verified here is kept as it is."""
    document: dict[str, object] = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": []}
    items: list[object] = []
    if index is not None:
        document |= parse(index.raw, "list of referrers", limit=len(index.raw))
        found = document["manifests"]
        items = found if isinstance(found, list) else []
    document["manifests"] = [*items, entry.to_json()]
    return dump(document)


def _entry(document: Manifest | Index, digest: Digest, media_type: str) -> Descriptor:
    """The descriptor of a referrer: its type and annotations are said in the list."""
    kind = document.artifact_type
    if kind is None and isinstance(document, Manifest):
        kind = document.config.media_type
    extra: dict[str, object] = {} if kind is None else {"artifactType": kind}
    return Descriptor(media_type, digest, len(document.raw), dict(document.annotations), extra)
