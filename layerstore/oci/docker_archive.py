"""Archives of ``docker save``, old and new, and of other tools that write the same.

::

    manifest.json     [{"Config": NAME, "RepoTags": […], "Layers": [NAME, …]}, …]
    repositories      what Docker before 1.10 read; ignored

Names are of members: ``HEX.json`` and ``HEX/layer.tar`` (often links to another layer's), ``HEX.tar``, or
``blobs/sha256/HEX`` where the archive is an OCI layout as well. Only the last kind is a digest to be checked. There
are no media types and no manifest: compression is found by magic, and a manifest is made up so that the image has the
same shape as all others. The digest of a plain layer is its diff ID; that of a compressed one is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    MalformedError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from layerstore.oci import mediatype
from layerstore.oci.blob import digest_of, verify
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import CONFIG_BYTES, dump, kind_of, parse_value, shown
from layerstore.oci.files import FileRange, Files
from layerstore.oci.manifest import Manifest
from layerstore.oci.platform import Platform
from layerstore.oci.reference import DockerReference
from layerstore.oci.selection import listed
from layerstore.oci.source import SourceImage, Warn, assemble
from layerstore.oci.source_name import SourceName
from layerstore.tar.compression import SNIFFED, sniff

MANIFEST = "manifest.json"

_BLOB = re.compile(r"(?:\./)?blobs/([a-z0-9]+)/([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class SavedImage:
    """An entry of manifest.json: names of members."""

    config: str
    tags: tuple[str, ...]
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(shown(tag) for tag in self.tags) or f"untagged {shown(self.config)}"


class DockerArchiveSource:
    """The images of a docker archive. ``name`` chooses one by tag or position; it owns ``files``."""

    def __init__(self, files: Files, name: SourceName, *, warn: Warn) -> None:
        self._files = files
        self._name = name
        self._warn = warn
        what = f"{MANIFEST} of {files.location}"
        file = files.find(MANIFEST)
        if file is None:
            if files.find("repositories") is not None:
                raise UnsupportedError(
                    f"{files.location} is of Docker before 1.10: it has 'repositories' but no {MANIFEST}; "
                    "load and save it with a newer one"
                )
            raise MalformedError(f"{files.location} is not a docker archive: it has no {MANIFEST}")
        self.images = _parse(parse_value(file.read(what, CONFIG_BYTES), what, limit=CONFIG_BYTES), what)

    def image(self, platform: Platform | None = None) -> SourceImage:
        saved = self._choose()
        name = str(self._name)
        config_data = self._member(saved.config, "config").read(f"config of {name}", CONFIG_BYTES)
        config_descriptor = self._config_descriptor(saved.config, config_data)
        config = ImageConfig.parse(config_data, f"config of {name}", warn=self._warn)
        if len(config.diff_ids) != len(saved.layers):
            config.check_layers(len(saved.layers), f"config of {name}", self._warn)
        places: dict[Digest, FileRange] = {}
        layers = []
        for number, (member, diff_id) in enumerate(zip(saved.layers, config.diff_ids, strict=True)):
            file = self._member(member, f"layer {number} ({diff_id})")
            layer = self._layer_descriptor(member, file, diff_id, f"layer {number} of {name}")
            places[layer.digest] = file
            layers.append(layer)

        def locate(descriptor: Descriptor, what: str) -> FileRange:
            file = places.get(descriptor.digest)
            if file is None:
                raise NotFoundError(f"{what} is missing: {descriptor.digest} is not in {self._files.location}")
            return file

        manifest = _made_up(config_descriptor, tuple(layers))
        return assemble(
            name=name,
            descriptor=Descriptor(manifest.media_type, Digest.of(manifest.raw), len(manifest.raw)),
            manifest=manifest,
            config=config,
            indexed=None,
            wanted=platform,
            locate=locate,
            warn=self._warn,
        )

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> DockerArchiveSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _choose(self) -> SavedImage:
        name, images = self._name, self.images
        if name.position is not None:
            if name.position >= len(images):
                raise NotFoundError(f"{self._files.location} has {len(images)} images, counted from 0: no {name}")
            return images[name.position]
        if name.digest is not None:
            raise UsageError(f"images of a docker archive have no digests; choose by tag or @POSITION: {name}")
        found = images if name.tag is None else _tagged(images, name.tag)
        if not found:
            raise NotFoundError(f"{name} does not exist; {self._files.location} has {listed(images) or 'nothing'}")
        if len({(image.config, image.layers) for image in found}) > 1:
            raise UsageError(f"{name} can mean {len(found)} images; choose by tag or @POSITION from {listed(found)}")
        return found[0]

    def _member(self, name: str, what: str) -> FileRange:
        file = self._files.find(name)
        if file is None:
            raise NotFoundError(f"{what} of {self._name} is missing: {shown(name)} is not in {self._files.location}")
        return file

    def _config_descriptor(self, member: str, data: bytes) -> Descriptor:
        digest = _blob_digest(member) or Digest.of(data)
        descriptor = Descriptor(mediatype.OCI_CONFIG, digest, len(data))
        verify(data, descriptor, f"{shown(member)} of {self._files.location}")
        return descriptor

    def _layer_descriptor(self, member: str, file: FileRange, diff_id: Digest, what: str) -> Descriptor:
        compression = sniff(file.peek(what, SNIFFED)).value
        digest = _blob_digest(member)
        if digest is None:
            digest = digest_of(file, what) if compression else diff_id
        elif not compression and digest.algorithm == diff_id.algorithm and digest != diff_id:
            raise CorruptError(f"{what} is not the config's", expected=str(diff_id), actual=str(digest))
        return Descriptor(mediatype.layer_type(compression), digest, file.size)


def _parse(document: object, what: str) -> list[SavedImage]:
    if not isinstance(document, list):
        raise MalformedError(f"{what} is {kind_of(document)} where an array belongs")
    images = []
    for number, item in enumerate(document):
        place = f"{what}: [{number}]"
        if not isinstance(item, dict):
            raise MalformedError(f"{place} is {kind_of(item)} where an object belongs")
        config = item.get("Config")
        if not isinstance(config, str) or not config:
            raise MalformedError(f"{place}.Config is not a name")
        images.append(SavedImage(config, _names(item, "RepoTags", place), _names(item, "Layers", place)))
    return images


def _names(item: dict[str, object], name: str, place: str) -> tuple[str, ...]:
    values = item.get(name)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise MalformedError(f"{place}.{name} is not an array of strings")
    return tuple(values)


def _tagged(images: list[SavedImage], wanted: str) -> list[SavedImage]:
    """``debian``, ``debian:latest`` and ``docker.io/library/debian:latest`` are one; else a bare tag, ``latest``."""
    exact = [image for image in images if any(_same(tag, wanted) for tag in image.tags)]
    return exact or [image for image in images if any(tag.rpartition(":")[2] == wanted for tag in image.tags)]


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return DockerReference.parse(one) == DockerReference.parse(other)
    except ImgtoolError:
        return False


def _blob_digest(member: str) -> Digest | None:
    match = _BLOB.fullmatch(member)
    return Digest.parse(f"{match[1]}:{match[2]}") if match else None


def _made_up(config: Descriptor, layers: tuple[Descriptor, ...]) -> Manifest:
    raw = dump(
        {
            "schemaVersion": 2,
            "mediaType": mediatype.OCI_MANIFEST,
            "config": config.to_json(),
            "layers": [layer.to_json() for layer in layers],
        }
    )
    return Manifest(mediatype.OCI_MANIFEST, config, layers, raw=raw)
