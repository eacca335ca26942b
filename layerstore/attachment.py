"""What a store has besides images: artifacts, and among them those that are attached to a layer, such as plans.

::

    reference  sha256-<hex of the layer>.plan
       └─▶ manifest   artifactType, annotations: which layer, and what is said of the content
             ├── config    the empty document of image-spec 1.1
             └── layers    the content, one blob

A layer is no document, so it can't be a manifest's ``subject``: the reference is found by name, and an annotation says
the layer again. Nothing here is a descriptor of the layer, so an attachment keeps no layer from collection; it goes
when no image has the layer any more (:mod:`layerstore.store.collect`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, MalformedError
from layerstore.oci import mediatype
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import dump, shown
from layerstore.oci.manifest import Manifest

EMPTY_MEDIA_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
"""The config of an artifact that has none (image-spec 1.1, manifest.md, "Guidance for an Empty Descriptor")."""

ATTACHED_LAYER = "org.imgtool.layer"
"""Annotation: identity of the layer that an artifact is attached to."""

PLAN = "plan"
"""The kind of attachment there is: the end of its reference's name."""

_NAME = re.compile(r"(sha256-[0-9a-f]{64}|sha512-[0-9a-f]{128})\.plan")


@dataclass(frozen=True, slots=True)
class Artifact:
    """A manifest with an ``artifactType``: no image, whatever else it is.

    Attributes:
        artifact_type: what it is.
        layer: identity of the layer that it is attached to; None where it is of some other tool.
        content: its blobs.
        annotations: those of the manifest but for the layer's.
    """

    artifact_type: str
    layer: Digest | None
    content: tuple[Descriptor, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, document: Manifest) -> Artifact | None:
        """None if it is an image's manifest.

        Raises:
            MalformedError: the annotation of the layer is no digest.
        """
        if document.artifact_type is None:
            return None
        notes = dict(document.annotations)
        text = notes.pop(ATTACHED_LAYER, None)
        try:
            layer = None if text is None else Digest.parse(text)
        except ImgtoolError as error:
            raise MalformedError(f"annotation {ATTACHED_LAYER}: {error}") from error
        return cls(document.artifact_type, layer, document.layers, notes)

    @property
    def config(self) -> Descriptor:
        return Descriptor(EMPTY_MEDIA_TYPE, Digest.of(EMPTY), len(EMPTY))

    def manifest(self) -> bytes:
        """The manifest's bytes: the same for the same artifact, always."""
        notes = {**self.annotations, **({} if self.layer is None else {ATTACHED_LAYER: str(self.layer)})}
        document: dict[str, object] = {
            "schemaVersion": 2,
            "mediaType": mediatype.OCI_MANIFEST,
            "artifactType": self.artifact_type,
            "config": self.config.to_json(),
            "layers": [descriptor.to_json() for descriptor in self.content],
        }
        if notes:
            document["annotations"] = dict(sorted(notes.items()))
        return dump(document)

    def descriptor(self) -> Descriptor:
        data = self.manifest()
        return Descriptor(mediatype.OCI_MANIFEST, Digest.of(data), len(data))

    @property
    def blobs(self) -> dict[Digest, int]:
        """Every blob that the manifest lists, with its size."""
        return {each.digest: each.size for each in (self.config, *self.content)}

    def described(self) -> str:
        """For messages: what it is, and of what."""
        what = f"an artifact of type {shown(self.artifact_type)}"
        return what if self.layer is None else f"{what} for layer {self.layer}"


def attachment_name(layer: Digest) -> str:
    """The reference of the plan of a layer."""
    return f"{layer.algorithm}-{layer.hex}.{PLAN}"


def attached_layer(name: str) -> Digest | None:
    """The layer that a reference belongs to by its name; None for every other name."""
    found = _NAME.fullmatch(name)
    return Digest.parse(found[1].replace("-", ":")) if found else None
