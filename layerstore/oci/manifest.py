"""Image manifests and indexes (image-spec 1.1, manifest.md and image-index.md; Docker's schema 2 equivalents)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layerstore.errors import MalformedError, NotFoundError, UnsupportedError
from layerstore.oci import mediatype
from layerstore.oci.descriptor import Descriptor, parse_annotations
from layerstore.oci.document import MANIFEST_BYTES, kind_of, parse, refuse_disguises, shown
from layerstore.oci.platform import Platform

_MEANINGFUL = ("schemaVersion", "mediaType", "config", "layers", "manifests", "fsLayers", "blobs", "subject")
"""Fields whose presence decides what a document is."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image: its config and its layers, lowest first. ``raw`` are the bytes that its digest names."""

    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    subject: Descriptor | None = None
    artifact_type: str | None = None
    raw: bytes = b""

    def require_image(self, what: str) -> None:
        """Refuse what is no root file system of tar layers, without looking into its blobs.

        Raises:
            UnsupportedError: an artifact, an encrypted image, or layers of another kind; names the media type.
        """
        if self.config.media_type not in mediatype.CONFIGS:
            kind = shown(self.artifact_type) if self.artifact_type else f"config {shown(self.config.media_type)}"
            raise UnsupportedError(f"{what} is not an image but an artifact of type {kind}")
        for number, layer in enumerate(self.layers):
            if mediatype.is_encrypted(layer.media_type):
                kind = shown(layer.media_type)
                raise UnsupportedError(
                    f"{what}: layer {number}, {layer.digest}, is encrypted ({kind}); decrypt the image"
                )
            if not mediatype.is_layer(layer.media_type):
                kind = shown(layer.media_type)
                raise UnsupportedError(f"{what} is not an image of tar layers: layer {number} is of type {kind}")


@dataclass(frozen=True, slots=True)
class UnusableEntry:
    """An entry of an index whose blob can't be verified here, and why."""

    position: int
    reason: str
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Index:
    """Several images, or indexes again, for different platforms.

    An entry that can't be verified here, for the algorithm of its digest, is no reason to refuse the others: it is in
    ``unusable`` and not in ``manifests``.
    """

    media_type: str
    manifests: tuple[Descriptor, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    subject: Descriptor | None = None
    artifact_type: str | None = None
    raw: bytes = b""
    unusable: tuple[UnusableEntry, ...] = ()

    def at(self, position: int, what: str) -> Descriptor:
        """The entry at a position of the document, from 0.

        Raises:
            NotFoundError: fewer entries.
            UnsupportedError: it can't be verified here.
        """
        for entry in self.unusable:
            if entry.position == position:
                raise UnsupportedError(entry.reason)
        before = sum(entry.position < position for entry in self.unusable)
        if position - before >= len(self.manifests):
            count = len(self.manifests) + len(self.unusable)
            raise NotFoundError(f"{what} has {count} entries, and so none at position {position} (counted from 0)")
        return self.manifests[position - before]


def parse_document(
    data: bytes, media_type_hint: str | None, what: str = "manifest", *, limit: int = MANIFEST_BYTES
) -> Manifest | Index:
    """Parse a manifest or an index, refusing whatever two readers could understand differently.

    Args:
        data: the document, already verified against its digest if there is one.
        media_type_hint: what the pointing descriptor or the server says that it is.
        what: names the document in messages.
        limit: bytes.

    Raises:
        MalformedError: breaks the specification, or is readable as more than one thing.
        UnsupportedError: Docker schema 1, or a document of another type; names the type.
        LimitError: larger than ``limit``.
    """
    document = parse(data, what, limit=limit)
    refuse_disguises(document, _MEANINGFUL, what)
    media_type = _media_type(document, media_type_hint, what)
    shapes = {
        "a manifest": "config" in document or "layers" in document,
        "an index": "manifests" in document,
        "a schema 1 manifest": "fsLayers" in document,
        "an artifact manifest": "blobs" in document,
    }
    found = [name for name, present in shapes.items() if present]
    if len(found) > 1:
        raise MalformedError(f"{what} is ambiguous: it can be read as {' and as '.join(found)}")
    if media_type in mediatype.SCHEMA1 or "fsLayers" in document or document.get("schemaVersion") == 1:
        name = media_type or "application/vnd.docker.distribution.manifest.v1+json"
        raise UnsupportedError(f"{what} is {name}: schema 1 is not supported; push the image again with a newer tool")
    if media_type and media_type not in mediatype.INDEXES | mediatype.MANIFESTS:
        raise UnsupportedError(f"{what} is of type {shown(media_type)}, neither an image manifest nor an index")
    if not found:
        raise MalformedError(f"{what} is neither a manifest nor an index: it has no 'config' and no 'manifests'")
    if found == ["an artifact manifest"]:
        raise UnsupportedError(f"{what} is an artifact manifest ('blobs'), neither an image manifest nor an index")
    is_index = found == ["an index"]
    if media_type and (media_type in mediatype.INDEXES) != is_index:
        raise MalformedError(f"{what} says that it is {media_type}, but is {found[0]}")
    if is_index:
        return _index(document, media_type or mediatype.OCI_INDEX, data, what)
    return _manifest(document, media_type or mediatype.OCI_MANIFEST, data, what)


def _media_type(document: Mapping[str, object], hint: str | None, what: str) -> str:
    """The one media type that the document and who points at it agree on; empty if neither says."""
    own = document.get("mediaType")
    if own is not None and not isinstance(own, str):
        raise MalformedError(f"{what}: mediaType is not a string")
    own = own or ""
    hinted = mediatype.normal(hint or "")
    if hinted in mediatype.VAGUE:
        return own
    if own and own != hinted:
        raise MalformedError(f"{what} is ambiguous: announced as {shown(hinted)}, it says that it is {shown(own)}")
    return hinted


def _index(document: dict[str, object], media_type: str, data: bytes, what: str) -> Index:
    _check_version(document, what)
    manifests: list[Descriptor] = []
    unusable: list[UnusableEntry] = []
    for number, item in enumerate(_items(document, "manifests", what)):
        place = f"{what}: manifests[{number}]"
        if isinstance(item, dict) and item.get("platform") is not None:
            Platform.from_json(item["platform"], f"{place}.platform")
        try:
            manifests.append(Descriptor.parse(item, place))
        except UnsupportedError as error:
            annotations = parse_annotations(item.get("annotations"), place) if isinstance(item, dict) else {}
            unusable.append(UnusableEntry(number, str(error), annotations))
    return Index(
        media_type=media_type,
        manifests=tuple(manifests),
        annotations=parse_annotations(document.get("annotations"), what),
        subject=_subject(document, what),
        artifact_type=_artifact_type(document, what),
        raw=data,
        unusable=tuple(unusable),
    )


def _manifest(document: dict[str, object], media_type: str, data: bytes, what: str) -> Manifest:
    _check_version(document, what)
    if "config" not in document:
        raise MalformedError(f"{what} has no 'config'")
    layers = enumerate(_items(document, "layers", what))
    return Manifest(
        media_type=media_type,
        config=Descriptor.parse(document["config"], f"{what}: config"),
        layers=tuple(Descriptor.parse(item, f"{what}: layers[{number}]") for number, item in layers),
        annotations=parse_annotations(document.get("annotations"), what),
        subject=_subject(document, what),
        artifact_type=_artifact_type(document, what),
        raw=data,
    )


def _check_version(document: Mapping[str, object], what: str) -> None:
    if "schemaVersion" not in document:
        raise MalformedError(f"{what} has no 'schemaVersion'")
    version = document["schemaVersion"]
    if type(version) is not int or version != 2:
        raise MalformedError(f"{what}: schemaVersion is {shown(str(version))} and has to be 2")


def _items(document: Mapping[str, object], name: str, what: str) -> list[object]:
    """A required array; null, which Go writes for an empty one, is empty."""
    if name not in document:
        raise MalformedError(f"{what} has no {name!r}")
    items = document[name]
    if items is None:
        return []
    if not isinstance(items, list):
        raise MalformedError(f"{what}: {name} is {kind_of(items)} where an array belongs")
    return items


def _subject(document: Mapping[str, object], what: str) -> Descriptor | None:
    subject = document.get("subject")
    return None if subject is None else Descriptor.parse(subject, f"{what}: subject")


def _artifact_type(document: Mapping[str, object], what: str) -> str | None:
    value = document.get("artifactType")
    if value is not None and not isinstance(value, str):
        raise MalformedError(f"{what}: artifactType is {kind_of(value)} where a string belongs")
    return value or None
