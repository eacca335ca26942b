"""What a manifest or an index reaches.

Descriptors are found generically: every JSON object with a media type, a digest and a size, at any depth and in any
field (config, layers, manifests, subject, blobs and whatever comes later). Only documents, manifests and indexes by
their media type, are read; other JSON is content. So deciding what may be deleted needs no knowledge of images, and an
artifact whose layer is another image's config keeps that config.

A descriptor of a pack also names its *raw form*, the uncompressed bytes, by the annotations ``pack/stored.py`` has:
that blob may be in the store besides the compressed one. Raw forms are kept as long as what names them, checked like
every other blob, never required, and not copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import CorruptError, ImgtoolError, NotFoundError
from layerstore.oci import mediatype
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import parse
from layerstore.pack.stored import ROLE, UNCOMPRESSED_DIGEST, UNCOMPRESSED_SIZE
from layerstore.store.protocol import Reference, Store
from layerstore.store.reading import read_blob

OCI_ARTIFACT = "application/vnd.oci.artifact.manifest.v1+json"
"""Of image-spec 1.1 release candidates: written for a while, so kept alive."""

DOCUMENTS = mediatype.INDEXES | mediatype.MANIFESTS | {OCI_ARTIFACT}

DOCUMENT_BYTES = 16 << 20
"""Largest document that is read; four times what registries must accept."""

RAW_MEDIA_TYPE = "application/octet-stream"
"""Of a raw form: a pack's media type without ``+zstd``."""

_SIZE = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Link:
    """A descriptor in a document.

    Attributes:
        descriptor: what is described.
        optional: the blob need not be there, as a subject's (image-spec 1.1).
        raw: it is the raw form of the blob that the document describes; always optional.
    """

    descriptor: Descriptor
    optional: bool = False
    raw: bool = False


def is_document(descriptor: Descriptor) -> bool:
    return mediatype.normal(descriptor.media_type) in DOCUMENTS


def links(data: bytes, what: str) -> tuple[Link, ...]:
    """All descriptors in a document, in its order, each followed by that of its raw form if it names one.

    Raises:
        MalformedError, UnsupportedError, CorruptError, LimitError: it can't be read with certainty.
    """
    found = []
    pending: list[tuple[object, bool]] = [(parse(data, what, limit=DOCUMENT_BYTES), False)]
    while pending:
        value, optional = pending.pop()
        if isinstance(value, dict):
            if value.keys() >= {"mediaType", "digest", "size"}:
                descriptor = Descriptor.parse(value, what)
                found.append(Link(descriptor, optional))
                found.extend(_raw_form(descriptor))
            pending.extend((item, optional or name == "subject") for name, item in reversed(value.items()))
        elif isinstance(value, list):
            pending.extend((item, optional) for item in reversed(value))
    return tuple(found)


def _raw_form(descriptor: Descriptor) -> list[Link]:
    """Nothing where the annotations don't name one as we write them: then no release has stored any."""
    notes = descriptor.annotations
    size = notes.get(UNCOMPRESSED_SIZE, "")
    if notes.get(ROLE) != "device" or not _SIZE.fullmatch(size):
        return []
    try:
        digest = Digest.parse(notes.get(UNCOMPRESSED_DIGEST))
    except ImgtoolError:
        return []
    return [Link(Descriptor(RAW_MEDIA_TYPE, digest, int(size)), optional=True, raw=True)]


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


def walk_links(documents: Documents, root: Descriptor, what: str) -> Iterator[Link]:
    """Everything that ``root`` reaches or, by optional links, may reach; itself last, documents after all they name.

    Content isn't looked at, so it may be missing; documents must be there, and optional ones are left out if they
    aren't. A digest comes once, or twice where it is optional at first and required elsewhere.

    Raises:
        CorruptError: a document is missing or isn't what its descriptor says; ``what`` names the root in the message.
        MalformedError, UnsupportedError, LimitError: a document can't be read with certainty.
    """
    required: set[Digest] = set()
    optional: set[Digest] = set()
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
                pending.append((Link(descriptor), True))
                pending.extend((each, False) for each in reversed(below))
            continue
        # Named as content here, and perhaps as a document elsewhere: then it is expanded there.
        if digest not in required and not (link.optional and digest in optional):
            (optional if link.optional else required).add(digest)
            yield link


def walk(documents: Documents, root: Descriptor, what: str) -> Iterator[Descriptor]:
    """As :func:`walk_links`, each digest once: without raw forms, and without optional content that isn't there.

    Raises:
        ImgtoolError: as :func:`walk_links`.
    """
    yielded: set[Digest] = set()
    for link in walk_links(documents, root, what):
        digest = link.descriptor.digest
        if not link.raw and digest not in yielded and (not link.optional or documents.has(link.descriptor)):
            yielded.add(digest)
            yield link.descriptor


def reference_links(store: Store, documents: Documents, reference: Reference) -> list[Link]:
    """:func:`walk_links` from a reference; nothing if it has been deleted, and swept, since it was listed.

    Raises:
        ImgtoolError: as :func:`walk_links`.
    """
    what = f"reference {reference.name!r} in {store.location}"
    target: Descriptor | None = reference.target
    while target is not None:
        try:
            return list(walk_links(documents, target, what))
        except CorruptError:
            current = present_target(store, reference.name)
            if current is not None and current.digest == target.digest:
                raise
            target = current
    return []


def present_target(store: Store, name: str) -> Descriptor | None:
    """What a reference stands for now; None if it does not exist."""
    try:
        return store.resolve(name)
    except NotFoundError:
        return None
