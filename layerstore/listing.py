"""What a store holds, image by image."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, NotFoundError
from layerstore.image import Role, parse_image, read_document
from layerstore.store.protocol import Store


@dataclass(frozen=True, slots=True)
class ListedImage:
    """A reference; sizes in bytes of the store. ``error`` says why an image can't be read, else it is None.

    ``manifest`` is None where the reference itself can't be read.
    """

    name: str
    manifest: Digest | None
    roles: tuple[Role, ...]
    size: int
    own_size: int
    error: str | None = None


def list_images(store: Store) -> list[ListedImage]:
    """Every reference, by name; one that can't be read is listed with its error."""
    blobs: dict[str, dict[Digest, int]] = {}
    listed = []
    for name in store.names():
        try:
            target = store.resolve(name)
        except NotFoundError:
            continue  # removed meanwhile
        except ImgtoolError as error:
            listed.append(ListedImage(name, None, (), 0, 0, str(error)))
            continue
        digest = target.digest
        try:
            image = parse_image(read_document(store, target, f"manifest of {name!r}"))
        except ImgtoolError as error:
            listed.append(ListedImage(name, digest, (), 0, 0, str(error)))
            continue
        blobs[name] = {digest: target.size, **image.blobs}
        listed.append(ListedImage(name, digest, tuple(layer.role for layer in image.layers), 0, 0))
    # Two names of one image share everything, so uses are counted by manifest and not by name.
    uses = Counter(
        blob
        for manifest in {item.manifest: item.name for item in listed if item.name in blobs}.values()
        for blob in blobs[manifest]
    )
    return [
        item
        if item.name not in blobs
        else ListedImage(
            item.name,
            item.manifest,
            item.roles,
            sum(blobs[item.name].values()),
            sum(size for blob, size in blobs[item.name].items() if uses[blob] == 1),
        )
        for item in listed
    ]
