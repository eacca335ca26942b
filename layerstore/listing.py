"""What a store holds: image by image, and what there is besides them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from layerstore.attachment import Artifact, attached_layer
from layerstore.digest import Digest
from layerstore.errors import ImgtoolError
from layerstore.image import Image, Role, parsed, resolved
from layerstore.oci.descriptor import Descriptor
from layerstore.store.ahead import ahead
from layerstore.store.protocol import Store


@dataclass(frozen=True, slots=True)
class ListedImage:
    """A reference; sizes in bytes of the store. ``error`` says why an image can't be read, else it is None.

    ``manifest`` is None where the reference itself can't be read. ``layers`` are the identities of its layers, bottom
    first, and ``planned`` those of them that have a plan in the store.
    """

    name: str
    manifest: Digest | None
    roles: tuple[Role, ...]
    size: int
    own_size: int
    error: str | None = None
    layers: tuple[Digest, ...] = ()
    planned: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class ListedArtifact:
    """A reference to what is no image; ``size`` in bytes of the store."""

    name: str
    manifest: Digest
    artifact: Artifact
    size: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything that has a name, by name."""

    images: tuple[ListedImage, ...]
    artifacts: tuple[ListedArtifact, ...]


def list_images(store: Store) -> Listing:
    """Every reference; one that can't be read is listed among the images, with its error."""
    blobs: dict[str, dict[Digest, int]] = {}
    listed = []
    artifacts = []
    names = list(store.names())
    planned = set(filter(None, map(attached_layer, names)))
    for name, (target, stored) in ahead(lambda name: _read(store, name), names):
        if target is None:
            if stored is not None:  # else removed meanwhile
                listed.append(ListedImage(name, None, (), 0, 0, str(stored)))
            continue
        digest = target.digest
        if isinstance(stored, ImgtoolError):
            listed.append(ListedImage(name, digest, (), 0, 0, str(stored)))
            continue
        assert stored is not None
        if isinstance(stored, Artifact):
            size = target.size + sum(each.size for each in stored.content)
            artifacts.append(ListedArtifact(name, digest, stored, size))
            continue
        blobs[name] = {digest: target.size, **stored.blobs}
        listed.append(_listed(name, digest, stored, planned))
    # Two names of one image share everything, so uses are counted by manifest and not by name.
    uses = Counter(
        blob
        for manifest in {item.manifest: item.name for item in listed if item.name in blobs}.values()
        for blob in blobs[manifest]
    )
    images = [
        item
        if item.name not in blobs
        else replace(
            item,
            size=sum(blobs[item.name].values()),
            own_size=sum(size for blob, size in blobs[item.name].items() if uses[blob] == 1),
        )
        for item in listed
    ]
    return Listing(tuple(images), tuple(artifacts))


def _read(store: Store, name: str) -> tuple[Descriptor | None, Image | Artifact | ImgtoolError | None]:
    target = resolved(store, name)
    if target is None or isinstance(target, ImgtoolError):
        return None, target
    return target, parsed(store, target, f"manifest of {name!r}")


def _listed(name: str, digest: Digest, image: Image, planned: set[Digest]) -> ListedImage:
    layers = tuple(layer.metadata for layer in image.layers)
    return ListedImage(
        name,
        digest,
        tuple(layer.role for layer in image.layers),
        0,
        0,
        layers=layers,
        planned=tuple(layer for layer in layers if layer in planned),
    )
