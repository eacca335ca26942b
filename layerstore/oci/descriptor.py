"""Descriptors: what OCI documents use to point at bytes (image-spec 1.1, descriptor.md)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

from layerstore.digest import Digest
from layerstore.errors import CorruptError, MalformedError, UnsupportedError
from layerstore.oci.document import kind_of, refuse_disguises, shown

SIZE_LIMIT = 1 << 63
"""Sizes are below this: int64 in the specification."""

_OWN_FIELDS = ("mediaType", "digest", "size", "annotations")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """``size`` bytes named ``digest``; the media type says what they mean. Unknown fields live in ``extra``."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def parse(cls, document: object, what: str) -> Descriptor:
        """Check a descriptor from outside; ``what`` names it, such as ``manifest sha256:…: layers[2]``.

        An embedded ``data`` is accepted only if it is what digest and size promise.

        Raises:
            MalformedError: it breaks the specification.
            UnsupportedError: the digest's algorithm can't be verified.
            CorruptError: ``data`` is something else than digest and size say.
        """
        if not isinstance(document, dict):
            raise MalformedError(f"{what} is {kind_of(document)} where a descriptor belongs")
        refuse_disguises(document, _OWN_FIELDS, what)
        for name in ("mediaType", "digest", "size"):
            if name not in document:
                raise MalformedError(f"{what} has no {name!r}")
        media_type, size = document["mediaType"], document["size"]
        if not isinstance(media_type, str) or not media_type:
            raise MalformedError(f"{what}.mediaType is {kind_of(media_type)} where a media type belongs")
        if type(size) is not int:
            raise MalformedError(f"{what}.size is {kind_of(size)} where an integer belongs")
        if not 0 <= size < SIZE_LIMIT:
            raise MalformedError(f"{what}.size is out of range: {size}")
        annotations = parse_annotations(document.get("annotations"), what)
        extra = {name: value for name, value in document.items() if name not in _OWN_FIELDS}
        _check_extra(extra, what)
        # Last, so that only a sound descriptor is called unsupported: an index goes on without those.
        digest = _parse_digest(document["digest"], what)
        descriptor = cls(media_type, digest, size, annotations, extra)
        _check_data(descriptor, what)
        return descriptor

    @property
    def artifact_type(self) -> str | None:
        """What kind of artifact it points at; None for most images."""
        value = self.extra.get("artifactType")
        return value if isinstance(value, str) and value else None

    @property
    def urls(self) -> tuple[str, ...]:
        """Where else the bytes may be had. Nothing here ever follows them."""
        value = self.extra.get("urls")
        return tuple(str(url) for url in value) if isinstance(value, list) else ()

    @property
    def data(self) -> bytes | None:
        """The embedded copy of the bytes, if there is one; verified by :meth:`parse`."""
        value = self.extra.get("data")
        return base64.b64decode(value, validate=True) if isinstance(value, str) else None

    def to_json(self) -> dict[str, object]:
        """Keys in the order of the specification; annotations sorted; empty ones left out."""
        document: dict[str, object] = {
            "mediaType": self.media_type,
            "digest": str(self.digest),
            "size": self.size,
        }
        document.update(self.extra)
        if self.annotations:
            document["annotations"] = dict(sorted(self.annotations.items()))
        return document


def parse_annotations(value: object, what: str) -> dict[str, str]:
    """An annotation map; null and absent are empty."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedError(f"{what}.annotations is {kind_of(value)} where an object belongs")
    for name, text in value.items():
        if not isinstance(text, str):
            raise MalformedError(f"{what}.annotations[{shown(name)}] is {kind_of(text)} where a string belongs")
    return value


def _parse_digest(value: object, what: str) -> Digest:
    if not isinstance(value, str):
        raise MalformedError(f"{what}.digest is {kind_of(value)} where a digest belongs")
    try:
        return Digest.parse(value)
    except MalformedError as error:
        raise MalformedError(f"{what}.digest is not a digest: {shown(value)}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{what}: {error}") from error


def _check_extra(extra: Mapping[str, object], what: str) -> None:
    """The types of the optional fields that are used here; null counts as absent."""
    urls = extra.get("urls")
    if urls is not None and not (isinstance(urls, list) and all(isinstance(url, str) for url in urls)):
        raise MalformedError(f"{what}.urls is not an array of strings")
    for name in ("artifactType", "data"):
        value = extra.get(name)
        if value is not None and not isinstance(value, str):
            raise MalformedError(f"{what}.{name} is {kind_of(value)} where a string belongs")


def _check_data(descriptor: Descriptor, what: str) -> None:
    try:
        data = descriptor.data
    except (binascii.Error, ValueError) as error:
        raise MalformedError(f"{what}.data is not base64") from error
    if data is None:
        return
    if len(data) != descriptor.size:
        raise CorruptError(
            f"{what}.data has another size than promised",
            expected=f"{descriptor.size} bytes",
            actual=str(len(data)),
        )
    hasher = descriptor.digest.hasher()
    hasher.update(data)
    descriptor.digest.check(hasher, f"{what}.data has another digest than promised")
