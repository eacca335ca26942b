"""What a manifest or an index reaches.

Descriptors are found generically: every JSON object with a media type, a digest and a size, at any depth and in any
field (config, layers, manifests, subject, blobs and whatever comes later). Only documents, manifests and indexes by
their media type, are read; other JSON is content. So deciding what may be deleted needs no knowledge of images, and an
artifact whose layer is another image's config keeps that config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import CorruptError, NotFoundError
from layerstore.oci import mediatype
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import parse
from layerstore.store.protocol import Store
from layerstore.store.reading import read_blob

OCI_ARTIFACT = "application/vnd.oci.artifact.manifest.v1+json"
"""Of image-spec 1.1 release candidates: written for a while, so kept alive."""

DOCUMENTS = mediatype.INDEXES | mediatype.MANIFESTS | {OCI_ARTIFACT}

DOCUMENT_BYTES = 16 << 20
"""Largest document that is read; four times what registries must accept."""


@dataclass(frozen=True, slots=True)
class Link:
    """A descriptor in a document. ``optional``: the blob need not be there, as a subject's (image-spec 1.1)."""

    descriptor: Descriptor
    optional: bool = False


def is_document(descriptor: Descriptor) -> bool:
    return mediatype.normal(descriptor.media_type) in DOCUMENTS


def links(data: bytes, what: str) -> tuple[Link, ...]:
    """All descriptors in a document, in its order.

    Raises:
        MalformedError, UnsupportedError, CorruptError, LimitError: it can't be read with certainty.
    """
    found = []
    pending: list[tuple[object, bool]] = [(parse(data, what, limit=DOCUMENT_BYTES), False)]
    while pending:
        value, optional = pending.pop()
        if isinstance(value, dict):
            if value.keys() >= {"mediaType", "digest", "size"}:
                found.append(Link(Descriptor.parse(value, what), optional))
            pending.extend((item, optional or name == "subject") for name, item in reversed(value.items()))
        elif isinstance(value, list):
            pending.extend((item, optional) for item in reversed(value))
    return tuple(found)


class Documents:
    """The links of a store's documents. Each document is read and verified once; documents never change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._links: dict[tuple[Digest, int], tuple[Link, ...]] = {}

    def links(self, descriptor: Descriptor) -> tuple[Link, ...]:
        """The links of one document.

        Raises:
            NotFoundError: it isn't there.
            CorruptError: it isn't what its descriptor says.
            MalformedError, UnsupportedError, LimitError: it can't be read with certainty.
        """
        key = (descriptor.digest, descriptor.size)
        known = self._links.get(key)
        if known is None:
            data = read_blob(self._store, descriptor, limit=DOCUMENT_BYTES)
            known = self._links[key] = links(data, f"document {descriptor.digest} in {self._store.location}")
        return known

    def has(self, descriptor: Descriptor) -> bool:
        try:
            self._store.stat(descriptor.digest)
        except NotFoundError:
            return False
        return True


def walk(documents: Documents, root: Descriptor, what: str) -> Iterator[Descriptor]:
    """Everything that ``root`` reaches, itself last: each digest once, after all that its document names.

    Content isn't looked at, so it may be missing; documents must be there, and optional ones are left out if they
    aren't.

    Raises:
        CorruptError: a document is missing or isn't what its descriptor says; ``what`` names the root in the message.
        MalformedError, UnsupportedError, LimitError: a document can't be read with certainty.
    """
    yielded: set[Digest] = set()
    expanded: set[Digest] = set()
    pending: list[tuple[Link, bool]] = [(Link(root), False)]
    while pending:
        link, descended = pending.pop()
        descriptor = link.descriptor
        digest = descriptor.digest
        if not descended and is_document(descriptor):
            if digest not in expanded:
                try:
                    below = documents.links(descriptor)
                except NotFoundError as error:
                    if link.optional:
                        continue
                    raise CorruptError(f"{what} reaches a document that is missing: {error}") from error
                expanded.add(digest)
                pending.append((link, True))
                pending.extend((each, False) for each in reversed(below))
            continue
        # Named as content here, and perhaps as a document elsewhere: then it is expanded there.
        if digest not in yielded and (descended or not link.optional or documents.has(descriptor)):
            yielded.add(digest)
            yield descriptor


def present_target(store: Store, name: str) -> Descriptor | None:
    """What a reference stands for now; None if it does not exist."""
    try:
        return store.resolve(name)
    except NotFoundError:
        return None
