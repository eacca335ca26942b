"""What an export comes to, and its last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.export.document import config_descriptor, config_of, entry_of, manifest_of
from layerstore.export.target import Target
from layerstore.image import Image
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor


@dataclass(frozen=True, slots=True)
class ExportedLayer:
    """A layer as it is in the target; ``raw_size`` is in bytes, uncompressed."""

    descriptor: Descriptor
    diff_id: Digest
    raw_size: int


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. ``manifest`` is the entry of the index, but for the tag."""

    manifest: Descriptor
    layers: tuple[ExportedLayer, ...]


def publish(
    target: Target, image: Image, config: ImageConfig, layers: Sequence[ExportedLayer], features: Sequence[str]
) -> Exported:
    """Write config and manifest of layers that the target has, and publish them.

    The history has one step a layer, without times: the same image gives the same config.
    """
    history = [{"created_by": f"imgtool: {layer.role} {layer.metadata}"} for layer in image.layers]
    document = config_of(config, [layer.diff_id for layer in layers], features, history)
    described = config_descriptor(document)
    with target.upload() as upload:
        upload.write(document)
        upload.commit(described.digest, described.size)
    manifest = manifest_of(described, [layer.descriptor for layer in layers], image.annotations)
    entry = entry_of(manifest, document)
    target.publish(manifest, entry)
    return Exported(entry, tuple(layers))
