"""Config and manifest of an exported image, and the entry that an index has for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from layerstore.digest import Digest
from layerstore.errors import UsageError
from layerstore.image import CONFIG_MEDIA_TYPE, MANIFEST_MEDIA_TYPE, Image, load_image, read_document
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import dump
from layerstore.oci.platform import Platform
from layerstore.store.protocol import Store

EROFS_FEATURE = "erofs"
"""The OS feature that our published configs require, and containerd from 2.3 on looks for."""
UNKNOWN = "unknown"
"""Architecture of what was made from a directory or archive; no container runtime takes it for its own."""


def load_stack(store: Store, name: str) -> Image:
    """An image that stands on nothing else.

    Raises:
        NotFoundError: no such image.
        UsageError: its lowest layer was made over a base, which it says nothing without.
    """
    image = load_image(store, name)
    lowest = image.layers[0]
    if lowest.base is not None:
        raise UsageError(
            f"{name!r} is a {lowest.role} over base layer {lowest.base}, without which it is no image: compose them, "
            "and export the stack"
        )
    return image


def load_config(
    store: Store, image: Image, name: str, platform: Platform | None, warn: Callable[[str], None]
) -> ImageConfig:
    """The published config of an image; where it names no machine, ``platform`` is put in, or ``warn`` hears of it.

    Raises:
        UsageError: it names another machine than ``platform``.
    """
    what = f"config of {name!r}"
    config = ImageConfig.parse(read_document(store, image.config, what), what)
    unknown = config.platform.architecture in ("", UNKNOWN)
    if platform is None:
        if unknown:
            warn(f"{name!r} names no architecture, so container runtimes won't run it: give --platform")
        return config
    document = dict(config.document)
    if unknown:
        document |= {"architecture": platform.architecture, "os": platform.os}
        if platform.variant:
            document["variant"] = platform.variant
        return ImageConfig.parse(dump(document), what)
    own = (config.platform.os, config.platform.architecture, config.platform.variant)
    if own != (platform.os, platform.architecture, platform.variant):
        raise UsageError(f"the image is for {config.platform}, not for {platform}; leave --platform out")
    return config


def config_of(
    config: ImageConfig, diff_ids: Sequence[Digest], features: Sequence[str], history: Sequence[Mapping[str, object]]
) -> bytes:
    """The config for other layers: ``features`` in place of our own, all else as it was."""
    document = dict(config.document)
    present = document.pop("os.features", None)
    if isinstance(present, list) and (others := [feature for feature in present if feature != EROFS_FEATURE]):
        document["os.features"] = others
    return replace(config, document=document).with_rootfs(diff_ids, history, features)


def manifest_of(config: Descriptor, layers: Sequence[Descriptor], annotations: Mapping[str, str]) -> bytes:
    document: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_MEDIA_TYPE,
        "config": config.to_json(),
        "layers": [layer.to_json() for layer in layers],
    }
    if annotations:
        document["annotations"] = dict(sorted(annotations.items()))
    return dump(document)


def config_descriptor(data: bytes) -> Descriptor:
    return Descriptor(CONFIG_MEDIA_TYPE, Digest.of(data), len(data))


def entry_of(manifest: bytes, config: bytes) -> Descriptor:
    """The manifest's descriptor as an index lists it: with the platform that the config says."""
    document = ImageConfig.parse(config, "config").document
    fields = ("architecture", "os", "os.version", "os.features", "variant")
    platform = {name: document[name] for name in fields if name in document}
    return Descriptor(MANIFEST_MEDIA_TYPE, Digest.of(manifest), len(manifest), extra={"platform": platform})
