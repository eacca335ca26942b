"""Image sources: anything that an image's manifest, config and layers can be read from.

Nothing of an image is trusted because of where it is: documents are verified when they are read, layers while they
are. What a conversion needs beyond that, the diff ID, is over decompressed bytes and checked by whoever decompresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from layerstore.digest import Digest
from layerstore.errors import NotFoundError
from layerstore.oci import mediatype
from layerstore.oci.blob import BlobReader
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.files import FileRange
from layerstore.oci.manifest import Manifest
from layerstore.oci.platform import Platform
from layerstore.tar.compression import SNIFFED, sniff

Warn = Callable[[str], None]
"""Told, in one line, what is odd about a source but no reason to refuse it."""

Locate = Callable[[Descriptor, str], FileRange]
"""Finds a blob; the second argument names it in messages. Raises NotFoundError, saying where it looked."""


@dataclass(frozen=True, slots=True)
class LayerBlob:
    """A layer: ``descriptor`` names the bytes that are stored, ``diff_id`` those of the tar in them."""

    descriptor: Descriptor
    diff_id: Digest


@dataclass(frozen=True, slots=True)
class SourceImage:
    """One image of a source, its documents verified.

    Attributes:
        name: for messages; already printable.
        descriptor: of the manifest. A docker archive has none: it's then the digest of one made up for it, which
            names the same image each time but exists nowhere.
        platform: the index's word where it has one, else the config's.
        layers: lowest first.
    """

    name: str
    descriptor: Descriptor
    manifest: Manifest
    config: ImageConfig
    platform: Platform
    layers: tuple[LayerBlob, ...]
    locate: Locate
    warn: Warn

    def open_layer(self, number: int) -> BlobReader:
        """The stored bytes of a layer, verified as they are read; layers may be read at the same time by threads.

        Raises:
            NotFoundError: the source doesn't have it; names the digest and where it was looked for.
            CorruptError: it has another size than promised.
        """
        descriptor = self.layers[number].descriptor
        return BlobReader(self.layer_file(number), descriptor, self._layer_name(number))

    def layer_file(self, number: int) -> FileRange:
        """Where the stored bytes of a layer lie, for who verifies size and digest without our help.

        Raises:
            NotFoundError: the source doesn't have it; names the digest and where it was looked for.
        """
        descriptor = self.layers[number].descriptor
        try:
            file = self.locate(descriptor, f"layer {number} of {self.name}")
        except NotFoundError as error:
            if descriptor.urls or mediatype.is_foreign(descriptor.media_type):
                raise NotFoundError(f"{error}; it is a foreign layer, and its urls are never followed") from error
            raise
        self._compare_type(file, descriptor, self._layer_name(number))
        return file

    def _layer_name(self, number: int) -> str:
        return f"layer {number} of {self.name} ({self.layers[number].descriptor.digest})"

    def _compare_type(self, file: FileRange, descriptor: Descriptor, what: str) -> None:
        actual = sniff(file.peek(what, SNIFFED)).value
        if file.size and actual != mediatype.compression(descriptor.media_type):
            self.warn(
                f"{what} is {actual or 'not compressed'}, though its media type is {descriptor.media_type}; "
                "its content decides"
            )


class ImageSource(Protocol):
    """A place with one or more images; a context manager."""

    def image(self, platform: Platform | None = None) -> SourceImage:
        """The image that the source's name and ``platform`` choose; it can be used until the source is closed.

        Raises:
            NotFoundError: no such tag, position, digest or platform; lists what there is. Or a document is missing.
            UsageError: several images fit; lists them.
            UnsupportedError: not an image: an artifact, schema 1, an encrypted image; names the media type.
            MalformedError, CorruptError, LimitError: as everywhere.
        """
        ...

    def close(self) -> None: ...
    def __enter__(self) -> ImageSource: ...
    def __exit__(self, *exc: object) -> None: ...


def assemble(
    *,
    name: str,
    descriptor: Descriptor,
    manifest: Manifest,
    config: ImageConfig,
    indexed: Platform | None,
    wanted: Platform | None,
    locate: Locate,
    warn: Warn,
) -> SourceImage:
    """Put an image together, checking that its parts agree.

    Args:
        name: of the image, for messages.
        descriptor: of the manifest.
        manifest: an image's.
        config: the manifest's.
        indexed: the platform that an index gives the manifest.
        wanted: the platform that the caller asked for.
        locate: finds layers.
        warn: see :data:`Warn`.

    Raises:
        MalformedError: layers and diff IDs don't pair.
        NotFoundError: the image is for another platform than the wanted one, and no index says otherwise.
    """
    config.check_layers(len(manifest.layers), f"config of {name}", warn)
    return SourceImage(
        name=name,
        descriptor=descriptor,
        manifest=manifest,
        config=config,
        platform=_decide_platform(name, config.platform, indexed, wanted, warn),
        layers=tuple(LayerBlob(*pair) for pair in zip(manifest.layers, config.diff_ids, strict=True)),
        locate=locate,
        warn=warn,
    )


def _decide_platform(
    name: str, stated: Platform, indexed: Platform | None, wanted: Platform | None, warn: Warn
) -> Platform:
    if indexed is not None:
        if stated.architecture and (stated.os or "linux", stated.architecture) != (indexed.os, indexed.architecture):
            warn(f"{name} is {indexed} by its index and {stated} by its config; the index counts")
        return indexed
    if not stated.architecture:
        if wanted is None:
            return stated
        warn(f"the config of {name} doesn't say its architecture; it is taken for {wanted}")
        return wanted
    if wanted is not None and wanted.rank(stated) is None:
        raise NotFoundError(f"{name} is for {stated}, not for {wanted}")
    return stated
