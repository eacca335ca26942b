"""What we publish: an ordinary OCI image whose layers are packs and metadata images.

::

    manifest
    ├── config            the source's own, with our rootfs; a stack's is merged (layerstore/compose.py)
    └── layers            for each layer, bottom first:
        ├── pack …        role "device", in the order of the metadata image's device table
        └── metadata image   role "overlay-lower"; carries what is said of the layer

One layer is a stack of one, so everything that takes an image takes both. Roles, media types and the ``org.erofs.*``
annotations follow the draft erofs-image-spec; what it lacks is under ``org.imgtool.*``. What a store has besides images
is in :mod:`layerstore.attachment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from layerstore.attachment import Artifact
from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, LimitError, MalformedError, NotFoundError, UnsupportedError, about
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import CONFIG_BYTES, dump
from layerstore.oci.manifest import Manifest, parse_document
from layerstore.pack.stored import ROLE, UNCOMPRESSED_DIGEST, UNCOMPRESSED_SIZE, StoredPack
from layerstore.store.ahead import ahead
from layerstore.store.protocol import Store
from layerstore.store.reading import read_blob
from layerstore.version import FORMAT_VERSION

MANIFEST_MEDIA_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_MEDIA_TYPE = "application/vnd.oci.image.config.v1+json"
METADATA_MEDIA_TYPE = "application/vnd.erofs+zstd"

LAYER_ROLE = "org.imgtool.role"
LAYER_FORMAT = "org.imgtool.format-version"
LAYER_BASE = "org.imgtool.base"
LAYER_SOURCE = "org.imgtool.source.digest"
LAYER_DIFF_IDS = "org.imgtool.source.diff-ids"

MAX_DOCUMENT = CONFIG_BYTES
"""Bytes of a manifest or config that are read: what is accepted of a source, so what we publish of it."""


class Role(StrEnum):
    """What a layer is for."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


@dataclass(frozen=True, slots=True)
class Layer:
    """One EROFS filesystem: a metadata image, and the packs that are its devices, counted from 1.

    Attributes:
        role: what it is for.
        metadata: digest of the raw metadata image, the layer's identity.
        metadata_size: its bytes, raw.
        blob: the compressed metadata image.
        blob_size: its bytes.
        packs: in device order.
        format_version: of the layout, see :mod:`layerstore.version`.
        base: identity of the layer that its whiteouts and copied-up directories were made over.
        source: what it was made from: digest of a manifest, or of a tar archive.
        diff_ids: of the source's layers, those of the base included.
    """

    role: Role
    metadata: Digest
    metadata_size: int
    blob: Digest
    blob_size: int
    packs: tuple[StoredPack, ...] = ()
    format_version: int = FORMAT_VERSION
    base: Digest | None = None
    source: Digest | None = None
    diff_ids: tuple[Digest, ...] = ()

    def descriptors(self) -> list[Descriptor]:
        """What a manifest lists for this layer."""
        notes = {
            ROLE: "overlay-lower",
            UNCOMPRESSED_DIGEST: str(self.metadata),
            UNCOMPRESSED_SIZE: str(self.metadata_size),
            LAYER_ROLE: str(self.role),
            LAYER_FORMAT: str(self.format_version),
        }
        if self.base is not None:
            notes[LAYER_BASE] = str(self.base)
        if self.source is not None:
            notes[LAYER_SOURCE] = str(self.source)
        if self.diff_ids:
            notes[LAYER_DIFF_IDS] = " ".join(map(str, self.diff_ids))
        own = Descriptor(METADATA_MEDIA_TYPE, self.blob, self.blob_size, notes)
        return [*(pack.descriptor() for pack in self.packs), own]

    @property
    def raw_digests(self) -> list[Digest]:
        """The ``diff_ids`` of the published config, as :meth:`descriptors` orders them."""
        return [*(pack.digest for pack in self.packs), self.metadata]

    @property
    def stored_size(self) -> int:
        """Bytes of all its blobs, those shared with other layers included."""
        return self.blob_size + sum(pack.blob_size for pack in self.packs)


@dataclass(frozen=True, slots=True)
class Image:
    """One or more layers, bottom first, under one config."""

    layers: tuple[Layer, ...]
    config: Descriptor
    annotations: Mapping[str, str] = field(default_factory=dict)

    def manifest(self) -> bytes:
        """The manifest's bytes: the same for the same image, always."""
        document: dict[str, object] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_MEDIA_TYPE,
            "config": self.config.to_json(),
            "layers": [descriptor.to_json() for layer in self.layers for descriptor in layer.descriptors()],
        }
        if self.annotations:
            document["annotations"] = dict(sorted(self.annotations.items()))
        return dump(document)

    def descriptor(self) -> Descriptor:
        data = self.manifest()
        return Descriptor(MANIFEST_MEDIA_TYPE, Digest.of(data), len(data))

    @property
    def blobs(self) -> dict[Digest, int]:
        """Every blob the manifest lists, with its size."""
        listed = {self.config.digest: self.config.size}
        for layer in self.layers:
            listed[layer.blob] = layer.blob_size
            listed.update((pack.blob, pack.blob_size) for pack in layer.packs)
        return listed


def parse_image(data: bytes) -> Image:
    """Read a manifest that :meth:`Image.manifest` wrote.

    Raises:
        MalformedError: not a manifest, or its annotations contradict each other.
        UnsupportedError: an artifact, an image of another kind, or of another format version.
    """
    stored = parse_stored(data)
    if isinstance(stored, Artifact):
        raise UnsupportedError(f"{stored.described()}, not an image")
    return stored


def parse_stored(data: bytes) -> Image | Artifact:
    """Read a manifest of a store, whichever of both it is.

    Raises:
        MalformedError, UnsupportedError: as :func:`parse_image`.
    """
    document = parse_document(data, MANIFEST_MEDIA_TYPE)
    if not isinstance(document, Manifest):
        raise UnsupportedError("an index, not an image of imgtool: convert one of its images first")
    artifact = Artifact.of(document)
    if artifact is not None:
        return artifact
    layers = []
    packs: list[StoredPack] = []
    for descriptor in document.layers:
        if descriptor.annotations.get(ROLE) == "device":
            packs.append(StoredPack.from_descriptor(descriptor))
        elif descriptor.media_type == METADATA_MEDIA_TYPE and LAYER_ROLE in descriptor.annotations:
            layers.append(_layer(descriptor, tuple(packs)))
            packs = []
        else:
            raise UnsupportedError(
                f"layer {descriptor.digest} has media type {descriptor.media_type!r}: not an image of imgtool, "
                "convert it first"
            )
    if packs or not layers:
        raise MalformedError("the manifest ends without a metadata image for its packs" if packs else "no layers")
    return Image(tuple(layers), document.config, document.annotations)


def _layer(descriptor: Descriptor, packs: tuple[StoredPack, ...]) -> Layer:
    notes = descriptor.annotations
    try:
        version = int(notes[LAYER_FORMAT])
        size = int(notes[UNCOMPRESSED_SIZE])
        role = Role(notes[LAYER_ROLE])
        metadata = Digest.parse(notes[UNCOMPRESSED_DIGEST])
    except (KeyError, ValueError) as error:
        raise MalformedError(f"metadata image {descriptor.digest}: bad or missing annotation: {error}") from error
    if version != FORMAT_VERSION:
        raise UnsupportedError(
            f"layer {metadata} has format version {version}, this release reads {FORMAT_VERSION}: convert it again"
        )
    if not 0 < size <= 1 << 40:
        raise MalformedError(f"metadata image {metadata} claims {size} bytes")
    return Layer(
        role,
        metadata,
        size,
        descriptor.digest,
        descriptor.size,
        packs,
        version,
        _optional(notes.get(LAYER_BASE)),
        _optional(notes.get(LAYER_SOURCE)),
        tuple(Digest.parse(text) for text in notes.get(LAYER_DIFF_IDS, "").split()),
    )


def _optional(text: str | None) -> Digest | None:
    return None if text is None else Digest.parse(text)


def find_target(store: Store, name: str) -> Descriptor:
    """The manifest that ``name``, a reference or a digest, stands for.

    Raises:
        NotFoundError: neither.
    """
    if name.startswith(("sha256:", "sha512:")):
        digest = Digest.parse(name)
        return Descriptor(MANIFEST_MEDIA_TYPE, digest, store.stat(digest))
    return store.resolve(name)


def read_document(store: Store, target: Descriptor, what: str) -> bytes:
    """A small blob, verified.

    Raises:
        CorruptError: its size or digest is wrong.
        LimitError: too large for a manifest or a config.
    """
    with about(what):
        return read_blob(store, target, limit=MAX_DOCUMENT)


def load_image(store: Store, name: str) -> Image:
    """The image behind a reference or digest of this store."""
    data = read_document(store, find_target(store, name), f"manifest of {name!r}")
    with about(repr(name)):
        return parse_image(data)


def layers_of(store: Store, target: Descriptor) -> tuple[Digest, ...]:
    """The identities of the layers of what a reference stands for; none where it is no image of ours."""
    try:
        stored = parse_stored(read_document(store, target, f"manifest {target.digest}"))
    except (MalformedError, UnsupportedError, LimitError):
        return ()
    return tuple(layer.metadata for layer in stored.layers) if isinstance(stored, Image) else ()


def all_packs(store: Store, unreadable: list[str]) -> Iterator[StoredPack]:
    """Every pack that a reference reaches, once. What can't be read is named in ``unreadable`` and left out."""
    packs: set[Digest] = set()
    for image in all_images(store, unreadable):
        for layer in image.layers:
            for pack in layer.packs:
                if pack.digest not in packs:
                    packs.add(pack.digest)
                    yield pack


def find_layers(store: Store, wanted: Iterable[Digest]) -> dict[Digest, Layer]:
    """Those of the layers that some image of the store has, by identity; what can't be read has none."""
    left = set(wanted)
    found: dict[Digest, Layer] = {}
    for image in all_images(store, []):
        for layer in image.layers:
            if layer.metadata in left:
                left.discard(layer.metadata)
                found[layer.metadata] = layer
        if not left:
            break
    return found


def all_images(store: Store, unreadable: list[str]) -> Iterator[Image]:
    """Every image that has a name, once. What can't be read is named in ``unreadable`` and left out."""
    targets: dict[Digest, tuple[str, Descriptor]] = {}
    for name, target in ahead(lambda name: resolved(store, name), store.names()):
        if isinstance(target, ImgtoolError):
            unreadable.append(str(target))
        elif target is not None:
            targets.setdefault(target.digest, (name, target))
    for (name, _), stored in ahead(lambda found: parsed(store, found[1], "manifest"), targets.values()):
        if isinstance(stored, ImgtoolError):
            unreadable.append(f"{name!r}: {stored}")
        elif isinstance(stored, Image):
            yield stored


def resolved(store: Store, name: str) -> Descriptor | ImgtoolError | None:
    """The target of a reference, or why it can't be read; None if it has been removed."""
    try:
        return store.resolve(name)
    except NotFoundError:
        return None
    except ImgtoolError as error:
        return error


def parsed(store: Store, target: Descriptor, what: str) -> Image | Artifact | ImgtoolError:
    """What a reference stands for, or why it can't be read."""
    try:
        return parse_stored(read_document(store, target, what))
    except ImgtoolError as error:
        return error
